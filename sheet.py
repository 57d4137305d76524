"""Every figure of a plan and its formula: parameters, work, memory, links, step, run, storage, decoding.

SHEET lists each figure as name, unit, formula, meaning. A formula is a Python expression over the figures
above it and the letters below, so what plan.py --explain prints is what was computed. Memory and traffic are
those of train.py: float32 master weights and gradients, bf16 copies, DDP, Muon's momentum and Newton-Schulz
shared out over the ranks.

  step = products + element-wise + exposed all-reduce + Newton-Schulz + optimizer + gather of the updates
  all-reduce of S bytes over m nodes of g GPUs, one rail for each GPU of a node:
         2 S (g-1)/g / inside + 2 (S/g) (m-1)/m / between + latency

Papers: ZAYA1, arXiv 2511.17127 (machine, storage, recipe); CCA, 2510.04476 (caches).
Glossary: N tokens of a micro-step on one GPU, c bytes of the compute type, n GPUs, g GPUs of a node that take
part, m nodes, share: part of the peak that matrix products reach (an assumption until --measure finds it);
model FLOPs: 6 for each active weight and half of attention's square, the convention of MFU. Letters B, T, D,
H, G, K, E, F, R, V as in model.py, L blocks, k top-k, C classes. The other names are plan.py's flags.
"""

import functools
import math

