"""Our model against transformers' ZAYA of the same shape, weights, batch and dtype, and the MoE against dense
products.

    python benchmarks/speed.py            all three comparisons; --rounds N for more repetitions

The results are kept in benchmarks/results/speed.json, and the README's table shows them.

Outputs are compared first, and a difference ends the script with status 1: a fast path that computes
something else is no fast path. Then the two sides take turns, so that a noisy machine is noisy for both, and
medians and their ratio are printed.

  step      forward, backward and AdamW of the laptop preset, float32
  decode    tokens a second at batch 1 with a cache, greedy
  moe       the MoE sublayer, forward and backward, against dense matrix products with the same floating-point
            operations, at the step's number of tokens and at four times as many
"""

import argparse
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402

from benchmarks.peers import transformers_twin  # noqa: E402
from model import ZAYA, ZAYAConfig  # noqa: E402
from sample import generate  # noqa: E402
from prepare import keep_freed_memory  # noqa: E402

B, T = 16, 128
RESULTS = Path(__file__).parent / "results" / "speed.json"
rows = []


def take_turns(sides, rounds):
    """Median seconds of each {name: function}, called in turns; three rounds of warm-up. A turn is one call
    to get the caches back from the other side, then one that is timed."""
    times = {name: [] for name in sides}
    for i in range(rounds + 3):
        for name, side in sides.items():
            side()
            start = time.perf_counter()
            side()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t[3:]) for name, t in times.items()}


def must_agree(what, ours, theirs, tolerance):
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    print(f"{what}: relative difference {error:.1e} (allowed {tolerance:.0e})")
    if not error <= tolerance:
        sys.exit(f"{what} differ: no speed is worth that")


def stepper(parameters, loss):
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step():
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step


def compare_step(ours, theirs, compiled, rounds):
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, ours.config.vocab_size, (B, T), generator=g) for _ in range(2))
    must_agree("logits", ours(x)[0], theirs(x).logits, 1e-4)
    loss = lambda: F.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())
    must_agree("loss", ours(x, y)[1], loss(), 1e-5)
    must_agree("compiled loss", compiled(x, y)[1], loss(), 1e-5)
    seconds = take_turns({"ours, compiled": stepper(compiled.parameters(), lambda: compiled(x, y)[1]),
                          "ours, eager": stepper(ours.parameters(), lambda: ours(x, y)[1]),
                          "transformers, grouped_mm": stepper(theirs.parameters(), loss)}, rounds)
    report(
        "step",
        {name: f"{s * 1e3:.0f} ms" for name, s in seconds.items()},
        seconds,
        "transformers, grouped_mm",
    )


def compare_decode(ours, theirs, rounds, new=64):
    prompt = torch.randint(1, ours.config.vocab_size, (1, 16), generator=torch.Generator().manual_seed(1))
    mine = lambda: generate(ours, prompt.tolist(), new, temperature=0)[0]
    others = lambda: theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
    )[0, 16:].tolist()
    if mine() != others():
        sys.exit("greedy tokens differ: no speed is worth that")
    seconds = take_turns({"ours": mine, "transformers": others}, rounds)
    report(
        "decode", {name: f"{new / s:.0f} tokens/s" for name, s in seconds.items()}, seconds, "transformers"
    )


def compare_moe(model, tokens, rounds):
    """The MoE sublayer, compiled as a training step has it, against the router's matrices and one expert's,
    on the same number of tokens."""
    c, moe = model.config, model.blocks[1].mlp
    D, R, F_ = c.hidden_size, c.router_hidden_size, c.expert_hidden_size
    x_1ND, up_1ND = torch.randn(1, tokens, D, requires_grad=True), torch.randn(1, tokens, D)
    r_NR, compiled = torch.randn(tokens, R), torch.compile(moe, dynamic=False)
    shapes = [(D, R), (R, R), (R, R), (R, c.num_classes), (D, 2 * F_), (F_, D)]
    pairs = [(torch.randn(tokens, i, requires_grad=True), torch.randn(i, o, requires_grad=True))
             for i, o in shapes]

    def sublayer():
        y_1ND = compiled(x_1ND, r_NR)[0]
        y_1ND.backward(up_1ND)
        return y_1ND

    def products():
        for a, w in pairs:
            y = a @ w
            y.backward(torch.ones_like(y))
    with torch.no_grad():
        p_NK, experts_NK, _ = moe.gate(x_1ND[0], r_NR)
        slow = torch.stack([p * (moe.experts.single(x, e) if e < c.num_experts else x)
                            for x, p, e in zip(x_1ND[0], p_NK[:, 0], experts_NK[:, 0].tolist())])
    must_agree("MoE, token by token", sublayer().detach()[0], slow, 1e-4)
    seconds = take_turns({"MoE sublayer": sublayer, "dense products": products}, rounds * 4)
    report(f"moe, {tokens:,} tokens", {name: f"{s * 1e3:.1f} ms" for name, s in seconds.items()}, seconds,
           "dense products")


def report(what, shown, seconds, base):
    for name in seconds:
        row = [what, name, shown[name], f"{seconds[name] / seconds[base]:.2f}"]
        print(f"{row[0]:19s} {row[1]:26s} {row[2]:>14s}   time against {base}: {row[3]}")
        rows.append(row)


def table():
    """Markdown from the last run's results."""
    results = json.loads(RESULTS.read_text())
    lines = [results["machine"], "", "| what | side | median | time against the peer |", "|---|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in results["rows"]])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    torch.set_flush_denormal(True)
    keep_freed_memory()
    config = ZAYAConfig.preset("laptop")
    torch.manual_seed(0)
    ours, compiled = ZAYA(config), ZAYA(config)
    compiled.load_state_dict(ours.state_dict())
    theirs = transformers_twin(ours, experts_implementation="grouped_mm")
    compiled.compile_blocks()
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())[1]
    machine = (f"{ours.num_parameters():,} parameters, {B} x {T} tokens, float32, {torch.get_num_threads()} "
               f"threads of {cpu}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(machine)
    compare_decode(ours.eval(), theirs.eval(), max(3, rounds // 4))
    compare_step(ours.train(), theirs.train(), compiled, rounds)     # last: it changes the weights
    for tokens in (B * T, 4 * B * T):
        compare_moe(compiled, tokens, rounds)
    RESULTS.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
