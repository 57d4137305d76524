"""The papers' ablations at the size of a laptop: what each part of ZAYA1 is worth, three seeds each.

    python benchmarks/ablations.py time     step times, for the rows at equal time
    python benchmarks/ablations.py run      every variant and seed; takes up where it stopped. Several such
                                            processes share the work
    python benchmarks/ablations.py table    the README's table; `plot` makes docs/ablations.png
    python benchmarks/ablations.py quick    repeats one comparison in about ten minutes, beside the kept one

Same corpus, tokenizer, batches, schedule (cosine to 5 %) and number of tokens for all; a seed decides on the
initial weights and on the order of the data. The experts' width is chosen so that every variant has ours'
active parameters, to about one percent. The shape is SMALL, narrower than the laptop preset, so that all runs
fit into about 45 minutes of two quiet cores; queries are compressed 2 times and keys 4 times. The optimizers
are compared on the laptop preset itself. One learning rate serves all variants, but each optimizer keeps the
best of its own. Nothing is compiled, and all was run and timed on one thread (OMP_NUM_THREADS=1). "seconds"
of a row is wall time, whatever else the machine did. A difference is a tie if its 95 % interval over
the paired seeds (Student's t; wide, with three) holds zero.

The sign rule, b <- b + rate sign(1/E - share), is equation (5) of router.py with AdamW's betas at zero.
Results lie in benchmarks/results/ablations.json, a row a run.
"""

import argparse
import dataclasses
import fcntl
import functools
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import config as command_line  # noqa: E402
import data  # noqa: E402
import optim  # noqa: E402
from benchmarks import quality  # noqa: E402
from model import ZAYA, ZAYAConfig, require  # noqa: E402
from plot import pyplot  # noqa: E402
from prepare import keep_freed_memory  # noqa: E402
from router import Balancer, balance_health  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "ablations.json"
PICTURE = Path(__file__).parent.parent / "docs" / "ablations.png"
TOKENS, BATCH, SEEDS, VAL_TOKENS = 500_000, 1024, (0, 1, 2), 65_536
SMALL = dict(hidden_size=128, head_dim=16, expert_hidden_size=128, init_std=0.08)
PLAIN = dict(conv_kernels=(), qk_mean=False, value_shift=False)


@dataclasses.dataclass
class Variant:
    """shape: fields of ZAYAConfig that differ from the base's. rates: learning rates tried with the first
    seed, the best serves the others; or the variant whose best is taken. balance: rate and betas of the
    balancing biases. like: as many steps as take the time of that variant's."""
    shape: dict = dataclasses.field(default_factory=dict)
    base: dict = dataclasses.field(default_factory=lambda: SMALL)
    optimizer: str = "muon"
    rates: tuple | str = (0.024,)
    balance: tuple = (0.02, (0.9, 0.999))
    like: str | None = None


DENSE = dict(num_experts=1, skip_expert="off", router="linear")
VARIANTS = {
    "ours": Variant(),
    "no convolution": Variant(PLAIN),
    "one convolution": Variant({**PLAIN, "conv_kernels": (2,)}),
    "two convolutions": Variant({**PLAIN, "conv_kernels": (2, 2)}),
    "two and value shift": Variant(dict(qk_mean=False)),
    "MHA, cache 1.5 times": Variant({**PLAIN, "num_heads": 3, "num_kv_heads": 3}),
    "MHA, same cache": Variant({**PLAIN, "num_heads": 2, "num_kv_heads": 2}),
    "linear router": Variant(dict(router="linear")),
    "no EDA": Variant(dict(eda=False)),
    "no residual scaling": Variant(dict(residual_scaling=False)),
    "no balancing": Variant(balance=(0.0, (0.9, 0.999))),
    "sign rule": Variant(balance=(0.02, (0.0, 0.0))),
    "top-2 of 16 half as wide": Variant(dict(top_k=2, num_experts=16)),
    "dense": Variant(DENSE),
    "dense, equal time": Variant(DENSE, like="ours"),
    "Muon": Variant(base={}, rates=(0.024, 0.012)),
    "AdamW": Variant(base={}, optimizer="adamw", rates=(0.004, 0.002, 0.008)),
    "AdamW, equal time": Variant(base={}, optimizer="adamw", rates="AdamW", like="Muon"),
}

