"""Sweeps, the planner's command line, and what was measured in place of a datasheet."""

import json
import sys

import pytest

import config as command_line
import plan as planner
import prices
from model import ZAYAConfig
from plan import PlanConfig
from prices import measure_operations, predict


def test_sweep_puts_what_fits_first_and_the_fastest_of_it():
    cfg = PlanConfig(sweep="num_experts=16,64 micro_batch=1,3,4 gpus=512,1024")
    rows = planner.sweep(cfg, ZAYAConfig.preset("zaya1_8b"))
    assert len(rows) == 12
    problems = [bool(problem) for *_, problem in rows]
    assert problems == sorted(problems) and any(problems) and not all(problems)
    rates = [p["tokens_per_s"] for _, p, problem in rows if not problem]
    assert rates == sorted(rates, reverse=True)
    assert any("does not divide" in problem for *_, problem in rows), "micro_batch=3"


@pytest.mark.parametrize("argv, words", [
    (["--gpus", "0"], ("gpus", "0")), (["--gpu", "tpu9"], ("tpu9", "not guessed", "MI300X")),
    (["--num-heads", "7"], ("num_heads 7", "num_kv_heads")), (["--share", "1.5"], ("share",)),
    (["--gpus", "1000"], ("4,096 sequences", "1,000 GPUs")),
    (["--micro-batch", "3"], ("micro-batch 3", "1, 2, 4")),
    (["--machine", "none.json"], ("none.json", "--measure")), (["--gpu", "mi250x"], ("MI250X", "--link")),
    (["--sweep", "wings=2"], ("wings",)), (["--sweep", "hidden_size=a"], ("hidden_size",)),
    (["--batch-tokens", "5000"], ("multiple",)), (["--gpuss", "3"], ("--gpus",)),
    (["--gpus", "12", "--batch-tokens", "49152"], ("whole nodes",)),
    (["--step-seconds", "nan"], ("step-seconds",))])
def test_bad_input_is_refused_in_one_line(argv, words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plan.py", *argv])
    with pytest.raises(SystemExit) as stop:
        command_line.run(planner.main)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert all(word.lower() in err.lower() for word in words), err


def test_machine_file_replaces_the_datasheet(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prices, "time_operation", lambda op, device: 1e-6 + 1e-11 * op.work)
    shapes = [(ZAYAConfig.preset("tiny"), 2, 16, "muon")]
    rows = measure_operations(shapes)
    found = dict(device="CPU, 1 threads", kind="cpu", dtype="float32", peak=5e10, memory=8e9, bandwidth=1e10,
                 link=None, overhead=1e-6, operations=rows)
    (tmp_path / "here.json").write_text(json.dumps(found))
    argv = ["--machine", str(tmp_path / "here.json"), "--preset", "tiny", "--gpus", "1", "--seq-len", "16",
            "--batch-tokens", "64", "--micro-batch", "2", "--dtype", "float32", "--json"]
    capsys.readouterr()
    planner.main(argv)
    data = json.loads(capsys.readouterr().out)
    times = predict(found, *shapes[0])
    assert data["figures"]["products_s"]["value"] == pytest.approx(2 * times["products"])    # two micro-steps
    assert data["figures"]["optimizer_s"]["value"] == pytest.approx(times["optimizer"])
    assert data["figures"]["products_s"]["formula"] == "measured"
    assert data["figures"]["memory"]["value"] == 8e9
