"""Muon for matrices, AdamW for everything else, and the learning-rate schedule.

Muon, for a matrix W (rows m, columns n) with gradient G and momentum buffer M:

  (1)  M <- mu M + G,   U = G + mu M                          Nesterov momentum, float32
  (2)  X_0 = U / |U|_F,   X <- a X + (b A + c A^2) X,  A = X X^T     five Newton-Schulz steps, (a, b, c) =
                                                                     (3.4445, -4.7750, 2.0315)
  (3)  W <- (1 - lr wd) W - lr 0.2 sqrt(max(m, n)) X           the factor gives X the RMS of a typical AdamW
                                                               update (0.2)

(2) moves every singular value of U close to 1: the update turns all directions of W equally fast. By (3) one
learning rate serves both optimizers. Muon takes the 2-D weights (attention projections, router matrices) and
each expert's matrices by themselves; AdamW takes the embedding, convolutions, norms, scales, biases and
temperatures. Nothing one-dimensional is decayed.

Papers: ZAYA1, arXiv 2511.17127 (its first version prints the two lists of parameters swapped).

With several ranks every matrix has one owner, which alone keeps its momentum and runs (2); the results are
gathered, in the dtype that (2) computed in. That is ZeRO-1 for the Muon part. Owners are fixed by the order
of names, so a checkpoint can be read on another number of ranks.

Glossary: newton_schulz (2), Muon.step (1) and (3). Not published: AdamW's betas and warm-up; the defaults
here are ours.
"""

import itertools
import math

