"""What a checkpoint must survive: kill -9, a full disk, a flipped bit, another number of ranks.

Child processes come from a fork server that has torch loaded, so that one costs milliseconds and not seconds.
"""

import json
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import checkpoint
import config
from checkpoint import Checkpointer, export, latest, load, load_weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "pytest"])


def make_state(seed=0, fill=True):
    """A toy training state with every kind of leaf, sizes pairwise different."""
    g = torch.Generator().manual_seed(seed)
    randn = lambda *size: torch.randn(*size, generator=g) if fill else torch.zeros(*size)
    return {"model": {"embed.weight": randn(11, 6), "blocks.0.gate.balancing_biases": randn(5),
                      "blocks.0.k.weight": randn(3, 4).bfloat16()},
            "optimizer": {"embed.weight": {"m": randn(11, 6), "step": torch.tensor(float(seed * fill))},
                          "empty": randn(0, 7), "transposed": randn(9, 2).t(),
                          "flags": torch.tensor([fill, False])},
            "sources": {"at": seed, "names": ["a", "b/c"], "rate": 0.1 + seed, "note": None, "on": fill},
            "step": seed}


def leaves(state, prefix=""):
    for key, value in state.items():
        yield from leaves(value, f"{prefix}{key}/") if isinstance(value, dict) else [(prefix + key, value)]


def assert_same(state, expected):
    state, expected = dict(leaves(state)), dict(leaves(expected))
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert state[name].dtype == value.dtype and torch.equal(state[name], value), f"{name} differs"
        else:
            assert (state[name], type(state[name])) == (value, type(value)), name


def save(folder, *steps, **options):
    saver = Checkpointer(folder, **options)
    for step in steps:
        saver.save(step, make_state(step), {"tokens": 64 * step})
        saver.wait()
    return saver


def start(target, *args):
    process = FORK.Process(target=target, args=args)
    process.start()
    return process


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


# ------------------------------------------------------------------------------------------ what comes back
def test_load_returns_every_leaf_bit_for_bit(tmp_path):
    save(tmp_path, 7)
    state = make_state(fill=False)
    embed = state["model"]["embed.weight"]
    meta = load(latest(tmp_path), state)
    assert_same(state, make_state(7))
    assert state["model"]["embed.weight"] is embed, "tensors must be filled in place"
    assert meta == {"step": 7, "tokens": 448}


def test_load_fills_parameters_that_train(tmp_path):
    torch.manual_seed(0)
    a, b = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    saver = Checkpointer(tmp_path)
    saver.save(1, {"model": dict(a.named_parameters())}, {})
    saver.wait()
    load(tmp_path, {"model": dict(b.named_parameters())})
    assert torch.equal(a.weight, b.weight) and torch.equal(a.bias, b.bias) and b.weight.requires_grad


def test_save_copies_before_it_returns(tmp_path):
    saver, state = Checkpointer(tmp_path), {"model": {"w": torch.zeros(700, 900)}, "seen": [1, 2]}
    for step in range(1, 6):  # the buffers of one save are used again by the next
        state["model"]["w"].fill_(step)
        state["seen"][0] = step
        saver.save(step, state, {})
        state["model"]["w"].fill_(-1.0)
        state["seen"][0] = -1
    saver.wait()
    load(latest(tmp_path), state)
    assert state["seen"] == [5, 2] and state["model"]["w"].unique().tolist() == [5.0]


def test_wrapped_names_are_stored_and_loaded_plain(tmp_path):
    saver, w, v = Checkpointer(tmp_path), torch.randn(3, 5), torch.randn(2)
    wrapped = {"module._orig_mod.blocks.0._orig_mod.w": w, "_orig_mod.module.v": v}
    saver.save(1, {"model": wrapped, "optimizer": {"module._orig_mod.v": v + 1}}, {})
    saver.wait()
    assert load_weights(tmp_path)[1].keys() == {"blocks.0.w", "v"}
    zeros = torch.zeros
    plain = {"model": {"blocks.0.w": zeros(3, 5), "v": zeros(2)}, "optimizer": {"v": zeros(2)}}
    load(tmp_path, plain)
    assert torch.equal(plain["model"]["blocks.0.w"], w) and torch.equal(plain["optimizer"]["v"], v + 1)
    again = {"model": {name: zeros(t.shape) for name, t in wrapped.items()}, "optimizer": {"v": zeros(2)}}
    load(tmp_path, again)
    assert torch.equal(again["model"]["_orig_mod.module.v"], v)


