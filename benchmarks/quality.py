"""ZAYA1's laptop preset against dense GPTs of equal active parameters: loss for tokens, loss for time.

    python benchmarks/quality.py run [KIND]   trains every model (or one: zaya, gpt, modern) at every learning
                                              rate; takes up where it stopped
    python benchmarks/quality.py time         the step time of each, side by side in one process
    python benchmarks/quality.py table        the table in the README, from the results of the two

Same corpus, tokenizer, batches, optimizer and schedule (cosine to 5 %) for all. A dense model is trained on
TOKENS tokens; ZAYA1 on the given shares of them, each a run of its own with its own full schedule. Each model
keeps its best of four learning rates for the longest run. ZAYA1's blocks are compiled, as train.py compiles
them; the dense models run eagerly. Results lie in benchmarks/results/quality.json, a row a run, so that the
table can be made again.
"""

import json
import math
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import data  # noqa: E402
import optim  # noqa: E402
from benchmarks.dense import dense_of_size  # noqa: E402
from model import ZAYA, ZAYAConfig  # noqa: E402
from router import Balancer  # noqa: E402
from train import evaluate  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "quality.json"
TOKENS, BATCH, T = 2_400_000, 4096, 128
RATES = dict.fromkeys(("zaya", "gpt", "modern"), (0.006, 0.012, 0.024, 0.048))
SHARES = {"zaya": (0.45, 0.3), "gpt": (1.0,), "modern": (1.0,)}


def build(kind, dataset):
    """(model, balancer or None); the dense ones have as many parameters as ZAYA1 uses for a token."""
    torch.manual_seed(0)
    vocab = -(-dataset.tokenizer.vocab_size // 64) * 64
    zaya = ZAYA(ZAYAConfig.preset("laptop", vocab_size=vocab, max_seq_len=T))
    if kind == "zaya":
        return zaya, Balancer(zaya, 0.02)
    return dense_of_size(kind, zaya.num_parameters(active=True), vocab_size=vocab, seq_len=T), None


def step(model, balancer, optimizers, batch, lr, peak):
    """One optimizer step; returns the loads of the experts (blocks, C), None of a dense model."""
    model(*batch)[1].backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    return balancer.step(balancer.optimizer.defaults["lr"] * lr / peak) if balancer else None


def fit(model, balancer, dataset, lr, tokens, batch=BATCH, optimizer="muon", seed=0):
    """Train a model on `tokens` tokens, `batch` a step, with its own full schedule. Returns each step's
    loads."""
    optimizers, steps, loads = optim.build(model, optimizer, lr), tokens // batch, []
    model.train()
    for i in range(steps):
        rows = data.windows(dataset.train, range(i * batch // T, (i + 1) * batch // T), T, seed)
        rate = optim.lr_at((i + 1) / steps, lr, 0.05 * lr, 0.05)
        loads.append(step(model, balancer, optimizers, rows, rate, lr))
    return loads


def validate(model, dataset, limit=10**9):
    """Validation loss in nats a token, over up to `limit` tokens, spread over the whole part."""
    return evaluate(model, dataset.val, T, limit, 0, 1, torch.no_grad)


def train(kind, lr, tokens, dataset):
    """Train one model; returns its final validation loss over the whole part, and its active parameters."""
    model, balancer = build(kind, dataset)
    fit(model, balancer, dataset, lr, tokens)
    return validate(model, dataset), model.num_parameters(active=True)


def times(steppers, dataset, batch=BATCH, rounds=12):
    """{name: median milliseconds of a whole step} of {name: (model, balancer, optimizers)}, taking turns, so
    that a noisy machine is noisy for all."""
    taken = {name: [] for name in steppers}
    for _ in range(rounds + 3):
        rows = data.windows(dataset.train, range(batch // T), T, 0)
        for name, parts in steppers.items():
            start = time.perf_counter()
            step(*parts, rows, 1e-3, 1e-3)
            taken[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(t[3:]) for name, t in taken.items()}


def load():
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": [], "ms": {}}


def save(results):
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def best_rate(results, kind):
    """The learning rate that won this model's longest runs."""
    longest = [r for r in results["runs"] if r["kind"] == kind and r["share"] == max(SHARES[kind])]
    return min(longest, key=lambda r: r["val"])["lr"]


def run():
    dataset = data.load("stdlib")
    for kind in sys.argv[2:] or RATES:
        for share in SHARES[kind]:
            for lr in RATES[kind] if share == max(SHARES[kind]) else [best_rate(load(), kind)]:
                results = load()
                if any((r["kind"], r["share"], r["lr"]) == (kind, share, lr) for r in results["runs"]):
                    continue
                val, active = train(kind, lr, int(TOKENS * share), dataset)
                results = load()
                results["runs"].append(
                    {"kind": kind, "share": share, "lr": lr, "tokens": int(TOKENS * share), "val": val,
                     "active": active, "bits_per_byte": val / math.log(2) / dataset.bytes_per_token}
                )
                save(results)
                print(results["runs"][-1], flush=True)


def measure():
    """Milliseconds of a whole step of each model."""
    dataset, steppers = data.load("stdlib"), {}
    for kind in RATES:
        model, balancer = build(kind, dataset)
        if kind == "zaya":
            model.compile_blocks()
        model.train()
        steppers[kind] = model, balancer, optim.build(model, "muon", 1e-3)
    results = load()
    results["ms"] = times(steppers, dataset)
    save(results)
    print(results["ms"])


def table():
    """Markdown: for each model its best run, and what share of the dense GPT's tokens and time it took."""
    results = load()
    gpt = min((r for r in results["runs"] if r["kind"] == "gpt"), key=lambda r: r["val"])
    gpt_time = gpt["tokens"] / BATCH * results["ms"]["gpt"]
    lines = [
        "| model | active parameters | learning rate | tokens | step | validation, bits a byte | tokens "
        "against GPT | time against GPT |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = {"zaya": "ZAYA1", "gpt": "dense GPT (as nanoGPT)", "modern": "dense, RMSNorm, RoPE, SwiGLU"}
    for kind in ("gpt", "modern", "zaya"):
        for share in SHARES[kind]:
            r = min(
                (r for r in results["runs"] if r["kind"] == kind and r["share"] == share),
                key=lambda r: r["val"],
            )
            spent = r["tokens"] / BATCH * results["ms"][kind]
            lines.append(
                f"| {names[kind]} | {r['active']:,} | {r['lr']:g} | {r['tokens'] / 1e6:.2f}M | "
                f"{results['ms'][kind]:.0f} ms | "
                f"{r['bits_per_byte']:.3f} | {r['tokens'] / gpt['tokens']:.2f} | {spent / gpt_time:.2f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    commands = {"run": run, "time": measure, "table": table}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    print(commands[sys.argv[1]]() or "")
