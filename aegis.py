"""Aegis: watches a training, names what befalls it, and repairs what can be repaired.

    python aegis.py run -- torchrun --nproc-per-node=8 train.py --resume auto --out runs/mine ...
    python aegis.py run -- python train.py --resume auto --out runs/mine
    python aegis.py report runs/mine                   goodput, faults, times; a picture of the time line
    python aegis.py                                    a demonstration: a stand-in for a training is killed

The loop's own guard (guard.py) skips bad steps and rolls back. This is the other half, around the run: one
process a node starts the command and reads heartbeats (a line that each rank writes in place, several times
a step), output, exit codes and the machine (probes.py). What it finds has a name and a class, and the class
decides:

    transient   end what is left of the group, start it again from the newest checkpoint, after a back-off
    data        the guard's: skip, roll back
    node        leave the run to the other nodes; without others: say so, and go on as long as it goes
    fatal       stop and say what to do; also when MAX_RESTARTS starts in a row brought no new checkpoint

A group is broken when its launcher has ended badly, when a rank is gone, or when one is silent: for longer
than HANG_STEPS median steps and HANG seconds in a step (BUSY times that while one computes); what has no
history (start-up, compiling) gets SLOW seconds. Why it broke is asked in this order: what its output says,
exit codes, what the survivors say.

Restarting ranks is torchrun's trade, deciding is Aegis's: give torchrun no --max-restarts. On several
nodes, torchrun --nnodes=MIN:MAX, a rendezvous that outlives a node, and one Aegis each with its --node.
Between them are only the run's shared folder (aegis/NODE.json says how each does) and the rendezvous: a
group that breaks on one node breaks on all, and each watcher starts its part again. A node more than MAX
waits in the rendezvous: a spare.

Aegis may be killed: the training does not notice, and the next Aegis takes it over. Everything seen and
done is in RUN/events.jsonl, a JSON line each: time, rank, what, evidence, class, action.

ZAYA1 was trained under a service of this name and kind (arXiv 2511.17127); it is not published, and all
rules here are ours. Left out: finding a slow link between healthy nodes, asking a scheduler for nodes,
paging people. Linux only (/proc)."""

import fcntl
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, replace
from pathlib import Path

import config
from config import option
from guard import GAVE_UP, append, read_events
from probes import (LINES, REMARKS, SYMPTOMS, Fault, Tail, awake, family, memory_left, nic_errors, process,
                    read_smi, recognise, smi_command)

# Seconds, unless they say otherwise.
POLL = 0.1              # between two looks at heartbeats and processes
HANG_STEPS, HANG = 4.5, 0.85    # silence of so many median steps and seconds is a hang: with POLL, 5 and 1
BUSY = 10               # times as long, while a rank is not asleep (R or D in /proc)
SLOW = 600.0            # limit for what has no history: start-up, the first steps of a phase (they compile)
GRACE = 5.0             # that a launcher gets to report why a rank died
STRAGGLE, STRAGGLE_STEPS = 4.0, 12      # times the others' own time, median of so many steps
MAX_RESTARTS = 3        # in a row without a new checkpoint
MAX_BACKOFF = 300.0
RISE = 10               # errors between two probes: single ones are corrected and happen
MEMORY = 0.03           # share of memory left that is a warning
HOT = 105.0             # degrees at the hottest spot; an MI300X slows down there
EXCLUDED = 4            # exit status of a node that left the run to the others


def say(text):
    """To the screen, which may be a file on the disk that is full, or a terminal that is gone."""
    try:
        print(text, flush=True)
    except OSError:
        pass


@dataclass
class WatchConfig:
    """How to watch. The command to watch stands after --."""
    node: str = option("0", "name of this node; several nodes, one Aegis each, share the folder of the run")
    backoff: float = option(1.0, "seconds before the first restart; doubled while no checkpoint is added")
    probe_every: float = option(10.0, "seconds between looks at memory, disk, network cards and GPUs")
    sys_root: str = option("/sys", "where sysfs is")
    kernel_log: str = option("/dev/kmsg", "the kernel's log, followed from its present end")

    def __post_init__(self):
        if not re.fullmatch(r"[\w-]+", self.node) or min(self.backoff, self.probe_every) <= 0:
            raise ValueError("--node is a word; --backoff and --probe-every are above 0")


