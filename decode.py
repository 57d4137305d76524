"""One decoding step: a token of every row through the whole model, with all that is fixed folded beforehand.

At batch 1 a step multiplies vectors, so a CPU spends as long on starting operations as on arithmetic, and
reading the weights is the rest. `Decoder` computes what `ZAYA.hidden` computes for T = 1, in fewer
operations and without touching a weight that the token does not need. `ZAYA.hidden` is its plain twin:
tests/test_sample.py holds one against the other.

What is folded, in the words of attention.py and model.py:

  (2)(3) q, k = sum over lags of W_lag z_(t-lag) + M z_t     M: the q-k mean, a matrix over the H + G heads
  (4)    qk <- qk s / |qk|                                   s = sqrt(K) [1, .., 1, T_1, .., T_G]
  (5)    qk <- qk C + swap(qk) S     C = [cos, cos, 1], S = [-sin, sin, 0], swap: the two halves exchanged
  (7)    the H / G query heads of a kv head are the queries of one attention; keys are not repeated
  res(h, R) = c + h a_h + R a_r                              c = b_h a_h + b_r a_r

Glossary: window (B, taps, C) the columns of z that the convolutions see. State: the `attention.Cache` that
the prompt has filled, so prompts are fed by the model and tokens by the decoder, in turn. Letters: B batch, D
hidden, H query heads, G kv heads, K head dim, R router hidden.

bfloat16 on a CPU: oneDNN, which torch asks for products, rearranges a weight matrix before each use. For a
single row that doubles the time, so a step of one row does without it (`direct_products`).

Left out: the ablations, which the model itself decodes (`supports` says so).
"""

import contextlib
import math
import time
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from router import choose


def supports(config):
    """Whether a Decoder exists for this configuration: the published architecture, of any size."""
    return (len(config.conv_kernels) == 2 and config.qk_mean and config.value_shift
            and config.router == "zaya1" and config.eda and config.residual_scaling)


