"""Plans a ZAYA1 on paper before a GPU hour is spent: size, work, memory, links, time, money, for any shape
and number of GPUs.

    python plan.py --preset zaya1_8b --gpus 1024                the published run on MI300X
    python plan.py --gpus 1024 --explain                        every figure with its formula
    python plan.py --gpus 1024 --step-seconds 2.5 --json        what a measured step amounts to, for programs
    python plan.py --sweep "hidden_size=1536,2048 micro_batch=1,4 gpus=512,1024"    what fits, fastest first
    python plan.py --measure --preset laptop --seq-len 128 --dtype float32 --machine here.json
                                                                measure this machine (torchrun: links too)
    python plan.py --machine here.json --preset laptop --seq-len 128 --batch-tokens 4096 --gpus 1 \\
        --dtype float32                                         plan with what was measured
    python plan.py --simulate --gpus 1024                       failures and checkpoints (simulate.py)

The plan is a sheet: SHEET lists each figure as name, unit, formula, meaning, and a formula is a Python
expression over the figures above it. What --explain prints is therefore what was computed. Memory and traffic
are those of train.py: float32 master weights and gradients, bf16 copies, DDP, Muon's momentum and
Newton-Schulz shared out over the ranks.

  step = products + element-wise + exposed all-reduce + Newton-Schulz + optimizer + gather of the updates
  all-reduce of S bytes over m nodes of g GPUs, one rail for each GPU of a node:
         2 S (g-1)/g / inside + 2 (S/g) (m-1)/m / between + latency

Papers: ZAYA1, arXiv 2511.17127 (machine, sizing rules, storage, recipe); CCA, 2510.04476
(caches).

Glossary: N tokens of a micro-step on one GPU, c bytes of the compute type, n GPUs, g GPUs of a node that take
part, m nodes, share: part of the peak that matrix products reach (an assumption until --machine measures it);
model FLOPs: 6 for each active weight and half of attention's square, the convention of MFU. Letters B, T, D,
H, G, K, E, F, R, V as in model.py, L blocks, k top-k, C classes.

Not published, hence flags: prices, power beyond the card's own, time between failures. A card whose peak is
not in CARDS is refused.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import config as command_line
from config import option
from model import PRESETS, ZAYAConfig, require


@dataclass
class Card:
    """One GPU, from its maker's datasheet unless said otherwise; bytes, seconds, FLOP/s. None: unknown here.

    link: to each other GPU of the node where `mesh` (an MI300X reaches all 7 with 7 links), else to the
    switch, one direction. saturating: FLOPs of a product from which it reaches its peak rate.
    """
    peak: float
    memory: float
    bandwidth: float
    watts: float
    link: float | None
    mesh: bool = False
    units: int | None = None
    saturating: float | None = None


# Dense bf16. MI300X: bandwidth is the copy measured in the paper (datasheet: 5.3 TB/s), links and saturation
# are the paper's too.
CARDS = {
    "MI300X": Card(1307e12, 192e9, 4.33e12, 750, 64e9, True, 304, 200e9),
    "MI325X": Card(1307e12, 256e9, 6.0e12, 1000, 64e9, True, 304, 200e9),
    "MI250X": Card(383e12, 128e9, 3.2e12, 560, None, True, 208),
    "H200": Card(989e12, 141e9, 4.8e12, 700, 450e9, False, 132),
    "H100": Card(989e12, 80e9, 3.35e12, 700, 450e9, False, 132),
    "A100": Card(312e12, 80e9, 2.0e12, 400, 300e9, False, 108),
}


@dataclass
class PlanConfig:
    """What to plan. Rates and times that are not known are flags."""

    preset: str = option("zaya1_8b", "shape of the model; single fields of it are flags too", tuple(PRESETS))
    gpus: int = option(1024, "GPUs of the run")
    gpu: str = option("mi300x", f"card: {', '.join(CARDS)}")
    machine: str | None = option(None, "file of --measure: measured rates in place of the datasheet's; with "
                                       "--measure: where to write")
    gpus_per_node: int = option(8, "GPUs that share a node's links")
    seq_len: int = option(4096, "context T in tokens")
    batch_tokens: float = option(4096 * 4096, "tokens of one optimizer step, over all GPUs")
    micro_batch: int | None = option(None, "sequences that one GPU computes at once; none: the most that fit")
    tokens: float = option(12e12, "tokens of the whole run")
    optimizer: str = option("muon", "muon or adamw", ("muon", "adamw"))
    dtype: str = option("bfloat16", "compute type", ("bfloat16", "float32"))
    recompute: bool = option(False, "activation checkpointing")
    share: float = option(0.4, "part of the peak that matrix products reach")
    step_seconds: float | None = option(None, "a step time known by measurement, in place of the planned one")
    nic: float = option(50.0, "GB/s of each GPU's network card (400 Gb/s)")
    link: float | None = option(None, "GB/s of a link inside the node; none: the card's")
    bucket_mb: float = option(25.0, "size of DDP's gradient buckets, MiB")
    latency_us: float = option(10.0, "microseconds of one hop of the network; an assumption")
    bucket_view: bool = option(True, "gradients lie in DDP's buckets (gradient_as_bucket_view); no: the "
                                     "buckets are a second copy")
    storage: float = option(25.0, "GB/s of each node's storage network (200 Gb/s)")
    page_kb: float = option(4.0, "page of the file system, KiB")
    watts: float | None = option(None, "power of a GPU with its share of the node; none: the card's board "
                                       "power")
    kwh_price: float | None = option(None, "price of a kWh")
    gpu_hour_price: float | None = option(None, "price of a GPU hour")
    mtbf_hours: float = option(50_000.0, "mean hours between failures of one GPU with its share of the node")
    stall: float = option(2.0, "seconds that a checkpoint holds training up beside its writing")
    restart: float = option(600.0, "seconds from a failure to the next step")
    explain: bool = option(False, "print every figure's formula")
    json: bool = option(False, "print the figures as JSON")
    sweep: str | None = option(None, "axes as 'hidden_size=1024,2048 micro_batch=1,4 gpus=512,1024'; lists "
                                     "what fits, fastest first")
    measure: bool = option(False, "measure this machine, write --machine FILE (default machine.json) and "
                                  "its pictures")
    simulate: bool = option(False, "simulate steps, failures and checkpoints from 1 GPU to 100,000")

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) in (int, float):
                require(value > 0 and math.isfinite(value),
                        f"--{field.name.replace('_', '-')} {value:g}: it must be a number above 0")
        require(self.share <= 1, f"--share {self.share:g} is part of the peak: at most 1")
        require(self.machine or self.card_name in CARDS,
                f"--gpu {self.gpu} is unknown and its peak is not guessed: one of {', '.join(CARDS)}, or "
                f"measure yours with --measure and give --machine FILE")
        require(self.batch_tokens % self.seq_len == 0,
                f"--batch-tokens {self.batch_tokens:g} is no multiple of --seq-len {self.seq_len}: "
                f"take {max(1, round(self.batch_tokens / self.seq_len)) * self.seq_len}")
        sequences = int(self.batch_tokens // self.seq_len)
        require(sequences % self.gpus == 0,
                f"{sequences:,} sequences a step do not divide among {self.gpus:,} GPUs: "
                f"take --batch-tokens {math.ceil(sequences / self.gpus) * self.gpus * self.seq_len}")
        own = sequences // self.gpus
        require(own % (self.micro_batch or 1) == 0,
                f"--micro-batch {self.micro_batch} does not divide a GPU's {own} sequences a step: "
                f"one of {', '.join(str(d) for d in range(1, own + 1) if own % d == 0)}")

    @property
    def card_name(self):
        return self.gpu.upper()

    @property
    def own_sequences(self):
        """Sequences of one GPU in one optimizer step."""
        return int(self.batch_tokens // self.seq_len) // self.gpus


# -------------------------------------------------------------------------------------------------- the sheet

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
    ("optimizer_scratch", "B", "muon * (8 * largest if n > 1 else 20 * largest)",
     "largest group of equal matrices: joined gradients and gathered updates, or Newton-Schulz's copies"),
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
    ("gathered", "B", "4 * matrices * (n > 1) * muon", "Muon's updates, from their owners to all"),
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


@functools.lru_cache(maxsize=None)
def compiled(formula):
    return compile(formula, "<sheet>", "eval")


def plan(cfg, config, given=None):
    """Every figure of SHEET by name, with the letters it was computed from: bytes, seconds, FLOPs.

    cfg: PlanConfig; its micro_batch None: the largest divisor of a GPU's sequences that fits. config:
    ZAYAConfig. given: {name: value} that replaces a formula (measured times). Raises ValueError for what
    cannot be computed (a card whose links are not known).
    """
    if cfg.micro_batch is None:
        sizes = [b for b in range(cfg.own_sequences, 0, -1) if cfg.own_sequences % b == 0]
        for size in sizes:
            p = plan(dataclasses.replace(cfg, micro_batch=size), config, given)
            if p["left"] >= 0:
                break
        return p
    values, given = letters(cfg, config), given or {}
    for row in SHEET:
        if isinstance(row, tuple):
            name, _, formula, _ = row
            values[name] = given[name] if name in given else eval(compiled(formula), values)
    return values


def letters(cfg, config):
    """What the formulas start from: the shape's letters, the machine's, the flags."""
    c, card = config, card_of(cfg)
    g = min(cfg.gpus, cfg.gpus_per_node)
    require(cfg.gpus % g == 0, f"--gpus {cfg.gpus} are no whole nodes of {g}")
    link = cfg.link * 1e9 if cfg.link else card.link
    require(link or g == 1, f"the links of {cfg.gpu} inside a node are not known here: give --link in GB/s")
    sees = [c.sliding_window if c.is_sliding(i) else None for i in range(c.num_blocks)]
    shapes = matrix_shapes(c).items()
    size = 2 if cfg.dtype == "bfloat16" else 4
    return FUNCTIONS | dataclasses.asdict(cfg) | dict(
        __builtins__={},                        # a formula sees its letters and nothing else
        V=c.vocab_size, D=c.hidden_size, L=c.num_blocks, H=c.num_heads, G=c.num_kv_heads, K=c.head_dim,
        E=c.num_experts, k=c.top_k, F=c.expert_hidden_size, R=c.router_hidden_size, C=c.num_classes,
        T=cfg.seq_len, N=cfg.micro_batch * cfg.seq_len, taps=c.taps, conv_weights=conv_weights(c),
        linear=c.router == "linear", eda=c.eda and c.router != "linear", scaled=c.residual_scaling,
        keys=sum(mean_keys(cfg.seq_len, w) for w in sees), full_blocks=sees.count(None),
        c=size, t=TRAFFIC[size], chunk=CHUNK, shapes=shapes, own_matrices=sum(
            math.ceil(count / cfg.gpus) * rows * cols for (rows, cols), count in shapes),
        largest=max(count * rows * cols for (rows, cols), count in shapes), ns_flops=newton_schulz_flops,
        muon=cfg.optimizer == "muon", card=card, n=cfg.gpus, g=g, m=cfg.gpus // g, link=link, mesh=card.mesh,
        nic=cfg.nic * 1e9, bucket=cfg.bucket_mb * 2**20, latency=cfg.latency_us * 1e-6,
        storage=cfg.storage * 1e9, page=cfg.page_kb * 1024,
        watts=cfg.watts or card.watts, id_bytes=2 if c.vocab_size <= 65_536 else 4)


def card_of(cfg):
    """The card of the plan: from CARDS, or what --measure found (its peak: the best product)."""
    if not cfg.machine:
        return CARDS[cfg.card_name]
    found = read_machine(cfg.machine)
    known = next((card for name, card in CARDS.items() if name in found["device"].upper()), None)
    return Card(found["peak"], found["memory"], found["bandwidth"], known.watts if known else cfg.watts,
                found["link"], False, known and known.units, known and known.saturating)


@functools.lru_cache(maxsize=None)
def read_machine(path):
    """The file that --measure wrote. FileNotFoundError or ValueError say how to make one."""
    if not Path(path).exists():
        raise FileNotFoundError(f"--machine {path} does not exist: make it with python plan.py --measure "
                                f"--machine {path}")
    try:
        found = json.loads(Path(path).read_text())
        missing = {"device", "kind", "dtype", "peak", "memory", "bandwidth", "link", "overhead",
                   "operations"} - found.keys()
    except (json.JSONDecodeError, AttributeError):
        missing = {"JSON"}
    require(not missing, f"--machine {path} is no file of plan.py --measure: it lacks "
                         f"{', '.join(sorted(missing))}")
    return found


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
    router = [(R, D, 1), (R, R, 2), (c.num_classes, R, 1)]
    if c.router == "linear":
        router = [(c.num_classes, D, 1)]
    for rows, cols, count in [(heads, D, 1), (kv, D, 1), (half, D, 1), (kv - half, D, 1), (D, heads, 1),
                              (2 * F, D, c.num_experts), (D, F, c.num_experts), *router]:
        shapes[rows, cols] = shapes.get((rows, cols), 0) + L * count
    return shapes


def newton_schulz_flops(rows, cols, steps=5):
    """Of one matrix: each step X X^T, A A, and B X, the smaller side first (equation (2) of optim.py)."""
    short, long = sorted((rows, cols))
    return steps * (4 * short * short * long + 2 * short**3)


def bound(values):
    """What bounds the planned step: (name of its largest term, that term's part of it)."""
    name = max(TERMS, key=values.get)
    return name, values[name] / values["planned_s"]


# ----------------------------------------------------------------------------------------------- sizing rules

def rules(cfg, config, p):
    """Checks of a shape against how MI300X behaves: list of (passes, what, value, why, what to change)."""
    c, card, N = config, p["card"], p["N"]
    rows, tile = p["N"] * c.top_k / c.num_experts, 256
    products = block_products(c, N)
    big = card.saturating and sum(f for f in products.values() if f >= card.saturating)
    big = card.saturating and round(100 * big / sum(products.values()))
    units = card.units or 1
    tiles = c.num_experts * math.ceil(rows / tile) * math.ceil(2 * c.expert_hidden_size / tile)
    filled = tiles / (math.ceil(tiles / units) * units)
    query = c.num_heads * c.head_dim
    narrowest = min(c.hidden_size, c.expert_hidden_size, query)
    up = lambda value, of: math.ceil(value / of) * of
    return [
        (c.hidden_size % 256 == 0, "hidden_size", c.hidden_size,
         "is a side of every product: whole tiles of 256", f"--hidden-size {up(c.hidden_size, 256)}"),
        (c.expert_hidden_size % 128 == 0, "expert_hidden_size", c.expert_hidden_size,
         "gate and up are then whole tiles", f"--expert-hidden-size {up(c.expert_hidden_size, 128)}"),
        (c.head_dim % 64 == 0, "head_dim", c.head_dim,
         "attention kernels work on 64 channels, a wavefront, at a time", f"--head-dim {up(c.head_dim, 64)}"),
        (c.vocab_size % 64 == 0, "vocab_size", c.vocab_size,
         "the widest product; odd widths lose its fast path", f"--vocab-size {up(c.vocab_size, 64)}"),
        (query % 256 == 0, "query channels", query,
         "rows of q_proj, columns of o_proj: whole tiles", f"num_heads * head_dim = {up(query, 256)}"),
        (narrowest >= 1024, "shortest contraction", narrowest,
         "below 1024 contracted channels a product does not reach its rate at any size", "a wider model"),
        (rows >= tile, "rows of an expert", round(rows), "they must fill a tile of 256, or it is wasted",
         f"--micro-batch of at least {math.ceil(tile * c.num_experts / c.top_k / cfg.seq_len)}"),
        (big is None or big >= 50, "work in saturated products, %", "n/a" if big is None else big,
         "a product reaches its rate from about 200 GFLOP: half of a block's work should lie in such",
         "a larger --micro-batch or a wider model"),
        (card.units is None or filled >= 0.75, "compute units filled by gate and up, %", round(100 * filled),
         f"{tiles:,} tiles of 256 x 256 run on {units} units in whole waves",
         "another --micro-batch or --expert-hidden-size"),
        (cfg.gpus == 1 or not card.mesh or p["g"] == cfg.gpus_per_node, "GPUs of a node", p["g"],
         "bandwidth inside a node grows with (g - 1) links: use all or do not split",
         f"--gpus {cfg.gpus_per_node}, or 1"),
        (p["left"] >= 0, "memory left, GB", round(p["left"] / 1e9, 1), "what training holds must fit",
         "a smaller --micro-batch, --recompute, or fewer experts"),
    ]


def block_products(config, N):
    """FLOPs of each forward product of one block at N tokens, with a block's part of the head."""
    c = config
    D, F, kv = c.hidden_size, c.expert_hidden_size, c.num_kv_heads * c.head_dim
    qk = c.num_heads * c.head_dim + kv
    return {"projections": 2 * N * D * (qk + kv), "o_proj": 2 * N * D * c.num_heads * c.head_dim,
            "convolutions": 2 * N * qk * c.head_dim * c.taps, "gate and up": 4 * N * c.top_k * D * F,
            "down": 2 * N * c.top_k * D * F, "router": 2 * N * D * c.router_hidden_size,
            "head": 2 * N * D * c.vocab_size / c.num_blocks}


# ------------------------------------------------------------------------------------------------ the command

def show(value, unit):
    """A figure for people: 3 to 4 digits, with its unit; whole counts in full."""
    if value is None or value == math.inf:
        return "n/a" if value is None else "no limit"
    if unit in ("", "tokens", "sequences") and abs(value) < 1e15:
        return f"{value:,.0f} {unit}".strip() if value == int(value) else f"{value:,.4g} {unit}".strip()
    if unit == "s":
        return f"{value * 1e3:,.4g} ms" if 0 < abs(value) < 1 else f"{value:,.4g} s"
    if unit in ("%", "days", "MWh", "x"):
        return f"{value:,.4g} {unit}"
    if unit == "1/s":
        return f"{value:,.0f} /s"
    power = min(max(int(math.log10(abs(value) or 1) // 3), 0), 6)
    return f"{value / 1000**power:,.4g} {' kMGTPE'[power].strip()}{unit}"


def report(cfg, config, p, given):
    """The sheet as text, with rules and the bound; formulas where cfg.explain."""
    lines = []
    for row in SHEET:
        if isinstance(row, str):
            lines.append(f"\n{row}")
            continue
        name, unit, formula, meaning = row
        lines.append(f"  {name:26}{show(p[name], unit):>22}  {meaning}")
        if cfg.explain:
            lines.append(f"  {'':26}{'':>22}  = {'measured on this machine' if name in given else formula}")
    name, share = bound(p)
    lines.append(f"\nThe planned step of {show(p['planned_s'], 's')} is bound by {name}, {share:.0%} of it. "
                 f"Micro-batch {p['micro_batch']} of {cfg.own_sequences} sequences a GPU.")
    if cfg.step_seconds:
        lines.append(f"Of the given step of {show(p['step_s'], 's')}, "
                     f"{p['unexplained_s'] / p['step_s']:.0%} lie outside the planned "
                     f"terms: its products reach {p['f_step'] * p['tokens_per_s_gpu'] / p['card'].peak:.1%} "
                     f"of the peak over the step.")
    lines.append(f"\nSizing rules ({cfg.machine or cfg.card_name})")
    for good, what, value, why, change in rules(cfg, config, p):
        lines.append(f"  {'ok    ' if good else 'CHANGE'}  {what} {value}: {why}"
                     + ("" if good else f". Take {change}"))
    return "\n".join(lines[1:])


def as_json(cfg, config, p, given):
    """The figures, the bound and the rules as plain types."""
    figures = {row[0]: dict(value=p[row[0]], unit=row[1], formula="measured" if row[0] in given else row[2],
                            meaning=row[3])
               for row in SHEET if isinstance(row, tuple)}
    for figure in figures.values():
        if figure["value"] == math.inf:
            figure["value"] = None
    checks = [dict(zip(("passes", "what", "value", "why", "change"), check))
              for check in rules(cfg, config, p)]
    return dict(figures=figures, bound=bound(p)[0], rules=checks, plan=dataclasses.asdict(cfg),
                model=dataclasses.asdict(config))


def sweep(cfg, config):
    """Every combination of cfg.sweep's axes: list of (axes, figures or None, why not); the fastest that fits
    comes first."""
    axes = {}
    for part in cfg.sweep.split():
        name, _, values = part.partition("=")
        owner = next((o for o in (config, cfg) if hasattr(o, name.replace("-", "_")) and values), None)
        require(owner, f"--sweep: {part!r} must be a flag and its values, as hidden_size=1024,2048")
        kind = type(getattr(owner, name.replace("-", "_")) or 1)
        try:
            axes[name.replace("-", "_")] = [kind(float(v)) for v in values.split(",")]
        except ValueError:
            raise ValueError(f"--sweep: {part!r} must list numbers") from None
    rows = []
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values))
        pick = lambda owner: {k: v for k, v in point.items() if hasattr(owner, k)}
        try:
            p = plan(dataclasses.replace(cfg, **pick(cfg)), dataclasses.replace(config, **pick(config)))
            rows.append((point, p, "" if p["left"] >= 0 else f"does not fit by {show(-p['left'], 'B')}"))
        except ValueError as error:
            rows.append((point, None, str(error)))
    return sorted(rows, key=lambda row: (bool(row[2]), -(row[1] or {}).get("tokens_per_s", 0)))


def print_sweep(rows):
    print(f"{'total':>8} {'active':>8} {'left':>10} {'step':>10} {'tokens/s':>10} {'a GPU':>8} {'MFU':>6} "
          f"{'days':>7}  axes")
    for point, p, problem in rows:
        axes = " ".join(f"{k}={v:g}" for k, v in point.items())
        figures = p and (f"{show(p['total'], 'P'):>8} {show(p['active'], 'P'):>8} "
                         f"{show(p['left'], 'B'):>10} {show(p['step_s'], 's'):>10} "
                         f"{p['tokens_per_s']:10,.0f} {p['tokens_per_s_gpu']:8,.0f} {p['mfu']:5.1f}% "
                         f"{p['days']:7.1f}")
        print(f"{figures or ' ' * 75}  {axes}" + (f"   {problem}" if problem else ""))


def measured_terms(cfg, config):
    """With --machine: the terms of the step from its measured operations, as plan's `given`; else {}."""
    if not cfg.machine:
        return {}
    import measure
    found = read_machine(cfg.machine)
    require(found["dtype"] == cfg.dtype, f"--machine {cfg.machine} was measured in {found['dtype']}: add "
                                         f"--dtype {found['dtype']}")
    size = cfg.micro_batch or plan(cfg, config)["micro_batch"]
    times = measure.predict(found, config, size, cfg.seq_len, cfg.optimizer)
    steps = cfg.own_sequences // size
    return {"products_s": steps * times["products"], "elementwise_s": steps * times["elementwise"],
            "newton_schulz_s": times["newton_schulz"] / cfg.gpus, "optimizer_s": times["optimizer"]}


def main(argv):
    early = argparse.ArgumentParser(add_help=False)
    early.add_argument("--preset", default=PlanConfig.preset)
    shape = PRESETS.get(early.parse_known_args(argv)[0].preset, {})
    cfg, config = command_line.parse("plan.py", __doc__, argv, PlanConfig, ZAYAConfig, **shape)
    if cfg.measure:
        import measure
        return measure.main(cfg, config)
    if cfg.simulate:
        import simulate
        return simulate.main(cfg, config)
    if cfg.sweep:
        return print_sweep(sweep(cfg, config))
    given = measured_terms(cfg, config)
    p = plan(cfg, config, given)
    print(json.dumps(as_json(cfg, config, p, given), indent=1) if cfg.json else report(cfg, config, p, given))


if __name__ == "__main__":
    command_line.run(main)