# {variant: (compared with, the papers' finding for it, the papers' figures)}; losses in nats: CCA paper
COMPARED = {
    "ours": (None, None, "2.241"),
    "no convolution": ("one convolution", "worse", "2.280 against 2.264"),
    "one convolution": ("two convolutions", "worse", "2.264 against 2.252"),
    "two convolutions": ("two and value shift", "worse", "2.252 against 2.248"),
    "two and value shift": ("ours", "worse", "2.248 against 2.241"),
    "MHA, cache 1.5 times": ("ours", "worse", "2.297 against 2.286 (cache 4 times)"),
    "MHA, same cache": ("ours", None, ""),
    "linear router": ("ours", None, "even after 900 steps against 400"),
    "no EDA": ("ours", None, ""),
    "no residual scaling": ("ours", None, ""),
    "no balancing": ("ours", None, ""),
    "sign rule": ("ours", None, ""),
    "top-2 of 16 half as wide": ("ours", None, ""),
    "dense": ("ours", "worse", "mixtures are better (the claim)"),
    "dense, equal time": ("ours", None, ""),
    "Muon": (None, None, ""),
    "AdamW": ("Muon", None, ""),
    "AdamW, equal time": ("Muon", None, ""),
}
QUICK = "no convolution"


def shape_of(variant, vocab_size):
    """ZAYAConfig of a variant, its experts as wide as gives it the active parameters of its base."""
    def make(**changes):
        fields = {**variant.base, **changes}
        return ZAYAConfig.preset("laptop", vocab_size=vocab_size, max_seq_len=quality.T, **fields)

    def active(config):
        with torch.device("meta"):
            return ZAYA(config).num_parameters(active=True)
    own, aim = make(**variant.shape), active(make())
    per_width = 3 * own.hidden_size * own.top_k * own.num_blocks
    width = own.expert_hidden_size + 4 * round((aim - active(own)) / per_width / 4)
    return dataclasses.replace(own, expert_hidden_size=width)


