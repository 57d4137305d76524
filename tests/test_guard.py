"""The guard: its rules on made-up numbers, and in the loop of tiny runs that are poisoned on purpose."""

import json
import math
import os
import random
from pathlib import Path

import pytest
import torch

import checkpoint
import data
import guard
import train
from conftest import ROOT
from test_train import SMALL, everything, go, own_cache, text, torchrun, weights  # noqa: F401

NOISE = torch.Generator()


def feed(memory, losses, norms, start=0, settled=True):
    return [guard.judge(memory, start + i, *pair, settled) for i, pair in enumerate(zip(losses, norms))]


def healthy(steps, seed=0):
    """A falling loss with normal noise, and norms whose tail is heavy, as trainings show them."""
    draw = random.Random(seed)
    return ([2 + 4 * math.exp(-i / 50) + draw.gauss(0, 0.03) for i in range(steps)],
            [0.4 * math.exp(draw.gauss(0, 0.25)) for _ in range(steps)])


# -------------------------------------------------------------------------------- rules

@pytest.mark.parametrize("loss, norm", [(math.nan, 1.0), (2.0, math.inf), (-math.inf, 1.0)])
def test_what_is_not_finite_is_bad_from_the_first_step(loss, norm):
    memory = guard.new_memory()
    assert "not finite" in guard.judge(memory, 0, loss, norm, settled=False)
    assert memory["bad"] == [0] and memory["loss"] == [] and memory["norm"] == []


@pytest.mark.parametrize("loss, norm, word", [(3.5, 0.4, "loss"), (2.0, 9.0, "norm")])
def test_spike_is_bad_once_there_is_something_to_compare_with(loss, norm, word):
    memory, (losses, norms) = guard.new_memory(), healthy(300)
    assert guard.judge(memory, 0, loss, norm, True) is None
    assert feed(memory, losses, norms, 1) == [None] * 300
    assert f"spike: {word}" in guard.judge(memory, 301, loss, norm, True)
    assert guard.judge(memory, 302, loss, norm, settled=False) is None, "warm-up is not judged"
    assert len(memory["loss"]) == guard.WINDOW


@pytest.mark.parametrize("seed", range(20))
def test_healthy_numbers_raise_no_alarm(seed):
    assert feed(guard.new_memory(), *healthy(1500, seed)) == [None] * 1500


def test_loss_that_hardly_moves_is_no_reason_to_call_its_next_move_a_spike():
    assert feed(guard.new_memory(), [2.0] * 40 + [2.1], [0.4] * 40 + [0.5]) == [None] * 41


def test_one_outlier_does_not_widen_what_is_allowed():
    memory, (losses, norms) = guard.new_memory(), healthy(300)
    feed(memory, losses, norms)
    before = guard.spike(memory["loss"], 9.0, guard.SPIKE)
    assert (all(feed(memory, [9.0, math.nan, 9.0], [0.4] * 3, 300))
            and guard.spike(memory["loss"], 9.0, guard.SPIKE) == before)


def test_memory_survives_a_checkpoint_and_judges_alike():
    memory, (losses, norms) = guard.new_memory(), healthy(60)
    feed(memory, losses[:30], norms[:30])
    copy = json.loads(json.dumps(memory))
    assert copy == memory
    odd = [30.0 if i % 9 == 0 else loss for i, loss in enumerate(losses[30:])]
    verdicts = feed(memory, odd, norms[30:], 30)
    assert feed(copy, odd, norms[30:], 30) == verdicts and sum(map(bool, verdicts)) == 4


def test_dead_expert_is_told_once_and_again_after_it_recovered():
    loads, even = guard.Loads(3), torch.tensor([[5, 5, 5, 1], [5, 5, 5, 1]])
    idle = torch.tensor([[5, 0, 5, 6], [5, 5, 5, 1]])
    told = []
    for load, steps in ((idle, guard.IDLE - 1), (idle, 1), (idle, 50), (even, 1), (idle, guard.IDLE)):
        for _ in range(steps):
            loads.add(load)
        told.append([what for what, _ in loads.look()[0]])
    assert told == [[], ["dead_expert"], [], [], ["dead_expert"]]


