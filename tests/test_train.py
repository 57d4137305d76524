"""The loop: plan, resume, ranks, signals, refusals. Runs are tiny: 12 steps of a 2-block model on made-up
text."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import checkpoint
import config
import log
import prepare
import recipe
import train
from conftest import ROOT, assert_close
from model import ZAYAConfig
from recipe import Phase, TrainConfig, micro_steps, plan

SMALL = dict(
    preset="tiny",
    tokenizer="bytes",
    tokens=12 * 256,
    batch_tokens=256,
    seq_len=32,
    micro_tokens=64,
    eval_every=4,
    eval_tokens=256,
    save_every=4,
    sample_every=0,
    log_every=1,
    device="cpu",
    compile="off",
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text with structure: words of a small made-up language."""
    g = torch.Generator().manual_seed(0)
    words = [
        "".join(chr(97 + int(c)) for c in torch.randint(0, 26, (int(n),), generator=g))
        for n in torch.randint(2, 8, (60,), generator=g)
    ]
    file = tmp_path_factory.mktemp("data") / "words.txt"
    file.write_text(" ".join(words[int(i)] for i in torch.randint(0, 60, (6000,), generator=g)))
    return str(file)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def go(text, out, stop_after=None, **changes):
    """One run in this process; stop_after: as if a signal came after that many steps."""
    with pytest.MonkeyPatch.context() as patch:
        if stop_after is not None:
            asked = iter([False] * stop_after + [True])

            def agreed(self, device):
                self.asked = next(asked)
                return self.asked
            patch.setattr(train.Stop, "agreed", agreed)
        return train.train(TrainConfig(**{**SMALL, "data": text, "out": str(out), **changes}))


def flags(**fields):
    return [f"--{k.replace('_', '-')}" + f"={v}" * (v is not True) for k, v in fields.items()]


