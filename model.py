"""ZAYA1: the whole language model, from token ids to logits and loss.

  R_0 = (embed(tokens) + b) a                               input affine
  for each block (one CCA sublayer and one MoE sublayer):
      R = res(CCA(norm(R)), R)                              attention.py
      p, e, r = router(norm(R), r)                          router.py; r goes on to the next block's router
      R = res(p[e] Expert_e(norm(R)), R)                    experts.py; kernels_hip.py moves the rows
  logits = norm(R) embed^T                                  tied head

  res(h, R) = (h + b_h) a_h + (R + b_r) a_r                 residual scaling, four learned vectors of width D
  norm(x)   = w x / sqrt(mean(x^2) + eps)                   RMSNorm

The residual stream R is float32 whatever the compute dtype. The skip class of the router stands for no expert
at all: its output is p x (skip_expert="identity": the original code and the papers) or 0 ("zero": what
transformers 5 computes).

Papers: ZAYA1, arXiv 2511.17127; ZAYA1-8B, 2605.05365; CCA, 2510.04476.

Glossary: block.mlp.gate the router, experts.gate_up_proj [W_gate; W_up], experts.down_proj W_down,
hidden_states_scale and _bias a_h and b_h, residual_scale and _bias a_r and b_r, input_hidden_states_scale and
_bias a and b of the input. Names and shapes are those of the released weights. Letters: B batch, T time, N =
B T tokens, D hidden size, E experts, F expert width, V vocabulary.

Departures. The papers write a x + b for the residual affine; every released implementation computes (x + b)
a, and so do we. Initialisation beyond "normal, 0.02" is not published. No dropout, as in the papers.
Left out: multi-GPU splits of the model itself. 192 GB a GPU hold it whole; train.py is data parallel.
"""

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import kernels_hip
from attention import CCA, Cache, Context
from config import option
from experts import MoE, compute_dtype
from router import count