def test_leaf_that_is_not_plain_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="sources/thing cannot be saved"):
        Checkpointer(tmp_path).save(1, {"sources": {"thing": object()}}, {})
    with pytest.raises(ValueError, match="two entries of the state are called model/w"):
        Checkpointer(tmp_path).save(1, {"model": {"w": torch.ones(1), "module.w": torch.ones(1)}}, {})


# ------------------------------------------------------------------------------------------ what does not fit
def test_misfits_are_listed_with_names_and_both_shapes(tmp_path):
    save(tmp_path, 3)
    state = make_state(fill=False)
    state["model"]["embed.weight"] = torch.zeros(6, 11)
    state["model"]["blocks.0.k.weight"] = torch.zeros(3, 4)
    state["model"]["new"] = torch.zeros(1)
    del state["optimizer"]["empty"], state["step"]
    untouched = state["optimizer"]["transposed"]
    with pytest.raises(ValueError) as error:
        load(tmp_path, state)
    for text in ("model/embed.weight is (11, 6) torch.float32 in the checkpoint, (6, 11) torch.float32 here",
                 "model/blocks.0.k.weight is (3, 4) torch.bfloat16 in the checkpoint, (3, 4) torch.float32",
                 "model/new is missing in the checkpoint", "optimizer/empty is not expected here",
                 "step is not expected here"):
        assert text in str(error.value)
    assert "\n" not in str(error.value) and not untouched.any(), "nothing may be filled unless all fits"


def test_entries_of_a_rank_may_lack_or_be_left_over(tmp_path):
    saver = Checkpointer(tmp_path)
    saver.save(4, {"step": 4, "rank0": {"rng": torch.arange(5)}, "rank1": {"rng": torch.ones(3)}}, {})
    saver.wait()
    new = {"step": 0, "rank0": {"rng": torch.zeros(5).long()}, "rank2": {"rng": torch.full((2,), 9.0)}}
    load(tmp_path, new)
    assert new["step"] == 4 and new["rank0"]["rng"].tolist() == [0, 1, 2, 3, 4]
    assert new["rank2"]["rng"].tolist() == [9, 9]


def test_weights_only_file_is_plain_and_resuming_from_it_explains(tmp_path):
    save(tmp_path / "run/checkpoints", 5, 6)
    file = tmp_path / "w.pt"
    export(tmp_path / "run", file)
    content = torch.load(file, weights_only=True)
    assert content["meta"] == {"step": 6, "tokens": 384} and type(content["model"]) is dict
    assert_same(content["model"], make_state(6)["model"])
    with pytest.raises(ValueError, match="w.pt holds weights only.*fresh optimizer"):
        load(file, make_state())
    assert names(tmp_path) == ["run", "w.pt"]


