"""Injects faults into small trainings under Aegis and counts what it made of them.

    python benchmarks/faults.py inject [N] [SEED]   N injections (100) in random order; it can be resumed
    python benchmarks/faults.py calm [N]            N undisturbed runs (20), each of its own seed: no alarm
    python benchmarks/faults.py overhead            what guard, heartbeat and watcher cost (laptop preset)
    python benchmarks/faults.py table               the tables of the README, from the results of the three

Each training is real: two ranks under torchrun, the tiny preset, three phases, on a small tmpfs; only its
steps are drawn out by a sleep, so that there is time to hit them. So are the faults: signals, damaged files,
a full disk, a poisoned gradient, a flipped bit in a weight, an address space that ends. GPU, network card and
kernel log are stand-ins: a program named amd-smi on PATH, a folder of sysfs files, a text file. A row for
each injection goes to benchmarks/results/faults.json. It passes if

  - what Aegis named, and its class, are exactly what the kind says, and nothing else was named meanwhile;
  - the run went on (or stopped, with the right exit status, where that is right), and later ended well;
  - a restart began at the newest whole checkpoint;
  - after faults that change no data, the final weights are those of an undisturbed run, bit for bit.

Needs Linux, and root for the tmpfs; without it the kind disk_full is left out, and says so.
"""

import json
import os
import random
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import checkpoint  # noqa: E402
import config  # noqa: E402
from aegis import HANG, HANG_STEPS  # noqa: E402
from guard import LEAST, read_events  # noqa: E402
from probes import process  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "faults.json"
STEPS, BATCH, PACE, SAVE = 200, 256, 0.02, 10      # PACE: seconds that every step sleeps
BETWEEN = 12                                        # injections a run at most
TRAIN = (f"--preset tiny --tokenizer bytes --tokens {STEPS * BATCH} --batch-tokens {BATCH} --seq-len 32 "
         f"--micro-tokens 128 --eval-every 50 --eval-tokens 512 --save-every {SAVE} --keep 4 "
         "--sample-every 0 --log-every 10 --device cpu --compile off").split()


# -------------------------------------------------------------------------------- inside the training

def worker(argv):
    """train.py with a sleep in each step, that obeys orders: a file ORDERS/RANK.json, {"do", "steps"}."""
    import torch

    import data
    import train
    orders, real, windows = Path(os.environ["FAULT_ORDERS"]), train.Run.gradients, data.windows
    order = {"do": None, "steps": 0}

    def gradients(run, step):
        file = orders / f"{run.rank}.json"
        if file.exists() and order["steps"] == 0:
            order.update(json.loads(file.read_text()))
            file.rename(file.with_suffix(".taken"))
        do = order["do"] if order["steps"] else None
        order["steps"] -= order["steps"] > 0
        time.sleep(PACE * (20 if do == "slow" else 1))
        weight = run.model.embed_tokens.weight
        hook = weight.register_hook(lambda g: g * float("nan")) if do == "nan" else None
        data.windows = noise if do == "corrupt" else windows
        if do == "flip":
            weight.data.view(torch.int32)[3, 5] ^= 1 << 20
        if do == "memory":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 24), resource.RLIM_INFINITY))
            torch.empty(1 << 28).fill_(0)
        try:
            return real(run, step)
        finally:
            if hook:
                hook.remove()

    def noise(tokens, indices, T, seed=0):
        x = torch.randint(0, 256, (len(indices), T + 1),
                          generator=torch.Generator().manual_seed(int(indices[0])))
        return x[:, :-1].contiguous(), x[:, 1:].contiguous()

    train.Run.gradients = gradients
    sys.argv = ["train.py", *argv]
    config.run(train.main)


# -------------------------------------------------------------------------------- a supervised run

