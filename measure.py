"""plan.py --measure: what the machine at hand does, as a file for the planner, a table and pictures.

Beside the operations of the model's own step (prices.py): copy bandwidth by size, product rate over sweeps of
M, N and K, grouped expert products against the number of tokens, all-reduce over the present ranks by message
size, writing and reading a checkpoint. ZAYA1 (arXiv 2511.17127) measures the same things on MI300X before it
chooses the model's dimensions.

Glossary: bus bandwidth: bytes that cross each rank's link, 2 (n - 1) / n of the message, over the time. M
rows (tokens), N output channels, K contracted channels. Letters otherwise as in model.py.
Run: `python measure.py` (the copy alone); the whole machine: `python plan.py --measure`.
"""

import dataclasses
import json
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from experts import grouped_linear
from model import ZAYAConfig
from plot import pyplot
from prices import measure_operations, overhead, seconds


# ------------------------------------------------------------------------------------------------ the machine

def copy_bandwidth(device="cpu"):
    """[[bytes read and written, B/s]] of a copy, by size."""
    rows = []
    for power in range(12, 31 if device != "cpu" else 28, 2):
        source = torch.ones(2**power // 8, device=device)
        target = torch.empty_like(source)
        rows.append([2**power, 2**power / seconds(lambda: target.copy_(source), device)])
    return rows


def product_rate(M, N, K, device, dtype):
    """FLOP/s of x w^T, and of its two backward products: g w and g^T x. x (M, K), w (N, K), g (M, N)."""
    x, w, g = (torch.rand(shape, device=device).to(dtype) for shape in ((M, K), (N, K), (M, N)))
    products = (lambda: x @ w.t(), lambda: g @ w, lambda: g.t() @ x)
    return [2 * M * N * K / seconds(work, device) for work in products]


def product_sweep(device, dtype):
    """[[M, N, K, forward, backward by input, backward by weight (FLOP/s)]] over a grid."""
    sides = (64, 192, 512, 1024) if device == "cpu" else (512, 1024, 2048, 4096, 8192, 16384)
    return [[M, N, K, *product_rate(M, N, K, device, dtype)]
            for K in (sides[1], sides[-1]) for M in sides for N in sides]


def grouped_sweep(config, device, dtype):
    """[[tokens, FLOP/s]] of gate_up of the model's experts, tokens spread evenly."""
    E, F_, D = config.num_experts, config.expert_hidden_size, config.hidden_size
    w, rows = torch.rand(E, 2 * F_, D, device=device).to(dtype), []
    with torch.no_grad():
        for tokens in (2**p for p in range(5, 13 if device == "cpu" else 17)):
            x = torch.rand(tokens, D, device=device).to(dtype)
            offsets = (torch.arange(1, E + 1, device=device) * tokens // E).int()
            spent = seconds(lambda: grouped_linear(x, w, offsets), device)
            rows.append([tokens, 4 * tokens * D * F_ / spent])
    return rows


def allreduce_sweep(device):
    """[[bytes, seconds, bus bandwidth in B/s]] over the ranks of the running process group."""
    world, rows = dist.get_world_size(), []
    for power in range(10, 27 if device == "cpu" else 31, 2):
        message, repeats = torch.ones(2**power // 4, device=device), max(3, 2**22 >> power)
        for timed in (False, True):                     # every rank must make the same number of calls
            dist.barrier()
            start = time.perf_counter()
            for _ in range(repeats if timed else 2):
                dist.all_reduce(message)
            if device != "cpu":
                torch.cuda.synchronize()
        spent = torch.tensor((time.perf_counter() - start) / repeats, device=device)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        rows.append([2**power, spent.item(), 2 * (world - 1) / world * 2**power / spent.item()])
    return rows


def checkpoint_speed(folder, size=2**27):
    """{"write", "read"}: B/s of a tensor saved and flushed, then read after the page cache forgot it."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        file = Path(scratch) / "tensor.pt"
        start = time.perf_counter()
        with open(file, "wb") as out:
            torch.save(torch.rand(size // 4), out)
            out.flush()
            os.fsync(out.fileno())
        write = time.perf_counter() - start
        with open(file, "rb") as f:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            torch.load(f, weights_only=True)
        return dict(write=size / write, read=size / (time.perf_counter() - start))


def measure(shapes, folder, ranks, allreduce):
    """Everything above on this device, as the dict of a machine file, in B/s and FLOP/s.

    shapes: as for measure_operations. allreduce: what allreduce_sweep found on `ranks` ranks, whose group
    must have ended: only one of them measures the rest.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype, threads = torch.bfloat16 if device == "cuda" else torch.float32, torch.get_num_threads()
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {threads} threads"
    torch.set_flush_denormal(True)
    found = dict(torch=torch.__version__, kind=device, dtype=str(dtype).split(".")[1], threads=threads,
                 device=name, memory=memory(device), ranks=ranks, allreduce=list(allreduce))
    print(f"measuring {name}, {found['dtype']}, {ranks} rank(s)")
    found.update(copy=copy_bandwidth(device), products=product_sweep(device, dtype),
                 checkpoint=checkpoint_speed(folder), grouped=grouped_sweep(shapes[0][0], device, dtype),
                 overhead=overhead(dtype, device), operations=measure_operations(shapes, device, dtype))
    rates = [rate for row in found["products"] for rate in row[3:]]
    rates += [row["work"] / row["seconds"] for row in found["operations"]
              if row["dims"] and found["dtype"] in row["signature"]]
    return found | dict(peak=max(rates), bandwidth=found["copy"][-1][1],
                        link=max((row[2] for row in found["allreduce"]), default=None))


def memory(device):
    """Bytes of the device: the GPU's own, or the machine's."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def table(found):
    """The machine file as text: the largest operations of the model, and the sweeps."""
    giga = lambda value: f"{value / 1e9:9.2f}"
    lines = [f"{found['device']}: best product {giga(found['peak'])} GFLOP/s, overhead "
             f"{found['overhead'] * 1e6:.2f} us an operation",
             "product of the model     batch      M      N      K   GFLOP/s"]
    products = sorted((r for r in found["operations"] if r["dims"]), key=lambda r: -r["work"])
    lines += [f"  {r['name']:20}{''.join(f'{d:7}' for d in r['dims'])} {giga(r['work'] / r['seconds'])}"
              for r in products[:16]]
    sweep = lambda title, rows: [title] + [f"  {row[0]:12,} {giga(row[-1])}" for row in rows]
    lines += sweep("copy, bytes          GB/s", found["copy"])
    lines += sweep("grouped, tokens   GFLOP/s", found["grouped"])
    alone = ["all-reduce: one rank; start with torchrun --nproc-per-node=N plan.py --measure"]
    lines += sweep("all-reduce, bytes    bus GB/s", found["allreduce"]) if found["allreduce"] else alone
    write, read = (giga(found["checkpoint"][way]) for way in ("write", "read"))
    return "\n".join([*lines, f"checkpoint write {write} GB/s, read {read}"])


# ------------------------------------------------------------------------------------------------ pictures

def draw_products(found, file):
    """Heat maps of the product rate over M and N, a row for each K: forward and the two backward products."""
    plt, rows, peak = pyplot(), found["products"], found["peak"] / 1e9
    titles = ("x w^T  (forward)", "g w  (by input)", "g^T x  (by weight)")
    depths, sides = sorted({r[2] for r in rows}), sorted({r[0] for r in rows})
    figure, axes = plt.subplots(len(depths), 3, figsize=(12, 4 * len(depths)), layout="constrained",
                                squeeze=False)
    for line, K in zip(axes, depths):
        for i, (axis, title) in enumerate(zip(line, titles)):
            rate = {(r[0], r[1]): r[3 + i] / 1e9 for r in rows if r[2] == K}
            table = [[rate[M, N] for N in sides] for M in sides]
            image = axis.imshow(table, origin="lower", vmin=0, vmax=peak)
            for y, M in enumerate(sides):
                for x, N in enumerate(sides):
                    axis.text(x, y, f"{rate[M, N]:.3g}", ha="center", va="center", fontsize=9,
                              color="white" if rate[M, N] < 0.6 * peak else "black")
            axis.set(title=f"{title}, K = {K}", xlabel="N", ylabel="M", xticks=range(len(sides)),
                     yticks=range(len(sides)), xticklabels=sides, yticklabels=sides)
    figure.colorbar(image, ax=axes, label="GFLOP/s", shrink=0.7)
    figure.suptitle(f"Matrix products on {found['device']}, {found['dtype']}")
    figure.savefig(file, dpi=100)
    plt.close(figure)


def draw_bandwidth(found, file):
    """Copy and bus bandwidth over size; rate of the grouped expert product over tokens."""
    plt, points = pyplot(), lambda rows: zip(*[(row[0], row[-1] / 1e9) for row in rows])
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    left.plot(*points(found["copy"]), "o-", label="copy, read + written")
    if found["allreduce"]:
        left.plot(*points(found["allreduce"]), "s-", label=f"all-reduce over {found['ranks']} ranks, bus")
    left.set(xscale="log", yscale="log", xlabel="bytes", ylabel="GB/s", title="Bandwidth by size")
    left.legend()
    right.plot(*points(found["grouped"]), "o-")
    right.set(xscale="log", xlabel="tokens", ylabel="GFLOP/s", ylim=0,
              title="Grouped product of the experts (gate and up)")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=100)
    plt.close(figure)


# ------------------------------------------------------------------------------------------------ the command

def main(cfg, config):
    """Writes the machine file (default machine.json) and two pictures beside it, prints the table.

    The operations are those of up to four blocks, and of the tiny preset as a second point to scale from.
    """
    rank, world, links = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), []
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if world > 1:                       # the ranks share this and nothing else
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        links = allreduce_sweep("cuda" if torch.cuda.is_available() else "cpu")
        dist.destroy_process_group()
    if rank > 0:
        return
    file = Path(cfg.machine or "machine.json")
    few = dataclasses.replace(config, num_blocks=min(config.num_blocks, 4))
    shapes = [(few, cfg.micro_batch or max(1, 4096 // cfg.seq_len), cfg.seq_len, cfg.optimizer),
              (ZAYAConfig.preset("tiny"), 8, 128, cfg.optimizer)]
    found = measure(shapes, file.parent, world, links)
    file.write_text(json.dumps(found))
    print(table(found))
    try:
        draw_products(found, file.with_name(file.stem + "-products.png"))
        draw_bandwidth(found, file.with_name(file.stem + "-bandwidth.png"))
        print(f"pictures: {file.stem}-products.png and {file.stem}-bandwidth.png beside it")
    except ValueError as error:
        print(f"no pictures: {error}")
    print(f"written: {file}; plan with it: --machine {file}")


if __name__ == "__main__":
    print("copy, bytes          GB/s")
    for size, rate in copy_bandwidth():
        print(f"  {size:12,} {rate / 1e9:9.2f}")