def test_load_weights_takes_every_path_a_user_may_name(tmp_path):
    save(tmp_path / "run/checkpoints", 5, 6)
    export(tmp_path / "run", tmp_path / "w.pt")
    for path in ("run", "run/checkpoints", "run/checkpoints/step_00000006", "w.pt"):
        meta, weights = load_weights(tmp_path / path)
        assert meta["step"] == 6
        assert_same(weights, make_state(6)["model"])
    assert load_weights(tmp_path / "run/checkpoints/step_00000005")[0]["step"] == 5
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        load_weights(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds no undamaged checkpoint"):
        load_weights(tmp_path)
    (tmp_path / "bad.pt").write_bytes((tmp_path / "w.pt").read_bytes()[:300])
    (tmp_path / "text.pt").write_text("The quick brown fox.\n" * 40)
    for name in ("bad.pt", "text.pt"):
        with pytest.raises(ValueError, match=f"{name} is damaged or not made by"):
            load_weights(tmp_path / name)


# ------------------------------------------------------------------------------------------ which are kept
def test_newest_and_best_are_kept(tmp_path):
    saver = Checkpointer(tmp_path, keep=2)
    kept = []
    for step, best in ((1, False), (2, True), (3, False), (4, False), (5, True), (6, False), (7, False)):
        saver.save(step, make_state(step), {}, best=best)
        saver.wait()
        kept.append("".join(name[-1] for name in names(tmp_path)))
    assert kept == ["1", "12", "23", "234", "45", "56", "567"]
    with pytest.raises(ValueError, match="keep=0"):
        Checkpointer(tmp_path, keep=0)


def test_newest_is_the_one_written_last_not_the_highest_step(tmp_path):
    save(tmp_path, 8, 9)
    save(tmp_path, 5)  # a run that went back
    assert latest(tmp_path).name == "step_00000005" and names(tmp_path) == ["step_00000005", "step_00000009"]


def test_saving_a_step_again_replaces_it(tmp_path):
    saver, state = save(tmp_path, 4), make_state(40)
    saver.save(4, state, {})
    saver.wait()
    again = make_state(fill=False)
    load(tmp_path / "step_00000004", again)
    assert_same(again, state)
    assert names(tmp_path) == ["step_00000004"]


# ------------------------------------------------------------------------------------------ damage
@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "meta.json", "COMPLETE"])
@pytest.mark.parametrize("kind", ["flip", "truncate", "delete"])
def test_damage_is_noticed_and_the_one_before_is_taken(tmp_path, file, kind):
    save(tmp_path, 1, 2)
    victim = tmp_path / "step_00000002" / file
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 4
    victim.write_bytes(content if kind == "flip" else content[:-1])
    if kind == "delete":
        victim.unlink()
    lines = []
    assert latest(tmp_path, lines.append).name == "step_00000001"
    if (file, kind) != ("COMPLETE", "delete"):  # then it is no checkpoint at all
        assert len(lines) == 1 and "step_00000002" in lines[0] and file in lines[0] and "\n" not in lines[0]
    for use in (lambda path: load(path, make_state()), load_weights):
        with pytest.raises(ValueError, match=f"step_00000002 is damaged: .*{file}"):
            use(victim.parent)
    save(tmp_path, 3)
    assert latest(tmp_path, lines.append).name == "step_00000003"


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_index_that_wants_to_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path, 1)
    path = tmp_path / "step_00000001"
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    marker = checkpoint._marker(path)  # forge the checksums as well
    marker["files"][".metadata"] = checkpoint._stamp(path / ".metadata")
    text = json.dumps(marker)
    (path / "COMPLETE").write_text(text + "\n" + checkpoint.hashlib.sha256(text.encode()).hexdigest())
    with pytest.raises(ValueError, match="refused.*mkdir"):
        load_weights(path)
    assert not os.path.exists("evil")


# ------------------------------------------------------------------------------------------ failing saves
def full_disk(parent):
    """A folder with 1 MB of room: a tmpfs where we may mount one, else None."""
    folder = parent / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        return None
    return folder


def test_full_disk_leaves_the_checkpoint_before_and_says_so(tmp_path, monkeypatch, capfd):
    folder = full_disk(tmp_path)
    try:
        if folder is None:
            folder = tmp_path / "folder"
            monkeypatch.setattr(checkpoint.dcp.FileSystemWriter, "_write_data", no_space_for_two)
        saver = save(folder, 1)
        saver.save(2, {"model": {"w": torch.randn(700, 900)}}, {})
        with pytest.raises(OSError, match="saving step 2 to .* failed .*No space left") as error:
            saver.save(3, make_state(3), {})
        assert "\n" not in str(error.value) and capfd.readouterr().err == ""
        assert names(folder) == ["step_00000001"] and latest(folder).name == "step_00000001"
        saver.save(3, make_state(3), {})  # the failure has been told once; the room is free again
        saver.wait()
        assert latest(folder).name == "step_00000003"
    finally:
        if folder.name == "small":
            subprocess.run(["umount", "-l", str(folder)], check=True)