# (section) or (name, unit, formula, meaning). A formula reads the letters of the header, flags, and every
# figure above it.
SHEET = [
    "Parameters",
    ("embedding", "", "V * D", "token embedding, tied: also the head"),
    ("attention", "", "L * (2 * H * K * D + 2 * G * K * D + G)", "q, o, k, two halves of v, temperatures"),
    ("convolutions", "", "L * (H + G) * K * conv_weights",
     "depthwise (w0 + 1 a channel), grouped (K w1 + 1)"),
    ("experts", "", "L * E * 3 * D * F", "gate, up and down of every expert"),
    ("routers", "",
     "L * D * C if linear else L * (D * R + 2 * R + 2 * (R * R + R) + C * R) + eda * (L - 1) * R",
     "down-projection, norm, two layers, classes; EDA's vector from block 1 on"),
    ("scaling", "", "L * scaled * 8 * D + 2 * D", "residual scaling, two sums a block; the input's affine"),
    ("norms", "", "(2 * L + 1) * D", "RMSNorm"),
    ("total", "", "embedding + attention + convolutions + experts + routers + scaling + norms", ""),
    ("total_no_embedding", "", "total - embedding", ""),
    ("active", "", "total - L * (E - k) * 3 * D * F", "that one token meets, the head included"),
    ("active_no_embedding", "", "active - embedding", ""),
    ("matrices", "", "sum(count * rows * cols for (rows, cols), count in shapes)",
     "two-dimensional weights: Muon's"),
    ("vectors", "", "total - matrices", "the rest: AdamW's (embedding, convolutions, vectors)"),

    "Work (FLOPs of a token)",
    ("f_projections", "FLOP", "2 * L * (2 * H * K * D + 2 * G * K * D)", "forward: q, k, v, o"),
    ("f_convolutions", "FLOP", "2 * L * (H + G) * K * K * taps * (conv_weights > 0)",
     "forward: both convolutions folded into one"),
    ("f_scores", "FLOP", "4 * H * K * keys",
     "forward: q k^T and its product with v; keys: seen by a mean query, all blocks"),
    ("f_experts", "FLOP", "2 * L * k * 3 * D * F", "forward: top-k experts"),
    ("f_routers", "FLOP", "2 * L * (D * C if linear else D * R + 2 * R * R + C * R)", "forward"),
    ("f_head", "FLOP", "2 * V * D", "forward"),
    ("f_forward", "FLOP", "f_projections + f_convolutions + f_scores + f_experts + f_routers + f_head", ""),
    ("f_step", "FLOP", "3 * f_forward + f_scores / 2 + recompute * (f_forward - f_head)",
     "forward and two backward products; flash attention computes q k^T again; checkpointing all but the "
     "head"),
    ("f_model", "FLOP", "6 * active + 6 * L * H * K * T", "the convention that MFU counts"),
    ("f_per_context", "FLOP", "2 * full_blocks * H * K",
     "added to a token's forward by each further token of context"),
    ("context_even", "tokens", "(f_forward - f_scores) / f_per_context if full_blocks else None",
     "context at which attention's square costs as much as everything else"),

    "Memory of one GPU",
    ("weights", "B", "4 * total", "float32 master weights"),
    ("copies", "B", "(c < 4) * c * (matrices + embedding)",
     "copies in the compute type, kept from forward to backward"),
    ("gradients", "B", "4 * total", "float32"),
    ("buckets", "B", "4 * total * (n > 1) * (not bucket_view)",
     "DDP's communication buffers, unless the gradients lie in them"),
    ("optimizer_plain", "B", "4 * matrices + 8 * vectors if muon else 8 * total",
     "momentum; AdamW's two moments"),
    ("optimizer_state", "B", "4 * own_matrices + 8 * vectors if muon else 8 * total",
     "momentum shared out over the ranks"),
    ("optimizer_scratch", "B", "muon * (2 * matrices + (4 + 24 / n) * largest if n > 1 else 20 * largest)",
     "all updates in bfloat16; of the largest group of equal matrices float32 and Newton-Schulz's copies"),
    ("a_block", "B/token",
     "(32 + 4 * c) * D + (c * (taps + 1) + 8) * (H + G) * K + c * (2 * H + G) * K + 4 * c * F"
     " + (5 * c + 8) * R + 4 * (2 * H + G + C) + 48", "activations that one block keeps for backward"),
    ("a_folded", "B", "c * D * (H + 2 * G) * K + ((taps + 2) * c + 8) * (H + G) * K * K * (conv_weights > 0)",
     "weights that CCA folds, one block"),
    ("activations_whole", "B", "L * (N * a_block + a_folded) + N * (12 + c) * D", "without checkpointing"),
    ("activations_recomputed", "B", "L * N * (4 * D + 4 * R) + N * a_block + a_folded + N * (12 + c) * D",
     "with checkpointing: R and r at each block's start, and one block whole"),
    ("activations", "B", "activations_recomputed if recompute else activations_whole", "as planned"),
    ("logits", "B", "min(chunk, N) * V * (4 + 2 * c) + 4 * V * D",
     "one chunk of logits and the head's gradient, float32"),
    ("fixed", "B", "weights + gradients + buckets + optimizer_state", "whatever the micro-batch"),
    ("used", "B", "fixed + max(copies + activations + logits, optimizer_scratch)", "at the worst moment"),
    ("memory", "B", "card.memory", "of the card"),
    ("left", "B", "memory - used", "below 0: it does not fit"),

    "Links, one step",
    ("reduced", "B", "4 * total * (n > 1)", "gradients that are all-reduced, float32"),
    ("gathered", "B", "2 * matrices * (n > 1) * muon", "Muon's updates, bfloat16, from owners to all"),
    ("inside", "B/s", "link * ((g - 1) if mesh else 1) if g > 1 else inf",
     "of a GPU to the others of its node"),
    ("between", "B/s", "nic", "of a GPU on its rail"),
    ("inside_s", "s", "2 * reduced * (g - 1) / g / inside", "reduce-scatter and all-gather inside the node"),
    ("between_s", "s", "2 * reduced / g * (m - 1) / m / between",
     "all-reduce of each GPU's part along its rail"),
    ("bucket_count", "", "max(ceil(reduced / bucket), 1)", "messages"),
    ("latency_s", "s", "bucket_count * 2 * latency * log2(n)", "of the messages, as along a tree"),
    ("allreduce_s", "s", "inside_s + between_s + latency_s", "not overlapped"),
    ("flat_s", "s", "2 * reduced * (n - 1) / n / (between if m > 1 else inside)",
     "one ring over all GPUs, for comparison"),
    ("gather_s", "s", "gathered * (g - 1) / g / inside + gathered / g * (m - 1) / m / between",
     "half an all-reduce"),

    "Step",
    ("own_tokens", "tokens", "batch_tokens / n", "of one GPU"),
    ("accumulate", "", "own_tokens / N", "micro-steps"),
    ("products_s", "s", "own_tokens * f_step / (share * card.peak)",
     "matrix products of forward and backward"),
    ("t_block", "B/token", "t[0] * D + t[1] * F + t[2] * H * K + t[3] * G * K + t[4] * R + t[5] * C + t[6]",
     "bytes that one block's element-wise operations move, counted on the real modules"),
    ("t_weights", "B", "(c < 4) * 12 * matrices + (accumulate > 1) * 12 * total",
     "a micro-step's bytes for weights and gradients: to the compute type and back, accumulation"),
    ("elementwise_s", "s",
     "(own_tokens * L * t_block * (4 / 3 if recompute else 1) + accumulate * t_weights) / card.bandwidth",
     "unfused, at copy bandwidth"),
    ("newton_schulz", "FLOP", "muon * sum(count * ns_flops(rows, cols) for (rows, cols), count in shapes)",
     "of all matrices"),
    ("newton_schulz_whole_s", "s", "newton_schulz / (share * card.peak)", "if every GPU did all of it"),
    ("newton_schulz_s", "s",
     "muon * sum(ceil(count / n) * ns_flops(rows, cols) for (rows, cols), count in shapes)"
     " / (share * card.peak)", "shared out, whole matrices to each"),
    ("optimizer_s", "s", "(40 * total + 44 * own_matrices * muon) / card.bandwidth",
     "reads and writes: clipping and update of all, momentum and Newton-Schulz's own of a rank's part"),
    ("backward_s", "s", "(products_s + elementwise_s) * 2 / 3 / accumulate",
     "of the last micro-step, which hides the all-reduce"),
    ("exposed_s", "s", "max(allreduce_s / bucket_count, allreduce_s - backward_s * (1 - 1 / bucket_count))",
     "all-reduce overlapped with backward: what is left (simulate.finish)"),
    ("planned_s", "s", "products_s + elementwise_s + exposed_s + newton_schulz_s + optimizer_s + gather_s",
     "the sum"),
    ("step_s", "s", "step_seconds or planned_s", "as given, or as planned"),
    ("unexplained_s", "s", "step_s - planned_s",
     "of a given step: outside these terms (launches, waiting, slower products)"),
    ("newton_schulz_share", "%", "100 * newton_schulz_s / planned_s", "of the planned step"),
    ("newton_schulz_whole_share", "%",
     "100 * newton_schulz_whole_s / (planned_s - newton_schulz_s + newton_schulz_whole_s)",
     "were it not shared out"),

    "Run",
    ("tokens_per_s", "tokens/s", "batch_tokens / step_s", ""),
    ("tokens_per_s_gpu", "tokens/s", "tokens_per_s / n", ""),
    ("mfu", "%", "100 * f_model * tokens_per_s_gpu / card.peak", "model FLOPs utilisation"),
    ("days", "days", "tokens / tokens_per_s / 86400", "without interruptions; simulate.py has those"),
    ("energy", "MWh", "watts * n * days * 24 / 1e6 if watts else None", "of the GPUs"),
    ("energy_cost", "", "energy * 1000 * kwh_price if kwh_price and energy else None",
     "in the money of --kwh-price"),
    ("gpu_cost", "", "n * days * 24 * gpu_hour_price if gpu_hour_price else None",
     "in the money of --gpu-hour-price"),

    "Storage",
    ("checkpoint", "B", "weights + optimizer_plain", "weights and optimizer, float32"),
    ("save_s", "s", "checkpoint / (m * storage)", "each rank writes its own part"),
    ("save_one_s", "s", "checkpoint / storage", "if one node wrote it all"),
    ("reads_packed", "1/s", "2 * (batch_tokens / T) * T * id_bytes / (page * step_s)",
     "sigma G s b / (P t), packed data: sigma 2"),
    ("reads_scattered", "1/s", "4 * reads_packed", "fragmented data: sigma 8"),

    "Decoding (bfloat16)",
    ("kv_cca", "B/token", "4 * L * G * K", "k and v of G heads"),
    ("kv_mha", "B/token", "4 * L * D", "D / K heads"),
    ("kv_gqa", "B/token", "4 * L * max(D // K // 4, 1) * K", "a quarter of those for k and v"),
    ("kv_mla", "B/token", "2 * L * (4 * K + K // 2)",
     "a latent of 4 K and a rotary key of K / 2 (DeepSeek-V2)"),
    ("kv_saving", "x", "kv_mha / kv_cca", "MHA over CCA"),
    ("kv_fixed", "B", "2 * L * ((taps - 1) * (H + G) * K + G * K / 2)",
     "a sequence's convolution state and delayed value"),
    ("served", "B", "2 * total", "weights"),
    ("batch_max", "sequences", "max((0.9 * memory - served) // (T * kv_cca + kv_fixed), 0)",
     "at context T, a tenth of memory kept free"),
    ("context_max", "tokens", "max((0.9 * memory - served - kv_fixed) // kv_cca, 0)", "of one sequence"),
    ("read_one", "B", "2 * active + T * kv_cca",
     "that a token at batch 1 reads: active weights and its cache"),
    ("decode_one", "tokens/s", "card.bandwidth / read_one", "bandwidth's limit at batch 1"),
    ("read_batch", "B", "2 * (total - experts * (1 - k / E) ** batch_max) + batch_max * (T * kv_cca)",
     "a step of the largest batch: the experts that at least one token meets, all caches"),
    ("decode_batch", "tokens/s", "batch_max * card.bandwidth / read_batch",
     "bandwidth's limit at the largest batch"),
]
TERMS = ("products_s", "elementwise_s", "exposed_s", "newton_schulz_s", "optimizer_s", "gather_s")
FUNCTIONS = dict(sum=sum, max=max, min=min, ceil=math.ceil, inf=math.inf, log2=math.log2)

