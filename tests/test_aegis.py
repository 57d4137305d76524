"""The watcher around stand-ins for a training: small programs that beat, die, hang and fail as they are
told."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import aegis
import checkpoint
import guard
import probes
from conftest import ROOT

PROGRAM = """
import json, os, signal, sys, time
sys.path.insert(0, {root!r})
from guard import Heartbeat, append
out, rank = {out!r}, int(os.environ.get("RANK", 0))
starts = sum(e == "start" for e in open(out + "/starts").read().split()) if os.path.exists(out + "/starts") \
    else 0
open(out + "/starts", "a").write("start ")
heart = Heartbeat(rank)
append(out + "/events.jsonl", dict(time=time.time(), rank=0, what="start", step=0))
def save(step):
    folder = out + "/checkpoints/step_%08d" % step
    os.makedirs(folder, exist_ok=True)
    open(folder + "/COMPLETE", "w").close()
for step in range({steps}):
    heart.beat("step", step)
    time.sleep(0.01)
    {body}
heart.beat("end")
append(out + "/events.jsonl", dict(time=time.time(), rank=0, what="done", step={steps}))
"""


@pytest.fixture(autouse=True)
def own_signals_and_short_waits(monkeypatch):
    monkeypatch.setattr(aegis, "SLOW", 30.0)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def watcher(tmp_path, body="pass", steps=30, command=None, **flags):
    out = tmp_path / "run"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(root=str(ROOT), out=str(out), body=body, steps=steps))
    (tmp_path / "kmsg").touch()
    cfg = aegis.WatchConfig(**{"backoff": 0.02, "sys_root": str(tmp_path / "sys"),
                               "kernel_log": str(tmp_path / "kmsg"), "probe_every": 0.1, **flags})
    return aegis.Watcher(cfg, [*(command or [sys.executable, str(program)]), "--resume", "auto",
                               "--out", str(out)])


def events(tmp_path, *what):
    return [e for e in guard.read_events(tmp_path / "run") if not what or e["what"] in what]


def faults(tmp_path):
    return [(e["fault"], e["class"]) for e in events(tmp_path, "fault")]


# -------------------------------------------------------------------------------- ends and restarts

def test_healthy_run_ends_with_no_finding(tmp_path):
    assert watcher(tmp_path).watch() == 0
    assert [e["what"] for e in events(tmp_path)] == ["launch", "start", "done", "over"]
    assert {"time", "rank", "what", "evidence"} <= set(events(tmp_path, "launch")[0])


def test_killed_rank_is_named_and_started_again(tmp_path):
    assert watcher(
        tmp_path, "if step == 20 and not starts: os.kill(os.getpid(), signal.SIGKILL)").watch() == 0
    assert faults(tmp_path) == [("rank killed", "transient")] and len(events(tmp_path, "start")) == 2
    fault, = events(tmp_path, "fault")
    assert fault["silent"] < 2 and fault["action"] == "end the group, restart 1 after 0.02 s"
    assert events(tmp_path, "recovered")[0]["seconds"] < 30


def test_restarts_are_bounded_and_the_advice_is_printed(tmp_path, capsys):
    assert watcher(tmp_path, "sys.exit('torch.OutOfMemoryError: HIP out of memory')").watch() == 1
    assert faults(tmp_path) == [("out of memory", "transient")] * (aegis.MAX_RESTARTS + 1)
    said = capsys.readouterr().out
    assert "brought no new checkpoint" in said and "--micro-tokens" in said
    waits = [float(re.search(r"after ([\d.]+) s", e["action"])[1]) for e in events(tmp_path, "fault")[:-1]]
    assert waits == [0.02, 0.04, 0.08], "each wait is twice the one before"


def test_a_new_checkpoint_gives_back_all_restarts(tmp_path):
    body = "save(starts); starts < 6 and step == 3 and os.kill(os.getpid(), signal.SIGSEGV)"
    assert watcher(tmp_path, body, steps=6).watch() == 0
    assert faults(tmp_path) == [("rank crashed", "transient")] * 6


@pytest.mark.parametrize("body, what, status", [
    ("print('train.py: --lr abc: a number', file=sys.stderr); sys.exit(2)", "bad configuration", 2),
    ("print('train.py: GaveUp: 3 bad steps', file=sys.stderr); sys.exit(3)", "gave up", guard.GAVE_UP),
    ("sys.exit('OSError: [Errno 28] No space left on device')", "disk full", 1)])
def test_what_no_restart_can_mend_stops_at_once(tmp_path, capsys, body, what, status):
    assert watcher(tmp_path, body).watch() == status
    assert faults(tmp_path) == [(what, "fatal")] and len(events(tmp_path, "launch")) == 1
    assert "to do:" in capsys.readouterr().out


@pytest.mark.parametrize("body", ["os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(1000)"])
def test_hang_is_seen_within_five_median_steps_and_a_second(tmp_path, body):
    assert watcher(tmp_path, f"if step == 150 and not starts: {body}", steps=200).watch() == 0
    fault, = events(tmp_path, "fault")
    allowed = float(re.search(r"allowed ([\d.]+) s", fault["evidence"])[1])
    median = (allowed - aegis.HANG) / aegis.HANG_STEPS
    # 0.5: a loaded machine.
    assert fault["fault"] == "hang" and 0 < median < 0.5 and fault["silent"] < 5 * median + 1 + 0.5
    assert events(tmp_path, "done")


def test_rank_that_computes_for_long_is_not_taken_for_a_hang(tmp_path):
    body = "end = time.time() + 2.5 * (step == 150)\n    while time.time() < end: pass"
    assert watcher(tmp_path, body, steps=200).watch() == 0 and faults(tmp_path) == []


def test_rank_whose_other_thread_computes_is_not_taken_for_a_hang(tmp_path):
    body = ("import threading; end = time.time() + 2.5 * (step == 150)\n"
            "    burn = lambda: [None for _ in iter(lambda: time.time() < end, False)]\n"
            "    thread = threading.Thread(target=burn); thread.start(); thread.join()")
    assert watcher(tmp_path, body, steps=200).watch() == 0 and faults(tmp_path) == []


def test_rank_that_ends_with_an_error_is_waited_for(tmp_path):
    body = "if step == 20 and not starts: heart.beat('failed'); time.sleep(2); sys.exit('MemoryError')"
    assert watcher(tmp_path, body).watch() == 0
    assert faults(tmp_path) == [("out of memory", "transient")]


def test_request_to_stop_is_passed_on_and_no_fault(tmp_path):
    body = "if step == 0: signal.signal(signal.SIGTERM, lambda *_: (heart.beat('end'), os._exit(0)))"
    watch = watcher(tmp_path, body, steps=10_000)
    threading.Timer(1.5, lambda: setattr(watch, "asked", True)).start()
    assert (watch.watch() == 0 and not faults(tmp_path)
            and "asked to stop" in events(tmp_path, "over")[0]["evidence"])


# -------------------------------------------------------------------------------- Aegis's own death

def test_second_aegis_on_a_run_is_refused(tmp_path):
    first = watcher(tmp_path)
    with pytest.raises(ValueError, match="another Aegis"):
        watcher(tmp_path)
    first.lock.close()


def test_run_that_outlived_its_aegis_is_adopted_and_not_started_twice(tmp_path):
    first = watcher(tmp_path, steps=300)
    first.begin()
    first.lock.close()                      # as its death would
    assert watcher(tmp_path, steps=300).watch() == 0
    assert len(events(tmp_path, "adopted")) == 1 and len(events(tmp_path, "start")) == 1
    assert (tmp_path / "run" / "starts").read_text() == "start "
    first.process.wait()


def test_orphans_are_ended_before_a_new_start(tmp_path):
    inner = [sys.executable, str(tmp_path / "program.py")]
    launcher = [sys.executable, "-c", f"import subprocess; subprocess.run({inner}, start_new_session=True)"]
    first = watcher(tmp_path, steps=40, command=launcher, body="not starts and time.sleep(100)")
    first.begin()
    while not events(tmp_path, "start"):
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGKILL)
    first.process.wait()
    first.lock.close()
    assert probes.family(first.beats_folder)
    assert watcher(tmp_path, steps=40, command=launcher, body="not starts and time.sleep(100)").watch() == 0
    assert ("1 processes" in events(tmp_path, "orphans")[0]["evidence"]
            and not probes.family(first.beats_folder))


# -------------------------------------------------------------------------------- the machine, other nodes

def test_rising_nic_counters_and_memory_are_told_once_and_kernel_lines_each_time(tmp_path, monkeypatch):
    counter = tmp_path / "sys/class/net/eth0/statistics/rx_errors"
    counter.parent.mkdir(parents=True)
    counter.write_text("5")
    monkeypatch.setattr(aegis, "memory_left", lambda: 0.01)
    body = (f"if step == 20: open({str(counter)!r}, 'w').write('500')\n"
            f"    if step in (20, 50): open({str(tmp_path / 'kmsg')!r}, 'a')"
            ".write('6,1,2,-;amdgpu 0000:c1:00.0: GPU reset begin!\\n')")
    assert watcher(tmp_path, body, steps=80).watch() == 0
    assert sorted(faults(tmp_path)) == [
        ("gpu reset", "node"), ("gpu reset", "node"), ("memory pressure", "warning"), ("nic errors", "node")]
    assert ({e["action"] for e in events(tmp_path, "fault")} == {"told"}
            and len(events(tmp_path, "start")) == 1)


def test_ecc_errors_come_from_the_tool_on_path(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "amd-smi"
    tool.write_text(f'#!/bin/sh\nread n < {tmp_path}/ecc\n'
                    'echo "[{\\"ecc\\": {\\"total_uncorrectable_count\\": $n}}]"\n')
    tool.chmod(0o755)
    (tmp_path / "ecc").write_text("2\n")
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    body = f"if step == 60: open({str(tmp_path / 'ecc')!r}, 'w').write('3\\n')"
    assert watcher(tmp_path, body, steps=200).watch() == 0
    assert [(e["fault"], e["evidence"]) for e in events(tmp_path, "fault")] == [
        ("ecc errors", "uncorrectable: 2 to 3")]


def note(watch, node, state, **more):
    (watch.folder / f"{node}.json").write_text(json.dumps(
        {"node": node, "state": state, "time": time.time(), "pid": 1, "born": "0", "offset": 0, "pace": None,
         **more}))


@pytest.mark.parametrize("nnodes, others, leaves", [
    ("2:4", ["b", "c"], True), ("2:4", ["b"], False), ("1:1", [], False)])
def test_sick_node_leaves_only_if_the_others_suffice_and_stays_away(tmp_path, nnodes, others, leaves):
    watch = watcher(tmp_path, command=["torchrun", f"--nnodes={nnodes}"], node="a")
    watch.pid, watch.born, watch.tail, watch.told = os.getpid(), "0", probes.Tail(tmp_path / "none", 0), set()
    watch.tail.offset = lambda: 0
    for node in others:
        note(watch, node, "running")
    status = watch.act(aegis.Fault("ecc errors", "node", "uncorrectable: 0 to 4", broken=False))
    assert status == (aegis.EXCLUDED if leaves else None)
    watch.lock.close()
    if leaves:
        with pytest.raises(ValueError, match="was excluded"):
            watcher(tmp_path, node="a").begin()


def test_old_notes_of_other_nodes_do_not_count(tmp_path):
    watch = watcher(tmp_path)
    note(watch, "b", "running", time=time.time() - 100)
    note(watch, "c", "fatal", time=time.time() - 100)
    assert watch.peers("running") == [] and watch.peers("fatal") == []
    note(watch, "c", "fatal")
    assert [peer["node"] for peer in watch.peers("fatal")] == ["c"]
    watch.lock.close()


def test_straggling_rank_is_named_and_its_recovery_forgets_it(tmp_path):
    watch = watcher(tmp_path)
    watch.told, watch.beats = set(), {0: {}, 1: {}, 2: {}}
    for rank in watch.beats:
        watch.history["own", rank].extend([0.02 + 0.001 * rank] * aegis.STRAGGLE_STEPS)
    assert watch.straggler() is None
    watch.history["own", 1].extend([0.2] * aegis.STRAGGLE_STEPS)
    fault = watch.straggler()
    assert (fault.what, fault.kind, fault.rank, fault.broken) == ("straggler", "node", 1, False)
    assert watch.straggler() is None
    watch.history["own", 1].extend([0.02] * aegis.STRAGGLE_STEPS)
    assert watch.straggler() is None and "straggler 1" not in watch.told
    watch.lock.close()


# -------------------------------------------------------------------------------- autopsy, command, report

def ranks(watch, *pids):
    watch.beats = {rank: {"pid": pid, "what": "step"} for rank, pid in enumerate(pids)}


@pytest.mark.parametrize("code, said, what", [
    (1, ["  exitcode  : -9 (pid: 11)  (SIGKILL)", "  exitcode  : -15 (pid: 12)  (SIGTERM)"], "rank killed"),
    (1, ["  exitcode  : -9 (pid: 11)", "failed (exitcode: -9) local_rank: 0 (pid: 11)",
         "  exitcode  : -9 (pid: 12)"], "all ranks killed"),
    (1, ["Connection closed by peer", "  exitcode  : -9 (pid: 11)"], "rank killed"),
    (1, ["Connection closed by peer [10.0.0.2]", "  exitcode  : 1 (pid: 11)"], "peer lost"),
    (1, ["  exitcode  : -11 (pid: 11)", "  exitcode  : -15 (pid: 12)"], "rank crashed"),
    (1, ["  exitcode  : 2 (pid: 11)", "Connection closed by peer", "  exitcode  : -15 (pid: 12)"],
     "bad configuration"),
    (-9, [], "launcher killed"),
    (1, ["HIP out of memory", "  exitcode  : 1 (pid: 11)"], "out of memory"),
    (1, ["  exitcode  : 1 (pid: 11)", "  exitcode  : -15 (pid: 12)"], "unexplained end")])
def test_autopsy_tells_causes_from_consequences(tmp_path, code, said, what):
    watch = watcher(tmp_path)
    watch.pid, watch.said, watch.dying = 10, said, time.monotonic()
    ranks(watch, 11, 12)
    assert watch.autopsy(code, [0]).what == what
    watch.lock.close()


def test_launcher_that_was_no_child_and_left_ranks_behind_was_killed(tmp_path):
    """After Aegis itself was started anew, there is no exit status to ask for."""
    watch = watcher(tmp_path)
    watch.pid, watch.said, watch.dying = 2**22 - 1, [], time.monotonic()        # no such process
    ranks(watch, os.getpid(), os.getpid())
    assert watch.autopsy(None, []).what == "launcher killed"
    ranks(watch, 2**22 - 2)
    assert watch.autopsy(None, [0]).what == "unexplained end"
    watch.lock.close()


@pytest.mark.parametrize("command, words", [
    ([], "what to watch"), (["train.py", "--resume", "auto"], "--out"),
    (["train.py", "--out=x"], "--resume")])
def test_command_that_could_not_be_started_again_is_refused(command, words):
    with pytest.raises(ValueError, match=words):
        aegis.run_folder(command)
    assert aegis.run_folder(["train.py", "--resume=auto", "--out=a", "--out", "b"]) == Path("b")


def test_report_counts_time_steps_and_faults(tmp_path):
    run, fault = tmp_path / "run", {"what": "fault", "class": "transient", "fault": "hang", "silent": 1.5}
    run.mkdir()
    for second, record in {
            0: {"what": "launch"}, 10: {"what": "start", "step": 0}, 50: {"what": "save", "step": 40},
            60: {**fault, "action": "end the group, restart 1 after 1 s"}, 62: {"what": "launch"},
            70: {"what": "start", "step": 40}, 71: {"what": "recovered", "seconds": 11.0, "step": 41},
            80: {"what": "bad_step", "step": 45, "class": "data", "action": "skip", "evidence": "nan"},
            100: {"what": "done", "step": 70}}.items():
        guard.append(run / "events.jsonl", {"time": 1000.0 + second, "rank": 0, **record})
    (run / "log.csv").write_text("# {}\nstep,step_ms\n10,1000\n20,1000\n30,1100\n")
    text = aegis.report(run)
    assert ("training 80%, starting 18%, down 2%" in text
            and "goodput  70%: 70 useful steps of 1000 ms" in text)
    assert re.search(r"transient +hang +1 +1.5 s +11.0 s +end the group, restart N after N s", text)
    assert re.search(r"data +bad step +1 +- +- +skip", text)
    pytest.importorskip("matplotlib")
    aegis.draw(run)
    assert (run / "aegis.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="no events"):
        aegis.report(tmp_path / "other")


# -------------------------------------------------------------------------------- real trainings

TRAIN = ("--preset tiny --tokenizer bytes --tokens 10240 --batch-tokens 256 --seq-len 32 --micro-tokens 128 "
         "--eval-every 20 --eval-tokens 256 --save-every 5 --sample-every 0 --device cpu --compile off "
         "--resume auto").split()


def training(tmp_path, out, body, *torchrun):
    """A command: train.py under torchrun; body runs in each step, with `run` and `step`."""
    (tmp_path / "words.txt").write_text("to be or not to be that is the question " * 300)
    program = tmp_path / f"{out}.py"
    program.write_text(f"import os, signal, sys, time\nsys.path.insert(0, {str(ROOT)!r})\nimport train\n"
                       "real = train.Run.gradients\ndef gradients(run, step):\n"
                       f"    {body}\n    return real(run, step)\n"
                       "train.Run.gradients = gradients\ntrain.main(sys.argv[1:])\n")
    return [sys.executable, "-m", "torch.distributed.run", *torchrun, str(program), *TRAIN, "--data",
            str(tmp_path / "words.txt"), "--out", str(tmp_path / out)]


@pytest.mark.slow
def test_killed_rank_of_two_goes_on_and_ends_bitwise_as_if_nothing_had_been(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    flag = str(tmp_path / "died")
    body = (f"if step == 22 and run.rank == 1 and not os.path.exists({flag!r}): open({flag!r}, 'w').close(); "
            "os.kill(os.getpid(), signal.SIGKILL)")
    two = ("--standalone", "--nproc-per-node=2")
    subprocess.run(training(tmp_path, "straight", "pass", *two), check=True, capture_output=True)
    assert aegis.Watcher(aegis.WatchConfig(backoff=0.1), training(tmp_path, "run", body, *two)).watch() == 0
    assert faults(tmp_path) == [("rank killed", "transient")]
    assert events(tmp_path, "start")[1]["step"] >= 15
    a, b = (checkpoint.load_weights(tmp_path / out)[1] for out in ("straight", "run"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_node_with_ecc_errors_leaves_and_the_other_finishes_alone(tmp_path):
    """Two watchers, two torchruns, one run: as two nodes with a shared folder."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "ecc").write_text("0\n")
    tool = tmp_path / "bin" / "amd-smi"
    tool.write_text(f'#!/bin/sh\nread n < {tmp_path}/ecc\n'
                    'echo "[{\\"ecc\\": {\\"total_uncorrectable_count\\": $n}}]"\n')
    tool.chmod(0o755)
    port = 29_500 + os.getpid() % 500
    watchers = {}
    for node in "ab":
        host = f"last_call_timeout=3,is_host={int(node == 'a')}"
        command = training(tmp_path, "run", "time.sleep(0.1)", "--nnodes=1:2", "--nproc-per-node=1",
                           "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=x",
                           "--rdzv-conf", host)
        path = f"{tool.parent}:{os.environ['PATH']}" if node == "b" else os.environ["PATH"]
        watchers[node] = subprocess.Popen(
            [sys.executable, str(ROOT / "aegis.py"), "run", "--node", node, "--probe-every", "0.5",
             "--backoff", "0.2", "--", *command],
            env={**os.environ, "PATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 100
    while not events(tmp_path, "save") and time.monotonic() < deadline:
        time.sleep(0.1)
    (tmp_path / "ecc").write_text("4\n")
    said = {node: process.communicate(timeout=150)[0] for node, process in watchers.items()}
    assert watchers["b"].returncode == aegis.EXCLUDED and watchers["a"].returncode == 0, said
    worlds = [e["world"] for e in events(tmp_path, "start")]
    assert worlds == [2, 1] and events(tmp_path, "start")[1]["step"] >= 5 and events(tmp_path, "done")


def test_full_disk_has_room_for_the_last_words(tmp_path):
    if os.getuid() or not shutil.which("mount"):
        pytest.skip("a small tmpfs needs root")
    (tmp_path / "run").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path / "run")]).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        watch = watcher(tmp_path)
        with open(tmp_path / "run" / "ballast", "wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        file = tmp_path / "run" / "events.jsonl"
        watch.event("fault", fault="disk full", **{"class": "fatal", "action": "stop"})
        assert faults(tmp_path) == [("disk full", "fatal")] and file.stat().st_size > 0
        watch.lock.close()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "run")])