def no_space(*_):
    raise OSError(28, "No space left on device")


def no_space_for_two(writer, *args, original=checkpoint.dcp.FileSystemWriter._write_data):
    return no_space() if writer.marker["step"] == 2 else original(writer, *args)


def test_unwritable_folder_is_told_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    saver = Checkpointer(tmp_path / "file/checkpoints")
    saver.save(1, make_state(1), {})
    with pytest.raises(OSError, match="saving step 1 to .*file/checkpoints failed .*Not a directory"):
        saver.wait()
    saver.wait()


@pytest.mark.parametrize("name", ["_fsync", "_stamp", "_remove"])
def test_failure_at_any_stage_leaves_the_checkpoint_before(tmp_path, monkeypatch, name):
    saver = save(tmp_path, 1, 2)
    calls, original = [], getattr(checkpoint, name)

    def fail(*args):
        calls.append(args)
        if len(calls) == fail.at:
            raise OSError(5, "Input/output error")
        return original(*args)

    for fail.at in range(1, 12):
        calls.clear()
        monkeypatch.setattr(checkpoint, name, fail)
        try:
            saver.save(3, make_state(3), {})
            saver.wait()
        except OSError as error:
            assert "Input/output error" in str(error)
        monkeypatch.undo()
        state = make_state(fill=False)
        found = latest(tmp_path, log=pytest.fail)
        load(found, state)
        assert_same(state, make_state(int(found.name[-1])))
        if len(calls) < fail.at:
            break
    assert fail.at > 1 and found.name == "step_00000003"


# ------------------------------------------------------------------------------------------ kill -9
def save_forever(folder, log, first):
    torch.set_num_threads(1)
    saver = Checkpointer(folder)
    for step in range(first, first + 100_000):
        saver.save(step, make_state(step), {}, best=step % 5 == 0)
        saver.wait()
        with open(log, "a") as file:
            file.write(f"{step}\n")


def kill_at_random(folder, log, times, seed):
    """Kills a saving process `times` times; returns in how many cases something unfinished lay about."""
    dice, litter = random.Random(seed), 0
    for _ in range(times):
        before = int(log.read_text().split()[-1]) if log.exists() else 0
        process = start(save_forever, folder, log, before + 1)
        while not log.exists() or int((log.read_text().split() or [0])[-1]) <= before:
            time.sleep(0.005)
            assert process.is_alive()
        time.sleep(dice.uniform(0, 0.06))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        litter += any("." in name or not (folder / name / "COMPLETE").exists() for name in names(folder))
        told = int(log.read_text().split()[-1])
        found, state = latest(folder, log=pytest.fail), make_state(fill=False)
        step = load(found, state)["step"]
        assert step in (told, told + 1), f"step {told} was complete, {step} is what is left"
        assert_same(state, make_state(step))
        with open(log, "a") as file:
            file.write(f"{step}\n")
    Checkpointer(folder)
    assert all((folder / name / "COMPLETE").exists() and "." not in name for name in names(folder))
    return litter


def test_kill_9_at_random_moments_never_costs_a_completed_save(tmp_path):
    assert kill_at_random(tmp_path / "c", tmp_path / "log", times=15, seed=0) > 3, "no kill fell into a save"


@pytest.mark.slow
def test_kill_9_a_hundred_times(tmp_path):
    assert kill_at_random(tmp_path / "c", tmp_path / "log", times=100, seed=1) > 20


def test_ctrl_c_while_waiting_loses_nothing(tmp_path, monkeypatch):
    saver, stamp = save(tmp_path, 1), checkpoint._stamp
    main = threading.current_thread()
    monkeypatch.setattr(checkpoint, "_stamp", lambda file: (
        time.sleep(0 if threading.current_thread() is main else 0.3), stamp(file))[1])
    saver.save(2, make_state(2), {})
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        saver.wait()
    signal.signal(signal.SIGALRM, before)
    assert latest(tmp_path).name == "step_00000001"
    saver.wait()
    assert latest(tmp_path).name == "step_00000002"


