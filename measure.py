"""What the machine at hand does, and what a training step costs on it, operation by operation.

    step time = sum over the operations of one step of (measured seconds + overhead of Python and autograd)

The operations come from the real modules: one forward, backward and optimizer step runs on torch's fake
tensors (shapes without data), and `Recorder` writes down each call with the shapes, strides and types of its
tensors. `measure` then times every distinct call once on real tensors. An operation that was not measured
takes the time of its nearest measured relative, scaled by its work: floating-point operations for products
and attention, bytes for the rest. So one measured shape serves to predict others.

  work of a product    2 M N K, for each member of a batch or expert of a group
  work of attention    4 T^2 K for each head (the full square, as torch counts), 2.5 times that backward
  work of the rest     bytes read + bytes written; a broadcast dimension is read once

Beside the operations: copy bandwidth by size, product rate over sweeps of M, N and K, grouped expert products
against the number of tokens, all-reduce over the present ranks by message size, writing and reading a
checkpoint. ZAYA1 (arXiv 2511.17127) measures the same things on MI300X before it chooses the
model's dimensions.

Glossary: bus bandwidth: bytes that cross each rank's link, 2 (n - 1) / n of the message, over the time. M
rows (tokens), N output channels, K contracted channels. Letters otherwise as in model.py.

Left out: the HIP kernels and torch.compile (the plain path is recorded), and what operations of one step do
to each other's caches. On a shared machine repeat a measurement that looks odd.
"""

import collections
import dataclasses
import json
import math
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import kernels_hip
import optim
from model import ZAYA, ZAYAConfig, grouped_linear
from router import Balancer

aten = torch.ops.aten
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
ALIASES = ("_unsafe_view", "_reshape_alias", "lift_fresh",
           "promote_types")       # no work, though not marked as views


# ----------------------------------------------------------------------------------- the operations of a step

@dataclass(frozen=True)
class Spec:
    """A tensor without its data."""
    shape: tuple
    stride: tuple
    dtype: torch.dtype

    @property
    def bytes(self):
        """Bytes in memory; a broadcast (stride 0) dimension counts once."""
        return self.dtype.itemsize * math.prod(n for n, s in zip(self.shape, self.stride) if s)


@dataclass(frozen=True)
class Operation:
    """One call: args and kwargs hold Specs for tensors. name: as in aten. dims: (batch, M, N, K) of a
    product, else ()."""
    function: object
    name: str
    signature: str
    args: tuple
    kwargs: dict
    dims: tuple
    work: float

    def __hash__(self):
        return hash(self.signature)

    def __eq__(self, other):
        return self.signature == other.signature


class Recorder(TorchDispatchMode):
    """Counts operations by phase and passes them on; answers the few that ask fake tensors for their data."""

    def __init__(self):
        super().__init__()
        self.phase, self.counts, self.views = "forward", collections.Counter(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace == "prim":
            return function(*args, **kwargs)
        if function is aten._local_scalar_dense.default:        # is any token skipped? while pricing: none is
            return False
        out = stand_in(function, args, kwargs)
        name = function._schema.name.split("::")[1]
        if function.is_view or name in ALIASES:
            self.views += 1
        else:
            self.counts[self.phase, operation(function, name, args, kwargs, out)] += 1
        return out


def stand_in(function, args, kwargs):
    """The fake result; for two operations whose fake version asks for data or refuses float32, a tensor
    of the right shape."""
    if function is aten.bincount.default:
        return args[0].new_empty(kwargs.get("minlength", args[-1]))
    if function is aten._grouped_mm.default:
        a, b, offsets = args[0], args[1], kwargs["offs"] if "offs" in kwargs else args[2]
        return a.new_empty((len(a), b.shape[-1]) if b.dim() == 3 else (len(offsets), len(a), b.shape[1]))
    return function(*args, **kwargs)


def operation(function, name, args, kwargs, out):
    """The Operation of one call with fake or real tensors."""
    spec = lambda t: Spec(tuple(t.shape), t.stride(), t.dtype) if isinstance(t, torch.Tensor) else t
    args, kwargs, out = tree_map(spec, args), tree_map(spec, kwargs), tree_map(spec, out)
    ins = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Spec)]
    outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Spec)]
    dims = product_dims(name, [s.shape for s in ins])
    if dims:
        work = 2 * math.prod(dims)
    elif "scaled_dot_product" in name:
        B, H, T, K = ins["backward" in name].shape
        work = 4 * B * H * T * ins[1 + ("backward" in name)].shape[2] * K * (2.5 if "backward" in name else 1)
    else:
        work = sum(s.bytes for s in ins + outs)
    numbers = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is int]      # dimensions, lengths
    text = ",".join(f"{s.shape}{s.stride}{s.dtype}" for s in ins) + str(numbers)
    signature = f"{name} {text}".replace("torch.", "").replace(" ", "")
    return Operation(function, name, signature, args, kwargs, dims, work)