def test_collapse_of_a_router_is_told_and_acted_on_only_where_it_was_healthy():
    full, even = torch.tensor([[16, 0, 0, 0]]), torch.tensor([[5, 5, 5, 1]])
    for first, act in ((even, True), (full, False)):
        loads = guard.Loads(3)
        for load, steps in ((first, 1), (full, guard.IDLE)):
            for _ in range(steps):
                loads.add(load)
        assert [what for what, _ in loads.look()[0]] == ["collapsed_router"] and loads.look() == ([], None)
        for _ in range(guard.COLLAPSED):
            loads.add(full)
        assert (loads.look()[1] is not None) == act


def test_damage_names_ranks_whose_weights_differ_or_are_not_finite(make, monkeypatch):
    model = make()
    mine = []

    def gather(out, value):
        mine[:] = [value.clone()]
        for rank, tensor in enumerate(out):
            tensor.copy_(value)
            tensor[0] += rank == 2          # as a flipped bit on rank 2 would
    monkeypatch.setattr(torch.distributed, "all_gather", gather)
    assert guard.damage(model, 1) is None and guard.damage(model, 4).endswith("odd one out: 2")
    before = mine[0][0].item()
    model.blocks[1].mlp.gate.balancing_biases.view(torch.int32)[0] ^= 1     # the smallest change there is
    guard.damage(model, 4)
    assert mine[0][0].item() != before, "the checksum must see the balancing biases"
    model.embed_tokens.weight.data[3, 2] = math.inf
    assert guard.damage(model, 1) == "weights not finite on rank 0"


def test_torn_line_costs_only_itself(tmp_path):
    file = tmp_path / "events.jsonl"
    guard.append(file, {"n": 1})
    with open(file, "a") as stream:
        stream.write('{"n": 2, "what": "to')
    guard.append(file, {"n": 3})
    assert [e["n"] for e in guard.read_events(tmp_path)] == [1, 3]


def test_line_that_a_full_disk_takes_in_part_is_an_error_and_can_be_written_again(tmp_path, monkeypatch):
    file, write = tmp_path / "events.jsonl", os.write
    with monkeypatch.context() as patch:
        patch.setattr(guard.os, "write", lambda handle, line: write(handle, line[:7]))
        with pytest.raises(OSError, match="No space left"):
            guard.append(file, {"n": 1})
    guard.append(file, {"n": 1})
    assert guard.read_events(tmp_path) == [{"n": 1}]


def test_heartbeat_says_what_each_thing_took_and_nothing_without_a_watcher(tmp_path, monkeypatch):
    monkeypatch.delenv("AEGIS_HEARTBEAT", raising=False)
    guard.Heartbeat(0).beat("step", 1)
    monkeypatch.setenv("AEGIS_HEARTBEAT", str(tmp_path))
    heart = guard.Heartbeat(3)
    heart.beat("step", 7)
    heart.mark()
    heart.beat("evaluate", 8)
    said = json.loads((tmp_path / "3").read_text())
    assert (said["what"], said["step"]) == ("evaluate", 8) and {"start", "step", "own"} == set(said["took"])
    assert [f.name for f in tmp_path.iterdir()] == ["3"]


# -------------------------------------------------------------------------------- in the loop

LONG = dict(tokens=60 * 256, eval_every=10, save_every=10, log_every=10)    # phases of 33, 15 and 12 steps


def poison(monkeypatch, kind, when, states=None):
    """Poisons the batches numbered `when` (shift included): "nan" in a gradient, or "noise" for data."""
    real, windows = train.Run.gradients, data.windows

    def gradients(run, step):
        bad = step + run.progress["shift"] in when
        if states is not None:
            states.append({name: owner[key].clone()
                           for name, (owner, key) in checkpoint._flatten(run.state()).items()
                           if isinstance(owner[key], torch.Tensor)})
        noise = lambda tokens, indices, T, seed=0: tuple(
            torch.randint(128, 256, (2, len(indices), T), generator=NOISE.manual_seed(step)))
        with pytest.MonkeyPatch.context() as patch:
            if bad and kind == "noise":
                patch.setattr(data, "windows", noise)
            loss = real(run, step)
        if bad and kind == "nan":
            run.model.embed_tokens.weight.grad[0, 0] = math.nan
        return loss
    monkeypatch.setattr(train.Run, "gradients", gradients)
    assert windows is data.windows


def found(out, *names):
    return [e for e in guard.read_events(out) if e["what"] in names]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nan", "noise"])