class Run:
    """A training under Aegis with its stand-ins around it, in a folder of its own."""

    def __init__(self, base, name, extra=(), ranks=2, aegis_flags=()):
        self.base, self.out = base / name, base / name / "run"
        self.screen = Path(f"{base}-{name}.screen")         # not on the disk that will be full
        for folder in ("orders", "bin", "sys/class/infiniband/mlx5_0/ports/1/counters"):
            (self.base / folder).mkdir(parents=True)
        self.smi, self.kmsg = self.base / "ecc", self.base / "kmsg"
        self.nic = self.base / "sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error"
        self.nic.write_text("0\n"), self.kmsg.write_text(""), self.smi.write_text("0")
        tool = self.base / "bin" / "amd-smi"
        tool.write_text('#!/bin/sh\nread n < "$(dirname "$0")/../ecc"\necho "[{\\"gpu\\": 0, \\"ecc\\": '
                        '{\\"total_correctable_count\\": 3, \\"total_uncorrectable_count\\": $n}, '
                        '\\"temperature\\": {\\"hotspot\\": {\\"value\\": 45, \\"unit\\": \\"C\\"}}}]"\n')
        tool.chmod(0o755)
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", "FAULT_ORDERS": str(self.base / "orders"),
                    "PATH": f"{tool.parent}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(base / "cache")}
        program = [str(Path(__file__).resolve()), "worker", *TRAIN, "--data", str(words(base)),
                   "--resume", "auto", "--out", str(self.out), *extra]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                    f"--nproc-per-node={ranks}"]
        self.training = (launcher if ranks > 1 else [sys.executable]) + program
        self.watching = [sys.executable, str(ROOT / "aegis.py"), "run", "--probe-every", "0.5",
                         "--backoff", "0.2", "--sys-root", str(self.base / "sys"),
                         "--kernel-log", str(self.kmsg), *aegis_flags, "--", *self.training]

    def start(self):
        with open(self.screen, "ab") as screen:
            self.process = subprocess.Popen(self.watching, env=self.env, stdout=screen, stderr=screen,
                                            cwd=self.base)

    def events(self, since=0.0):
        return [e for e in read_events(self.out) if e["time"] >= since]

    def beats(self):
        """{rank: its heartbeat}"""
        found = {}
        for file in (self.out / "aegis" / "0.beats").glob("*"):
            try:
                found[int(file.name)] = json.loads(file.read_bytes())
            except ValueError:
                pass
        return found

    def step(self):
        """The step that all ranks are at, in the midst of training; None while they are not."""
        beats = self.beats()
        ready = len(beats) == 2 and all(b["what"] == "step" and process(b["pid"]) for b in beats.values())
        return min(b["step"] for b in beats.values()) if ready else None

    def saved(self):
        """Steps of the whole checkpoints, oldest first."""
        return [marker["step"] for marker, _ in checkpoint._checkpoints(self.out / "checkpoints") if marker]

    def order(self, do, steps, ranks=(0, 1)):
        """Gives an order and returns the time at which it was taken up."""
        files = [self.base / "orders" / f"{rank}.json" for rank in ranks]
        for file in files:
            file.with_suffix(".taken").unlink(missing_ok=True)
            file.with_suffix(".new").write_text(json.dumps({"do": do, "steps": steps}))
        for file in files:
            file.with_suffix(".new").rename(file)
        wait(lambda: all(file.with_suffix(".taken").exists() for file in files), 20)
        return time.time()

    def kill(self, ranks, number=signal.SIGKILL):
        pids = [beat["pid"] for rank, beat in self.beats().items() if rank in ranks]
        now = time.time()
        for pid in pids:
            os.kill(pid, number)
        return now


def words(base):
    """A text with structure: words of a small made-up language."""
    file, draw = base / "words.txt", random.Random(0)
    if not file.exists():
        language = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(60)]
        file.write_text(" ".join(draw.choices(language, k=6000)))
    return file


