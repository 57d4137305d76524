"""The MoE sublayer of a block: a router, E experts, and each token's way to its own and back.

  p, e, r     = router(x, r)                                router.py
  y           = sum_k p[k] Expert_{e[k]}(x)                 top-k experts, k = 1 in ZAYA1; (4) of router.py
  Expert_e(x) = W_down (silu(W_gate x) * W_up x)            SwiGLU

Rows are sorted by expert (kernels_hip.dispatch), so an expert's rows lie together and each projection of all
experts is one grouped product; kernels_hip.combine brings the results back in token order, times p. The skip
class, index E, stands for no expert: it gives p x (skip_expert="identity") or 0 ("zero").

All experts of a projection are one tensor, for three reasons: an idle expert then has a gradient, and it is
exactly zero, so no parameter is ever unused; one grouped product takes it whole; and Muon steps it in one
batch. How many rows an expert has never leaves the device: grouped products read `offsets` there.

Papers: ZAYA1, arXiv 2511.17127 (16 experts, top-1); SwiGLU, 2002.05202.

Glossary: gate the router, gate_up_proj [W_gate; W_up] (E, 2 F, D), down_proj W_down (E, D, F); rows (S, D)
the S = N K slots in expert order, offsets (E,) the inclusive end of each expert's. Letters: N tokens, K
choices a token, E experts, D hidden size, F expert width, I and O in and out of a product.

Departures: none in what is computed. Left out: experts on several GPUs, capacity limits, dropped tokens. 192
GB hold all experts, and no token is ever dropped.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

import kernels_hip
from router import Router

FEW_SLOTS = 8  # rows up to which experts are called one by one in decoding: sorting costs more than it joins


class MoE(nn.Module):
    """x (B, T, D), r (N, R) of the previous block or None -> y (B, T, D), r (N, R), chosen classes (N, K)."""

    def __init__(self, config, block=0):
        super().__init__()
        self.num_experts, self.skip_is_identity = config.num_experts, config.skip_expert == "identity"
        self.gate = Router(config, block)
        self.experts = Experts(config)

    def forward(self, x, r=None):
        p_NK, experts_NK, r = self.gate(x.flatten(0, 1), r)
        return self.visit(x.flatten(0, 1), p_NK, experts_NK).view_as(x), r, experts_NK

    def visit(self, x_ND, p_NK, experts_NK):
        """Each token's rows go to its experts and come back weighted: (N, D) -> (N, D)."""
        if 0 < experts_NK.numel() <= FEW_SLOTS and x_ND.device.type == "cpu" and not torch.is_grad_enabled():
            return self.visit_few(x_ND, p_NK, experts_NK)
        rows, offsets, positions = kernels_hip.dispatch(x_ND, experts_NK, self.num_experts)
        rows = self.experts(rows, offsets)
        return kernels_hip.combine(rows, p_NK, positions, x_ND if self.skip_is_identity else None)

    def visit_few(self, x_ND, p_NK, experts_NK):
        """`visit` for a decoding step on a CPU, slot by slot: it reads the chosen experts' weights and
        nothing else."""
        wide, outputs = torch.promote_types(x_ND.dtype, torch.float32), []
        for x_1D, experts, weights in zip(x_ND.split(1), experts_NK.tolist(), p_NK.tolist()):
            skip = x_1D if self.skip_is_identity else torch.zeros_like(x_1D)
            rows = [self.experts.single(x_1D, e) if e < self.num_experts else skip for e in experts]
            outputs.append(sum(row.to(wide) * p for row, p in zip(rows, weights)))
        return torch.cat(outputs).to(x_ND.dtype)


class Experts(nn.Module):
    """E SwiGLU experts. rows (S, D) in expert order, offsets (E,) int32 -> (S, D). Rows past the last offset
    come out undefined."""

    def __init__(self, config):
        super().__init__()
        E, F_, D = config.num_experts, config.expert_hidden_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * F_, D))                 # gate rows first
        self.down_proj = nn.Parameter(torch.empty(E, D, F_))

    def forward(self, rows, offsets):
        h = kernels_hip.swiglu(grouped_linear(rows, self.gate_up_proj, offsets))
        return grouped_linear(h, self.down_proj, offsets)

    def single(self, x, e):
        """Expert e alone: (..., D) -> (..., D)."""
        return F.linear(kernels_hip.swiglu(F.linear(x, self.gate_up_proj[e])), self.down_proj[e])


def grouped_linear(x, weight, offsets):
    """x[offsets[e-1]:offsets[e]] @ weight[e]^T for every expert e: (S, I), (E, O, I) -> (S, O)."""
    # autocast does not know grouped products
    return GroupedLinear.apply(x.to(compute_dtype(weight)), weight.to(compute_dtype(weight)), offsets)