def build(variant, dataset, seed):
    torch.manual_seed(seed)
    model = ZAYA(shape_of(variant, -(-dataset.tokenizer.vocab_size // 64) * 64))
    rate, betas = variant.balance
    return model, Balancer(model, rate, betas)


def train(name, seed, lr, dataset, ms):
    """One run; returns its row."""
    variant = VARIANTS[name]
    steps = TOKENS // BATCH
    if variant.like:
        steps = round(steps * ms[variant.like] / ms[name])
    model, balancer = build(variant, dataset, seed)
    start = time.perf_counter()
    loads = quality.fit(model, balancer, dataset, lr, steps * BATCH, BATCH, variant.optimizer, seed)
    seconds = time.perf_counter() - start
    even = [balance_health(load, model.config.num_experts)["entropy"].mean().item() for load in loads]
    val = quality.validate(model, dataset, VAL_TOKENS)
    return {"variant": name, "seed": seed, "lr": lr, "tokens": steps * BATCH, "val": val,
            "bits_per_byte": val / math.log(2) / dataset.bytes_per_token, "seconds": round(seconds, 1),
            "active": model.num_parameters(active=True), "total": model.num_parameters(),
            "width": model.config.expert_hidden_size, "entropy": round(statistics.mean(even[-20:]), 4),
            "even_after": next((i + 1 for i, e in enumerate(even) if e >= 0.99), None)}


def load():
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"ms": {}, "runs": []}


@functools.cache
def lock_file():
    """One handle for the whole process: closing any would give up all of its locks."""
    return open(RESULTS.with_suffix(".lock"), "w")


def locked(byte, wait=True):
    """Hold one byte of the lock file, as long as the process lives: byte 0 guards the results, 1 + i the i-th
    run. Returns False where another process holds it."""
    try:
        fcntl.lockf(lock_file(), fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, byte)
        return True
    except OSError:
        return False


def unlock(byte):
    fcntl.lockf(lock_file(), fcntl.LOCK_UN, 1, byte)


def update(change):
    """Apply change(results) to the file: whole or not at all, one process at a time."""
    locked(0)
    results = load()
    change(results)
    results["runs"].sort(key=lambda r: (list(VARIANTS).index(r["variant"]), r["seed"], r["lr"]))
    new = RESULTS.with_suffix(".new")
    runs = ",\n  ".join(map(json.dumps, results["runs"]))
    new.write_text(f'{{"ms": {json.dumps(results["ms"])},\n "runs": [\n  {runs}\n ]}}\n')
    os.replace(new, RESULTS)
    unlock(0)


def best_rate(results, name):
    """The learning rate that was best with the first seed; None while rates are still to be tried."""
    rates = VARIANTS[name].rates
    if isinstance(rates, str):
        return best_rate(results, rates)
    tried = {r["lr"]: r["val"] for r in results["runs"] if r["variant"] == name and r["seed"] == SEEDS[0]}
    return min(tried, key=tried.get) if tried.keys() >= set(rates) else None


def rows(results, name):
    """This variant's rows at its best learning rate, by seed."""
    lr = best_rate(results, name)
    return {r["seed"]: r for r in results["runs"] if r["variant"] == name and r["lr"] == lr}


def run():
    """Every run, seed by seed, so that an early stop leaves whole seeds. One that another process is at, or
    whose learning rate is not known yet, is left for the next round."""
    dataset = data.load("stdlib")
    tasks = [(name, seed, lr) for seed in SEEDS for name, v in VARIANTS.items()
             for lr in (v.rates if seed == SEEDS[0] and isinstance(v.rates, tuple) else (None,))]
    while todo := [task for task in tasks if not done(load(), *task)]:
        for name, seed, given in todo:
            lr, byte = given or best_rate(load(), name), 1 + tasks.index((name, seed, given))
            if lr and locked(byte, wait=False):
                if not done(load(), name, seed, lr):
                    row = train(name, seed, lr, dataset, load()["ms"])
                    update(lambda results, row=row: results["runs"].append(row))
                    print(row, flush=True)
                unlock(byte)
        time.sleep(1)


def done(results, name, seed, lr):
    lr = lr or best_rate(results, name)
    return any((r["variant"], r["seed"], r["lr"]) == (name, seed, lr) for r in results["runs"])


def measure():
    """Milliseconds of a whole step of the variants that a row at equal time compares, side by side."""
    dataset, steppers = data.load("stdlib"), {}
    for name, variant in VARIANTS.items():
        if variant.like:
            for each in (variant.like, name):
                model, balancer = build(VARIANTS[each], dataset, 0)
                model.train()
                steppers[each] = model, balancer, optim.build(model, VARIANTS[each].optimizer, 1e-3)
    ms = quality.times(steppers, dataset, BATCH)
    update(lambda results: results["ms"].update(ms))
    print(ms)


T95 = {2: 12.71, 3: 4.303}      # Student's t, 95 % of both sides, by number of seeds


def against(results, name, other):
    """Difference name - other in bits a byte, seed by seed: (mean, half the width of its 95 % interval); None
    below two seeds."""
    a, b = rows(results, name), rows(results, other)
    gaps = [a[seed]["bits_per_byte"] - b[seed]["bits_per_byte"] for seed in a.keys() & b.keys()]
    if len(gaps) < 2:
        return None
    return statistics.mean(gaps), T95[len(gaps)] * statistics.stdev(gaps) / math.sqrt(len(gaps))


def verdict(gap):
    """"better", "worse", or "tie": zero lies in the 95 % interval; "" without a gap."""
    return "" if gap is None else "tie" if abs(gap[0]) <= gap[1] else "worse" if gap[0] > 0 else "better"


def loss_of(own):
    """Mean and standard deviation over the seeds, as text; says so where seeds are missing."""
    values = [r["bits_per_byte"] for r in own.values()]
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    missing = f", {len(values)} of {len(SEEDS)} seeds" if len(values) < len(SEEDS) else ""
    return f"{statistics.mean(values):.3f}{spread}{missing}"


HEAD = ("variant", "parameters active / total", "tokens", "bits a byte", "against", "difference, 95 %",
        "we find", "papers", "same order", "entropy of the load")


def table():
    """Markdown: every variant beside what it is compared with, the papers' order, and whether ours agrees."""
    results = load()
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for name, (other, order, figures) in COMPARED.items():
        own = rows(results, name)
        if not own:
            continue
        row, gap = next(iter(own.values())), against(results, name, other) if other else None
        found = verdict(gap)
        same = {order: "yes", "tie": "tie", "": ""}.get(found, "no") if order else ""
        cells = (name, f"{row['active'] / 1e3:.0f}k / {row['total'] / 1e3:.0f}k",
                 f"{row['tokens'] / 1e6:.2f}M", loss_of(own), other or "",
                 "{:+.3f} ± {:.3f}".format(*gap) if gap else "", found, figures, same, evenness(own))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def evenness(own):
    """Final entropy of the loads, and the median step at which it first was 0.99; "" for a dense model."""
    if all(r["active"] == r["total"] for r in own.values()):
        return ""
    after = sorted(r["even_after"] or math.inf for r in own.values())[len(own) // 2]
    reached = f"0.99 at step {after}" if after < math.inf else "never 0.99"
    return f"{statistics.mean(r['entropy'] for r in own.values()):.3f}, {reached}"


def plot():
    """docs/ablations.png: each seed a dot, the mean a bar with its spread."""
    plt = pyplot()
    results = load()
    names = [name for name in COMPARED if rows(results, name)]
    figure, axis = plt.subplots(figsize=(9, 6.5), layout="constrained", facecolor="white")
    for y, name in enumerate(names):
        values = [r["bits_per_byte"] for r in rows(results, name).values()]
        spread = statistics.stdev(values) if len(values) > 1 else 0
        axis.errorbar(statistics.mean(values), y, xerr=spread, fmt="|", color="black", markersize=14,
                      capsize=4)
        axis.plot(values, [y] * len(values), "o", color="tab:blue", markersize=5, alpha=0.7)
    ours = statistics.mean(r["bits_per_byte"] for r in rows(results, "ours").values())
    axis.axvline(ours, color="tab:gray", linestyle="--", linewidth=1)
    axis.set(yticks=range(len(names)), yticklabels=names,
             xlabel="validation loss, bits a byte (less is better)",
             title="A dot a seed; bar: mean, standard deviation; dashed: ours; optimizers: laptop preset")
    axis.invert_yaxis()
    axis.grid(alpha=0.3)
    figure.savefig(PICTURE, dpi=110)
    plt.close(figure)
    print(f"wrote {PICTURE}")


def quick():
    """Train ours and QUICK again on two seeds, beside the kept results; status 1 if the order came out
    otherwise."""
    dataset, kept, again = data.load("stdlib"), load(), {"ms": {}, "runs": []}
    before = against(kept, QUICK, "ours")
    require(before, f"{RESULTS} does not hold two seeds of ours and of {QUICK!r} yet: run them first")
    for seed in SEEDS[:2]:
        for name in ("ours", QUICK):
            row = train(name, seed, VARIANTS[name].rates[0], dataset, {})
            again["runs"].append(row)
            print(f"{name}, seed {seed}: {row['bits_per_byte']:.3f} bits a byte now, "
                  f"{rows(kept, name)[seed]['bits_per_byte']:.3f} kept", flush=True)
    gap = statistics.mean(rows(again, QUICK)[s]["bits_per_byte"] - rows(again, "ours")[s]["bits_per_byte"]
                          for s in SEEDS[:2])
    print(f"{QUICK} against ours: {gap:+.3f} now, {before[0]:+.3f} kept")
    return int(gap * before[0] <= 0)


def main(argv):
    commands = {"time": measure, "run": run, "table": lambda: print(table()), "plot": plot, "quick": quick}
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=commands)
    torch.set_flush_denormal(True)
    keep_freed_memory()
    return commands[parser.parse_args(argv).command]()


if __name__ == "__main__":
    command_line.run(main)
