"""What a second rank gains, what the ranks send each other, and what a save in the background costs.

    python benchmarks/scaling.py ranks          the laptop preset on 1 rank of one thread, on 2, and in two
                                                runs at once that know nothing of each other, which is
                                                the most that two cores can do
    python benchmarks/scaling.py saves          one rank, a checkpoint every 40 steps
    python benchmarks/scaling.py table          both as Markdown, from benchmarks/results/scaling.json

Each run is train.py's own `train`, started by torchrun, with a clock behind every optimizer step. Bytes are
those of the loopback interface, so nothing else should use it meanwhile (in a network namespace of its own
nothing does: unshare -n sh -c "ip link set lo up; python benchmarks/scaling.py ranks").

Lower bounds for W ranks, bytes that each must send in a step: a ring all-reduce of the gradients 2 (W - 1) /
W of their size; gathering Muon's updates, each rank the ones it made, (W - 1) / W of theirs.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = Path(__file__).parent / "results" / "scaling.json"
STEPS, WARM_UP, SAVE_EVERY, SHADOW = 60, 20, 40, 15     # SHADOW: steps after a save that may feel it


def loopback_bytes():
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split()[9])         # sent
    return 0


def worker(out, steps, save_every):
    """One rank of a measured run: writes [(seconds, loopback bytes) after each step], rank 0 alone."""
    import train
    from recipe import RECIPES, TrainConfig
    marks, update = [], train.Run.update

    def marked(run, *args):
        result = update(run, *args)
        marks.append((time.perf_counter(), loopback_bytes()))
        return result
    train.Run.update = marked
    phase = RECIPES["laptop"][0]
    RECIPES["laptop"] = [phase]         # one phase: all steps alike
    train.train(TrainConfig(out=out, tokens=int(steps) * phase.batch_tokens, save_every=int(save_every),
                            eval_every=0, sample_every=0, compile="on"))
    if int(os.environ["RANK"]) == 0:
        Path(out, "marks.json").write_text(json.dumps(marks))


def launch(folder, ranks, threads, steps, save_every=0):
    """(seconds of each step, bytes of each step) of one run, warm-up left off."""
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
               __file__, "worker", str(out), str(steps), str(save_every)]
    settings = {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **settings})
    marks = json.loads((out / "marks.json").read_text())
    pairs = list(zip(marks, marks[1:]))[WARM_UP:]
    return [b[0] - a[0] for a, b in pairs], [b[1] - a[1] for a, b in pairs]


def sizes():
    """Bytes of all gradients and of the updates that Muon makes, in the laptop preset."""
    import torch

    import optim
    from model import ZAYA, ZAYAConfig
    model = ZAYA(ZAYAConfig.preset("laptop"))
    muon = sum(p.numel() for _, p in optim.groups(model)["muon"])
    return 4 * model.num_parameters(), optim.fast_dtype(torch.device("cpu")).itemsize * muon


def ranks(folder, rounds=2):
    one, two, apart, sent = [], [], [], []
    for _ in range(rounds):
        one += launch(folder, 1, 1, STEPS)[0]
        seconds, counts = launch(folder, 2, 1, STEPS)
        two, sent = two + seconds, sent + counts
        with ThreadPoolExecutor() as pool:
            for run in [pool.submit(launch, folder, 1, 1, STEPS) for _ in range(2)]:
                apart += run.result()[0]
    gradients, muon = sizes()
    one, two, apart = (1e3 * statistics.median(seconds) for seconds in (one, two, apart))
    return {"ms_one": one, "ms_two": two, "ms_apart": apart, "speedup": one / two, "most": 2 * one / apart,
            "sent_per_rank": statistics.median(sent) / 2, "all_reduce_bound": gradients,
            "gather_bound": muon / 2}


def saves(folder):
    times, _ = launch(folder, 1, os.cpu_count(), 6 * SAVE_EVERY, SAVE_EVERY)
    first = [i for i in range(len(times)) if (i + WARM_UP + 1) % SAVE_EVERY == 0]   # its step holds the save
    near = {i + j for i in first for j in range(SHADOW)}
    calm = statistics.median(t for i, t in enumerate(times) if i not in near)
    excess = lambda i: sum(t - calm for t in times[i:i + SHADOW])
    costs = [excess(i) for i in first if i + SHADOW <= len(times)]
    noise = [excess(i + SHADOW) for i in first if i + 2 * SHADOW <= len(times)]
    return {"step_ms": calm * 1e3, "save_ms": statistics.median(costs) * 1e3, "saves": len(costs),
            "noise_ms": statistics.median(noise) * 1e3, "share": statistics.median(costs) / 60}


def table():
    """Markdown from the last runs' results."""
    r = json.loads(RESULTS.read_text())
    a, s, mb = r["ranks"], r["saves"], 1e6
    rows = [("a step on 1 rank of 1 thread", f"{a['ms_one']:.0f} ms"),
            ("the same step in two runs at once that know nothing of each other",
             f"{a['ms_apart']:.0f} ms, together {a['most']:.2f} times the tokens a second"),
            ("a step on 2 ranks of 1 thread",
             f"{a['ms_two']:.0f} ms, {a['speedup']:.2f} times the tokens a second"),
            ("sent by a rank in a step", f"{a['sent_per_rank'] / mb:.1f} MB"),
            ("its lower bound: ring all-reduce of the gradients, gathering Muon's updates",
             f"{a['all_reduce_bound'] / mb:.1f} + {a['gather_bound'] / mb:.1f} MB"),
            (f"a save in the background: what its {SHADOW} steps take more than others "
             f"(median of {s['saves']})",
             f"{s['save_ms']:.0f} ms (between saves, the same way: {s['noise_ms']:.0f} ms)"),
            ("at one save a minute", f"{s['share']:.1%} of the time")]
    return "\n".join(["| what | measured |", "|---|---|"] + [f"| {' | '.join(row)} |" for row in rows])


def main(argv):
    if argv[:1] == ["worker"]:
        return worker(*argv[1:])
    if argv == ["table"]:
        return print(table())
    if argv not in (["ranks"], ["saves"]):
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        found = {"ranks": ranks, "saves": saves}[argv[0]](folder)
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**before, argv[0]: found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
