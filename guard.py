"""The guard: what train.py asks about each step before its optimizers see it, and how a run tells of
itself.

All that decides is the same number on all ranks (the loss, averaged by one small all-reduce; the gradient
norm, which DDP has averaged; checksums of the weights, gathered), so all ranks decide alike and nobody
asks:

  (1)  bad step   loss or norm is not finite, or above  m + k max(1.4826 MAD, FLOOR m),  m the median and
                  MAD the median distance from it over the last WINDOW good steps; k = SPIKE, for the norm
                  twice that. Skipped: weights, optimizer and balancing biases stay as they are
  (2)  trouble    TROUBLE bad steps among RECENT: back to the newest whole checkpoint, past the data since
  (3)  damage     weights not finite, or not the same bits on all ranks: back, on the same data. Looked for
                  every CHECK_EVERY steps and before every save, so that a bad state is never saved over a
                  good one
  (4)  no way out MAX_ROLL_BACKS without getting past the place of the trouble: GaveUp, exit status 3

1.4826 MAD is the standard deviation for normal noise, and no single outlier moves it: median and MAD
against mean and deviation, Leys et al. 2013. Skipping past the data of a spike, after a restart from a
checkpoint before it: PaLM, arXiv 2204.02311, section 5.1. Their numbers are not ours: these were chosen on
small runs.

The memory of (1), (2) and (4) is plain numbers and lies in train.py's progress, hence in each checkpoint: a
resumed run judges exactly as the undisturbed one would. The counters of idle experts (Loads) start anew.

A run tells of itself by events.jsonl (`append`: a JSON line each: time, rank, what, evidence, class,
action) and, where a watcher asks for it, by heartbeats. aegis.py reads both; torch is imported in the two
functions that need it, because the watcher imports this file and must be there at once.

Left out: a level of loss that rises for good (new data) looks like trouble, and ends the run; a step that
is bad for one rank's hardware is skipped like one of bad data."""

import errno
import json
import math
import os
import statistics
import time
from collections import Counter
from pathlib import Path

WINDOW = 64             # good steps to compare loss and norm with: long for a median, short for a trend
LEAST = 20              # of them before spikes are judged; anew in each phase, and never during warm-up
SPIKE = 8               # robust standard deviations; a gradient norm's tail is heavy, so it gets twice that
FLOOR = 0.02            # of the median: an even loss, its MAD nothing, must not make every step a spike
TROUBLE, RECENT = 3, 10     # bad steps, among how many, are no accident any more
MAX_ROLL_BACKS = 2      # to no avail: a third would meet the same
CHECK_EVERY = 100       # steps between checksums; one is also taken before every save
IDLE, COLLAPSED = 200, 1000     # steps before an expert is called dead or a router collapsed; before acting
GAVE_UP = 3             # exit status; 2 is the user's mistake, as everywhere in this project


# -------------------------------------------------------------------------------- what a run tells of itself

def append(file, record):
    """One JSON line, in one write: lines of several processes do not mix. Starts anew after a torn line.
    Raises OSError where the disk takes only a part of it."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(handle).st_size
        torn = b"\n" if size and os.pread(handle, 1, size - 1) != b"\n" else b""
        line = torn + json.dumps(record).encode() + b"\n"
        if os.write(handle, line) < len(line):      # a full disk takes what fits, and says nothing
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
    finally:
        os.close(handle)


def read_events(run):
    """The records of a run's events.jsonl in order; torn lines are passed over."""
    file, events = Path(run) / "events.jsonl", []
    for line in file.read_text(errors="replace").splitlines() if file.exists() else ():
        try:
            events.append(json.loads(line))
        except ValueError:
            pass
    return events


class Heartbeat:
    """What a rank is at, written in place into a file of its own; nothing without a watcher around the run.

    beat("step", 7) says that step 7 begins, and that whatever came before has ended. mark() stops the clock
    of the rank's own work in a step: what follows may wait for the others, and all ranks would look as slow.
    """

    def __init__(self, rank):
        folder = os.environ.get("AEGIS_HEARTBEAT")
        self.file = folder and os.open(Path(folder) / str(rank), os.O_WRONLY | os.O_CREAT, 0o644)
        self.last, self.now, self.took = time.monotonic(), {"pid": os.getpid(), "what": "start"}, {}

    def beat(self, what, step=None):
        if self.file:
            now = time.monotonic()
            self.took[self.now["what"]] = round(now - self.last, 4)
            self.last = now
            self.now.update(what=what, step=step, time=now, took=self.took)
            os.pwrite(self.file, json.dumps(self.now).ljust(400).encode(), 0)

    def mark(self):
        self.took["own"] = round(time.monotonic() - self.last, 4)


# -------------------------------------------------------------------------------- one step

class GaveUp(RuntimeError):
    """Rolling back did not help. train.py ends with status 3, and no watcher starts it again."""


def new_memory():
    """What the guard knows of a run, plain numbers: train.py keeps it in its progress, so that a resumed run
    judges exactly as the undisturbed one would."""
    return {"loss": [], "norm": [], "bad": [], "roll_backs": 0, "furthest": 0}