@dataclass
class ZAYAConfig:
    """Shape of a ZAYA1. Impossible combinations raise ValueError."""

    vocab_size: int = option(1024, "token ids the embedding holds")
    hidden_size: int = option(192, "width D of the residual stream")
    num_blocks: int = option(4, "blocks, each one CCA and one MoE sublayer")
    num_heads: int = option(4, "query heads H")
    num_kv_heads: int = option(2, "key and value heads G")
    head_dim: int = option(32, "channels K of a head")
    num_experts: int = option(8, "experts E in a block")
    top_k: int = option(1, "experts a token visits")
    expert_hidden_size: int = option(192, "SwiGLU width F of an expert, gate and up each")
    router_hidden_size: int = option(32, "width R of the router")
    conv_kernels: tuple = option(
        (2, 2), "widths of CCA's depthwise and grouped convolutions; fewer than two: an ablation"
    )
    rope_theta: float = option(10_000.0, "RoPE base")
    rope_fraction: float = option(0.5, "part of each head's channels that RoPE turns")
    sliding_window: int | None = option(
        None, "tokens a windowed block sees, the current one included; none: all"
    )
    window_every: int = option(2, "with a sliding window: every n-th block has it, from block 0 on")
    local_rope_theta: float = option(10_000.0, "RoPE base of the windowed blocks")
    norm_eps: float = option(1e-5, "epsilon of RMSNorm")
    max_seq_len: int = option(4096, "longest context the model is meant for, in tokens")
    skip_expert: str = option("identity", "the skip class gives p x, 0, or is left off",
                              ("identity", "zero", "off"))
    init_std: float = option(0.02, "standard deviation of every matrix at the start")
    qk_mean: bool = option(True, "ablation: CCA's q-k mean")
    value_shift: bool = option(True, "ablation: CCA's value shift")
    router: str = option("zaya1", "ablation: the papers' router or a linear one", ("zaya1", "linear"))
    eda: bool = option(True, "ablation: the router state of the previous block")
    residual_scaling: bool = option(True, "ablation: learned scales and biases at every residual sum")

    def __post_init__(self):
        self.conv_kernels = tuple(self.conv_kernels)
        sizes = ("vocab_size", "hidden_size", "num_blocks", "num_heads", "num_kv_heads", "head_dim",
                 "num_experts", "top_k", "expert_hidden_size", "router_hidden_size", "window_every",
                 "max_seq_len")
        for name in sizes:
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}, it must be at least 1")
        require(self.num_heads % self.num_kv_heads == 0,
                f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        require(self.top_k <= self.num_experts, f"top_k {self.top_k} exceeds num_experts {self.num_experts}")
        for name in ("init_std", "norm_eps", "rope_theta", "local_rope_theta"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"{name} is {value}, it must be a number above 0")
        require(0 < self.rope_fraction <= 1, f"rope_fraction is {self.rope_fraction}, it must be in (0, 1]")
        rotary = self.head_dim * self.rope_fraction
        require(
            rotary == int(rotary) and rotary % 2 == 0,
            f"RoPE would turn {rotary:g} of {self.head_dim} channels: head_dim * rope_fraction must be even",
        )
        require(
            self.num_kv_heads * self.head_dim % 2 == 0,
            "num_kv_heads * head_dim must be even: the value shift halves it",
        )
        require(len(self.conv_kernels) <= 2 and all(w >= 1 for w in self.conv_kernels),
                f"conv_kernels {self.conv_kernels}: up to two widths, each at least 1")
        require(
            self.sliding_window is None or self.sliding_window >= 1,
            "sliding_window must be at least 1, or none",
        )
        for field in dataclasses.fields(self):
            choices = field.metadata.get("choices")
            require(not choices or getattr(self, field.name) in choices,
                    f"{field.name} is {getattr(self, field.name)!r}, not one of {', '.join(choices or ())}")

    @classmethod
    def preset(cls, name, **changes):
        """A named shape: "tiny", "laptop", "zaya1_8b" (also ZAYA1-base), "zaya1_74b". changes: fields to set
        otherwise."""
        require(name in PRESETS, f"preset {name!r} is unknown, it must be one of {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **changes})

    @property
    def num_classes(self):
        """What the router chooses among: the experts and, unless left off, the skip class."""
        return self.num_experts + (self.skip_expert != "off")

    @property
    def rotary_dim(self):
        return int(self.head_dim * self.rope_fraction)

    @property
    def taps(self):
        """Tokens that the convolutions reach over, the current one included: 3 for two of width 2."""
        return 1 + sum(w - 1 for w in self.conv_kernels)

    @property
    def lags(self):
        """How far back convolutions or value shift look."""
        return max(self.taps - 1, 1)

    def is_sliding(self, block):
        return self.sliding_window is not None and block % self.window_every == 0


def require(condition, message):
    if not condition:
        raise ValueError(message)


ZAYA1_8B = dict(
    vocab_size=262_272, hidden_size=2048, num_blocks=40, num_heads=8, num_kv_heads=2, head_dim=128,
    num_experts=16, expert_hidden_size=2048, router_hidden_size=256, rope_theta=5e6, max_seq_len=131_072)
PRESETS = {
    "tiny": dict(
        vocab_size=257, hidden_size=32, num_blocks=2, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=4,
        expert_hidden_size=48, router_hidden_size=24, max_seq_len=256),
    # The defaults above. init_std keeps the gain of the published matrices, 0.02 at width 2048, at width 192:
    # the routers' first probabilities then differ between tokens by more than one balancing step, or all
    # tokens would follow the bias together.
    "laptop": dict(init_std=0.065),
    "zaya1_8b": ZAYA1_8B,
    # Windowed blocks see 4096 earlier tokens and their own.
    "zaya1_74b": {**ZAYA1_8B, "hidden_size": 4096, "num_blocks": 60, "num_heads": 16, "num_experts": 24,
                  "expert_hidden_size": 4096, "sliding_window": 4097},
}


class ResidualScaling(nn.Module):
    """res(h, R) of the header: h (B, T, D) in the compute dtype, R (B, T, D) float32 -> float32."""

    def __init__(self, config):
        super().__init__()
        D = config.hidden_size
        self.learned = config.residual_scaling
        if self.learned:
            self.hidden_states_scale = nn.Parameter(torch.ones(D))
            self.hidden_states_bias = nn.Parameter(torch.zeros(D))
            self.residual_scale = nn.Parameter(torch.ones(D))
            self.residual_bias = nn.Parameter(torch.zeros(D))

    def forward(self, h, residual):
        if not self.learned:
            return h + residual
        h = (h + self.hidden_states_bias) * self.hidden_states_scale
        return h + (residual + self.residual_bias) * self.residual_scale


class Block(nn.Module):
    """One block: residual R (B, T, D) float32, router state r (N, R) -> R, r, chosen classes (N, K)."""

    def __init__(self, config, index):
        super().__init__()
        D, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = nn.RMSNorm(D, eps)
        self.self_attn = CCA(config, index)
        self.post_attention_residual_scale = ResidualScaling(config)
        self.post_attention_layernorm = nn.RMSNorm(D, eps)
        self.mlp = MoE(config, index)
        self.post_mlp_residual_scale = ResidualScaling(config)

    def forward(self, residual, r, context, state=None):
        h = self.self_attn(norm(self.input_layernorm, residual), context, state)
        residual = self.post_attention_residual_scale(h, residual)
        h, r, experts_NK = self.mlp(norm(self.post_attention_layernorm, residual), r)
        return self.post_mlp_residual_scale(h, residual), r, experts_NK


def norm(layer, residual):
    """RMSNorm of the float32 stream: computed in float32, returned in the compute dtype."""
    return F.rms_norm(residual, layer.normalized_shape, layer.weight.float(), layer.eps).to(
        compute_dtype(layer.weight)
    )


class ZAYA(nn.Module):
    """The language model. See the header for its equations, ZAYAConfig for its shape."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        D = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, D)                      # also the head
        self.input_hidden_states_scale = nn.Parameter(torch.ones(D))
        self.input_hidden_states_bias = nn.Parameter(torch.zeros(D))
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.num_blocks))
        self.norm = nn.RMSNorm(D, config.norm_eps)
        # activation checkpointing: drop each block's activations, compute them again in backward
        self.recompute = False
        self.compiled = None        # Block.forward, compiled; see compile_blocks
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Normal for matrices and convolutions; scales are one and biases zero."""
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                p.normal_(std=self.config.init_std)
            elif name.endswith("bias"):
                p.zero_()

    def forward(self, tokens, targets=None, *, segments=None, cache=None):
        """Next-token logits, or the mean loss where targets are given.

        tokens (B, T) int64; targets (B, T) int64, -1 ignored; segments (B, T) int64: a token sees only its
        own segment, in attention, convolutions and delayed value alike, and negative means padding; cache:
        from new_cache, advanced by T. Returns (logits (B, T, V) float32, None) or (None, loss in nats per
        target): logits then never exist as a whole. Raises ValueError for tokens that are not (B, T),
        or a cache that is full or of another batch size.
        """
        h = self.hidden(tokens, segments=segments, cache=cache)
        if targets is None:
            return self.logits(h), None
        return None, cross_entropy(h.flatten(0, 1), self.embed_tokens.weight, targets.flatten())

    def hidden(self, tokens, *, segments=None, cache=None):
        """The normalised last hidden states (B, T, D); arguments as for forward."""
        require(tokens.dim() == 2, f"tokens must be (B, T), they are {tuple(tokens.shape)}")
        past = cache.length if cache else 0
        if cache:
            segments = cache.extend(tokens.shape, segments)
        context = Context(self.config, tokens.shape, past, segments, tokens.device)
        residual = self.embed_tokens(tokens).float()
        residual = (residual + self.input_hidden_states_bias) * self.input_hidden_states_scale
        r = None
        for i, block in enumerate(self.blocks):
            residual, r, experts_NK = self.run_block(block, residual, r, context,
                                                     cache.blocks[i] if cache else None)
            if self.training and torch.is_grad_enabled():
                # here and not inside the block: a recomputed block must not count twice
                block.mlp.gate.load += count(experts_NK, self.config.num_classes, context.keep)
        if cache:
            cache.advance(tokens.shape[1])
        return norm(self.norm, residual)

    def run_block(self, block, *args):
        forward = self.compiled if self.compiled and torch.is_grad_enabled() else Block.__call__
        if self.recompute and torch.is_grad_enabled():
            return torch.utils.checkpoint.checkpoint(forward, block, *args, use_reentrant=False)
        return forward(block, *args)

    def compile_blocks(self, compiled=True):
        """torch.compile for training forwards (compiled=False: no longer). A block becomes one graph, and its
        many small element-wise operations a few; HIP kernels split it in three. The first step at each shape
        takes half a minute where nothing is cached."""
        self.compiled = None
        if compiled:
            from torch import _dynamo                   # here: it takes a second to load
            _dynamo.config.recompile_limit = 64         # up to three kinds of blocks at each shape
            kernels_hip.status()                        # finds the kernels now: that cannot be traced
            self.compiled = torch.compile(Block.forward, dynamic=False)

    def logits(self, h):
        """Tied head: h (..., D) -> (..., V) float32."""
        return F.linear(h, self.embed_tokens.weight).float()

    def new_cache(self, batch_size, max_len):
        """An empty decoding cache for batch_size sequences of up to max_len tokens."""
        return Cache([block.self_attn for block in self.blocks], batch_size, max_len)

    def num_parameters(self, active=False, embedding=True):
        """Parameters in total, or active for one token (top_k of the E experts); with the (tied) embedding or
        without."""
        total = sum(p.numel() for p in self.parameters())
        if active:
            experts = sum(p.numel() for block in self.blocks for p in block.mlp.experts.parameters())
            total -= experts * (self.config.num_experts - self.config.top_k) // self.config.num_experts
        return total - (0 if embedding else self.embed_tokens.weight.numel())


def cross_entropy(h_ND, weight_VD, targets_N, chunk=2048):
    """Mean cross entropy in nats of softmax(h W^T) against targets_N, -1 ignored, `chunk` tokens at a
    time."""
    return ChunkedCrossEntropy.apply(h_ND, weight_VD, targets_N, chunk)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Head and loss together. For V = 262,272 the logits of 16k tokens would be 17 GB and their gradient as
    much again; here `chunk` rows exist at a time, and their gradient is taken while they do: d loss / d
    logits = softmax - onehot."""

    @staticmethod
    def forward(ctx, h_ND, weight_VD, targets_N, chunk):
        dtype = compute_dtype(weight_VD)
        h, w = h_ND.to(dtype), weight_VD.to(dtype)
        grads = any(ctx.needs_input_grad[:2])
        grad_h = torch.zeros_like(h_ND) if grads else None
        grad_w = (
            torch.zeros_like(weight_VD, dtype=torch.promote_types(weight_VD.dtype, torch.float32))
            if grads
            else None
        )
        scale_N = (targets_N >= 0) / (targets_N >= 0).sum().clamp(min=1)  # 1 / kept, and 0 for the ignored
        total = h.new_zeros((), dtype=torch.promote_types(dtype, torch.float32))
        for start in range(0, len(h), chunk):
            part = slice(start, start + chunk)
            target, scale = targets_N[part, None].clamp(min=0), scale_N[part, None].to(total.dtype)
            log_p = (h[part] @ w.t()).to(total.dtype).log_softmax(1)                # (chunk, V)
            total -= (log_p.gather(1, target) * scale).sum()
            if grads:
                slope = log_p.exp_().scatter_add_(1, target, torch.full_like(scale, -1.0)).to(dtype)
                grad_h[part] = (slope @ w) * scale
                grad_w += slope.t() @ (h[part] * scale).to(dtype)
        ctx.grads = grad_h, grad_w
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        grad_h, grad_w = ctx.grads
        return grad_h * grad.to(grad_h.dtype), grad_w.mul_(grad).to(grad_h.dtype), None, None


def tree(module, flops, name="ZAYA", depth=0):
    """Lines of a module and what is in it: name, shape, parameters, and the FLOPs of one token's forward pass
    where `flops` {name: number} knows them. Of a list of equal blocks the second stands for all."""
    line = lambda depth, name, shape, n: f"{'  ' * depth + name:44s} {shape:18s} {n:>11,}"
    work = f" {flops[name]:>12,.0f} FLOP" if name in flops else ""
    leaves = [(n, str(tuple(p.shape)), p.numel()) for n, p in module.named_parameters(recurse=False)]
    if len(leaves) == 1 and not any(module.children()):     # a linear layer without bias, a norm: one line
        leaf, shape, count = leaves[0]
        yield line(depth, f"{name}.{leaf}", shape, count) + work
        return
    yield line(depth, name, "", sum(p.numel() for p in module.parameters())) + work
    yield from (line(depth + 1, *leaf) for leaf in leaves)
    for child, inner in module.named_children():
        if isinstance(inner, nn.ModuleList):
            child, inner = f"blocks: {len(inner)}, one of them", inner[min(1, len(inner) - 1)]
        if any(True for _ in inner.parameters()):
            yield from tree(inner, flops, child, depth + 1)


def work_by_module(config, seq_len):
    """FLOPs of a token's forward pass by module, of one block where it lies in one: the planner's."""
    from plan import PlanConfig, plan       # here, since plan.py imports this file
    p = plan(PlanConfig(gpus=1, seq_len=seq_len, batch_tokens=seq_len, micro_batch=1), config)
    L = config.num_blocks
    return {"ZAYA": p["f_forward"], "embed_tokens": p["f_head"], "gate": p["f_routers"] / L,
            "self_attn": (p["f_projections"] + p["f_convolutions"] + p["f_scores"]) / L,
            "experts": p["f_experts"] / L}


def demonstrate():
    """The laptop preset as a tree, and the published sizes, counted without memory."""
    config, T = ZAYAConfig.preset("laptop"), 128
    model = ZAYA(config)
    print(f"{f'the laptop preset at a context of {T}':44s} {'shape':18s}  parameters   forward, a token")
    print("\n".join(tree(model, work_by_module(config, T))))
    for name in PRESETS:
        with torch.device("meta"):
            m = ZAYA(ZAYAConfig.preset(name))
        whole, active = m.num_parameters(embedding=False), m.num_parameters(active=True, embedding=False)
        print(f"{name:10s} {m.num_parameters():>15,} parameters, {whole:>15,} without the embedding, "
              f"{active:>13,} of them active for a token")
    _, loss = model(torch.randint(0, 1024, (2, 64)), torch.randint(0, 1024, (2, 64)))
    print(f"loss of the untrained model {loss.item():.3f} nats; log(vocabulary) is {math.log(1024):.3f}")


if __name__ == "__main__":
    demonstrate()