import torch
import torch.distributed as dist

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(U, steps=5, dtype=torch.float32):
    """Equation (2) for a batch of matrices U (M, m, n): the same shape, computed and returned in dtype,
    singular values between about 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    X = U / U.norm(dim=(1, 2), keepdim=True).clamp(min=1e-30)
    X = X.to(dtype)
    tall = X.shape[1] > X.shape[2]
    if tall:                                # A is then the smaller of the two Gram matrices
        X = X.transpose(1, 2)
    for _ in range(steps):
        A = X @ X.transpose(1, 2)
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    return X.transpose(1, 2) if tall else X


def fast_dtype(device):
    """bfloat16 where matrix products in it are faster than in float32: GPUs, and CPUs with bf16
    instructions."""
    if device.type != "cpu":
        return torch.bfloat16
    return (
        torch.bfloat16
        if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        else torch.float32
    )


class Muon(torch.optim.Optimizer):
    """Muon over named parameters of two dimensions, or three (a stack of independent matrices).

    Matrices of one shape are stepped as one batch; with torch.distributed running, each rank steps its own
    part of the batch.
    """

    def __init__(self, named_parameters, lr, momentum=0.95, weight_decay=0.1, ns_steps=5):
        named = list(named_parameters)
        super().__init__(
            [p for _, p in named],
            dict(lr=lr, momentum=momentum, weight_decay=weight_decay, ns_steps=ns_steps),
        )
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        shapes = {}
        for name, p in named:
            shapes.setdefault(tuple(p.shape[-2:]), []).append((name, p))
        self.batches = [Batch(group, self.rank, self.world) for group in shapes.values()]

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        # While a batch's updates travel the next are computed.
        gathered = [gather(batch.own_update(group["momentum"], group["ns_steps"]), self.world)
                    for batch in self.batches]
        for batch, (update, arrived) in zip(self.batches, gathered):
            arrived()
            update = update[:batch.total].float()       # till here in Newton-Schulz's dtype
            rows, cols = update.shape[1:]
            scale = group["lr"] * 0.2 * math.sqrt(max(rows, cols))
            parts = update.split(batch.sizes)
            torch._foreach_mul_(batch.parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(batch.parameters, [u.view_as(p) for u, p in zip(parts, batch.parameters)],
                                alpha=-scale)

    def named_state(self):
        """{matrix name: momentum (m, n)} of the matrices this rank owns; views, so that loading into them
        restores them."""
        return {name: m for batch in self.batches for name, m in zip(batch.own_names, batch.momentum)}


class Batch:
    """All matrices of one shape, in the order of their parameters, and the momentum of those this rank
    owns."""

    def __init__(self, named, rank, world):
        self.parameters = [p for _, p in named]
        rows, cols = self.parameters[0].shape[-2:]
        self.sizes = [p.numel() // (rows * cols) for p in self.parameters]      # matrices in each parameter
        names = [f"{name}.{i}" if p.dim() == 3 else name
                 for (name, p), size in zip(named, self.sizes) for i in range(size)]
        self.total = len(names)
        self.share = math.ceil(self.total / world)  # the last rank's part may be shorter: gather pads it
        self.own = slice(rank * self.share, min((rank + 1) * self.share, self.total))
        starts = itertools.accumulate(self.sizes, initial=0)
        self.own_of_each = [slice(max(self.own.start - start, 0), max(self.own.stop - start, 0))
                            for start in starts][:-1]
        self.own_names = names[self.own]
        self.momentum = self.parameters[0].new_zeros(len(self.own_names), rows, cols, dtype=torch.float32)

    def own_update(self, momentum, ns_steps):
        """Equations (1) and (2) for the owned matrices: (share, m, n), zeros where the share is short."""
        rows, cols = self.momentum.shape[1:]
        G = torch.cat([p.grad.reshape(-1, rows, cols)[own]
                       for p, own in zip(self.parameters, self.own_of_each)]).float()
        self.momentum.mul_(momentum).add_(G)
        U = G.add_(self.momentum, alpha=momentum)
        X = newton_schulz(U, ns_steps, fast_dtype(U.device))
        return torch.cat([X, X.new_zeros(self.share - len(X), rows, cols)]) if len(X) < self.share else X


def gather(part, world):
    """Parts of equal shape from all ranks, joined along the first dimension, and a function that waits for
    them."""
    if world == 1:
        return part, lambda: None
    whole = part.new_empty(world * part.shape[0], *part.shape[1:])
    return whole, dist.all_gather_into_tensor(whole, part.contiguous(), async_op=True).wait


def groups(model):
    """Every trainable parameter in exactly one of three lists of (name, parameter): "muon", "adamw"
    (decayed), "plain"."""
    lists = {"muon": [], "adamw": [], "plain": []}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if p.dim() < 2:
            lists["plain"].append((name, p))
        elif name.startswith("embed") or ".conv_" in name:
            lists["adamw"].append((name, p))
        else:
            lists["muon"].append((name, p))
    return lists


def build(model, kind, lr, weight_decay=0.1, betas=(0.9, 0.95), momentum=0.95, ns_steps=5):
    """The optimizers of a model: [Muon, AdamW] for kind "muon", [AdamW] for "adamw". One learning rate serves
    both."""
    lists = groups(model)
    decayed = [p for _, p in lists["adamw"]] + ([] if kind == "muon" else [p for _, p in lists["muon"]])
    adamw = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": [p for _, p in lists["plain"]], "weight_decay": 0.0},
        ],
        lr=lr,
        betas=betas,
        fused=True,
    )
    if kind == "adamw":
        return [adamw]
    return [Muon(lists["muon"], lr, momentum, weight_decay, ns_steps), adamw]


def adam_state(optimizer, names):
    """AdamW's state by name, {name.exp_avg, name.exp_avg_sq, name.step: tensor}; made first where no step was
    taken yet, so that a checkpoint can be read into it. names: {parameter: name}."""
    state = {}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if not optimizer.state[p]:
            zero = torch.zeros_like(p, memory_format=torch.preserve_format).detach()
            step = torch.zeros((), device=p.device if optimizer.defaults["fused"] else "cpu")
            optimizer.state[p].update(step=step, exp_avg=zero, exp_avg_sq=zero.clone())
        state.update({f"{names[p]}.{key}": value for key, value in optimizer.state[p].items()})
    return state


def lr_at(progress, start, end, warmup=0.0):
    """Learning rate at a fraction `progress` in [0, 1] of a phase: linear from 0 over `warmup`, then cosine
    from start to end."""
    if progress < warmup:
        return start * progress / warmup
    along = (progress - warmup) / max(1 - warmup, 1e-12)
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(along, 1.0)))


def demonstrate():
    """What Newton-Schulz does to a matrix: its singular values before and after each step."""
    torch.manual_seed(0)
    U = torch.randn(1, 64, 96) @ torch.diag(torch.logspace(0, -1, 96))
    print("steps  largest and smallest singular value of X")
    for steps in range(7):
        values = torch.linalg.svdvals(newton_schulz(U, steps)[0])
        print(f"{steps:5d}  {values.max():.3f}  {values.min():.4f}")
    print("after five, every direction of the gradient moves the weights by about the same amount")


if __name__ == "__main__":
    demonstrate()
