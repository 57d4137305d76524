"""What the kernels of kernels_hip.py must move, on paper, and what they reach on the GPU at hand.

    python benchmarks/kernels.py     bytes per kernel; on a GPU also times, GB/s, share of its copy bandwidth

The paper part takes ZAYA1-8B's layer (16,384 tokens of 2,048, 16 experts of 2,048, bfloat16) and divides by
the copy bandwidth that was published for MI300X, 4.33 TB/s (arXiv 2511.17127). It is a lower bound and NOT
MEASURED. Without a GPU nothing is timed: the CPU shim says nothing about speed. On a GPU every kernel's
output is first compared with its twin (kernels_hip.check), so that a fast kernel that writes rubbish fails
here.
"""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import kernels_hip  # noqa: E402

MI300X_COPY = 4.33e12
LAYER = dict(tokens=16384, width=2048, num_experts=16, hidden=2048)


def traffic(tokens, width, num_experts, hidden, size=2):
    """Bytes each kernel must move at least, and those of torch's operations -> {name: (ours, torch's)}.

    Top-1. hidden is the experts' F, size the bytes of an element; positions and weights are 12 bytes a token.
    Torch's combine gathers, widens to float32, multiplies and narrows, each through memory; its backward
    widens two tensors, multiplies twice, sums and narrows. Its swiglu is silu and a product; the backward is
    two products, silu's and chunk's.
    """
    x, wide, small, a = tokens * width * size, tokens * width * 4, tokens * 12, tokens * hidden * size
    chunks = -(-tokens // kernels_hip.CHUNK)
    return {
        "routing": (3 * 8 * tokens + 4 * 4 * num_experts * chunks, 16 * 8 * tokens),
        "dispatch": (2 * x + small, 2 * x + small),
        "dispatch, backward": (2 * x + small, 2 * x + small),
        "combine": (2 * x + small, 2 * x + (x + wide) + 2 * wide + (wide + x)),
        "combine, backward": (3 * x + 2 * small, 2 * x + 2 * (x + wide) + 4 * wide + 2 * wide + (wide + x)),
        "swiglu": (3 * a, 5 * a),
        "swiglu, backward": (5 * a, 13 * a),
    }


def table():
    """The bytes on paper as Markdown, for the README: what `main` prints before it measures anything."""
    lines = ["| kernel | bytes | at 4.33 TB/s | torch's operations | at 4.33 TB/s |", "|---|---|---|---|---|"]
    for name, sizes in traffic(**LAYER).items():
        cells = [f"{n / 1e6:.1f} MB | {n / MI300X_COPY * 1e6:.1f} us" for n in sizes]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def seconds(work, repeats=50):
    """Mean time of one call on the GPU, after five calls to warm up."""
    for _ in range(5):
        work()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3 / repeats


def copy_bandwidth(elements=2**29):
    """Bytes a second, read and written, of torch's copy of a gigabyte on this GPU."""
    source = torch.empty(elements, device="cuda", dtype=torch.bfloat16)
    copied = torch.empty_like(source)
    return 4 * elements / seconds(lambda: copied.copy_(source))


def works(tokens, width, num_experts, hidden):
    """{name: (the kernel's call, the plain path's call)} on random tensors of this GPU."""
    options = dict(device="cuda", dtype=torch.bfloat16)
    x, h = torch.randn(tokens, width, **options), torch.randn(tokens, 2 * hidden, **options)
    act, leaf = torch.randn(tokens, hidden, **options), h.clone().requires_grad_()
    weights = torch.rand(tokens, 1, device="cuda")
    experts = torch.randint(num_experts, (tokens, 1), device="cuda")
    library, k = kernels_hip._library_for(x, num_experts), kernels_hip
    rows, _, positions = k.dispatch(x, experts, num_experts)
    twin = k.swiglu_ref(leaf)
    narrow = x[:, :8].contiguous()
    return {
        "routing": (lambda: k._dispatch_hip(library, narrow, experts, num_experts),
                    lambda: k.dispatch_ref(narrow, experts, num_experts)),
        "dispatch": (lambda: k._dispatch_hip(library, x, experts, num_experts),
                     lambda: k.dispatch_ref(x, experts, num_experts)),
        "dispatch, backward": (lambda: k._combine_hip(library, rows, None, positions),
                               lambda: k.combine_ref(rows, None, positions)),
        "combine": (lambda: k._combine_hip(library, rows, weights, positions),
                    lambda: k.combine_ref(rows, weights, positions)),
        "combine, backward": (lambda: k._combine_backward_hip(library, x, rows, weights, positions, None),
                              lambda: k.combine_backward_ref(x, rows, weights, positions, None)),
        "swiglu": (lambda: k._swiglu_hip(library, h), lambda: k.swiglu_ref(h)),
        "swiglu, backward": (lambda: k._swiglu_hip(library, h, act),
                             lambda: torch.autograd.grad(twin, leaf, act, retain_graph=True)),
    }


def main():
    print("bytes on paper for 16,384 tokens x 2,048, 16 experts of 2,048, bfloat16; time at the copy rate")
    print("published for MI300X, 4.33 TB/s; the launches, a few us each, are not in it. NOT MEASURED:")
    for name, (ours, torchs) in traffic(**LAYER).items():
        print(f"  {name:<20}{ours / 1e6:8.1f} MB {ours / MI300X_COPY * 1e6:6.1f} us    torch's operations "
              f"{torchs / 1e6:8.1f} MB {torchs / MI300X_COPY * 1e6:6.1f} us")
    if not torch.cuda.is_available():
        print("no GPU here, so nothing was timed (the CPU shim says nothing about speed)")
        return
    kernels_hip.select("hip")
    print(f"{kernels_hip.status()}; largest difference from the twins {kernels_hip.check('cuda'):.1e}")
    peak = copy_bandwidth()
    print(f"measured on this GPU; copy {peak / 1e9:.0f} GB/s; dispatch includes routing:")
    for name, (kernel, plain) in works(**LAYER).items():
        ours, torchs = seconds(kernel), seconds(plain)
        rate = traffic(**LAYER)[name][0] / ours
        print(f"  {name:<20}{ours * 1e6:8.1f} us {rate / 1e9:6.0f} GB/s {rate / peak:4.0%} of copy   torch "
              f"{torchs * 1e6:8.1f} us")


if __name__ == "__main__":
    main()
