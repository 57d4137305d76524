"""Trainings killed by SIGKILL at random moments, most of them while a checkpoint is written, and resumed.

    python benchmarks/kills.py                  100 kills on one rank, 100 on two: some 15 minutes
    python benchmarks/kills.py --kills 20       fewer
    python benchmarks/kills.py table            the table in the README, from benchmarks/results/kills.json

A tiny run is started, killed, resumed with --resume auto, killed again, and so on; when it gets to its end a
new one begins. On two ranks one of them is killed, then the rest, as torchrun would. Three things are checked
and counted, and one that does not hold makes the script end with status 1:

  readable    every checkpoint that counts as complete is undamaged, byte by byte
  not lost    the newest one is at least the newest that was complete before the kill, and the resumed run
              goes on from it
  the same    a run that reaches its end has, bit for bit, the weights and the losses of the undisturbed run

Ranks are forked from this process, which has torch loaded, so that a start takes a fraction of a second. The
moment of a kill is drawn from three kinds: as a checkpoint is being written, at any time, and before the
first step. The tally counts what was really hit.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401     once here, not in every rank

import checkpoint  # noqa: E402
import train  # noqa: E402
from recipe import TrainConfig  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "kills.json"
STEPS = 40
SETTINGS = dict(preset="tiny", tokenizer="bytes", data=str(ROOT / "model.py"), tokens=STEPS * 256,
                batch_tokens=256, seq_len=32, micro_tokens=64, eval_every=0, eval_tokens=256, save_every=4,
                sample_every=0, log_every=1, device="cpu", compile="off", resume="auto")
HIT = ("while a checkpoint was written", "between two checkpoints", "before the first step")


def start(out, ranks):
    """Fork the ranks of one training; returns their process ids. What they print goes to a file beside the
    run."""
    port, pids = str(random.randint(20_000, 40_000)), []
    for rank in range(ranks):
        if pid := os.fork():
            pids.append(pid)
            continue
        status = 1
        try:
            handle = os.open(f"{out}.{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(handle, 1), os.dup2(handle, 2)
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank),
                              MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            train.train(TrainConfig(out=str(out), **SETTINGS))
            status = 0
        except BaseException as error:      # of a rank whose peer is dead: the parent kills it anyway
            print(repr(error), flush=True)
        finally:
            sys.stdout.flush()
            os._exit(status)
    return pids


def ended(pids):
    """Exit statuses of all, or None while one of them runs (and none has failed)."""
    states = [os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids]
    return None if any(state is None for state in states) else [state.si_status for state in states]


def kill(pids, chance):
    """One rank dies, the others a moment later."""
    first = chance.choice(pids)
    with contextlib.suppress(ProcessLookupError):
        os.kill(first, signal.SIGKILL)
    time.sleep(chance.uniform(0, 0.02) if len(pids) > 1 else 0)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def reap(pids):
    return [os.waitpid(pid, 0)[1] for pid in pids]


def folders(out):
    """(steps of complete checkpoints, whether one is being written) as a run's folder looks now."""
    complete, writing = [], False
    for path in (out / "checkpoints").glob("step_*"):
        if (path / checkpoint.MARKER).exists():
            complete.append(int(path.name[5:13]))
        else:
            writing = True
    return complete, writing


def starts(out):
    """Steps at which this run's processes started, by its events."""
    events = out / "events.jsonl"
    lines = events.read_text().splitlines() if events.exists() else []
    return [json.loads(line)["step"] for line in lines if '"start"' in line]


def wait_for(moment, out, pids, chance):
    """Until the moment of the kill has come, or the run has ended: "save" (a few ms into one of the next
    four), "any" (up to a second after the first step) or "start" (before). Returns the newest step that was
    seen complete."""
    before, newest, was_writing, saves = len(starts(out)), 0, False, chance.randint(1, 4)
    began, patience = time.monotonic(), chance.uniform(0, 1.0 if moment == "any" else 0.3)
    while ended(pids) is None:
        complete, writing = folders(out)
        newest = max([newest, *complete])
        under_way = len(starts(out)) > before       # until then what a killed save left may still lie there
        saves -= writing and under_way and not was_writing
        was_writing = writing and under_way
        if moment == "save" and saves == 0:
            time.sleep(chance.uniform(0, 0.01))
            break
        if moment == "any" and not under_way:
            began = time.monotonic()
        if moment != "save" and time.monotonic() - began > patience:
            break
        time.sleep(0.001)
    return max([newest, *folders(out)[0]])