def product_dims(name, shapes):
    """(batch, M, N, K) of a matrix product from its operands' shapes; () for anything else. A group
    counts as one product."""
    if name not in PRODUCTS:
        return ()
    a, b = shapes[1:3] if name in ("addmm", "baddbmm") else shapes[:2]
    if name == "_grouped_mm":       # rows of a, or its columns (product by weight), are dealt out to experts
        return (1, a[0], b[-1], a[1])
    return (a[0] if len(a) == 3 else 1, a[-2], b[-1], a[-1])


def step_operations(config, batch, seq_len, optimizer="muon", dtype=torch.float32, device="cpu"):
    """Every operation of one training step of batch x seq_len tokens: (Counter {(phase, Operation): times},
    number of views).

    Phases: forward, backward, optimizer (clipping, Muon and AdamW in their second step, balancing). Nothing
    is computed.
    """
    chosen = kernels_hip._chosen
    kernels_hip.select("plain")
    autocast = torch.autocast(device, dtype) if dtype != torch.float32 else nullcontext()
    try:
        with FakeTensorMode(), torch.device(device):
            model, tokens = ZAYA(config), torch.zeros(batch, seq_len, dtype=torch.int64)
            optimizers, balancer = optim.build(model, optimizer, 0.01), Balancer(model)
            for _ in range(2):                              # the first step makes the optimizers' state
                with Recorder() as recorder:
                    with autocast:
                        loss = model(tokens, tokens)[1]
                    recorder.phase = "backward"
                    loss.backward()
                    recorder.phase = "optimizer"
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
                    for each in optimizers:
                        each.step()
                    balancer.step()
                model.zero_grad()
    finally:
        kernels_hip.select(chosen)
    return recorder.counts, recorder.views


# ------------------------------------------------------------------------------------------------ timing

def seconds(work, device="cpu", least=0.002, repeats=5):
    """Seconds of one call of `work`: the least of `repeats` rounds of at least `least` seconds each.
    Other processes only ever add."""
    wait = torch.cuda.synchronize if str(device).startswith("cuda") else lambda: None
    work()
    wait()
    count, rounds = 1, []
    while len(rounds) < repeats:
        start = time.perf_counter()
        for _ in range(count):
            work()
        wait()
        spent = time.perf_counter() - start
        if spent < least and count < 10_000:
            count, rounds = max(2 * count, int(count * least / max(spent, 1e-9))), []
        else:
            rounds.append(spent / count)
    return min(rounds)


def real(spec, device):
    """A tensor like spec: floats between 0.5 and 1.5 (no denormals, no overflow), whole numbers and
    indices zero, masks true."""
    length = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride)) if 0 not in spec.shape else 0
    flat = torch.empty(length, dtype=spec.dtype, device=device)
    flat.uniform_(0.5, 1.5) if spec.dtype.is_floating_point else flat.fill_(spec.dtype == torch.bool)
    return flat.as_strided(spec.shape, spec.stride)