# Bytes that the element-wise operations of one block move for a token, forward and backward, as coefficients
# of D, F, H K, G K, R, C and 1, by bytes of the compute type. Counted with measure.step_operations; a test
# counts them again.
TRAFFIC = {4: (539, 71, 417, 366, 228, 48, 1332), 2: (579, 35, 321, 293, 226, 60, 1169)}
CHUNK = 2048            # tokens whose logits exist at a time: model.cross_entropy


def evaluate(values, given):
    """Every figure of SHEET by name, beside the letters in `values`. given: {name: value} in their place."""
    values = FUNCTIONS | {"__builtins__": {}} | values          # a formula sees its letters and nothing else
    for name, _, formula, _ in figures():
        values[name] = given[name] if name in given else eval(compiled(formula), values)
    return values


def figures():
    """The rows of SHEET that are figures."""
    return [row for row in SHEET if isinstance(row, tuple)]


@functools.lru_cache(maxsize=None)
def compiled(formula):
    return compile(formula, "<sheet>", "eval")


def bound(values):
    """What bounds the planned step: (name of its largest term, that term's part of it)."""
    name = max(TERMS, key=values.get)
    return name, values[name] / values["planned_s"]


def conv_weights(config):
    """Convolution parameters of one of the (H + G) K channels, biases included."""
    depthwise = [w + 1 for w in config.conv_kernels[:1]]
    return sum(depthwise + [config.head_dim * w + 1 for w in config.conv_kernels[1:]])