def wait(condition, limit):
    """The first true value of condition(), None if the limit (seconds) passes."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)


# -------------------------------------------------------------------------------- the kinds of faults
# Each injects into a running training and returns the time at which it did.

def kill_rank(run):
    return run.kill([random.randrange(2)])


def kill_all_ranks(run):
    return run.kill([0, 1])


def launcher(run):
    return json.loads((run.out / "aegis" / "0.json").read_text())["pid"]


def kill_torchrun(run):
    os.kill(launcher(run), signal.SIGKILL)
    return time.time()


def hang(run):
    return run.kill([random.randrange(2)], signal.SIGSTOP)


def nan_gradient(run):
    return run.order("nan", 1, [random.randrange(2)])


def corrupt_batch(run):
    return run.order("corrupt", 1)


def corrupt_stretch(run):
    return run.order("corrupt", 4)


def damage_newest(run, damage):
    """Damages the largest file of the newest checkpoint while the ranks stand still, then kills them."""
    run.kill([0, 1], signal.SIGSTOP)
    folder = checkpoint._checkpoints(run.out / "checkpoints")[-1][1]
    damage(max(folder.glob("*.distcp"), key=lambda f: f.stat().st_size))
    return run.kill([0, 1])


def truncate_checkpoint(run):
    return damage_newest(run, lambda file: os.truncate(file, file.stat().st_size - 100))


def flip_bit_in_checkpoint(run):
    def flip(file):
        content = bytearray(file.read_bytes())
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        file.write_bytes(content)
    return damage_newest(run, flip)


def flip_bit_in_weight(run):
    return run.order("flip", 1, [1])


def disk_full(run):
    with open(run.base / "ballast", "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass
    return time.time()


def slow_rank(run):
    return run.order("slow", 14, [random.randrange(2)])


def ecc_errors(run):
    run.smi.write_text(str(int(run.smi.read_text()) + 4))
    return time.time()


def nic_errors(run):
    run.nic.write_text(str(int(run.nic.read_text()) + 900) + "\n")
    return time.time()


def gpu_reset(run):
    with open(run.kmsg, "a") as file:
        file.write("6,4711,98765,-;amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!\n")
    return time.time()


def out_of_memory(run):
    return run.order("memory", 1, [random.randrange(2)])


def kill_aegis(run):
    run.process.kill()
    run.process.wait()
    now = time.time()
    run.start()
    return now


def kill_aegis_and_torchrun(run):
    run.process.kill()
    os.kill(launcher(run), signal.SIGKILL)
    run.process.wait()
    now = time.time()
    run.start()
    return now


# kind: (what Aegis must name, class), whether the training starts again, whether weights may differ after it.
KINDS = {
    kill_rank: ({"rank killed"}, "transient", True, False),
    kill_all_ranks: ({"all ranks killed"}, "transient", True, False),
    kill_torchrun: ({"launcher killed"}, "transient", True, False),
    hang: ({"hang"}, "transient", True, False),
    nan_gradient: ({"bad_step"}, "data", False, True),
    corrupt_batch: ({"bad_step"}, "data", False, True),
    corrupt_stretch: ({"bad_step", "roll_back"}, "data", False, True),
    truncate_checkpoint: ({"all ranks killed", "checkpoint truncated"}, "transient", True, False),
    flip_bit_in_checkpoint: ({"all ranks killed", "checkpoint damaged"}, "transient", True, False),
    flip_bit_in_weight: ({"roll_back"}, "data", False, False),
    disk_full: ({"disk full"}, "fatal", False, False),
    slow_rank: ({"straggler"}, "node", False, False),
    ecc_errors: ({"ecc errors"}, "node", False, False),
    nic_errors: ({"nic errors"}, "node", False, False),
    gpu_reset: ({"gpu reset"}, "node", False, False),
    out_of_memory: ({"out of memory"}, "transient", True, False),
    kill_aegis: ({"adopted"}, "transient", False, False),
    kill_aegis_and_torchrun: ({"orphans"}, "transient", True, False),
}
QUIET = {"launch", "save", "start", "phase", "recovered", "over", "done", "stopped"}      # no findings
TITLES = {"config_error": "configuration error at start"}


def names(events):
    """What was found, and its classes: {name: class}. A disk that fills may be announced first."""
    found = {e.get("fault", e["what"]): e["class"] for e in events if e["what"] not in QUIET}
    found.pop("disk nearly full", None)
    return found


def fits(kind, step):
    """Whether this is a moment for this kind: spikes need LEAST steps of the phase behind them and some
    ahead."""
    starts = (0, 110, 160, STEPS)
    begin, end = next((a, b) for a, b in zip(starts, starts[1:]) if a <= step < b)
    if kind in (corrupt_batch, corrupt_stretch):
        return begin + LEAST + 15 < step < end - 12
    return 25 < step < STEPS - 30


def inject(run, kind):
    """One injection into a run in the midst of training. Returns its row."""
    expected, kind_class, restarts, _ = KINDS[kind]
    saved, took = run.saved(), run.beats()[0]["took"]["step"]
    t0 = kind(run)
    row = {"kind": kind.__name__, "step_s": took, "at": round(t0, 3)}
    seen = lambda: expected <= set(names(run.events(t0 - 0.2))) and time.time()
    wait(seen, 90)
    if kind is disk_full:
        row["status"] = run.process.wait(60)
        told = run.screen.read_text(errors="replace")
        row["went_on"] = row["status"] == 1 and "free space on the run's disk" in told
        (run.base / "ballast").unlink()
    elif restarts:
        started = wait(lambda: [e for e in run.events(t0) if e["what"] == "start"], 90)
        allowed = saved[-2 if "checkpoint" in kind.__name__ else -1]
        row["went_on"] = bool(started) and started[0]["step"] >= allowed
        row["lost_steps"] = max(0, allowed - started[0]["step"]) if started else None
    else:
        row["went_on"] = wait(lambda: run.step() is not None, 60) is not None
    if kind in (slow_rank, kill_aegis):
        wait(lambda: False, 1.0)        # the slow steps end; an adopted run shows its events
    events = run.events(t0 - 0.2)
    found = names(events)
    first = [e for e in events if e.get("fault", e["what"]) in expected][:1]
    if kind is hang and (allowed := re.search(r"allowed ([\d.]+) s", json.dumps(events))):
        median = (float(allowed[1]) - HANG) / HANG_STEPS
        row["budget_s"] = round(5 * median + 1, 3)      # what a hang's detection may take
    if first and kind in (kill_rank, kill_all_ranks, kill_torchrun):
        row["noticed_s"] = round(first[0]["time"] - first[0]["silent"] - t0, 3)     # before it was known why
    row.update(named=sorted(found), classes=sorted(set(found.values())),
               detect_s=round(first[0]["time"] - t0, 3) if first else None,
               right=set(found) == expected and set(found.values()) == {kind_class})
    if kind is disk_full:
        run.start()
    return row


def bad_command(base, number):
    """A configuration error at start: its own short run. Returns its row."""
    run = Run(base, f"bad{number}",
              random.choice([["--lr=abc"], ["--seq-len", "33"], ["--data", "no/such/file"]]))
    t0 = time.time()
    run.start()
    status = run.process.wait(120)
    events = run.events()
    found, launches = names(events), sum(e["what"] == "launch" for e in events)
    shutil.rmtree(run.base)
    run.screen.unlink()
    return {"kind": "config_error", "named": sorted(found), "classes": sorted(set(found.values())),
            "status": status, "right": found == {"bad configuration": "fatal"},
            "went_on": status == 2 and launches == 1, "ended": True, "same": None, "detect_s": None,
            "at": round(t0, 3)}


def several(base, number, todo, reference):
    """One run that suffers some of `todo` (removed from it). Returns their rows."""
    run, rows = Run(base, f"run{number}"), []
    run.start()
    newest = -1
    while len(rows) < BETWEEN and run.process.poll() is None:
        step = run.step()
        if step is not None and step > STEPS - 30:
            break
        kind = next((k for k in todo if k != "config_error" and step is not None and fits(k, step)), None)
        if kind is None or len(run.saved()) < 2 or run.saved()[-1] <= newest:
            time.sleep(0.02)
            continue
        todo.remove(kind)
        rows.append(inject(run, kind))
        newest = run.saved()[-1]        # the next one only when this one has been got over
        print(json.dumps(rows[-1]), flush=True)
    try:
        status = run.process.wait(120)
    except subprocess.TimeoutExpired:
        status = None
    weights = checkpoint.load_weights(run.out)[1] if status == 0 else {}
    equal = weights.keys() == reference.keys() and all(weights[n].equal(reference[n]) for n in reference)
    finite = bool(weights) and all(w.isfinite().all() for w in weights.values() if w.is_floating_point())
    differs = any(KINDS[globals()[row["kind"]]][3] for row in rows)
    # no restart but those that were called for; a full disk and Aegis's own death begin one of their own
    starts = sum(KINDS[globals()[row["kind"]]][2] or row["kind"] == "disk_full" for row in rows)
    looped = sum(e["what"] == "launch" for e in run.events()) > 1 + starts
    for row in rows:
        row.update(ended=status == 0 and finite and not looped, same=None if differs else equal, run=number)
    if not all(passed(row) for row in rows):
        keep = Path(tempfile.gettempdir()) / f"faults-run{number}"
        shutil.copytree(run.base, keep, dirs_exist_ok=True)
        shutil.copy(run.screen, keep / "screen")
        print(f"a failure: look at {keep}")
    shutil.rmtree(run.base, ignore_errors=True)
    run.screen.unlink()
    return rows


def passed(row):
    return row["right"] and row["went_on"] and row["ended"] and row["same"] is not False


def load():
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {
        "injections": [], "calm": [], "overhead": {}}


def store(key, value):
    results = load() | {key: value}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


class Disk:
    """A small tmpfs, as a context; an ordinary folder where mounting is not allowed."""

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="faults"))
        command = ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(self.folder)]
        self.small = shutil.which("mount") and subprocess.run(command, capture_output=True).returncode == 0
        return self

    def __exit__(self, *error):
        if self.small:
            subprocess.run(["umount", "-l", str(self.folder)])
        shutil.rmtree(self.folder, ignore_errors=True)


def undisturbed(base):
    """Final weights of the same training without Aegis and without faults."""
    run = Run(base, "reference")
    subprocess.run(run.training, env=run.env, check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)
    return checkpoint.load_weights(run.out)[1]


def campaign(count=100, seed=1):
    rows, draw = load()["injections"], random.Random(int(seed))
    random.seed(int(seed) + len(rows))
    with Disk() as disk:
        kinds = ["config_error", *(k for k in KINDS if disk.small or k is not disk_full)]
        if not disk.small:
            print("no small disk: mounting a tmpfs is not allowed here, disk_full is left out")
        order = [kinds[i % len(kinds)] for i in range(int(count))]
        draw.shuffle(order)
        for row in rows:
            order.remove(row["kind"] if row["kind"] == "config_error" else globals()[row["kind"]])
        number, reference = len(rows), undisturbed(disk.folder)
        while order:
            number += 1
            if order[0] == "config_error":
                order.pop(0)
                rows.append(bad_command(disk.folder, number))
                print(json.dumps(rows[-1]), flush=True)
            else:
                rows += several(disk.folder, number, order, reference)
            store("injections", rows)
    return tally()


def calm(count=20):
    """Undisturbed runs, one rank and two by turns, each of its own seed: any finding is a false alarm."""
    rows = load()["calm"]
    with Disk() as disk:
        for seed in range(len(rows), int(count)):
            run = Run(disk.folder, f"calm{seed}", ["--seed", str(seed)], ranks=1 + seed % 2)
            run.start()
            status, events = run.process.wait(300), run.events()
            phases = sum(e["what"] == "phase" for e in events)
            rows.append({"seed": seed, "ranks": 1 + seed % 2, "status": status, "alarms": names(events),
                         "phases": phases, "launches": sum(e["what"] == "launch" for e in events)})
            print(json.dumps(rows[-1]), flush=True)
            store("calm", rows)
            shutil.rmtree(run.base)
            run.screen.unlink()


def overhead(steps=6):
    """What a step of the laptop preset takes, and what of it guard and heartbeat; and the watcher's processor
    time around it. The guard's calls are timed one by one in the same process, as medians: a difference of
    two whole trainings would drown in noise."""
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        timings, run = Path(folder) / "timings.json", Run(Path(folder), "laptop", ranks=1)
        program = [sys.executable, str(Path(__file__).resolve()), "timed", str(timings),
                   "--tokens", str(steps * 4096), "--resume", "auto", "--out", str(run.out),
                   "--eval-every", "0", "--sample-every", "0", "--save-every", "0", "--compile", "off",
                   "--eval-tokens", "256"]
        run.watching = [*run.watching[:run.watching.index("--probe-every")], "--", *program]
        del run.env["OMP_NUM_THREADS"], run.env["XDG_CACHE_HOME"]
        run.start()
        wait(lambda: run.beats(), 120)
        begun, used = time.monotonic(), processor_seconds(run.process.pid)
        wait(lambda: timings.exists() or run.process.poll() is not None, 600)
        share = (processor_seconds(run.process.pid) - used) / (time.monotonic() - begun) / os.cpu_count()
        status = run.process.wait(60)
        if status:
            raise RuntimeError(f"status {status}: {run.screen.read_text()[-2000:]}")
        store("overhead", json.loads(timings.read_text()) | {"watcher_share": share})
        run.screen.unlink()
    return table()


def processor_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed(file, *argv):
    """A short train.py that notes its steps; then times what guard and heartbeat do in each, on its own
    model."""
    import torch

    import guard
    import train
    steps, seen, gradients = [], [], train.Run.gradients

    def noted(run, step):
        steps.append(time.perf_counter())
        seen[:] = [run]
        return gradients(run, step)
    train.Run.gradients = noted
    train.main(list(argv))
    run, memory = seen[0], guard.new_memory()
    load = torch.ones(run.cfg.model.num_blocks, run.cfg.model.num_classes, dtype=torch.int64)
    for step in range(guard.WINDOW):
        guard.judge(memory, step, 2.0 + step % 7 / 100, 0.4 + step % 5 / 100, True)

    def median_ms(call, times=51):
        taken = []
        for _ in range(times):
            begun = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - begun))
        return statistics.median(taken)

    loss, norm = torch.tensor(2.0), torch.tensor(0.4)
    step = {"judge": median_ms(lambda: guard.judge(memory, 100, *guard.share_mean(loss, norm, 1), True)),
            "loads": median_ms(lambda: run.loads.add(load)),
            "beats": 2 * median_ms(lambda: run.heart.beat("step", 1)) + median_ms(run.heart.mark),
            "damage": median_ms(lambda: guard.damage(run.model, 1)) / guard.CHECK_EVERY}
    taken = 1e3 * statistics.median(b - a for a, b in zip(steps[1:], steps[2:]))
    Path(file).write_text(json.dumps({"step_ms": taken, "ms_a_step": step}))


def table():
    """Markdown: all three results."""
    results = load()
    calm, cost = results["calm"], results["overhead"]
    lines = [tally()] if results["injections"] else []
    if calm:
        alarms = sum(bool(row["alarms"]) or row["status"] != 0 for row in calm)
        lines += ["", f"{len(calm)} undisturbed runs of as many seeds, each through warm-up and "
                  f"three phases: {alarms} with a false alarm."]
    if cost:
        own = sum(cost["ms_a_step"].values())
        lines += ["", f"Of a step of {cost['step_ms']:.0f} ms (laptop preset, one process) guard and "
                  f"heartbeat took {own:.2f} ms ({own / cost['step_ms']:.2%}), and the watcher "
                  f"{cost['watcher_share']:.2%} of the processors."]
    return "\n".join(lines)


def tally():
    """Markdown: a row a kind of fault."""
    rows = load()["injections"]
    lines = ["| fault | injected | named, acted on and got over | Aegis calls it | class "
             "| median time to detect |", "|---|---|---|---|---|---|"]
    for kind in dict.fromkeys(["config_error", *(k.__name__ for k in KINDS)]):
        own = [row for row in rows if row["kind"] == kind]
        times = [row["detect_s"] for row in own if row["detect_s"] is not None]
        if own:
            wanted, of_class = (KINDS[globals()[kind]][:2] if kind != "config_error" else
                                ({"bad configuration"}, "fatal"))
            lines.append(f"| {kind.replace('_', ' ')} | {len(own)} | {sum(map(passed, own))} | "
                         f"{', '.join(sorted(w.replace('_', ' ') for w in wanted))} | {of_class} | "
                         + (f"{statistics.median(times):.2f} s |" if times else "n/a |"))
    dead = [(r["noticed_s"], r["detect_s"]) for r in rows if r.get("noticed_s") is not None]
    noticed, named = zip(*dead) if dead else ([0], [0])
    lines += [f"| all | {len(rows)} | {sum(map(passed, rows))} | | | |", "",
              f"Medians and longest: a dead process was noticed after {statistics.median(noticed):.2f} s "
              f"({max(noticed):.2f} s), and named once its launcher had said why, "
              f"{statistics.median(named):.2f} s ({max(named):.2f} s)."]
    if hangs := [r["detect_s"] / r["budget_s"] for r in rows if r.get("budget_s") and r["detect_s"]]:
        lines[-1] += (f" A hang took {statistics.median(hangs):.2f} ({max(hangs):.2f}) of the time allowed, "
                      "five median steps and a second.")
    same = [r["same"] for r in rows if r["same"] is not None]
    lines[-1] += (f" Weights were compared bit for bit after {len(same)} injections, "
                  f"and equal after {sum(same)}.")
    return "\n".join(lines)


if __name__ == "__main__":
    commands = {"inject": campaign, "calm": calm, "overhead": overhead, "table": table, "timed": timed,
                "worker": lambda *argv: worker(list(argv))}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    print(commands[sys.argv[1]](*sys.argv[2:]) or "")