class Killed(BaseException):
    pass


def test_every_call_of_the_system_may_be_the_last(tmp_path, monkeypatch):
    """Stops a save (of a step saved before: the hardest case) at each call that changes something."""
    write_text = Path.write_text

    def stop_at(number):
        count = [0]

        def wrap(original):
            def call(*args, **kwargs):
                count[0] += 1
                if count[0] == number and original is write_text:  # killed half-way through it
                    original(args[0], args[1][:len(args[1]) // 2])
                if count[0] >= number:  # a dead process does nothing more
                    raise Killed
                return original(*args, **kwargs)
            return call

        for owner, name in ((Path, "write_text"), (Path, "rename"), (Path, "unlink"), (Path, "mkdir"),
                            (os, "fsync"), (os, "unlink"), (os, "rmdir"), (checkpoint.shutil, "rmtree")):
            monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
        return count

    for number in range(1, 60):
        folder = tmp_path / str(number)
        saver, new = save(folder, 4, 5), make_state(50)
        saver.keep = 1  # so that something is pruned as well
        count = stop_at(number)
        saver.save(5, new, {})
        try:
            saver.wait()
        except (OSError, Killed):
            pass
        monkeypatch.undo()
        state = make_state(fill=False)
        for _ in range(2):  # before and after the next start cleans up
            assert not any(checkpoint._damage(path) for _, path in checkpoint._checkpoints(folder))
            load(latest(folder, log=pytest.fail), state)
            assert_same(state, new if state["step"] == 50 else make_state(5))
            Checkpointer(folder)
        assert set(names(folder)) <= {"step_00000004", "step_00000005"}
        if count[0] < number:
            break
    assert 10 < number < 59 and state["step"] == 50


# ------------------------------------------------------------------------------------------ several ranks
def zero1(rank, world, fill):
    """Weights everywhere, the momentum of every `world`-th parameter here, random state of this rank."""
    full = make_state(21 if fill else 0, fill)
    mine = dict(list(leaves(full["optimizer"]))[rank::world])
    return {**full, "optimizer": mine, f"rank{rank}": {"rng": torch.full((3,), rank + 1.0 if fill else 0.0)}}


def with_ranks(world, target, folder, codes=None):
    """Runs target(rank, world, folder) on `world` gloo ranks; they must exit with 0 (or `codes`) in 60 s."""
    store = folder.parent / f"store{time.monotonic_ns()}"
    processes = [start(join_and_run, target, rank, world, folder, store) for rank in range(world)]
    for process in processes:
        process.join(60)
        if process.exitcode is None:
            process.kill()
    assert [process.exitcode for process in processes] == (codes or [0] * world)


def join_and_run(target, rank, world, folder, store):
    torch.set_num_threads(1)
    # See train.train; `import torch._dynamo` would make torch local.
    from torch import _dynamo  # noqa: F401
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world,
                            timeout=timedelta(seconds=30))
    target(rank, world, folder)
    dist.destroy_process_group()


def rank_saves(rank, world, folder):
    saver = Checkpointer(folder)
    for step in (1, 2):
        saver.save(step, zero1(rank, world, True), {"step": step, "world": world})
        for _ in range(20):  # training goes on meanwhile
            x = torch.full((50,), rank + 1.0)
            dist.all_reduce(x)
            assert x.tolist() == [world * (world + 1) / 2] * 50
    saver.wait()


def rank_loads(rank, world, folder):
    state = zero1(rank, world, False)
    meta = load(latest(folder), state)
    expected = zero1(rank, world, True)
    if rank >= meta["world"]:
        expected[f"rank{rank}"]["rng"].zero_()
    assert_same(state, expected)


def rank_misfits(rank, world, folder):
    state = zero1(rank, world, False)
    if rank == 1:
        state["model"]["embed.weight"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"embed.weight is \(11, 6\) .* in the checkpoint, \(2, 2\) .* here"):
        load(folder, state)
    with pytest.raises(ValueError, match="optimizer/.* is not expected here"):
        load(folder, {**zero1(rank, world, False), "optimizer": {}})


def rank_saves_without_room(rank, world, folder):
    saver = Checkpointer(folder)
    if rank == 1:
        checkpoint.dcp.FileSystemWriter._write_data = no_space
    saver.save(9, zero1(rank, world, True), {})
    with pytest.raises(OSError, match=r"saving step 9 to .* failed \(rank 1: .*No space left"):
        saver.wait()


def rank_dies_in_a_save(rank, world, folder):
    saver = Checkpointer(folder)
    if rank == 1:
        checkpoint._stamp = lambda file: os.kill(os.getpid(), signal.SIGKILL)
    saver.save(9, zero1(rank, world, True), {})
    with pytest.raises(OSError, match="saving step 9 to .* failed"):
        saver.wait()
    os._exit(7)  # leaving the process group would wait for the dead


@pytest.mark.parametrize("saved, loaded", [(2, 1), (1, 2), (2, 2), (3, 2)])
def test_another_number_of_ranks_loads_bit_for_bit(tmp_path, saved, loaded):
    folder = tmp_path / "c"
    with_ranks(saved, rank_saves, folder)
    assert names(folder) == ["step_00000001", "step_00000002"]
    with_ranks(loaded, rank_loads, folder)


def test_ranks_share_the_writing_and_the_errors(tmp_path):
    folder = tmp_path / "c"
    with_ranks(2, rank_saves, folder)
    single = save(tmp_path / "one", 2) and tmp_path / "one/step_00000002/__0_0.distcp"
    for rank in range(2):
        size = (folder / f"step_00000002/__{rank}_0.distcp").stat().st_size
        assert 0.25 < size / single.stat().st_size < 0.8, "each rank must write its share, nothing twice"
    state = {**zero1(0, 1, False)}
    load(folder, state)  # without a process group
    assert_same(state, zero1(0, 1, True))
    with_ranks(2, rank_misfits, folder)
    with_ranks(2, rank_saves_without_room, folder)
    with_ranks(2, rank_dies_in_a_save, folder, codes=[7, -signal.SIGKILL])
    assert names(folder) == ["step_00000001", "step_00000002"]
    with_ranks(2, rank_loads, folder)


# ------------------------------------------------------------------------------------------ command line
def command(*args):
    file = Path(checkpoint.__file__)
    return subprocess.run([sys.executable, file, *map(str, args)], capture_output=True, text=True, timeout=60)


def test_command_line_lists_exports_and_fails_in_one_line(tmp_path, monkeypatch, capsys):
    save(tmp_path / "run/checkpoints", 1, 2)
    with open(tmp_path / "run/checkpoints/step_00000002/meta.json", "a") as file:
        file.write(" ")
    (tmp_path / "run/checkpoints/step_00000003.tmp").mkdir()
    lines = command(tmp_path / "run").stdout.splitlines()
    assert [("complete" in line, "DAMAGED: meta.json" in line, "unfinished" in line) for line in lines] == [
        (True, False, False), (False, True, False), (False, False, True)]

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["checkpoint.py", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            config.run(checkpoint.main)
        return end.value.code, capsys.readouterr().err
    code, error = run(tmp_path / "nowhere")
    assert code == 2 and "nowhere" in error and error.count("\n") == 1
    (tmp_path / "folder").mkdir()
    for file, reason in (("no/w.pt", "No such file"), ("folder", "Is a directory")):
        code, error = run(tmp_path / "run", "--export", tmp_path / file)
        assert code == 2 and error.count("\n") == 1 and reason in error, error
    assert names(tmp_path) == ["folder", "run"]
    code, error = run(tmp_path, "--foo")
    assert code == 2 and error.count("\n") == 1 and "--foo" in error
    code, error = run(tmp_path, "--export", tmp_path / "w.pt")
    assert code == 2 and "no undamaged checkpoint" in error and not (tmp_path / "w.pt").exists()
    assert run("--export", "w.pt")[0] == 2
    checkpoint.main([str(tmp_path / "run"), "--export", str(tmp_path / "w.pt")])
    assert torch.load(tmp_path / "w.pt", weights_only=True)["meta"]["step"] == 1
