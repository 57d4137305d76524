"""The operations of a training step, written down without computing one.

One forward, backward and optimizer step of the real modules runs on torch's fake tensors (shapes without
data), and `Recorder` notes each call with the shapes, strides and types of its tensors, and its work:

  work of a product    2 M N K, for each member of a batch or expert of a group
  work of attention    4 T^2 K for each head (the full square, as torch counts), 2.5 times that backward
  work of the rest     bytes read + bytes written; a broadcast dimension is read once

prices.py times these operations, sheet.py's traffic is counted from them.

Glossary: M rows (tokens), N output channels, K contracted channels of a product; phase: forward, backward,
optimizer. Left out: the HIP kernels and torch.compile (the plain path is recorded).
Run: `python operations.py`.
"""

import collections
import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import kernels_hip
import optim
from model import ZAYA, ZAYAConfig
from router import Balancer

aten = torch.ops.aten
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "grouped_product")
ALIASES = ("_unsafe_view", "_reshape_alias", "lift_fresh", "promote_types")     # no work, though no views


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
    """One call; args and kwargs hold Specs for tensors. name: aten's or ours; dims: see product_dims."""
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

    def enter(self, phase):
        self.phase = phase

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
    """The fake result; a tensor of its shape where the fake version asks for data."""
    if function is aten.bincount.default:
        return args[0].new_empty(kwargs.get("minlength", args[-1]))
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
    """(batch, M, N, K) of a matrix product by its operands' shapes, else (). A group is one product."""
    if name not in PRODUCTS:
        return ()
    a, b = shapes[1:3] if name in ("addmm", "baddbmm") else shapes[:2]
    if name == "grouped_product":   # rows of a, or its columns (product by weight), are dealt out to experts
        return (1, a[0], b[-1], a[1])
    return (a[0] if len(a) == 3 else 1, a[-2], b[-1], a[-1])


def train_once(model, optimizers, balancer, tokens, targets, dtype, enter=lambda phase: None):
    """One training step as train.py's loop takes it, without data and log -> loss. enter: told of phases."""
    device = tokens.device.type
    with torch.autocast(device, dtype) if dtype != torch.float32 else nullcontext():
        loss = model(tokens, targets)[1]
    enter("backward")
    loss.backward()
    enter("optimizer")
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    for each in (*optimizers, balancer):
        each.step()
    model.zero_grad()
    return loss


def step_operations(config, batch, seq_len, optimizer="muon", dtype=torch.float32, device="cpu"):
    """Every operation of one training step of batch x seq_len tokens, nothing computed:
    (Counter {(phase, Operation): times}, number of views).

    Phases: forward, backward, optimizer (clipping, Muon and AdamW in their second step, balancing).
    """
    chosen = kernels_hip._chosen
    kernels_hip.select("plain")
    try:
        with FakeTensorMode(), torch.device(device):
            model, tokens = ZAYA(config), torch.zeros(batch, seq_len, dtype=torch.int64)
            optimizers, balancer = optim.build(model, optimizer, 0.01), Balancer(model)
            for _ in range(2):                              # the first step makes the optimizers' state
                with Recorder() as recorder:
                    train_once(model, optimizers, balancer, tokens, tokens, dtype, recorder.enter)
    finally:
        kernels_hip.select(chosen)
    return recorder.counts, recorder.views


def real_step(config, batch, seq_len, optimizer="muon", dtype=torch.float32, device="cpu"):
    """A function that trains one step of batch x seq_len random tokens and returns the loss."""
    torch.manual_seed(0)
    model = ZAYA(config).to(device)
    optimizers, balancer = optim.build(model, optimizer, 0.01), Balancer(model)
    tokens = torch.randint(config.vocab_size, (batch, seq_len + 1), device=device)
    return lambda: train_once(model, optimizers, balancer, tokens[:, :-1], tokens[:, 1:], dtype)


def demonstrate():
    """What a step of the tiny preset consists of: its largest products."""
    counts, views = step_operations(ZAYAConfig.preset("tiny"), 4, 64)
    print(f"one step of the tiny preset, 4 x 64 tokens: {sum(counts.values())} operations ({len(counts)} "
          f"distinct), {views} views; its largest products:")
    products = sorted(((n * op.work, n, phase, op) for (phase, op), n in counts.items() if op.dims),
                      key=lambda row: -row[0])
    for work, n, phase, op in products[:6]:
        batch, M, N, K = op.dims
        print(f"  {phase:9} {n:3} x {op.name:13} batch {batch}, {M} x {N} x {K}: {work / 1e6:.1f} MFLOP")


if __name__ == "__main__":
    demonstrate()