def run_folder(command):
    """The run that a training command works on. Raises ValueError where Aegis could not start it again."""
    words = " ".join(command).replace("=", " ").split()
    if not command:
        raise ValueError("what to watch? "
                         "python aegis.py run -- torchrun ... train.py --resume auto --out RUN")
    for flag, example in (("--out", "runs/mine"), ("--resume", "auto")):
        if flag not in words[:-1]:
            raise ValueError(f"the command needs {flag} {example}, or it could not be started again")
    return Path(words[len(words) - 1 - words[::-1].index("--out") + 1])


class Watcher:
    """One node's part of a run: starts, follows, judges, repairs. watch() returns the exit status."""

    def __init__(self, cfg, command):
        self.cfg, self.command, self.run = cfg, command, run_folder(command).resolve()
        self.folder = self.run / "aegis"
        self.beats_folder, self.output = self.folder / f"{cfg.node}.beats", self.folder / f"{cfg.node}.log"
        self.own_file = self.folder / f"{cfg.node}.json"
        self.beats_folder.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.folder / f"{cfg.node}.lock", "w")     # the kernel frees it when we die
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another Aegis watches {self.run} as node {cfg.node}") from None
        (self.folder / "reserve").write_bytes(bytes(1 << 16))   # given up for last words on a full disk
        self.kernel, self.smi, self.process, self.asked = Tail(cfg.kernel_log), None, None, False
        self.counters, self.restarts, self.next_probe, self.recovering, self.begun = (
            {}, 0, 0.0, None, time.time())
        self.history = defaultdict(lambda: deque(maxlen=STRAGGLE_STEPS))    # seconds, by what a rank was at
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(self, "asked", True))

    def event(self, what, **facts):
        """A line in events.jsonl and on the screen. On a full disk the reserve makes room for it."""
        record = {"time": round(time.time(), 3), "rank": facts.pop("rank", None), "node": self.cfg.node,
                  "what": what, **facts}
        say(f"aegis   {what}: " + ", ".join(f"{k} {v}" for k, v in facts.items() if v not in (None, "")))
        for _ in range(2):
            try:
                return append(self.run / "events.jsonl", record)
            except OSError:
                (self.folder / "reserve").unlink(missing_ok=True)

    # ----- start and end
    def save_state(self, state):
        own = [seconds for key, past in self.history.items() if key[0] == "own" for seconds in past]
        facts = {"node": self.cfg.node, "state": state, "time": time.time(), "pid": self.pid,
                 "born": self.born, "offset": self.tail.offset(),
                 "pace": statistics.median(own) if own else None}
        try:
            self.own_file.with_suffix(".tmp").write_text(json.dumps(facts))
            self.own_file.with_suffix(".tmp").replace(self.own_file)
        except OSError:
            pass            # a full disk: it will be said, and the old file still finds the processes

    def peers(self, state):
        """What the other nodes wrote that are in this state, and wrote lately (or, of an end, since we
        began)."""
        notes = [json.loads(f.read_text()) for f in self.folder.glob("*.json") if f != self.own_file]
        late = time.time() - 3 * self.cfg.probe_every - 5 if state == "running" else self.begun
        return [note for note in notes if note["state"] == state and note["time"] >= late]

    def begin(self):
        """Take over what an Aegis before us left: watch a group that lives, end one that lost its
        launcher."""
        old = json.loads(self.own_file.read_text()) if self.own_file.exists() else {}
        if old.get("state") == "excluded":
            raise ValueError(f"node {self.cfg.node} was excluded from {self.run}: once it is mended, remove "
                             f"{self.own_file}")
        if old and (found := process(old["pid"])) and found[1] == old["born"]:
            self.pid, self.born, self.offset = old["pid"], old["born"], old["offset"]
            self.fresh()
            self.event("adopted", evidence=f"process {self.pid}, started by an Aegis that is gone",
                       **{"class": "transient", "action": "watch it"})
        else:
            if orphans := self.end():
                self.event("orphans", evidence=f"{orphans} processes without a launcher",
                           **{"class": "transient", "action": "ended"})
            self.launch()

    def fresh(self):
        """Forget what is known of the ranks that were."""
        self.tail, self.said, self.told, self.beats = (
            Tail(self.output, self.offset), deque(maxlen=500), set(), {})
        self.launched, self.dying = time.monotonic(), None
        self.newest_at_start = self.newest()
        for key in [key for key in self.history if key[0] == "own"]:
            del self.history[key]

    def launch(self):
        for file in self.beats_folder.iterdir():
            file.unlink()
        env = {**os.environ, "AEGIS_HEARTBEAT": str(self.beats_folder), "PYTHONUNBUFFERED": "1",
               "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}   # else a new group meets a dead one's addresses
        with open(self.output, "ab") as output:     # a file, no pipe: the run must outlive us
            self.offset = output.tell()
            self.process = subprocess.Popen(self.command, env=env, start_new_session=True,
                                            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        self.pid = self.process.pid
        self.born = (process(self.pid) or ("", "gone"))[1]
        self.fresh()
        self.save_state("running")
        self.event("launch", evidence=" ".join(self.command), pid=self.pid)

    def end(self):
        """Kill every process of the group that is left, and wait until it is gone. Returns how many there
        were."""
        first = members = family(self.beats_folder)
        while members:
            for pid in members:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.02)
            members = family(self.beats_folder)
        if self.process:
            self.process.wait()
        return len(first)

    def newest(self):
        """The highest step of a whole checkpoint, -1 without one: the measure of progress."""
        return max((int(f.parent.name[5:13]) for f in self.run.glob("checkpoints/step_*/COMPLETE")),
                   default=-1)

    # ----- seeing
    def listen(self):
        """Output and kernel log since the last look: shown, kept for an autopsy, and searched for what does
        not end a run. Returns the faults that may be acted on while the run lives."""
        lines, kernel = self.tail.lines(), self.kernel.lines()
        for line in lines:
            say(line)
        ours = {str(beat["pid"]) for beat in self.beats.values()}
        self.said += lines + [k for k in kernel
                              if (m := re.search(r"Killed process (\d+)", k)) and m[1] in ours]
        remarks = [recognise([line], REMARKS) for line in lines]
        new = {fault.what: fault for fault in remarks if fault and fault.what not in self.told}
        self.told |= set(new)
        hardware = [recognise([line], LINES) for line in kernel]     # told each time: a second one matters
        new |= {fault.what: fault for fault in hardware if fault and fault.kind == "node"}
        return [replace(fault, broken=False) for fault in new.values()]

    def read_beats(self):
        for file in self.beats_folder.iterdir():
            try:
                beat, old = json.loads(file.read_bytes()), self.beats.get(int(file.name))
            except ValueError:              # not written yet, or just now
                continue
            rank = int(file.name)
            for kind, seconds in beat["took"].items():
                stepped = kind in ("step", "own") and old and beat["step"] != old["step"]
                if stepped or old is None or old["took"].get(kind) != seconds:      # even steps count each
                    self.history[(kind, rank) if kind == "own" else kind].append(seconds)
            if self.recovering and beat["what"] == "step":
                self.event("recovered", step=beat["step"],
                           seconds=round(time.monotonic() - self.recovering, 2))
                self.recovering = None
            self.beats[rank] = beat

    def limit(self, what):
        """Seconds of silence, by what the rank last said it was at, that make a hang."""
        past = self.history[what]
        if what == "step" and len(past) >= 5:
            return HANG_STEPS * statistics.median(past) + HANG
        return 10 + 5 * max(past) if what in ("evaluate", "save", "sample") and past else SLOW

    def hang(self, now):
        """Silence past the limit. To blame is who was stopped, or else who was the first to fall silent."""
        at = {rank: beat for rank, beat in self.beats.items() if beat["what"] != "end"}
        # The others wait for the end of one that failed.
        if failed := [rank for rank, beat in at.items() if beat["what"] == "failed"]:
            late = all(now - at[rank]["time"] > 2 * GRACE for rank in failed)
            return self.autopsy(None, failed) if late else None
        if not self.beats and now - self.launched > SLOW and not self.peers("running"):     # else a spare
            return Fault("no start", "transient", f"no rank in {SLOW:.0f} s", since=self.launched)
        states = {rank: (process(beat["pid"]) or "?")[0] for rank, beat in at.items()}
        # who still computes, or waits for a disk, may be slow only: on a crowded machine, or in a long loop
        late = [r for r, beat in at.items() if now - beat["time"] > self.limit(beat["what"])]
        patience = BUSY if late and "T" not in states.values() and any(awake(at[r]["pid"]) for r in at) else 1
        silent = [r for r in late if now - at[r]["time"] > patience * self.limit(at[r]["what"])]
        if silent:
            blame = min(silent, key=lambda rank: (states[rank] != "T", at[rank]["time"]))
            seen = ", ".join(f"rank {rank} at {beat['what']} {beat['step']} ({states[rank]}) for "
                             f"{now - beat['time']:.2f} s" for rank, beat in sorted(at.items()))
            allowed = patience * self.limit(at[blame]["what"])
            return Fault("hang", "transient", f"{seen}; allowed {allowed:.2f} s", rank=blame,
                         since=at[blame]["time"])

    def straggler(self):
        """A rank whose own work takes several times the others' (or the other nodes' usual), told once."""
        own = {rank: statistics.median(past) for rank in self.beats
               if len(past := self.history["own", rank]) >= STRAGGLE_STEPS}
        for rank, seconds in own.items():
            others = [s for r, s in own.items() if r != rank] or [
                p["pace"] for p in self.peers("running") if p["pace"]]
            usual = statistics.median(others) if others else seconds
            if seconds < usual * STRAGGLE / 2:
                self.told.discard(f"straggler {rank}")
            elif seconds > usual * STRAGGLE and f"straggler {rank}" not in self.told:
                self.told.add(f"straggler {rank}")
                return Fault("straggler", "node", f"{1e3 * seconds:.1f} ms of own work a step, the others "
                             f"{1e3 * usual:.1f}", rank=rank, broken=False)

    def machine(self, now):
        """Faults of memory, disk, network cards and GPUs since the last probe. The smi tool takes its time,
        so it is started at one probe and read when it has ended."""
        faults = []
        if self.smi and self.smi.poll() is not None:
            (soft, hard, heat), self.smi = read_smi(self.smi.communicate()[0]), None
            faults += [self.rise("ecc errors", "correctable", soft, RISE),
                       self.rise("ecc errors", "uncorrectable", hard, 1),
                       self.low("gpu hot", heat > HOT, f"{heat:.0f} C")]
        if now >= self.next_probe:
            self.next_probe = now + self.cfg.probe_every
            self.save_state("running")
            faults += [self.low("memory pressure", memory_left() < MEMORY, f"{memory_left():.1%} left"),
                       self.low("disk nearly full", *self.disk())]
            faults += [self.rise("nic errors", card, n, RISE)
                       for card, n in nic_errors(self.cfg.sys_root).items()]
            if self.smi:                    # hangs, as these tools do when a card does
                self.smi.kill()
            command = smi_command()
            self.smi = command and subprocess.Popen(command, stdout=subprocess.PIPE,
                                                    stderr=subprocess.DEVNULL, text=True)
        return [fault for fault in faults if fault]

    def disk(self):
        """Whether the next checkpoint may not fit, and how much is left."""
        folders = sorted(self.run.glob("checkpoints/step_*[0-9]"))
        need = 2 * max((sum(f.stat().st_size for f in folder.glob("*")) for folder in folders[-1:]),
                       default=0)
        free = shutil.disk_usage(self.run).free
        return free < need, f"{free / 1e6:.0f} MB left, a checkpoint and room for it are {need / 1e6:.0f} MB"

    def low(self, what, bad, evidence):
        """A warning, once until it is better."""
        if not bad:
            self.told.discard(what)
        elif what not in self.told:
            self.told.add(what)
            return Fault(what, "warning", evidence, broken=False)

    def rise(self, what, counter, count, least):
        """A counter that rose by `least` since it was last told."""
        before = self.counters.setdefault((what, counter), count)
        if count - before >= least:
            self.counters[what, counter] = count
            return Fault(what, "node", f"{counter}: {before} to {count}", "the node needs service",
                         broken=False)

    def look(self):
        """All that is wrong now: faults, the first broken one ends the list. None: the run is over, and
        well."""
        now = time.monotonic()
        faults = self.listen()
        self.read_beats()
        if self.process:
            over, code = self.process.poll() is not None, self.process.returncode
        else:
            over, code = (process(self.pid) or (0, 0))[1] != self.born, None
        gone = [r for r, beat in self.beats.items() if beat["what"] != "end" and not process(beat["pid"])]
        if (over or gone) and self.dying is None:
            self.dying = now
        if over or (self.dying and now - self.dying > GRACE):
            faults += self.listen()         # the last words
            if code == 0 or self.finished():
                return None
            return faults + [self.autopsy(code, gone)]
        if self.dying is None and (fault := self.hang(now)):
            return faults + [fault]
        return faults + [fault for fault in [self.straggler()] if fault] + self.machine(now)

    def finished(self):
        said = [e["what"] for e in read_events(self.run) if e["what"] in ("start", "done", "stopped")]
        return bool(said) and said[-1] != "start"

    def autopsy(self, code, gone):
        """Why the group ended: what it said, then exit codes, then what survivors said. code: the launcher's,
        None where it still lives or was no child of ours. gone: ranks whose process is not there any more."""
        codes = list({pid: int(c) for line in self.said
                      for c, pid in re.findall(r"exitcode\s*: (-?\d+) \(pid: (\d+)\)", line)}.values())
        launcher = self.pid not in [beat["pid"] for beat in self.beats.values()]
        codes += [code] * (code is not None and not launcher)
        free = shutil.disk_usage(self.run).free
        facts = dict(since=self.dying, rank=gone[0] if len(gone) == 1 else None)
        words = [line for line in self.said if re.match(r"(\S*\] ?:?)?\S+\.py: |.*GaveUp: ", line)]
        if fault := recognise(self.said, LINES):
            return replace(fault, **facts)
        if free < 1 << 20:                  # then its last words may not have fitted either
            return Fault("disk full", "fatal", f"{free} bytes free", LINES[0][3], **facts)
        for status, what, advice in ((2, "bad configuration", "mend the command"),
                                     (GAVE_UP, "gave up", "look at the data and at --lr")):
            if status in codes or code == status:
                return Fault(what, "fatal", (words or [f"exit status {status}"])[-1][:300], advice, **facts)
        orphans = [beat["pid"] for beat in self.beats.values() if process(beat["pid"])]
        # By itself a launcher never leaves ranks behind.
        if launcher and ((code or 0) < 0 or (orphans and not process(self.pid))):
            return Fault("launcher killed", "transient",
                         f"exit status {code}, {len(orphans)} ranks live on", **facts)
        codes = [c for c in codes if c != -signal.SIGTERM]      # what torchrun ends the others with
        if any(c < 0 for c in codes):
            killed = codes.count(-signal.SIGKILL)
            what = ("rank crashed" if not killed else
                    "rank killed" if killed < len(self.beats) or killed == 1 else "all ranks killed")
            return Fault(what, "transient", f"exit codes {codes} of {len(self.beats)} ranks", **facts)
        return (replace(fault, **facts) if (fault := recognise(self.said, SYMPTOMS)) else
                Fault("unexplained end", "transient", f"exit status {code}; {list(self.said)[-1:]}", **facts))

    # ----- acting
    def watch(self):
        """Until the run is over, or Aegis has to stop it. Returns the exit status."""
        self.begin()
        stopping = False
        while True:
            time.sleep(POLL)
            if self.asked and not stopping:         # the ranks save and leave, torchrun then ends by itself
                stopping = True
                for pid in [b["pid"] for b in self.beats.values() if process(b["pid"])] or [self.pid]:
                    os.kill(pid, signal.SIGTERM)
            faults = self.look()
            if faults is None or (stopping and any(fault.broken for fault in faults)):
                self.end()
                self.save_state("over")
                self.event("over", evidence="asked to stop" if stopping else "the command ended well")
                return 0
            for fault in faults:
                if (status := self.act(fault)) is not None:
                    return status

    def act(self, fault):
        """What the fault's class asks for. Returns an exit status, None to go on."""
        wait, stop = 0, False
        if fault.kind == "node" and self.others_suffice():
            action = "end this node's part, leave the run to the others"
        elif not fault.broken:
            action = "told"
        else:
            self.restarts = 1 if self.newest() > self.newest_at_start else self.restarts + 1
            wait = min(MAX_BACKOFF, self.cfg.backoff * 2 ** (self.restarts - 1))
            stop = fault.kind == "fatal" or self.restarts > MAX_RESTARTS or bool(self.peers("fatal"))
            action = "stop" if stop else f"end the group, restart {self.restarts} after {wait:g} s"
        now = time.monotonic()
        self.event("fault", fault=fault.what, rank=fault.rank, evidence=fault.evidence, action=action,
                   advice=fault.advice, silent=fault.since and round(now - fault.since, 3),
                   **{"class": fault.kind})
        if action == "told":
            return None
        self.end()
        if stop or not fault.broken or wait == 0:
            return self.leave(fault, stop)
        while time.monotonic() < now + wait and not self.asked:
            time.sleep(POLL)
        if self.asked:
            self.save_state("over")
            return 0
        self.launch()
        self.recovering = now

    def others_suffice(self):
        """Whether the other nodes that run are at least the MIN of torchrun's --nnodes=MIN:MAX."""
        least = re.search(r"--nnodes[= ](\d+):", " ".join(self.command))
        return least is not None and len(self.peers("running")) >= int(least[1])

    def leave(self, fault, stop):
        self.save_state("fatal" if stop else "excluded")
        if not stop:
            return EXCLUDED
        tried = (f"\n        {self.restarts - 1} restarts brought no new checkpoint"
                 if fault.kind != "fatal" else "")
        say(f"aegis   stopped: {fault.what}: {fault.evidence}{tried}\n"
            f"        to do: {fault.advice or 'see above'}; "
            f"the last whole checkpoint is of step {self.newest()}")
        return {"bad configuration": 2, "gave up": GAVE_UP}.get(fault.what, 1)


# -------------------------------------------------------------------------------- the report

FINDINGS = {"fault", "bad_step", "roll_back", "not_saved", "gave_up", "dead_expert", "collapsed_router",
            "adopted", "orphans"}
STATES = {"launch": "starting", "start": "training", "done": "over", "stopped": "over", "over": "over"}


def timeline(events):
    """[(state, from, to)] in seconds since the first event; states: starting, training, down, over."""
    spans, state, since, zero = [], "starting", 0.0, events[0]["time"]
    for e in events:
        ended = e["what"] == "fault" and not e["action"].startswith("told")
        new = "down" if ended else STATES.get(e["what"], state)
        if new != state:
            spans.append((state, since, e["time"] - zero))
            state, since = new, e["time"] - zero
    return [span for span in [*spans, (state, since, events[-1]["time"] - zero)] if span[2] > span[1]]


def steps_over_time(events):
    """(seconds, steps): where training stood, from every event that says so."""
    zero = events[0]["time"]
    points = [(e["time"] - zero, e["step"]) for e in events if e.get("step") is not None
              and e["what"] in ("start", "save", "phase", "roll_back", "done", "stopped")]
    return [t for t, _ in points], [n for _, n in points]


def found(events):
    """{(class, name): rows}, a row (seconds to detect or None, seconds to recover or None, action) a
    finding."""
    table, waiting = defaultdict(list), None
    for e in events:
        if e["what"] in FINDINGS:
            row = [e.get("silent"), None, re.sub(r"\d+", "N", e["action"])]
            table[e["class"], e.get("fault", e["what"])].append(row)
            waiting = row if e["what"] == "fault" and not e["action"].startswith("told") else waiting
        elif e["what"] == "recovered" and waiting:
            waiting[1], waiting = e["seconds"], None
    return table


def report(run):
    """A run's life as text. Raises ValueError where there is none."""
    run, events = Path(run), sorted(read_events(run), key=lambda e: e["time"])
    if not events:
        raise ValueError(f"{run} holds no events.jsonl: name the folder of a run, as in runs/001")
    total = max(events[-1]["time"] - events[0]["time"], 1e-9)
    share = Counter()
    for state, begin, end in timeline(events):
        share[state] += (end - begin) / total
    steps = (steps_over_time(events)[1] or [0])[-1]
    log = (run / "log.csv").read_text().splitlines() if (run / "log.csv").exists() else []
    rows = [row.split(",") for row in log if not row.startswith("#")]
    times = [float(row[rows[0].index("step_ms")]) for row in rows[1:]]
    usual = statistics.median(times) / 1e3 if times else 0.0
    lines = [f"run      {run}: step {steps}, {total:.0f} s from the first event to the last",
             "time     " + ", ".join(f"{state} {share[state]:.0%}"
                                     for state in ("training", "starting", "down")),
             f"goodput  {steps * usual / total:.0%}: {steps} useful steps of {1e3 * usual:.0f} ms"
             if usual else "goodput  n/a: no log.csv",
             f"{'class':10s}{'fault':28s}{'times':>6s}{'detected':>10s}{'recovered':>11s}  done"]
    middle = lambda values: (
        f"{statistics.median(v):.1f} s" if (v := [x for x in values if x is not None]) else "-")
    for (kind, what), rows in sorted(found(events).items()):
        detect, recover, actions = zip(*rows)
        lines.append(f"{kind:10s}{what.replace('_', ' '):28s}{len(rows):6d}{middle(detect):>10s}"
                     f"{middle(recover):>11s}  " + "; ".join(dict.fromkeys(actions)))
    return "\n".join(lines)


def draw(run):
    """The time line as RUN/aegis.png: steps against time, what the run was at, what was found. Needs
    matplotlib."""
    from plot import pyplot         # here: the watcher itself draws nothing
    plt = pyplot()
    events = sorted(read_events(run), key=lambda e: e["time"])
    figure, axis = plt.subplots(figsize=(11, 4.5), layout="constrained", facecolor="white")
    colors = {"training": "white", "starting": "tab:olive", "down": "tab:red", "over": "tab:gray"}
    named = set()
    for state, begin, end in timeline(events):
        axis.axvspan(begin, end, color=colors[state], alpha=0.25, lw=0,
                     label=None if state in named | {"training"} else state)
        named.add(state)
    seconds, steps = steps_over_time(events)
    axis.plot(seconds, steps, color="tab:blue", lw=1.2)
    marks = dict(transient="o", data="^", node="s", fatal="X", warning="v")
    for kind, mark in marks.items():
        mine = [e for e in events if e["what"] in FINDINGS and e["class"] == kind]
        at = [e["time"] - events[0]["time"] for e in mine]
        height = [max((n for t, n in zip(seconds, steps) if t <= x), default=0) for x in at]
        if mine:
            axis.scatter(at, height, marker=mark, zorder=3, s=45, edgecolor="black", lw=0.5, label=kind)
        previous = -1e9
        for x, y, e in zip(at, height, mine):
            # Else texts would lie on each other.
            if x - previous > 0.02 * (events[-1]["time"] - events[0]["time"]):
                axis.annotate(e.get("fault", e["what"]).replace("_", " "), (x, y), xytext=(3, 6), rotation=60,
                              textcoords="offset points", fontsize=7)
                previous = x
    axis.set(xlabel="seconds", ylabel="step", title=f"{Path(run).name}: steps over time, and what was found")
    axis.set_ylim(0, 1.35 * max([*steps, 1]))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="upper left", ncols=8)
    figure.savefig(Path(run) / "aegis.png", dpi=110)
    plt.close(figure)