def test_bad_batch_leaves_weights_optimizer_biases_and_best_as_they_were(
        text, monkeypatch, kind):  # noqa: F811
    """A checkpoint falls on the bad step too; it is not written then, and the best stays what it
    was."""
    states = []
    poison(monkeypatch, kind, {29}, states)
    go(text, "run", **LONG)
    assert len(states[29]) > 100 and any("balancing" in n for n in states[29])
    changed = [n for n in states[29] if not torch.equal(states[29][n], states[30][n])]
    assert not changed, f"changed by a bad step: {changed[:5]}"
    assert any(not torch.equal(states[30][n], states[31][n]) for n in states[30]), (
        "the next step must train again")
    assert [e["step"] for e in found("run", "bad_step")] == [30] and not found("run", "roll_back")
    assert [e["step"] for e in found("run", "save")] == [10, 20, 40, 50, 60]
    assert all(t.isfinite().all() for t in weights("run").values() if t.is_floating_point())


@pytest.mark.slow
def test_trouble_goes_back_and_past_the_data_and_a_resumed_run_does_the_same(text, monkeypatch):  # noqa: F811
    poison(monkeypatch, "noise", {24, 25, 26})
    go(text, "straight", **LONG)
    back, = found("straight", "roll_back")
    assert back["step"] == 20 and "from step 27" in back["action"] and len(found("straight", "bad_step")) == 3
    go(text, "halves", stop_after=31, **LONG)
    assert found("halves", "stopped")[0]["step"] < 31, "the stop must fall behind the way back"
    go(text, "halves", resume="auto", **LONG)
    ours, theirs = (everything(checkpoint.latest(f"{out}/checkpoints")) for out in ("straight", "halves"))
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert json.loads(bytes(ours["progress/shift"].tolist())) == 7
    assert [r.split(",")[0] for r in Path("straight/log.csv").read_text().splitlines()[2:]] == [
        str(n) for n in range(10, 61, 10)], "rows that were undone are made again, not doubled"


@pytest.mark.slow
def test_roll_backs_that_do_not_help_end_the_run_with_a_status_of_its_own(
        text, monkeypatch, capsys):  # noqa: F811
    poison(monkeypatch, "nan", range(24, 1000))
    changes = {**SMALL, **LONG, "data": text, "out": "run"}
    with pytest.raises(SystemExit) as stop:
        train.main([f"--{k.replace('_', '-')}={v}" for k, v in changes.items()])
    assert stop.value.code == guard.GAVE_UP and "going back did not help" in capsys.readouterr().err
    assert len(found("run", "roll_back")) == guard.MAX_ROLL_BACKS and len(found("run", "gave_up")) == 1
    assert checkpoint.latest("run/checkpoints").name == "step_00000020"


@pytest.mark.slow
def test_damaged_weights_are_never_saved_and_training_goes_back(text, monkeypatch):  # noqa: F811
    go(text, "straight", **LONG)
    real, done = train.Run.update, []

    def update(run, step, loss):
        result = real(run, step, loss)
        if step == 38 and not done:
            done.append(True)
            run.model.blocks[0].mlp.experts.down_proj.data.view(-1)[5] = math.nan
        return result
    monkeypatch.setattr(train.Run, "update", update)
    go(text, "run", **LONG)
    a, b = weights("straight"), weights("run")
    assert all(torch.equal(a[n], b[n]) for n in a), "the data was not to blame: the same run must come out"
    assert found("run", "roll_back") and done


@pytest.mark.slow
def test_nan_on_one_rank_is_skipped_by_both_and_a_flipped_bit_is_found(text):  # noqa: F811
    program = Path("poisoned.py")
    program.write_text(f"""import sys, torch
sys.path.insert(0, {str(ROOT)!r})
import train
real, flipped = train.Run.gradients, []
def gradients(run, step):
    if step == 13 and run.rank == 1 and not flipped:
        flipped.append(True)
        run.model.embed_tokens.weight.data.view(torch.int32)[1, 1] ^= 1 << 9
    weight = run.model.embed_tokens.weight
    hook = weight.register_hook(lambda g: g * float("nan")) if step == 5 and run.rank == 1 else None
    loss = real(run, step)
    if hook:
        hook.remove()
    return loss
train.Run.gradients = gradients
train.main(sys.argv[1:])
""")
    torchrun(text, "run", program=str(program), tokens=20 * 256)
    assert [e["step"] for e in found("run", "bad_step")] == [6]
    back, = found("run", "roll_back")
    assert "differ between ranks" in back["evidence"] and back["step"] == 12
    assert found("run", "done")[0]["step"] == 20