@contextlib.contextmanager
def direct_products(rows):
    """Inside, products of a single row read the weights where they lie, without oneDNN."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = before and rows > 1
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


class Decoder:
    """decoder(tokens (B,) int64) -> normalised last hidden state (B, D); advances `cache` by one token."""

    def __init__(self, model, cache):
        c = self.config = model.config
        self.head, self.cache, self.embed = model.logits, cache, model.embed_tokens.weight
        self.input_scale = model.input_hidden_states_scale.float()
        self.input_shift = model.input_hidden_states_bias.float() * self.input_scale
        self.norm, self.eps = model.norm.weight.float(), torch.tensor(c.norm_eps, device=self.embed.device)
        bases = (c.rope_theta,) if c.sliding_window is None else (c.rope_theta, c.local_rope_theta)
        self.turns = [turns_per_token(c, base, self.embed.device) for base in bases]
        half = c.rotary_dim // 2
        swap = [*range(half, 2 * half), *range(half), *range(2 * half, c.head_dim)]
        self.swap = torch.tensor(swap, device=self.embed.device)
        self.blocks = [fold_block(block, state) for block, state in zip(model.blocks, cache.blocks)]
        self.clear_other_segments()

    def clear_other_segments(self):
        """Columns of z that lie in padding become 0, as if the text began there: a step then needs no mask
        for them."""
        segments, lags = self.cache.segments, self.config.lags
        if segments is not None:
            latest = F.pad(segments, (lags, 0), value=torch.iinfo(segments.dtype).min)[:, -lags:]
            keep = (latest == segments[:, -1:])[..., None]                              # (B, lags, 1)
            for state in self.cache.blocks:
                state.z = state.z * keep[:, :state.z.shape[1]]

    def logits(self, tokens):
        """tokens (B,) -> logits of the next ones, (B, V) float32."""
        with direct_products(len(tokens)):
            return self.head(self(tokens))

    @torch.inference_mode()
    def __call__(self, tokens):
        with direct_products(len(tokens)):
            return self.step(tokens)

    def step(self, tokens):
        past = self.cache.length
        self.cache.extend((len(tokens), 1), None)
        ropes = [((past * turns).cos(), (past * turns).sin()) for turns in self.turns]
        windows = {None, self.config.sliding_window}
        first = {window: max(0, past + 1 - (window or past + 1)) for window in windows}
        masks = {window: self.mask(start) for window, start in first.items()}
        residual = torch.addcmul(self.input_shift, self.embed[tokens].float(), self.input_scale)
        r = None
        for b in self.blocks:
            x = self.rms_norm(residual, b.input_norm)
            h = self.attend(b, x, first[b.window], past, masks[b.window], *ropes[b.sliding])
            residual = b.after_attention(h, residual)
            x = self.rms_norm(residual, b.mlp_norm)
            p, experts, r = self.route(b, x, r)
            residual = b.after_mlp(self.visit(b, x, p, experts), residual)
        self.cache.advance(1)
        return self.rms_norm(residual, self.norm)

    def rms_norm(self, x, weight):
        """x (B, D) float32 -> (B, D) in the model's dtype."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * weight).mul_(scale).to(self.embed.dtype)

    def mask(self, first):
        """Which keys from `first` on a row may see, (B, 1, 1, S) bool: those of its last segment. None:
        all."""
        segments = self.cache.segments
        return None if segments is None else (segments[:, first:] == segments[:, -1:])[:, None, None]

    def attend(self, b, x, first, past, mask, C, S):
        """CCA of one block, equations (1) to (7) of attention.py: x (B, D) -> (B, D). It sees the tokens from
        `first` on."""
        B, state, (H, G, K) = len(x), b.state, b.sizes
        z, v_now, v_next = torch.split_with_sizes(F.linear(x, b.w_in), b.parts, -1)
        window = torch.cat([state.z, z.unsqueeze(1)], dim=1)
        columns = window.view(B, -1, H + G, K).permute(2, 0, 1, 3).reshape(H + G, B, -1)    # last: taps * K
        qk = torch.baddbmm(b.b_taps, columns, b.w_taps).view(H + G, B * K)
        heads = z.view(B, H + G, K).transpose(0, 1).reshape(H + G, B * K)
        qk = torch.addmm(qk, b.mix, heads).view(H + G, B, K).float()
        qk = qk * (b.scale / torch.linalg.vector_norm(qk, dim=-1, keepdim=True).clamp_min_(1e-6))
        qk = torch.addcmul(qk * C, qk.index_select(-1, self.swap), S).to(x.dtype)
        q, k = torch.split_with_sizes(qk.transpose(0, 1), (H, G), 1)                    # (B, H or G, K)
        state.k.select(2, past).copy_(k)
        state.v.select(2, past).copy_(torch.cat([v_now, state.v_next.squeeze(1)], dim=-1).view(B, G, K))
        state.z, state.v_next = window.narrow(1, 1, window.shape[1] - 1), v_next.unsqueeze(1)
        k, v = (cached.narrow(2, first, past + 1 - first) for cached in (state.k, state.v))
        o = F.scaled_dot_product_attention(q.reshape(B, G, H // G, K), k, v, mask, scale=1 / math.sqrt(K))
        return F.linear(o.reshape(B, H * K), b.w_out)

    def route(self, b, x, r):
        """Equations (1) to (3) of router.py: x (B, D), r (B, R) or None -> p (B, top_k), experts (B, top_k),
        r."""
        down, gamma, norm, fc1, fc2, w_out, biases = b.router
        before, r = r, F.linear(x, *down).float()
        if before is not None:
            r = torch.addcmul(r, gamma, before)
        h = F.gelu(F.linear(F.gelu(F.linear(self.rms_norm(r, norm), *fc1)), *fc2))
        p = F.linear(h, w_out).float().softmax(-1)
        experts = choose(p + biases, self.config.top_k)
        return p.gather(1, experts), experts, r

    def visit(self, b, x, p, experts):
        """Equation (4): a single slot goes to its expert directly."""
        e = experts.item() if experts.numel() == 1 and x.device.type == "cpu" else self.config.num_experts
        if e == self.config.num_experts:
            return b.visit(x, p, experts)
        gate, up = F.linear(x, b.gate_up[e]).chunk(2, -1)
        return F.linear(F.silu(gate).mul_(up), b.down[e]) * p


def turns_per_token(config, theta, device):
    """(K,) float32: what RoPE's angle of each channel grows by per token. Its cos is C of (5), its sin S,
    sign included."""
    i = torch.arange(0, config.rotary_dim, 2, device=device, dtype=torch.float32)
    inverse = theta ** (-i / config.rotary_dim)
    return torch.cat([-inverse, inverse, inverse.new_zeros(config.head_dim - config.rotary_dim)])


def fold_block(block, state):
    """The weights of one block in the form that a step uses."""
    attention, gate, experts = block.self_attn, block.mlp.gate, block.mlp.experts
    H, G, K = attention.H, attention.G, attention.K
    w_in, w_taps, b_taps = state.folded
    in_time = w_taps.view(H + G, attention.taps, K, K).flip(1).reshape(H + G, -1, K)    # lags: newest first
    mix = torch.zeros(H + G, H + G)
    for h in range(H):
        g = H + h * G // H
        mix[h, h] = mix[h, g] = mix[g, g] = 0.5
        mix[g, h] = 0.5 * G / H
    scale = math.sqrt(K) * torch.cat([attention.temp.new_ones(H), attention.temp]).float()[:, None, None]
    gamma = None if gate.router_states_scale is None else gate.router_states_scale.float()
    layers = [(layer.weight, layer.bias) for layer in (gate.down_proj, gate.fc1, gate.fc2)]
    half = G * K // 2
    return SimpleNamespace(
        state=state, sizes=(H, G, K), parts=[(H + G) * K, half, G * K - half], window=attention.window,
        sliding=attention.sliding, w_in=w_in, w_taps=in_time, b_taps=b_taps, mix=mix.to(w_in), scale=scale,
        w_out=attention.o_proj.weight, input_norm=block.input_layernorm.weight.float(),
        mlp_norm=block.post_attention_layernorm.weight.float(),
        after_attention=fold_residual(block.post_attention_residual_scale),
        after_mlp=fold_residual(block.post_mlp_residual_scale), visit=block.mlp.visit,
        router=(layers[0], gamma, gate.norm.weight.float(), *layers[1:], gate.out_proj.weight,
                gate.balancing_biases),
        gate_up=experts.gate_up_proj.unbind(0), down=experts.down_proj.unbind(0))


def fold_residual(scaling):
    a_h, a_r = scaling.hidden_states_scale.float(), scaling.residual_scale.float()
    c = scaling.hidden_states_bias.float() * a_h + scaling.residual_bias.float() * a_r
    return lambda h, residual: torch.addcmul(torch.addcmul(c, h, a_h), residual, a_r)


def demonstrate(count=100):
    """The laptop shape, random weights, batch 1: both paths, their agreement and their speed."""
    from model import ZAYA, ZAYAConfig
    model, first = ZAYA(ZAYAConfig.preset("laptop")).eval(), torch.tensor([[1]])
    with torch.inference_mode():
        caches = [model.new_cache(1, count + 1) for _ in range(2)]
        for cache in caches:
            model.hidden(first, cache=cache)
        decoder = Decoder(model, caches[0])
        plain = lambda t: model.hidden(t[:, None], cache=caches[1])[:, -1]
        paths = {"decoder": decoder, "model.hidden": plain}
        found = {}
        for name, path in paths.items():
            began = time.perf_counter()
            found[name] = torch.stack([path(torch.tensor([t % 1000])) for t in range(count)])
            print(f"{name:13} {count / (time.perf_counter() - began):6.0f} tokens/s without the head")
    a, b = found.values()
    print(f"largest difference of hidden states {(a - b).abs().max():.1e}, of values up to {b.max():.1f}")


if __name__ == "__main__":
    demonstrate()
