"""The real size on a small machine: writes a random ZAYA1-8B in bfloat16, loads it, decodes at memory speed.

    python benchmarks/full_size.py FOLDER              needs 18 GB of disk and 20 GB of free memory
    python benchmarks/full_size.py FOLDER --blocks 4   the same with a tenth of the blocks, to try the script

A token must read every weight that it uses once: head, attention, routers and one expert a block, about 2.6
GB. A machine that copies C bytes a second (read and written both counted) cannot decode faster than C / 2.6
GB; printed is the share of that. The random weights say nothing sensible; their speed is that of real ones.
Fails if the decoder and the plain model disagree and, with all 40 blocks, if loading takes more than 1.15
times the weights' memory or less than half the bandwidth is reached.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import decode  # noqa: E402
import layouts  # noqa: E402
import pretrained  # noqa: E402
from chat import Meter, peak_memory  # noqa: E402
from model import ZAYA, ZAYAConfig  # noqa: E402
from prices import seconds  # noqa: E402
from sample import stream  # noqa: E402

PROMPT, TOKENS = list(range(1000, 1064)), 48


def write(folder, blocks):
    """A checkpoint of random weights, by shards, repeated from a pool: 8.8e9 fresh draws take minutes."""
    with torch.device("meta"):
        model = ZAYA(ZAYAConfig.preset("zaya1_8b", num_blocks=blocks)).bfloat16()
    pool = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).bfloat16()

    def ready(name, t):
        if t.dim() < 2:
            return torch.full(t.shape, float(name.endswith(("scale", "temp", "norm.weight"))), dtype=t.dtype)
        values = (pool * (0.1 if "conv" in name else 0.02)).repeat(-(-t.numel() // len(pool)))
        return values[:t.numel()].view(t.shape)

    state = model.state_dict()
    names = layouts.tensor_map(model.config, "transformers")
    tensors = {theirs: state[ours] for theirs, (ours, _) in names.items()}
    theirs = layouts.write_config(model.config, "transformers", "bfloat16")
    pretrained.write_folder(folder, tensors, theirs, 1_000_000_000, ready)


def copy_bandwidth():
    """Bytes a second of a large copy, read and written both counted; the best of several."""
    source = torch.ones(1 << 27)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), repeats=8)


def compare(model):
    """Relative difference of the decoder's hidden state from the plain model's, after a few tokens."""
    tokens = torch.tensor([PROMPT[:12]])
    with torch.inference_mode():
        cache = model.new_cache(1, 12)
        model.hidden(tokens[:, :6], cache=cache)
        step = decode.Decoder(model, cache)
        for t in tokens[0, 6:]:
            h = step(t[None])
        plain = model.hidden(tokens)[:, -1]
    return ((h - plain).float().norm() / plain.float().norm()).item()


def run(folder):
    device = torch.device("cpu")
    bandwidth = copy_bandwidth()
    began = time.perf_counter()
    model = pretrained.load(folder)
    spent = time.perf_counter() - began
    size = sum(map(pretrained.num_bytes, model.state_dict().values())) / 1e9
    memory = peak_memory(device) / size         # of the whole process, torch and the copied buffers included
    print(f"loading     {size:.2f} GB in {spent:.1f} s, peak memory {peak_memory(device):.2f} GB, "
          f"{memory:.3f} of the weights")
    meter = Meter(model)
    rows = list(meter.over(stream(model, [PROMPT], TOKENS, temperature=0)))
    rate, needed = meter.tokens / (meter.last - meter.first), 2 * model.num_parameters(active=True) / 1e9
    share = rate * needed * 1e9 / bandwidth
    print(f"decoding    {len(PROMPT)} prompt tokens, {len(rows)} new ones: {meter.line()}")
    print(f"bandwidth   {needed:.2f} GB a token: {rate * needed:.1f} GB/s, {share:.0%} of the "
          f"{bandwidth / 1e9:.1f} GB/s of a copy ({torch.get_num_threads()} threads)")
    error = compare(model)
    print(f"check       decoder against plain model: relative difference {error:.4f}")
    full = model.config.num_blocks == 40
    limits = {"the decoder disagrees with the plain model": error > 0.05,
              "loading takes more than 1.15 times the weights": full and memory > 1.15,
              "less than half the bandwidth": full and share < 0.5}
    if failed := [text for text, wrong in limits.items() if wrong]:
        raise SystemExit("failed: " + "; ".join(failed))


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folder", type=Path, help="where the checkpoint goes; removed afterwards")
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint, and use it if it is there")
    parser.add_argument("--step", choices=("write", "run"), help="one step alone, as the script calls itself")
    args = parser.parse_args()
    if args.step:
        return write(args.folder, args.blocks) if args.step == "write" else run(args.folder)
    there = (args.folder / "config.json").exists()
    if args.folder.exists() and not (there and args.keep):
        parser.error(f"{args.folder} exists: name a new folder, it is removed afterwards (or --keep)")
    try:
        for step in ("run",) if there else ("write", "run"):
            began = time.perf_counter()
            command = [sys.executable, __file__, args.folder, "--blocks", str(args.blocks), "--step", step]
            subprocess.run(command, check=True)
            print(f"{step:<11} {time.perf_counter() - began:.0f} s altogether")
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
    finally:
        if not args.keep:
            shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
