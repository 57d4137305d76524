"""The dense models that ZAYA1 is measured against: a GPT as nanoGPT trains it, and a modern one.

kind "gpt":    LayerNorm, learned positions, GELU MLP of four times the width, multi-head attention.
kind "modern": RMSNorm, RoPE, normalised q and k, SwiGLU MLP.
Both: tied embedding, no biases, no dropout; same call as model.ZAYA: (tokens, targets) -> (None, loss).
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from attention import rope_table, rotate
from kernels_hip import swiglu
from model import cross_entropy


class DenseBlock(nn.Module):
    def __init__(self, width, heads, kind):
        super().__init__()
        self.heads, self.modern = heads, kind == "modern"
        new_norm = nn.RMSNorm if self.modern else lambda n: nn.LayerNorm(n, bias=False)
        self.norm1, self.norm2 = new_norm(width), new_norm(width)
        hidden = 64 * round(width * 8 / 3 / 64) if self.modern else 4 * width
        self.qkv_proj, self.o_proj = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.up_proj = nn.Linear(width, 2 * hidden if self.modern else hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x, rope):
        # (B, H, T, K) each
        q, k, v = self.qkv_proj(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.modern:
            q, k = (rotate(F.rms_norm(t, t.shape[-1:]), *rope) for t in (q, k))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(o.transpose(1, 2).flatten(2))
        h = self.up_proj(self.norm2(x))
        return x + self.down_proj(swiglu(h) if self.modern else F.gelu(h))


class Dense(nn.Module):
    def __init__(self, kind, vocab_size, width, layers=4, heads=4, seq_len=128):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, width)
        self.embed_positions = nn.Embedding(seq_len, width) if kind == "gpt" else None
        self.blocks = nn.ModuleList(DenseBlock(width, heads, kind) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False) if kind == "gpt" else nn.RMSNorm(width)
        self.head_dim = width // heads
        for name, p in self.named_parameters():
            if p.dim() == 2:        # projections into the residual stream start smaller, as in GPT-2
                p.data.normal_(
                    std=0.02 / math.sqrt(2 * layers)
                    if name.endswith(("o_proj.weight", "down_proj.weight"))
                    else 0.02
                )

    def forward(self, tokens, targets):
        x = self.embed_tokens(tokens)
        position = torch.arange(tokens.shape[1], device=tokens.device)
        if self.embed_positions is not None:
            x = x + self.embed_positions(position)
        rope = rope_table(position, 10_000.0, self.head_dim)
        for block in self.blocks:
            x = block(x, rope)
        return None, cross_entropy(self.norm(x).flatten(0, 1), self.embed_tokens.weight, targets.flatten())

    def num_parameters(self, active=False):
        return sum(p.numel() for p in self.parameters())


def dense_of_size(kind, parameters, **shape):
    """A dense model whose parameters come closest to a number; the width moves in steps of 8 a head."""
    widths = range(64, 641, 8)
    sizes = {w: abs(Dense(kind, width=w, **shape).num_parameters() - parameters) for w in widths}
    return Dense(kind, width=min(sizes, key=sizes.get), **shape)
