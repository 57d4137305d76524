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

Formulas, papers and letters are in sheet.py, the cards in cards.py, the text and the sizing rules in
report.py, measuring in measure.py. Here: the flags, what they and the model's shape give the formulas to
start from, and sweeps.

Not published, hence flags: prices, power beyond the card's own, time between failures.
"""

import argparse
import dataclasses
import itertools
import json
import math
from dataclasses import dataclass

import config as command_line
from cards import CARDS, card_of, read_machine
from config import option
from model import PRESETS, ZAYAConfig, require
from report import as_json, report, show
from sheet import CHUNK, TRAFFIC, conv_weights, evaluate, matrix_shapes, mean_keys, newton_schulz_flops


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
    measure: bool = option(False, "measure this machine, write --machine FILE (default machine.json) and its "
                           "pictures")
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
    return evaluate(letters(cfg, config), given or {})


def letters(cfg, config):
    """What the formulas start from: the shape's letters, the machine's, the flags."""
    c, card = config, card_of(cfg.card_name, cfg.machine, cfg.watts)
    g = min(cfg.gpus, cfg.gpus_per_node)
    require(cfg.gpus % g == 0, f"--gpus {cfg.gpus} are no whole nodes of {g}")
    link = cfg.link * 1e9 if cfg.link else card.link
    require(link or g == 1, f"the links of {cfg.gpu} inside a node are not known here: give --link in GB/s")
    sees = [c.sliding_window if c.is_sliding(i) else None for i in range(c.num_blocks)]
    shapes = matrix_shapes(c).items()
    size = 2 if cfg.dtype == "bfloat16" else 4
    return dataclasses.asdict(cfg) | dict(
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


def measured_terms(cfg, config):
    """With --machine: the terms of the step from its measured operations, as plan's `given`; else {}."""
    if not cfg.machine:
        return {}
    import prices
    found = read_machine(cfg.machine)
    require(found["dtype"] == cfg.dtype, f"--machine {cfg.machine} was measured in {found['dtype']}: add "
                                         f"--dtype {found['dtype']}")
    size = cfg.micro_batch or plan(cfg, config)["micro_batch"]
    times = prices.predict(found, config, size, cfg.seq_len, cfg.optimizer)
    steps = cfg.own_sequences // size
    return {"products_s": steps * times["products"], "elementwise_s": steps * times["elementwise"],
            "newton_schulz_s": times["newton_schulz"] / cfg.gpus, "optimizer_s": times["optimizer"]}


def sweep(cfg, config):
    """Every combination of cfg.sweep's axes: list of (axes, figures or None, why not), the fastest first."""
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