@torch.no_grad()
def time_operation(op, device="cpu"):
    """Seconds of one call of this operation on real tensors."""
    args, kwargs = tree_map(lambda x: real(x, device) if isinstance(x, Spec) else x, (op.args, op.kwargs))
    if op.name == "_grouped_mm":            # tokens spread evenly over the experts
        offsets = kwargs.get("offs", args[2] if len(args) > 2 else None)
        rows = args[0].shape[0] if args[1].dim() == 3 else args[0].shape[1]
        offsets.copy_(torch.arange(1, len(offsets) + 1) * rows // len(offsets))
    return seconds(lambda: KEPT.keep(op.function(*args, **kwargs)), device)


class Kept:
    """Holds the last results, as autograd does in a step: each new one then lands in memory that no cache
    holds. Timed without this, element-wise operations on a CPU look twice as fast as they are."""

    def __init__(self, limit=2**25):
        self.limit, self.bytes, self.held = limit, 0, collections.deque()

    def keep(self, result):
        size = result.nbytes if isinstance(result, torch.Tensor) else 0
        self.held.append((size, result))
        self.bytes += size
        while self.bytes > self.limit or len(self.held) > 1000:
            self.bytes -= self.held.popleft()[0]


KEPT = Kept()


def real_step(config, batch, seq_len, optimizer="muon", dtype=torch.float32, device="cpu"):
    """A function that trains one step of batch x seq_len random tokens, as train.py's loop does without
    data and log."""
    torch.manual_seed(0)
    model = ZAYA(config).to(device)
    optimizers, balancer = optim.build(model, optimizer, 0.01), Balancer(model)
    tokens = torch.randint(config.vocab_size, (batch, seq_len + 1), device=device)

    def step():
        with torch.autocast(device, dtype) if dtype != torch.float32 else nullcontext():
            loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        for each in optimizers:
            each.step()
        balancer.step()
        model.zero_grad()
        return loss
    return step


def overhead(dtype=torch.float32, device="cpu"):
    """Seconds of Python and autograd for each operation (views too) beyond the operation itself: what a step
    of one sequence of two tokens takes beyond its operations, where there is hardly any work."""
    config = ZAYAConfig.preset("tiny")
    counts, views = step_operations(config, 1, 2, "muon", dtype, device)
    priced = sum(n * time_operation(op, device) for (_, op), n in counts.items())
    step = seconds(real_step(config, 1, 2, "muon", dtype, device), device, least=0.2)
    return max(step - priced, 0) / (sum(counts.values()) + views)


# ---------------------------------------------------------------------------------------- the price of a step

class Prices:
    """Measured seconds by operation, with the nearest relative's for what was not measured. rows:
    machine["operations"]."""

    def __init__(self, rows):
        self.exact = {row["signature"]: row["seconds"] for row in rows}
        self.relatives = collections.defaultdict(list)
        for row in rows:
            self.relatives[row["name"]].append(row)
        self.floor = {name: min(r["seconds"] for r in rows) for name, rows in self.relatives.items()}
        self.any = [row for row in rows if not row["dims"]]

    def __call__(self, op):
        if op.signature in self.exact:
            return self.exact[op.signature]
        rows = self.relatives.get(op.name) or self.any
        near = min(rows, key=lambda row: distance(op, row))
        floor, ratio = self.floor.get(op.name, 0), op.work / max(near["work"], 1)
        if near["seconds"] > floor:         # a fixed cost and one by work
            return floor + (near["seconds"] - floor) * ratio
        return floor * max(ratio, 1)


def distance(op, row):
    """How unlike two operations are: in the logarithms of M, N, K and batch for products, of the bytes
    for the rest."""
    if op.dims and row["dims"]:
        return sum(abs(math.log(max(a, 1) / max(b, 1))) for a, b in zip(op.dims, row["dims"]))
    return abs(math.log(max(op.work, 1) / max(row["work"], 1)))


def predict(machine, config, batch, seq_len, optimizer="muon"):
    """Seconds of one training step of batch x seq_len tokens, from a measured machine, by kind: products and
    elementwise of forward and backward, newton_schulz (the optimizer's products), optimizer (the rest of it),
    and their sum, step."""
    counts, views = step_operations(config, batch, seq_len, optimizer, getattr(torch, machine["dtype"]),
                                    machine["kind"])
    price, times = Prices(machine["operations"]), collections.Counter(elementwise=views * machine["overhead"])
    for (phase, op), n in counts.items():
        product = bool(op.dims) or "scaled_dot" in op.name
        kind = ("elementwise", "products") if phase != "optimizer" else ("optimizer", "newton_schulz")
        times[kind[product]] += n * (price(op) + machine["overhead"])
    times["step"] = sum(times.values())
    return dict(times)


# ------------------------------------------------------------------------------------------------ the machine

def measure_operations(shapes, device="cpu", dtype=torch.float32, say=print):
    """Time each distinct operation of the steps in shapes, a list of (config, batch, seq_len, optimizer)
    -> rows of a machine file."""
    operations = {}
    for config, batch, seq_len, optimizer in shapes:
        counts, _ = step_operations(config, batch, seq_len, optimizer, dtype, device)
        operations.update((op.signature, op) for _, op in counts)
    say(f"timing {len(operations)} operations of the model's step")
    return [dict(name=op.name, signature=signature, dims=op.dims, work=op.work,
                 seconds=time_operation(op, device))
            for signature, op in operations.items()]


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
    return [2 * M * N * K / seconds(work, device) for work in (lambda: x @ w.t(), lambda: g @ w,
                                                               lambda: g.t() @ x)]


def product_sweep(device, dtype):
    """[[M, N, K, forward, backward by input, backward by weight (FLOP/s)]] over a grid."""
    sides = (64, 192, 512, 1024) if device == "cpu" else (512, 1024, 2048, 4096, 8192, 16384)
    return [[M, N, K, *product_rate(M, N, K, device, dtype)] for K in (sides[1], sides[-1]) for M in sides
            for N in sides]


def grouped_sweep(config, device, dtype):
    """[[tokens, FLOP/s]] of gate_up of the model's experts, tokens spread evenly."""
    E, F_, D = config.num_experts, config.expert_hidden_size, config.hidden_size
    w, rows = torch.rand(E, 2 * F_, D, device=device).to(dtype), []
    with torch.no_grad():
        for tokens in (2**p for p in range(5, 13 if device == "cpu" else 17)):
            x = torch.rand(tokens, D, device=device).to(dtype)
            offsets = (torch.arange(1, E + 1, device=device) * tokens // E).int()
            rows.append([tokens, 4 * tokens * D * F_ / seconds(lambda: grouped_linear(x, w, offsets),
                                                               device)])
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
    """{"write", "read"}: B/s of a tensor saved to disk and flushed, then read with the page cache told to
    forget it."""
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


def measure(shapes, folder=".", ranks=1, allreduce=(), say=print):
    """Everything above on this device, as the dict of a machine file. shapes: as for measure_operations;
    allreduce: what allreduce_sweep found on `ranks` ranks, whose group must have ended: only one of them
    measures the rest. B/s and FLOP/s."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.set_flush_denormal(True)
    found = dict(torch=torch.__version__, kind=device, dtype=str(dtype).split(".")[1],
                 threads=torch.get_num_threads(),
                 device=torch.cuda.get_device_name() if device == "cuda"
                 else f"CPU, {torch.get_num_threads()} threads",
                 memory=memory(device), ranks=ranks, allreduce=list(allreduce))
    say(f"measuring {found['device']}, {found['dtype']}, {ranks} rank(s)")
    found.update(copy=copy_bandwidth(device), products=product_sweep(device, dtype),
                 checkpoint=checkpoint_speed(folder),
                 grouped=grouped_sweep(shapes[0][0], device, dtype), overhead=overhead(dtype, device),
                 operations=measure_operations(shapes, device, dtype, say))
    rates = [rate for row in found["products"] for rate in row[3:]]
    rates += [row["work"] / row["seconds"] for row in found["operations"] if row["dims"]
              and found["dtype"] in row["signature"]]
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
    lines += [f"  {r['name']:20}" + "".join(f"{d:7}" for d in r["dims"])
              + f" {giga(r['work'] / r['seconds'])}" for r in products[:16]]
    lines += ["copy, bytes          GB/s"] + [f"  {size:12,} {giga(rate)}" for size, rate in found["copy"]]
    lines += ["grouped, tokens   GFLOP/s"] + [f"  {tokens:12,} {giga(rate)}" for tokens,
                                              rate in found["grouped"]]
    lines += ["all-reduce, bytes    bus GB/s"] + [f"  {size:12,} {giga(rate)}" for size, _,
                                                  rate in found["allreduce"]] if found[
        "allreduce"] else ["all-reduce: one rank; start with torchrun --nproc-per-node=N plan.py --measure"]
    return "\n".join(lines + [f"checkpoint write {giga(found['checkpoint']['write'])} GB/s, read "
                              f"{giga(found['checkpoint']['read'])}"])


# ------------------------------------------------------------------------------------------------ pictures

def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise ValueError("pictures need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def draw_products(found, file):
    """Heat maps of the product rate over M and N, a row for each K: forward and the two backward products."""
    plt, rows = pyplot(), found["products"]
    depths, sides = sorted({r[2] for r in rows}), sorted({r[0] for r in rows})
    figure, axes = plt.subplots(len(depths), 3, figsize=(12, 4 * len(depths)), layout="constrained",
                                squeeze=False)
    for line, K in zip(axes, depths):
        for i, (axis, title) in enumerate(zip(line, ("x w^T  (forward)", "g w  (by input)",
                                                     "g^T x  (by weight)"))):
            rate = {(r[0], r[1]): r[3 + i] / 1e9 for r in rows if r[2] == K}
            image = axis.imshow([[rate[M, N] for N in sides] for M in sides], origin="lower", vmin=0,
                                vmax=found["peak"] / 1e9)
            for y, M in enumerate(sides):
                for x, N in enumerate(sides):
                    dark = rate[M, N] < 0.6 * found["peak"] / 1e9
                    axis.text(x, y, f"{rate[M, N]:.3g}", ha="center", va="center",
                              color="white" if dark else "black", fontsize=9)
            axis.set(title=f"{title}, K = {K}", xlabel="N", ylabel="M", xticks=range(len(sides)),
                     yticks=range(len(sides)),
                     xticklabels=sides, yticklabels=sides)
    figure.colorbar(image, ax=axes, label="GFLOP/s", shrink=0.7)
    figure.suptitle(f"Matrix products on {found['device']}, {found['dtype']}")
    figure.savefig(file, dpi=100)
    plt.close(figure)


def draw_bandwidth(found, file):
    """Copy and bus bandwidth over size; rate of the grouped expert product over tokens."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    left.plot(*zip(*[(size, rate / 1e9) for size, rate in found["copy"]]), "o-", label="copy, read + written")
    if found["allreduce"]:
        left.plot(*zip(*[(size, rate / 1e9) for size, _, rate in found["allreduce"]]), "s-",
                  label=f"all-reduce over {found['ranks']} ranks, bus")
    left.set(xscale="log", yscale="log", xlabel="bytes", ylabel="GB/s", title="Bandwidth by size")
    left.legend()
    right.plot(*zip(*[(tokens, rate / 1e9) for tokens, rate in found["grouped"]]), "o-")
    right.set(xscale="log", xlabel="tokens", ylabel="GFLOP/s", title="Grouped product of the experts (gate "
                                                                     "and up)", ylim=0)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=100)
    plt.close(figure)


# ------------------------------------------------------------------------------------------------ the command

def main(cfg, config):
    """plan.py --measure: this machine at the shape's operations -> cfg.machine (default machine.json) and two
    pictures beside it.

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


def demo():
    """What a step of the tiny preset consists of, and what its dearest operations take here."""
    counts, views = step_operations(ZAYAConfig.preset("tiny"), 4, 64)
    print(f"one step of the tiny preset, 4 x 64 tokens: {sum(counts.values())} operations ({len(counts)} "
          f"distinct), {views} views")
    spent = {(phase, op): (n * time_operation(op), n) for (phase, op), n in counts.items() if op.dims}
    for (phase, op), (t, n) in sorted(spent.items(), key=lambda item: -item[1][0])[:6]:
        print(f"  {phase:9} {n:3} x {op.name:13} batch {op.dims[0]}, {op.dims[1]} x {op.dims[2]} x "
              f"{op.dims[3]}: {t * 1e6:8.1f} us")
    print("the whole machine: python plan.py --measure")


if __name__ == "__main__":
    sys.exit(demo())