def torchrun(text, out, ranks=2, stop_after=None, program=str(ROOT / "train.py"), **changes):
    """One run by torchrun in subprocesses."""
    if stop_after is not None:
        program = f"{out}-stop.py"
        Path(program).write_text(f"""import sys, train
asked = iter([False] * {stop_after} + [True])
def agreed(self, device):
    self.asked = next(asked)
    return self.asked
train.Stop.agreed = agreed
train.main(sys.argv[1:])
""")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        program,
    ]
    done = subprocess.run(
        command + flags(**{**SMALL, "data": text, "out": out, **changes}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done


def rows(out):
    """log.csv without its comment, and without what the clock decides."""
    lines = [line for line in (Path(out) / "log.csv").read_text().splitlines() if not line.startswith("#")]
    return [
        {k: v for k, v in row.items() if k not in ("step_ms", "tokens_per_s")}
        for row in csv.DictReader(lines)
    ]


def weights(out):
    return checkpoint.load_weights(out)[1]


def same(a, b):
    a, b = weights(a), weights(b)
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert a.keys() == b.keys() and not different, f"different: {different[:5]}"


def everything(path):
    """Every tensor of a checkpoint, optimizer and balancing state too."""
    index = checkpoint._index(path)
    tensors = {name: checkpoint._empty(entry) for name, entry in index.items()}
    checkpoint._read(path, tensors)
    return tensors


# -------------------------------------------------------------------------------- one process

def test_loss_falls_and_a_second_run_is_bitwise_equal(text, tmp_path):
    first, second = go(text, "a"), go(text, "b")
    same("a", "b")
    assert (
        rows("a") == rows("b")
        and first["step"] == 12
        and first["tokens"] == 3072
        and first["val_loss"] == second["val_loss"]
    )
    assert float(rows("a")[-1]["train_loss"]) < float(rows("a")[0]["train_loss"]) - 0.5
    assert set(first) == {"step", "train_loss", "val_loss", "tokens", "out"}


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("stop", [5, 8])
def test_stopped_and_resumed_is_bitwise_the_undisturbed_run(text, optimizer, stop):
    go(text, "straight", optimizer=optimizer)
    result = go(text, "halves", stop_after=stop, optimizer=optimizer)
    assert result["step"] == stop and result["val_loss"] is None
    go(text, "halves", resume="auto", optimizer=optimizer)
    ours, theirs = (everything(checkpoint.latest(f"{out}/checkpoints")) for out in ("straight", "halves"))
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert ours.keys() == theirs.keys() and not different, f"different after resuming: {different[:5]}"
    assert any("exp_avg" in name for name in ours) and any("balancing_biases" in name for name in ours)
    assert rows("straight") == rows("halves"), "the log must read as if nothing had happened"


def test_resume_restores_every_bias_moment_and_counter(text):
    go(text, "run", stop_after=6)
    cfg = TrainConfig(**{**SMALL, "data": text, "out": "run", "resume": "auto"})
    run = train.Run(cfg, 0, 1, 0)
    saved = everything(checkpoint.latest("run/checkpoints"))
    live = {name: owner[key] for name, (owner, key) in checkpoint._flatten(run.state()).items()}
    for name, value in saved.items():
        if isinstance(live[name], torch.Tensor):
            assert torch.equal(live[name], value), f"{name} was not restored"
    assert run.progress["step"] == 6 and run.progress["tokens"] == 6 * 256
    assert all(float(live[name]) == 6 for name in live if name.endswith(".step") and name.startswith("adamw"))


def test_accumulated_micro_steps_give_the_mean_loss_and_the_same_step(text):
    for micro in (64, 256):
        go(text, f"micro{micro}", micro_tokens=micro, optimizer="adamw", tokens=3 * 256)
    few, many = rows("micro64"), rows("micro256")
    assert [abs(float(a["train_loss"]) - float(b["train_loss"])) < 1e-3 for a, b in zip(few, many)] == [
        True
    ] * 3
    assert few[0]["load"] == many[0]["load"] and few[0]["train_loss"] == many[0]["train_loss"]
    a, b = weights("micro64"), weights("micro256")
    assert all(torch.equal(a[name], b[name]) for name in a if "balancing" in name)


def test_phases_change_context_rope_and_rate(text, monkeypatch):
    phases = [Phase("short", 1024, 256, 16, 1e4, 0.02, 0.01, 0.1, {"text": 1.0}),
              Phase("long", 512, 256, 64, 1e6, 0.01, 0.001, 0.0, {"text": 1.0})]
    monkeypatch.setitem(recipe.RECIPES, "laptop", phases)
    result = go(text, "run", tokens=None, seq_len=None, batch_tokens=None)
    log = rows("run")
    assert result["step"] == 6 and [r["phase"] for r in log] == ["short"] * 4 + ["long"] * 2
    assert float(log[3]["lr"]) == pytest.approx(0.01) and float(log[5]["lr"]) == pytest.approx(0.001)
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    assert [(e["step"], e["seq_len"], e["rope_theta"]) for e in events if e["what"] == "phase"] == [
        (0, 16, 1e4),
        (4, 64, 1e6),
    ]
    config = checkpoint.load_weights("run")[0]["config"]["model"]
    assert config["rope_theta"] == 1e6 and config["max_seq_len"] == 64


def test_several_sources_are_mixed_as_the_phase_says(text, tmp_path, monkeypatch):
    (tmp_path / "digits.txt").write_text("0123456789 " * 3000)
    phases = [Phase("mixed", 1536, 256, 16, 1e4, 0.02, 0.01, 0.1, {"words": 3.0, "digits": 1.0})]
    monkeypatch.setitem(recipe.RECIPES, "laptop", phases)
    cfg = TrainConfig(**{**SMALL, "tokens": None, "seq_len": None, "batch_tokens": None, "out": "run",
                         "data": f"words={text},digits={tmp_path / 'digits.txt'}"})
    run = train.Run(cfg, 0, 1, 0)
    x, _ = train.data.windows(run.streams[0], range(1000), 16, 0)
    digits = int(((x >= ord("0")) & (x <= ord("9"))).any(1).sum())
    assert digits == 250, "a quarter of every thousand samples"
    with pytest.raises(ValueError, match="names no digits"):
        go(text, "other", data=f"words={text},letters={text}", tokens=None, seq_len=None, batch_tokens=None)


@pytest.mark.parametrize("changes, lengths, words", [
    (dict(), {128}, "on for context 128, "), (dict(compile="on"), {128, 256}, "on, "),
    (dict(tokens=1e5), set(), "off (the run is short)"), (dict(compile="off"), set(), "off"),
    (dict(tokens=1e8), {128, 256}, "on, ")])
def test_blocks_are_compiled_for_contexts_that_last(changes, lengths, words, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    cfg = TrainConfig(**changes)
    found, said = prepare.resolve_compile(cfg, plan(cfg))
    assert found == lengths and said.startswith(words)


def test_a_run_that_goes_on_compiles_what_the_undisturbed_one_did(text, monkeypatch):
    """Compiled blocks round differently: what is left of the plan must not decide."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(prepare, "EARNS", 9)
    go(text, "run", compile="auto", stop_after=8)
    run = train.Run(TrainConfig(**{**SMALL, "data": text, "out": "run", "compile": "auto", "resume": "auto"}),
                    0, 1, 0)
    assert run.progress["step"] == 8
    run.enter_phase(8, announce=True)
    assert run.compiled and run.model.compiled


def test_not_finite_gradient_changes_nothing(text, monkeypatch):
    real, states = train.Run.gradients, []

    def poisoned(run, step):
        if step in (3, 4):
            states.append(
                {
                    name: tensor.clone()
                    for name, (owner, key) in checkpoint._flatten(run.state()).items()
                    if isinstance(tensor := owner[key], torch.Tensor)
                }
            )
        loss = real(run, step)
        if step == 3:
            run.model.embed_tokens.weight.grad[0, 0] = float("nan")
        return loss
    monkeypatch.setattr(train.Run, "gradients", poisoned)
    go(text, "run", tokens=6 * 256)
    different = [name for name in states[0] if not torch.equal(states[0][name], states[1][name])]
    assert len(states[0]) > 100 and not different, f"changed by a bad step: {different[:5]}"
    assert [
        json.loads(e)["step"] for e in Path("run/events.jsonl").read_text().splitlines() if "bad_step" in e
    ] == [4]


def test_run_of_bad_steps_ends_with_advice(text, monkeypatch):
    real = train.Run.gradients

    def poisoned(run, step):
        loss = real(run, step)
        run.model.embed_tokens.weight.grad.fill_(float("inf"))
        return loss
    monkeypatch.setattr(train.Run, "gradients", poisoned)
    with pytest.raises(RuntimeError, match="lower --lr"):
        go(text, "run")


def test_weights_to_start_from(text):
    go(text, "first")
    checkpoint.export("first", "first.pt")
    go(text, "second", init="first.pt", tokens=256, lr=1e-9)
    a, b = weights("first"), weights("second")
    assert_close(
        b["embed_tokens.weight"], a["embed_tokens.weight"], 1e-5, "embedding after a step of no size"
    )
    with pytest.raises(ValueError, match=r"is \(32,\), the model wants \(40,\)"):
        go(text, "third", init="first.pt", model=ZAYAConfig.preset("tiny", hidden_size=40))
    with pytest.raises(ValueError, match="--init"):
        checkpoint.load("first.pt", {})


# -------------------------------------------------------------------------------- plan and counting

def test_published_recipe_has_the_published_numbers():
    phases = plan(TrainConfig(recipe="zaya1"))
    assert phases[0][2].batch_tokens == 16_777_216
    assert phases[1][0] + phases[1][1] == pytest.approx(715_256, abs=1)         # 12T tokens
    assert [p.seq_len for _, _, p in phases] == [4096, 4096, 32768] and [
        p.rope_theta for _, _, p in phases
    ] == [1e4, 1e4, 1e6]
    assert (phases[0][2].lr, phases[0][2].lr_end) == (6e-4, 2e-4) and sum(
        phases[2][2].mix.values()
    ) == pytest.approx(1)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_step_has_the_same_tokens_on_any_number_of_ranks(world):
    phase = Phase("p", 1e6, 4096, 128, 1e4, 1, 1, 0, {})
    count, size = micro_steps(phase, world, 512)
    assert count * size * world * 128 == 4096 and size * 128 <= 512


def test_ranks_that_do_not_divide_are_refused_with_a_batch_that_does():
    with pytest.raises(ValueError, match="--batch-tokens 4224"):
        micro_steps(Phase("p", 1e6, 4096, 128, 1e4, 1, 1, 0, {}), 3, 512)


def test_mfu_counts_active_parameters_and_knows_what_it_does_not_know(make):
    model = make()
    c = model.config
    assert (
        log.flops_per_token(model, 64)
        == 6 * model.num_parameters(active=True) + 6 * c.num_blocks * 4 * 16 * 64
    )
    assert log.mfu(1e12, torch.device("cpu"), 1) == "n/a"


# -------------------------------------------------------------------------------- refusals

@pytest.fixture
def assert_refused(capsys, monkeypatch):
    """The command ends with status 2 and one line that holds these words."""
    def call(args, *words):
        monkeypatch.setattr(sys, "argv", ["train.py", *args])
        with pytest.raises(SystemExit) as end:
            config.run(train.main)
        said = capsys.readouterr().err
        assert end.value.code == 2 and said.count("\n") == 1, said
        for word in words:
            assert word in said, f"{word!r} is not in {said!r}"
    return call


@pytest.mark.parametrize("args, words", [
    (["--foo=1"], ["--foo"]), (["--lerning-rate=1"], ["--lerning-rate"]),
    (["--evalevery=3"], ["did you mean --eval-every"]),
    (["--lr=abc"], ["--lr", "number", "abc"]), (["--lr"], ["--lr", "expected one argument"]),
    (["--num-heads=5"], ["num_heads 5"]),
    (["--lr=nan"], ["--lr nan"]), (["--tokens=1e400"], ["--tokens inf"]), (["--tokens=0"], ["--tokens 0.0"]),
    (["--seq-len=0"], ["--seq-len 0"]), (["--norm-eps=-1"], ["norm_eps is -1.0"]),
    (["--grad-clip=0"], ["--grad-clip"]),
    (["--eval-every=-1"], ["--eval-every -1"]), (["--optimizer=sgd"], ["--optimizer", "muon", "adamw"]),
    (["--data=nowhere.txt"], ["nowhere.txt"]),
    (["--top-k=9"], ["top_k 9"])])
def test_bad_flags_end_in_one_line(args, words, assert_refused):
    assert_refused(args, *words)


def test_bad_data_and_folders_end_in_one_line(text, tmp_path, assert_refused):
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.write_text("")
    short.write_text("few words")
    small = ["--preset=tiny", "--tokenizer=bytes", "--device=cpu"]
    assert_refused([f"--data={empty}", *small], "empty.txt")
    assert_refused([f"--data={short}", *small], "short.txt", "128")
    assert_refused([f"--data={text}", *small, f"--out={short}/run"], "--out")
    assert_refused([f"--data={text}", *small, "--tokens=10"], "--tokens")
    short.write_text("ab cd ef\n" * 100)           # 855 bytes to train on, 45 to validate
    assert_refused([f"--data={short}", *small, "--seq-len=64"], "validation part of", "is 45 tokens",
                   "at least 65")


def test_model_beyond_the_memory_is_refused_before_anything_is_made(text, assert_refused):
    assert_refused([f"--data={text}", "--preset=zaya1_74b", "--tokenizer=bytes", "--device=cpu", "--out=run"],
                   "need 885 GB", "cpu has", "--dry-run")
    assert not Path("run").exists()


def test_existing_run_is_never_overwritten(text):
    go(text, "run", tokens=256)
    before = {f: f.read_bytes() for f in Path("run").rglob("*") if f.is_file()}
    with pytest.raises(ValueError, match="holds a run already"):
        go(text, "run", tokens=256)
    assert before == {f: f.read_bytes() for f in Path("run").rglob("*") if f.is_file()}


def test_damaged_configuration_is_named_and_nothing_is_lost(text, assert_refused):
    go(text, "run", tokens=256)
    file, before = Path("run/config.json"), {f: f.read_bytes() for f in Path("run").rglob("*") if f.is_file()}
    saved = json.loads(file.read_text())
    for wrong in ("{", "[]", "{}", "\xff", {"model": 3}, {"model": {"foo": 1}}, {"lr": [1]}, {"seed": None}):
        content = wrong if isinstance(wrong, str) else json.dumps({**saved, **wrong})
        file.write_text(content)
        assert_refused(["--resume=auto", "--out=run", "--tokens=512"], "run/config.json is")
        file.write_bytes(before[file])
        assert before == {f: f.read_bytes() for f in Path("run").rglob("*") if f.is_file()}, wrong
    assert_refused(["--resume=auto", "--out=run", "--preset=laptop"], "--preset laptop", "--preset tiny")


def test_log_goes_on_behind_its_last_whole_row(tmp_path):
    (tmp_path / "log.csv").write_bytes(b"# {}\nstep,x\n1,a\n3x\n\xff\n2,b\n3,c\n1")
    log.Log(tmp_path, 0, {}, step=2).row({"step": 3, "x": "d"})
    assert (tmp_path / "log.csv").read_text() == "# {}\nstep,x\n1,a\n2,b\n3,d\n"


def test_folder_with_other_files_is_not_taken_for_a_run(text, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("mine")
    with pytest.raises(ValueError, match="--out mine is not empty"):
        go(text, "mine", tokens=256)
    assert [f.name for f in (tmp_path / "mine").iterdir()] == ["config.json"]


def test_resuming_a_finished_run_changes_no_checkpoint(text):
    first = go(text, "run", tokens=512)
    before = {f: f.read_bytes() for f in Path("run/checkpoints").rglob("*") if f.is_file()}
    again = go(text, "run", tokens=512, resume="auto")
    assert before == {f: f.read_bytes() for f in Path("run/checkpoints").rglob("*") if f.is_file()}
    assert again["val_loss"] == first["val_loss"] and again["step"] == 2 and again["train_loss"] is None


def test_run_without_a_sound_checkpoint_is_not_started_over(text):
    go(text, "run", tokens=256)
    shard = next(Path("run/checkpoints").glob("step_*/*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100])
    before = {f: f.read_bytes() for f in Path("run").rglob("*") if f.is_file()}
    with pytest.raises(ValueError, match="every checkpoint is damaged"):
        go(text, "run", tokens=256, resume="auto")
    assert before == {f: f.read_bytes() for f in Path("run").rglob("*") if f.is_file()}


def test_checkpoint_of_another_configuration_is_refused(text):
    go(text, "run", tokens=256)
    with pytest.raises(ValueError, match="does not fit: .* is .* in the checkpoint, .* here"):
        go(text, "run", tokens=512, resume="auto", model=ZAYAConfig.preset("tiny", hidden_size=40))


def test_resume_with_another_tokenizer_is_refused_and_nothing_changes(text, tmp_path):
    (tmp_path / "other.txt").write_text(Path(text).read_text()[::-1])
    go(text, "run", tokens=256, tokenizer="bpe:300")
    before = {f: f.read_bytes() for f in Path("run").rglob("*") if f.is_file()}
    with pytest.raises(ValueError, match="--tokenizer bpe:run/tokenizer.json"):
        go(str(tmp_path / "other.txt"), "run", tokens=512, tokenizer="bpe:300", resume="auto")
    assert before == {f: f.read_bytes() for f in Path("run").rglob("*") if f.is_file()}
    go(str(tmp_path / "other.txt"), "run", tokens=512, tokenizer="bpe:run/tokenizer.json", resume="auto")


# -------------------------------------------------------------------------------- signals

def start(text, out, **changes):
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *flags(**{**SMALL, "data": text, "out": out, **changes})],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(out, step, process, limit=60):
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline and process.poll() is None:
        log = Path(out) / "log.csv"
        if log.exists() and sum(line[:1].isdigit() for line in log.read_text().splitlines()) >= step:
            return
        time.sleep(0.02)
    said = process.stdout.read()[-800:] if process.poll() is not None else "too slow"
    raise AssertionError(f"step {step} not reached: {said}")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_leaves_and_the_rest_is_bitwise_equal(text, number):
    more = dict(tokens=60 * 256)
    process = start(text, "run", **more)
    wait_for_step("run", 7, process)
    process.send_signal(number)
    said = process.communicate(timeout=30)[0]
    assert process.returncode == 0 and "--resume auto" in said, said
    stopped = json.loads(Path("run/events.jsonl").read_text().splitlines()[-1])
    assert stopped["what"] == "stopped" and 7 <= stopped["step"] < 60
    assert checkpoint.latest("run/checkpoints").name == f"step_{stopped['step']:08d}"
    go(text, "run", resume="auto", **more)
    go(text, "straight", **more)
    same("run", "straight")


@pytest.mark.parametrize("moment", ["evaluate", "save"])
def test_signal_while_evaluating_or_saving_stops_at_that_step(text, moment, monkeypatch):
    """Another one while the last checkpoint is written costs nothing."""
    real, late = getattr(train.Run, moment), []
    before = signal.signal(signal.SIGTERM, lambda *_: late.append("after the run had let go of its signals"))

    def interrupted(run, *args):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(run, *args)
    with monkeypatch.context() as patch:
        patch.setattr(train.Run, moment, interrupted)
        assert go(text, "run")["step"] == 4 and not late
    signal.signal(signal.SIGTERM, before)
    assert json.loads(Path("run/events.jsonl").read_text().splitlines()[-1])["what"] == "stopped"
    assert checkpoint.latest("run/checkpoints", log=pytest.fail).name == "step_00000004"
    go(text, "run", resume="auto")
    go(text, "straight")
    same("run", "straight")


# -------------------------------------------------------------------------------- several ranks

RANKS = """import os, signal, sys, torch, torch.distributed as dist, train
from datetime import timedelta
train.timedelta = lambda minutes: timedelta(seconds=60)         # a rank that waits in vain fails the test
rank, args = int(os.environ["RANK"]), sys.argv[1:]

def signalled(name, step):
    real = getattr(train.Run, name)
    def call(run, *more):
        if run.progress["step"] == step and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(run, *more)
    setattr(train.Run, name, call)

"""

@pytest.mark.slow
def test_two_ranks_make_the_step_of_one(text, monkeypatch):
    """First step equal to rounding, gradient by gradient; biases and loads exactly; data shared out and not
    repeated."""
    program, settings = Path("gradients.py"), dict(tokens=512, optimizer="adamw", eval_every=1)
    program.write_text(RANKS + """real = train.Run.update
def update(run, step, loss):
    if step == 0 and rank == 0:
        torch.save({name: p.grad for name, p in run.model.named_parameters()}, "two.pt")
    return real(run, step, loss)
train.Run.update = update
train.main(args)
""")
    real, gradients = train.Run.update, {}

    def update(run, step, loss):
        gradients.update({name: p.grad.clone() for name, p in run.model.named_parameters() if step == 0})
        return real(run, step, loss)
    monkeypatch.setattr(train.Run, "update", update)
    go(text, "one", **settings)
    torchrun(text, "two", program=str(program), **settings)
    for name, gradient in torch.load("two.pt").items():
        assert_close(gradient, gradients[name], 1e-4, f"gradient of {name}")
    one, two = rows("one"), rows("two")
    assert one[0]["load"] == two[0]["load"] and one[0]["train_loss"][:-1] == two[0]["train_loss"][:-1]
    assert abs(float(one[-1]["val_loss"]) - float(two[-1]["val_loss"])) < 1e-3
    a, b = weights("one"), weights("two")
    assert all(torch.equal(a[name], b[name]) for name in a if "balancing" in name)


@pytest.mark.slow
def test_two_ranks_with_compiled_and_recomputed_blocks_make_the_same_step(text):
    for name, flag in (("plain", {}), ("compiled", dict(compile="on", recompute=True))):
        torchrun(text, name, tokens=3 * 256, **flag)
    for plain, compiled in zip(rows("plain"), rows("compiled"), strict=True):
        for column in ("train_loss", "grad_norm"):      # weights: Newton-Schulz blows up last digits
            assert float(compiled[column]) == pytest.approx(float(plain[column]), rel=2e-3), column


@pytest.mark.slow
def test_ranks_stay_equal_when_one_sends_all_its_tokens_to_one_expert(text):
    program = Path("skewed.py")
    program.write_text(RANKS + """import router
if rank == 1:
    router.choose = lambda score_NC, top_k: torch.zeros(len(score_NC), top_k, dtype=torch.int64)
real = train.Run.finish
def finish(run, *more):
    copies = [None, None]
    dist.all_gather_object(copies, run.model.state_dict())
    assert all(torch.equal(copies[0][name], copies[1][name]) for name in copies[0]), "the ranks differ"
    return real(run, *more)
train.Run.finish = finish
train.main(args)
""")
    torchrun(text, "run", program=str(program), tokens=3 * 256)
    first = [[int(n) for n in block.split()] for block in rows("run")[0]["load"].split("|")]
    assert len(rows("run")) == 3 and all(block[0] > 128 for block in first), first


@pytest.mark.slow
def test_no_thread_of_the_process_group_outlives_the_training(text):
    """One that does aborts the interpreter's exit now and then, and a finished run looks like a failed
    one."""
    program = Path("threads.py")
    program.write_text("""import sys, pathlib, train
train.main(sys.argv[1:])
names = [p.read_text().strip() for p in pathlib.Path("/proc/self/task").glob("*/comm")]
sys.exit(f"still running: {names}" if any("gloo" in name for name in names) else 0)
""")
    torchrun(text, "run", program=str(program), tokens=256)


@pytest.mark.slow
def test_two_ranks_stopped_by_a_signal_to_one_and_resumed_are_bitwise_the_undisturbed_run(text):
    """The signal comes while evaluating, and in the resumed run while saving: both stop, at that very
    step."""
    for moment, step in (("evaluate", 4), ("save", 8)):
        Path(f"{moment}.py").write_text(RANKS + f"signalled({moment!r}, {step})\ntrain.main(args)\n")
        torchrun(text, "halves", program=f"{moment}.py", resume="auto")
    ends = [json.loads(line) for line in Path("halves/events.jsonl").read_text().splitlines()]
    assert [(e["what"], e["step"]) for e in ends if e["what"] in ("stopped", "done")] == [
        ("stopped", 4), ("stopped", 8)]
    assert [path.name for path in sorted(Path("halves/checkpoints").iterdir())] == [
        "step_00000004", "step_00000008"]
    torchrun(text, "straight", stop_after=8)
    same("straight", "halves")
    assert rows("straight") == rows("halves")


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [(2, 1), (1, 2)])
def test_resume_on_another_number_of_ranks_reads_the_same_batches(text, before, after):
    run = lambda ranks, **more: torchrun(text, "moved", **more) if ranks == 2 else go(text, "moved", **more)
    go(text, "straight")
    run(before, stop_after=6)
    run(after, resume="auto")
    losses = [[float(r["train_loss"]) for r in rows(out)] for out in ("straight", "moved")]
    assert max(abs(a - b) for a, b in zip(*losses)) < 0.02, losses


@pytest.mark.slow
def test_killed_worker_goes_on_from_the_last_save(text):
    """torchrun restarts the group, and --resume auto takes the newest checkpoint, not step 0."""
    program = Path("dies.py")
    program.write_text("""import os, signal, sys, train
real = train.Run.gradients
def gradients(run, step):
    if step == 9 and run.rank == 1 and not os.path.exists("died"):
        run.checkpoints.wait()
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return real(run, step)
train.Run.gradients = gradients
train.main(sys.argv[1:])
""")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
        str(program),
    ]
    done = subprocess.run(
        command + flags(**{**SMALL, "data": text, "out": "run", "resume": "auto"}),
        capture_output=True,
        text=True,
        # pytorch issue 135712
        timeout=300,
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    starts = [
        json.loads(e)["step"] for e in Path("run/events.jsonl").read_text().splitlines() if '"start"' in e
    ]
    assert starts == [0, 8] and rows("run")[-1]["step"] == "12"