def mean_keys(seq_len, window):
    """Keys that a query of one block sees, on average over a causal context."""
    w = min(window or seq_len, seq_len)
    return (w * (w + 1) / 2 + (seq_len - w) * w) / seq_len


def matrix_shapes(config):
    """Muon's matrices: {(rows, columns): number of them}, as optim.Muon batches them."""
    c, shapes = config, {}
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    L, D, R, F, half = c.num_blocks, c.hidden_size, c.router_hidden_size, c.expert_hidden_size, kv // 2
    C = c.num_classes
    router = [(C, D, 1)] if c.router == "linear" else [(R, D, 1), (R, R, 2), (C, R, 1)]
    for rows, cols, count in [(heads, D, 1), (kv, D, 1), (half, D, 1), (kv - half, D, 1), (D, heads, 1),
                              (2 * F, D, c.num_experts), (D, F, c.num_experts), *router]:
        shapes[rows, cols] = shapes.get((rows, cols), 0) + L * count
    return shapes


def newton_schulz_flops(rows, cols, steps=5):
    """Of one matrix: each step X X^T, A A, and B X, the smaller side first (equation (2) of optim.py)."""
    short, long = sorted((rows, cols))
    return steps * (4 * short * short * long + 2 * short**3)


if __name__ == "__main__":
    for row in SHEET:
        print(f"\n{row}" if isinstance(row, str) else f"  {row[0]} = {row[2]}")