# -------------------------------------------------------------------------------- demonstration, command line

STAND_IN = """
import os, signal, sys, time
sys.path.insert(0, {here!r})
from guard import Heartbeat, append
heart, events = Heartbeat(0), {out!r} + "/events.jsonl"
first = "start" not in open(events).read()
append(events, dict(time=time.time(), what="start", step=0))
for step in range(40):
    heart.beat("step", step)
    time.sleep(0.03)
    if first and step == 20:
        os.kill(os.getpid(), signal.SIGKILL)
append(events, dict(time=time.time(), what="done", step=40))
"""


def demonstrate():
    """The watcher around a stand-in for a training, which is killed once."""
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        program, out = Path(folder) / "stand_in.py", str(Path(folder) / "run")
        program.write_text(STAND_IN.format(here=str(Path(__file__).parent), out=out))
        command = [sys.executable, str(program), "--resume", "auto", "--out", out]
        Watcher(WatchConfig(backoff=0.1), command).watch()
        print(report(out))


def main(argv):
    if argv[:1] == ["run"]:
        own, command = ((argv[1:argv.index("--")], argv[argv.index("--") + 1:]) if "--" in argv else
                        (argv[1:], []))
        cfg, = config.parse("aegis.py run", WatchConfig.__doc__, own, WatchConfig)
        return Watcher(cfg, command).watch()
    if argv[:1] == ["report"] and len(argv) == 2:
        print(report(argv[1]))
        draw(argv[1])
        return print(f"picture  {Path(argv[1]) / 'aegis.png'}")
    if argv:
        raise ValueError("python aegis.py run [flags] -- COMMAND, python aegis.py report RUN, "
                         "or nothing at all")
    demonstrate()


if __name__ == "__main__":
    config.run(main)
