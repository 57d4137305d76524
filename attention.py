"""Compressed convolutional attention (CCA) with grouped heads, the attention of ZAYA1.

Queries, keys and values are projected to a few narrow heads and attention runs in that compressed space; two
short causal convolutions, a mean of queries and keys and a one-token value shift give back what the
compression takes away.

Per token t, x_t of width D, query heads h = 1..H, kv heads g = 1..G, g(h) the kv head of query head h:

  (1)  z_t = [q0_t, k0_t] = [W_q x_t, W_k x_t]                          projection, (H + G) K channels
  (2)  c   = conv_grouped(conv_depthwise(z))                            causal; z is zero before the text
  (3)  m_q[h] = (q0[h] + k0[g(h)]) / 2,   m_k[g] = mean of g's m_q[h]     q-k mean
       q = c_q + m_q,   k = c_k + m_k
  (4)  q <- sqrt(K) q / |q|,   k <- T_g sqrt(K) k / |k|                 per head; T_g: learned temperature
  (5)  q, k <- RoPE(q), RoPE(k)                                         first half of each head's channels
  (6)  v_t = [W_v1 x_t, W_v2 x_(t-1)],   x_(-1) = 0                      value shift
  (7)  o = W_o softmax(q k^T / sqrt(K)) v                               causal, heads shared in groups

Papers: CCA, arXiv 2510.04476 (1-7); ZAYA1, arXiv 2511.17127 (the sizes).

Glossary: q_proj W_q, k_proj W_k, v_proj_current W_v1, v_proj_delayed W_v2, o_proj W_o, conv_qk_depthwise and
conv_qk_grouped the two convolutions of (2), temp T. Letters: B batch, T time, D hidden size, H query heads, G
kv heads, K head dim.

Both convolutions are linear with nothing between them, so they are computed as one, exactly (`CCA.folded`):
lag j of the composite has the K x K matrix W_j per head, and z_(t-j) is simply masked where t-j lies in
another segment. Isolating packed documents and left padding is then one mask, and the decoding state is the
last columns of z.

Departures. T is stored raw, as in the released weights; the CCA paper writes exp(beta). It starts at 1: at 0,
where the public port starts it, keys vanish and q, k and the convolutions get no gradient. conv_kernels=(),
qk_mean=False, value_shift=False leaves plain grouped-query attention with normalised q and k (and multi-head
attention when G = H). Left out: the fused CCA kernel and context parallelism of the papers.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Context:
    """What every block of one forward pass shares: rotary tables, attention masks, same-segment flags.

    tokens_shape (B, T); past: number of cached tokens before them; segments (B, past + T) int64 or None.
    """

    def __init__(self, config, tokens_shape, past, segments, device):
        B, T = tokens_shape
        self.T, self.past = T, past
        position = torch.arange(past, past + T, device=device)
        # One table for full and one for windowed blocks; the base is read now, since it changes between
        # training phases.
        bases = (
            (config.rope_theta,)
            if config.sliding_window is None
            else (config.rope_theta, config.local_rope_theta)
        )
        self.rope = [rope_table(position, theta, config.rotary_dim) for theta in bases]
        self.masks = {
            window: attention_mask(past, position, window, segments)
            for window in {None, config.sliding_window}
        }
        # (N,): False for padding
        self.keep = None if segments is None else (segments[:, past:] >= 0).flatten()
        # same[j - 1] (B, T, 1): may token t look j tokens back? Only inside its own segment.
        self.same = (
            None if segments is None else [lag_mask(segments, j, T) for j in range(1, config.lags + 1)]
        )


def rope_table(position, theta, rotary_dim):
    """Rotary angles, equation (5): cos and sin, each (T, rotary_dim / 2) float32, of position * theta^(-2i /
    rotary_dim)."""
    inverse = theta ** (
        -torch.arange(0, rotary_dim, 2, device=position.device, dtype=torch.float32) / rotary_dim
    )
    angle = position[:, None].float() * inverse
    return angle.cos(), angle.sin()


def attention_mask(past, position, window, segments):
    """Which of the S = past + T keys each of the T queries may see: bool, (T, S) or (B, 1, T, S). None: plain
    causal or all.

    Built by hand whenever tokens are cached: with T != S, SDPA's is_causal would align the two at their first
    token.
    """
    T = len(position)
    key = torch.arange(past + T, device=position.device)
    narrow = window is not None and past + T > window
    if segments is None and not narrow and (past == 0 or T == 1):
        return None
    distance = position[:, None] - key                                              # (T, S)
    mask = distance >= 0
    if narrow:
        mask = mask & (distance < window)
    if segments is not None:
        mask = mask & (segments[:, past:, None] == segments[:, None, :])            # (B, T, S)
        mask = mask[:, None]
    return mask


def lag_mask(segments, lag, T):
    """(B, T, 1) bool: token t and the token `lag` before it lie in the same segment. segments (B, S), its
    last T columns now."""
    earlier = F.pad(segments, (lag, 0), value=torch.iinfo(segments.dtype).min)[:, :-lag]
    return (segments == earlier)[:, segments.shape[1] - T:, None]


def rotate(x, cos, sin):
    """Equation (5): turn channel pairs (i, i + rotary_dim/2) of x (..., T, K) by their angles; other channels
    pass."""
    half = cos.shape[-1]
    x1, x2, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], dim=-1)


class CCA(nn.Module):
    """One attention sublayer; see the equations above. x (B, T, D) -> (B, T, D).

    config: model.ZAYAConfig. block: index of the block; it decides on the sliding window and the RoPE base.
    """

    def __init__(self, config, block=0):
        super().__init__()
        D, H, G, K = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.H, self.G, self.K = H, G, K
        self.qk_mean, self.value_shift = config.qk_mean, config.value_shift
        self.taps = config.taps
        self.window = config.sliding_window if config.is_sliding(block) else None
        self.sliding = config.is_sliding(block)
        self.q_proj = nn.Linear(D, H * K, bias=False)
        self.k_proj = nn.Linear(D, G * K, bias=False)
        self.v_proj_current = nn.Linear(D, G * K // 2, bias=False)
        self.v_proj_delayed = nn.Linear(D, G * K - G * K // 2, bias=False)
        C = (H + G) * K
        widths = config.conv_kernels
        self.conv_qk_depthwise = nn.Conv1d(C, C, widths[0], groups=C) if len(widths) > 0 else None
        self.conv_qk_grouped = nn.Conv1d(C, C, widths[1], groups=H + G) if len(widths) > 1 else None
        self.temp = nn.Parameter(torch.ones(G))
        self.o_proj = nn.Linear(H * K, D, bias=False)

    def folded(self):
        """The weights as used: one input projection, and the two convolutions of (2) as one.

        Returns w_in ((H + G) K + 2 (G K / 2), D); w_taps (H + G, taps * K, K), lag-major; b_taps (H + G, 1,
        K). With depthwise lags a_i and grouped lags g_j, W_lag = sum over i + j = lag of g_j diag(a_i). The
        depthwise bias reaches the output through every lag of the grouped convolution, on padding too: the
        released code pads once, before both.
        """
        w_in = torch.cat(
            [self.q_proj.weight, self.k_proj.weight, self.v_proj_current.weight, self.v_proj_delayed.weight]
        )
        if self.conv_qk_depthwise is None:
            return w_in, None, None
        heads, K = self.H + self.G, self.K
        a = self.conv_qk_depthwise.weight.view(heads, K, -1).flip(-1)               # (heads, K_in, w0) by lag
        bias = self.conv_qk_depthwise.bias.view(heads, 1, K)
        if self.conv_qk_grouped is None:
            g = torch.eye(K, device=a.device, dtype=a.dtype).expand(heads, K, K)[..., None]
        else:
            # (heads, K_in, K_out, w1)
            g = self.conv_qk_grouped.weight.view(heads, K, K, -1).flip(-1).transpose(1, 2)
            bias = bias @ g.sum(-1) + self.conv_qk_grouped.bias.view(heads, 1, K)
        w_lag = [0] * self.taps
        for i in range(a.shape[-1]):
            for j in range(g.shape[-1]):
                w_lag[i + j] = w_lag[i + j] + a[:, :, None, i] * g[..., j]          # (heads, K_in, K_out)
        return w_in, torch.cat(w_lag, dim=1), bias

    def convolve(self, z, earlier, same, w_taps, b_taps):
        """Equation (2). z (B, T, C), earlier (B, taps - 1, C) the columns before it -> (B, H + G, T, K)."""
        B, T, C = z.shape
        heads, K = self.H + self.G, self.K
        if w_taps is None:
            return z.view(B, T, heads, K).transpose(1, 2)
        history = torch.cat([earlier, z], dim=1)                                    # (B, taps - 1 + T, C)
        lags = [z] + [history[:, self.taps - 1 - j:self.taps - 1 - j + T] for j in range(1, self.taps)]
        if same is not None:
            lags[1:] = [lag * keep for lag, keep in zip(lags[1:], same)]
        window = torch.cat([lag.unflatten(-1, (heads, K)) for lag in lags], dim=-1)  # (B, T, H + G, taps * K)
        window = window.view(B * T, heads, self.taps * K).transpose(0, 1)
        return torch.baddbmm(b_taps, window, w_taps).view(heads, B, T, K).transpose(0, 1)

    def mean(self, z):
        """Equation (3): the q-k mean (B, H + G, T, K) of z (B, T, C)."""
        B, T, _ = z.shape
        q0, k0 = z.view(B, T, self.H + self.G, self.K).split([self.H, self.G], dim=2)
        m_q = (q0.unflatten(2, (self.G, -1)) + k0[:, :, :, None]) * 0.5              # (B, T, G, H / G, K)
        return torch.cat([m_q.flatten(2, 3), m_q.mean(3)], dim=2).transpose(1, 2)

    def qkv(self, x, context, state=None):
        """Equations (1) to (6): q (B, H, T, K), k and v (B, G, T, K) of the tokens in x (B, T, D), and their
        state."""
        B, T, _ = x.shape
        H, G, K = self.H, self.G, self.K
        w_in, w_taps, b_taps = self.folded() if state is None else state.folded
        half = G * K // 2
        z, v_now, v_next = F.linear(x, w_in).split([(H + G) * K, half, G * K - half], dim=-1)
        earlier_z = z.new_zeros(B, self.taps - 1, z.shape[-1]) if state is None else state.z
        earlier_v = z.new_zeros(B, 1, v_next.shape[-1]) if state is None else state.v_next

        qk = self.convolve(z, earlier_z, context.same, w_taps, b_taps)              # (B, H + G, T, K)
        if self.qk_mean:
            qk = qk + self.mean(z)
        # float32: in bf16 the norm of a head would carry 3 digits, and an error in T_g scales every logit.
        # eps keeps 0 at 0.
        qk = F.rms_norm(qk.float(), (K,), eps=1e-12)
        scale = torch.cat([self.temp.new_ones(H), self.temp]).float()
        qk = rotate(qk * scale[:, None, None], *context.rope[int(self.sliding)]).to(z.dtype)

        v_prev = v_next
        if self.value_shift:
            v_prev = torch.cat([earlier_v, v_next], dim=1)[:, :T]
            if context.same is not None:
                v_prev = v_prev * context.same[0]
        v = torch.cat([v_now, v_prev], dim=-1).view(B, T, G, K).transpose(1, 2)     # (B, G, T, K)
        if state is not None:
            state.advance(z, v_next)
        return *qk.split([H, G], dim=1), v

    def forward(self, x, context, state=None):
        """x (B, T, D) -> (B, T, D), equation (7). state: this block's BlockState when decoding; it is
        advanced by T tokens."""
        q, k, v = self.qkv(x, context, state)
        if state is not None:
            k, v = state.append(k, v, context.past)
        mask = context.masks[self.window]
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask,
                                           is_causal=mask is None and context.past == 0 and context.T > 1,
                                           enable_gqa=True, scale=1 / math.sqrt(self.K))
        return self.o_proj(o.transpose(1, 2).flatten(2))


class BlockState:
    """Decoding state of one block: keys and values (B, G, max_len, K), the last taps - 1 columns of z before
    the convolutions (B, taps - 1, C), and the last token's W_v2 projection (B, 1, G K / 2): the projection,
    not the hidden state."""

    def __init__(self, attention, batch_size, max_len):
        self.folded = tuple(w if w is None else w.detach() for w in attention.folded())
        new = self.folded[0].new_zeros
        H, G, K, taps = attention.H, attention.G, attention.K, attention.taps
        self.k, self.v = new(batch_size, G, max_len, K), new(batch_size, G, max_len, K)
        self.z, self.v_next = new(batch_size, taps - 1, (H + G) * K), new(batch_size, 1, G * K - G * K // 2)

    def append(self, k, v, past):
        """Store T new keys and values behind the `past` old ones; returns views on all past + T of them."""
        end = past + k.shape[2]
        self.k[:, :, past:end], self.v[:, :, past:end] = k, v
        return self.k[:, :, :end], self.v[:, :, :end]

    def advance(self, z, v_next):
        """Keep the last columns; fewer new columns than the state holds push out only as many."""
        if self.z.shape[1]:
            self.z = torch.cat([self.z, z], dim=1)[:, -self.z.shape[1]:]
        if z.shape[1]:
            self.v_next = v_next[:, -1:]


class Cache:
    """Decoding state of a whole model for a batch: made by ZAYA.new_cache, filled by ZAYA.forward in chunks
    of any size.

    It holds the weights folded at its making: after an optimizer step make a new one. It cannot be rewound,
    since the convolution state of an earlier token is gone; start a new one instead.
    """

    def __init__(self, attentions, batch_size, max_len):
        self.blocks = [BlockState(attention, batch_size, max_len) for attention in attentions]
        self.batch_size, self.max_len, self._length, self.segments = batch_size, max_len, 0, None

    @property
    def length(self):
        """Number of tokens seen. Read-only."""
        return self._length

    def extend(self, tokens_shape, segments):
        """Check that (B, T) more tokens fit; returns the segments (B, length + T) of all tokens so far, or
        None."""
        B, T = tokens_shape
        if B != self.batch_size or self._length + T > self.max_len:
            raise ValueError(
                f"a cache for {self.batch_size} x {self.max_len} tokens holding {self._length} cannot take "
                f"{B} x {T} more: make a new one with new_cache(batch_size, max_len)"
            )
        if segments is None and self.segments is not None:
            # generated tokens continue their prompt's last segment
            segments = self.segments[:, -1:].expand(B, T)
        elif segments is not None and self.segments is None:
            if self._length:
                raise ValueError(
                    "segments were not given for the first tokens of this cache, so they cannot start now"
                )
            self.segments = segments[:, :0]
        if segments is not None:
            self.segments = torch.cat([self.segments, segments], dim=1)
        return self.segments

    def advance(self, T):
        self._length += T


def reach(attention, config, T=8, changed=3):
    """Which positions move when the input of one token changes: {"q", "k", "v": bool (heads, T)}."""
    x = torch.randn(1, T, config.hidden_size)
    other = x.clone()
    other[0, changed] += 1
    context = Context(config, (1, T), 0, None, x.device)
    pairs = zip(attention.qkv(x, context), attention.qkv(other, context))
    return {name: (a != b).any(-1)[0] for name, (a, b) in zip("qkv", pairs)}


def likeness(attention, config, T=64):
    """Mean cosine of a token's queries and its own key. RoPE turns both alike; T texts of one token each are
    read, so that nothing but the token itself is in them."""
    q, k, _ = attention.qkv(torch.randn(T, 1, config.hidden_size), Context(config, (T, 1), 0, None, "cpu"))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return F.cosine_similarity(q, k, dim=-1).mean().item()


@torch.no_grad()
def demonstrate():
    """What each part of CCA does to q, k and v, part by part, and the size of the decoding cache."""
    from model import ZAYAConfig
    plain = dict(conv_kernels=(), qk_mean=False, value_shift=False)
    parts = {"no convolution": plain, "one": {**plain, "conv_kernels": (2,)},
             "two": {**plain, "conv_kernels": (2, 2)}, "+ value shift": dict(qk_mean=False), "+ q-k mean": {}}
    show = lambda moved: " ".join("#" if m else "." for m in moved.tolist())
    print("Token 3 of 8 is changed. Which positions of q, k and v move?")
    print(f"{'':16s} {'q, k':17s} {'v, head 0':17s} {'v, last head':17s} cosine of a token's q and k")
    for name, changes in parts.items():
        config = ZAYAConfig.preset("laptop", **changes)
        torch.manual_seed(0)
        cca = CCA(config)
        for weight in (p for p in cca.parameters() if p.dim() > 1):
            nn.init.normal_(weight, std=config.init_std)                # as ZAYA.init_weights
        moved = reach(cca, config)
        print(f"{name:16s} {show(moved['q'][0]):17s} {show(moved['v'][0]):17s} {show(moved['v'][-1]):17s} "
              f"{likeness(cca, config):.2f}")
    print("Each convolution lets q and k see one token further back; the shift gives the last head of v the\n"
          "token before; the mean makes a token's queries and its key alike from the start.\n")
    big = ZAYAConfig.preset("zaya1_8b")
    H, G, K = big.num_heads, big.num_kv_heads, big.head_dim
    once = (big.taps - 1) * (H + G) * K + G * K // 2
    print("Cache of one block of the 8B model, values a token:")
    for name, heads in ((f"multi-head attention, {big.hidden_size // K} heads", big.hidden_size // K),
                        (f"multi-head attention, {H} heads as CCA has", H), ("CCA", G)):
        print(f"  {name:44s} {2 * heads * K:5d}, {heads // G} x")
    print(f"and once for a text, for convolutions and shift: {once}")


if __name__ == "__main__":
    demonstrate()