def compute_dtype(weight):
    """The dtype that products with this weight run in: its own, or autocast's."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


class GroupedLinear(torch.autograd.Function):
    """The linear map of grouped_linear and its two gradients: three grouped products."""

    @staticmethod
    def forward(ctx, x, weight, offsets):
        ctx.save_for_backward(x, weight, offsets)
        return torch.ops.zaya1.grouped_product(x, weight.transpose(1, 2), offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x, weight, offsets), grad = ctx.saved_tensors, grad.contiguous()
        grad_x = torch.ops.zaya1.grouped_product(grad, weight, offsets)
        return grad_x, torch.ops.zaya1.grouped_product(grad.t(), x, offsets), None


def grouped_product(a, b, offsets):
    """The products of each expert's slices. a (S, I), b (E, I, O): rows of a times the expert's matrix, (S,
    O). a (I, S), b (S, O): columns of a times rows of b, (E, I, O)."""
    if grouped_product_works(a, b):
        return F.grouped_mm(a, b, offs=offsets)
    ends = offsets.tolist()
    slices = [slice(start, end) for start, end in zip([0, *ends], ends)]
    if b.dim() == 2:
        return torch.stack([a[:, s] @ b[s] for s in slices])
    rows = torch.cat([a[s] @ matrix for s, matrix in zip(slices, b)])
    return torch.cat([rows, rows.new_zeros(len(a) - len(rows), rows.shape[1])])


def grouped_product_works(a, b):
    """torch's grouped product takes these dtypes, and rows of a multiple of 16 bytes."""
    sizes = (a.shape[0], b.shape[1]) if b.dim() == 2 else b.shape[1:]
    return (hasattr(F, "grouped_mm") and a.dtype in (torch.float32, torch.bfloat16, torch.float16)
            and all(size * a.element_size() % 16 == 0 for size in sizes))


# An operator of its own, so that a compiler takes it as it is: torch 2.13 cannot trace F.grouped_mm in
# float32, and the loop reads offsets back.
LIBRARY = torch.library.Library("zaya1", "FRAGMENT")
if not hasattr(torch.ops.zaya1, "grouped_product"):         # `python experts.py` loads this file twice
    LIBRARY.define("grouped_product(Tensor a, Tensor b, Tensor offsets) -> Tensor")
    LIBRARY.impl("grouped_product", grouped_product, "CompositeExplicitAutograd")

    @torch.library.register_fake("zaya1::grouped_product", lib=LIBRARY)
    def shape_of_grouped_product(a, b, offsets):
        return a.new_empty(*((len(offsets),) if b.dim() == 2 else ()), a.shape[0], b.shape[-1])


def demonstrate():
    """Sixteen tokens on their way to four experts and back, and that nothing was lost on it."""
    from model import ZAYAConfig
    torch.manual_seed(0)
    moe = MoE(ZAYAConfig.preset("tiny"))
    for name, p in moe.named_parameters():
        nn.init.normal_(p, std=1.0 if "gate." in name else 0.2)
    moe.gate.balancing_biases[0] = -1.0         # nobody shall choose expert 0
    moe.gate.balancing_biases[-1] = 0.0         # the skip class may be chosen
    x_ND = torch.randn(16, 32)
    p_NK, experts_NK, _ = moe.gate(x_ND)
    rows, offsets, positions = kernels_hip.dispatch(x_ND, experts_NK, moe.num_experts)
    print("token", *(f"{n:4d}" for n in range(16)))
    print("class", *(f"{e:4d}" for e in experts_NK[:, 0].tolist()), f"   {moe.num_experts} is the skip class")
    print("row  ", *(f"{i:4d}" for i in positions[:, 0].tolist()), "   -1: no row")
    print(f"offsets {offsets.tolist()}: the rows of expert e end before the e-th of these")
    y_ND = moe.visit(x_ND, p_NK, experts_NK)
    slow = torch.stack([p * (moe.experts.single(x, e) if e < moe.num_experts else x)
                        for x, p, e in zip(x_ND, p_NK[:, 0], experts_NK[:, 0].tolist())])
    print(f"all together against token by token: largest difference {(y_ND - slow).abs().max().item():.1e}")
    y_ND.sum().backward()
    norms = moe.experts.down_proj.grad.norm(dim=(1, 2)).tolist()
    print("gradient norm of each expert:", *(f"{norm:.3g}" for norm in norms), "  exactly 0 without a token")


if __name__ == "__main__":
    demonstrate()