def spike(values, value, deviations):
    """The limit that `value` exceeds against the earlier `values`, or None."""
    if len(values) < LEAST:
        return None
    middle = statistics.median(values)
    spread = max(1.4826 * statistics.median(abs(v - middle) for v in values), FLOOR * abs(middle))
    limit = middle + deviations * spread
    return limit if value > limit else None


def judge(memory, step, loss, norm, settled):
    """Why this step must not be taken, or None; remembers either. loss, norm: the same on all ranks. settled:
    the warm-up is over."""
    reason = None
    if not (math.isfinite(loss) and math.isfinite(norm)):
        reason = f"not finite: loss {loss}, gradient norm {norm}"
    elif settled:
        for name, value, deviations in (("loss", loss, SPIKE), ("norm", norm, 2 * SPIKE)):
            if reason is None and (limit := spike(memory[name], value, deviations)):
                reason = f"spike: {name} {value:.4g} is above {limit:.4g}"
    memory["bad"] = [s for s in memory["bad"] if s > step - RECENT] + [step] * (reason is not None)
    if reason is None:
        for name, value in (("loss", loss), ("norm", norm)):
            memory[name] = [*memory[name], value][-WINDOW:]
        if step >= memory["furthest"] + RECENT:
            memory["roll_backs"] = 0
    return reason


def share_mean(loss, norm, world):
    """Mean loss over the ranks, and the gradient norm, as floats: one small all-reduce, one wait for the
    GPU."""
    import torch
    if world > 1:
        torch.distributed.all_reduce(loss)
    loss, norm = torch.stack((loss, norm.to(loss.dtype))).tolist()
    return loss / world, norm


def damage(model, world):
    """What is wrong with the weights, as text the same on all ranks, or None. A flipped bit changes the sum
    of the bits read as integers; ranks that differ from most are named."""
    import torch
    tensors = [t.detach() for t in model.state_dict().values() if t.is_floating_point()]
    bits = {4: torch.int32, 2: torch.int16, 8: torch.int64}
    mine = torch.stack([sum(t.contiguous().view(bits[t.element_size()]).sum() for t in tensors),
                        sum((~t.isfinite()).sum() for t in tensors)])
    everyone = [mine]
    if world > 1:
        torch.distributed.all_gather(everyone := [torch.empty_like(mine) for _ in range(world)], mine)
    sums, bad = zip(*(pair.tolist() for pair in everyone))
    if any(bad):
        return f"weights not finite on rank {', '.join(str(r) for r, n in enumerate(bad) if n)}"
    usual, votes = Counter(sums).most_common(1)[0]
    if votes < world:
        odd = [str(r) for r, s in enumerate(sums) if s != usual] if votes > 1 else ["unknown"]
        return f"weights differ between ranks; odd one out: {', '.join(odd)}"
    return None


class Loads:
    """Counts, on the device, for how many steps each expert had no token, and each router sent nearly all to
    one class. Starts anew with the process, which at worst makes a warning late."""

    def __init__(self, experts):
        self.experts, self.idle_LE, self.collapsed_L, self.healthy_L, self.told = experts, 0, 0, False, set()

    def add(self, load_LC):
        top_L = load_LC.amax(1) / load_LC.sum(1).clamp(min=1)
        self.idle_LE = (self.idle_LE + 1) * (load_LC[:, :self.experts] == 0)
        self.collapsed_L = (self.collapsed_L + 1) * (top_L > 0.9)
        self.healthy_L = self.healthy_L | (top_L < 0.5)

    def look(self):
        """([(what, evidence), ...] not told before, why to roll back or None). Waits for the device, so not
        every step. A router that never spread its tokens is the configuration's doing, and only told."""
        if self.experts < 2 or isinstance(self.idle_LE, int):
            return [], None
        full = {b: n for b, n in enumerate(self.collapsed_L.tolist()) if n >= IDLE}
        dead = [(b, e) for b, row in enumerate(self.idle_LE.tolist()) for e, n in enumerate(row) if n >= IDLE]
        found = {("dead_expert", f"block {b}, expert {e}: {IDLE} steps or more")
                 for b, e in dead if b not in full}
        found |= {("collapsed_router", f"block {b}: {IDLE} steps or more") for b in full}
        new, self.told = sorted(found - self.told), found       # one that recovered will be told again
        lost = [b for b, n in full.items() if n >= COLLAPSED and self.healthy_L[b]]
        return new, f"router collapsed in block {lost[0]}, {COLLAPSED} steps" if lost else None


def demonstrate():
    """A made-up loss with three accidents."""
    import random
    memory, noise = new_memory(), random.Random(0)
    for step in range(60):
        loss, norm = 3 - 0.01 * step + noise.gauss(0, 0.02), 0.4 + noise.gauss(0, 0.05)
        loss, norm = {30: (math.nan, norm), 40: (loss + 2, norm), 50: (loss, 30.0)}.get(step, (loss, norm))
        if reason := judge(memory, step, loss, norm, settled=step > 3):
            print(f"step {step}: {reason}: skipped, {len(memory['bad'])} of the last {RECENT}")
    print(f"{len(memory['loss'])} good steps are remembered; none of the three is among them")


if __name__ == "__main__":
    demonstrate()