def must(condition, what):
    if not condition:
        sys.exit(f"FAILED: {what}")


def one_kill(out, ranks, chance, tally):
    """Start or resume the run in `out` and kill it. Returns True if it reached its end before."""
    before, started = checkpoint.latest(out / "checkpoints", log=tally["damage"].append), len(starts(out))
    pids = start(out, ranks)
    complete = wait_for(chance.choices(("save", "any", "start"), (6, 3, 1))[0], out, pids, chance)
    if statuses := ended(pids):
        reap(pids)
        must(not any(statuses), f"a run that nobody killed ended with {statuses}, see {out}.0.txt")
        return True
    kill(pids, chance)
    reap(pids)
    new = starts(out)[started:]
    tally["hit"][HIT[2] if not new else HIT[0] if folders(out)[1] else HIT[1]] += 1
    newest = checkpoint.latest(out / "checkpoints", log=tally["damage"].append)
    step = int(newest.name[5:13]) if newest else 0
    resumed_from = int(before.name[5:13]) if before else 0
    tally["lost"] += step < max(complete, resumed_from) or bool(new) and new[0] != resumed_from
    return False


def losses(out):
    lines = (out / "log.csv").read_text().splitlines()
    rows = [line.split(",") for line in lines if not line.startswith("#")]
    return [(row[rows[0].index("step")], row[rows[0].index("train_loss")]) for row in rows]


def same(a, b):
    """Weights and the log's losses of two finished runs, bit for bit."""
    (_, x), (_, y) = checkpoint.load_weights(a), checkpoint.load_weights(b)
    equal = x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)
    return equal and losses(a) == losses(b)


def campaign(kills, ranks, seed, folder):
    """`kills` kills on runs of `ranks` ranks. Returns the row of the table."""
    chance, straight = random.Random(seed), folder / f"straight{ranks}"
    pids = start(straight, ranks)
    must(not any(reap(pids)), f"the undisturbed run failed, see {straight}.0.txt")
    tally = {"hit": Counter(), "damage": [], "lost": 0, "same": 0, "different": 0}
    done, out = 0, folder / "run0"
    while done < kills or starts(out):
        if done < kills:
            over = one_kill(out, ranks, chance, tally)
        else:
            over = not any(reap(start(out, ranks)))
            must(over, f"the last resume failed, see {out}.0.txt")
        done += not over
        if over:
            tally["same" if same(straight, out) else "different"] += 1
            shutil.rmtree(out)
            out = folder / f"run{tally['same'] + tally['different']}"
        print(f"\r{ranks} rank(s): {done} kills, {tally['same']} runs finished", end="", flush=True)
    shutil.rmtree(straight)
    print(*tally["damage"], sep="\n")
    return {"ranks": ranks, "kills": done, **tally, "damage": len(tally["damage"])}


def table():
    """Markdown from the last campaign's results."""
    lines = [f"| ranks | kills | {' | '.join(HIT)} | unreadable | lost | finished, bit-identical "
             "| different |",
             "|---|---|---|---|---|---|---|---|---|"]
    for row in json.loads(RESULTS.read_text()):
        hits = [row["hit"].get(kind, 0) for kind in HIT]
        cells = [row["ranks"], row["kills"], *hits, row["damage"], row["lost"], row["same"], row["different"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=("run", "table"), default="run")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.command == "table":
        return print(table())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = [campaign(args.kills, ranks, args.seed, Path(folder)) for ranks in args.ranks]
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print(table())
    return any(row["damage"] or row["lost"] or row["different"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
