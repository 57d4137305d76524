"""The ablations' bookkeeping: equal sizes, the sign rule, rates, verdicts, restarts."""

import subprocess
import sys

import pytest
import torch

from benchmarks import ablations
from conftest import ROOT
from model import ZAYA
from router import Balancer, count


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(ablations, "RESULTS", tmp_path / "ablations.json")
    ablations.lock_file.cache_clear()
    yield tmp_path / "ablations.json"
    ablations.lock_file.cache_clear()


def row(variant, seed, loss, lr=0.024):
    return {"variant": variant, "seed": seed, "lr": lr, "val": loss, "bits_per_byte": loss, "tokens": 1000,
            "active": 10, "total": 20, "entropy": 0.5, "even_after": None}


def active(variant):
    with torch.device("meta"):
        return ZAYA(ablations.shape_of(variant, 1024)).num_parameters(active=True)


@pytest.mark.parametrize("name", ablations.VARIANTS)
def test_variants_have_the_active_parameters_of_their_base(name):
    variant = ablations.VARIANTS[name]
    assert active(variant) == pytest.approx(active(ablations.Variant(base=variant.base)), rel=0.01)


def test_balancing_without_betas_is_the_sign_rule(make):
    model = make(num_experts=4)
    gate, (rate, betas) = model.blocks[0].mlp.gate, ablations.VARIANTS["sign rule"].balance
    balancer = Balancer(model, rate, betas)
    for experts in ([0, 0, 0, 1], [0, 1, 2, 3], [3, 3, 2, 1]):
        before = gate.balancing_biases.clone()
        gate.load += count(torch.tensor(experts)[:, None], 5)
        share = torch.bincount(torch.tensor(experts), minlength=4) / 4
        balancer.step()
        moved = gate.balancing_biases - before
        assert torch.allclose(moved[:4], rate * (0.25 - share).sign(), atol=1e-6), moved
        assert moved[4] == 0


def test_best_rate_is_the_first_seeds_and_waits_for_all():
    runs = [row("AdamW", 0, 2.0, 0.004), row("AdamW", 0, 1.5, 0.002), row("AdamW", 1, 9.0, 0.002)]
    assert ablations.best_rate({"runs": runs}, "AdamW") is None             # 0.008 is still to be tried
    runs.append(row("AdamW", 0, 3.0, 0.008))
    for name in ("AdamW", "AdamW, equal time"):
        assert ablations.best_rate({"runs": runs}, name) == 0.002
    assert [r["val"] for r in ablations.rows({"runs": runs}, "AdamW").values()] == [1.5, 9.0]


@pytest.mark.parametrize("losses, expected", [
    ((2.1, 2.3, 2.5), "worse"), ((1.9, 2.1, 2.3), "better"), ((2.3, 2.0, 2.4), "tie")])
def test_verdict_goes_by_the_differences_of_equal_seeds(losses, expected):
    runs = [row("ours", s, x) for s, x in enumerate((2.0, 2.2, 2.4))]
    runs += [row("no EDA", s, x) for s, x in enumerate(losses)]
    assert ablations.verdict(ablations.against({"runs": runs}, "no EDA", "ours")) == expected
    assert ablations.against({"runs": runs[:4]}, "no EDA", "ours") is None     # one seed says nothing


def test_rows_survive_and_are_never_trained_twice(results, monkeypatch):
    trained = []

    def train(name, seed, lr, dataset, ms):
        trained.append((name, seed, lr))
        if len(trained) == 4:
            raise KeyboardInterrupt
        return row(name, seed, 2.0 + seed, lr)
    monkeypatch.setattr(ablations, "train", train)
    monkeypatch.setattr(ablations.data, "load", lambda name: None)
    with pytest.raises(KeyboardInterrupt):
        ablations.run()
    assert len(ablations.load()["runs"]) == 3
    ablations.lock_file.cache_clear()
    ablations.run()
    done = [(r["variant"], r["seed"], r["lr"]) for r in ablations.load()["runs"]]
    assert len(set(done)) == len(done) == len(trained) - 1
    assert {(name, seed) for name, seed, _ in done} == {(n, s) for n in ablations.VARIANTS for s in range(3)}
    assert trained[3] in done                       # the interrupted one was made up
    lines = ablations.table().splitlines()
    assert len(lines) == 2 + len(ablations.COMPARED)
    assert all(line.count("|") == lines[0].count("|") for line in lines)


@pytest.mark.slow
def test_run_that_another_process_is_at_is_left_to_it(results):
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from benchmarks import ablations
ablations.RESULTS = Path({str(results)!r})
print(ablations.locked(7), flush=True); sys.stdin.read()"""
    pipe = subprocess.PIPE
    other = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
    assert other.stdout.readline() == "True\n"
    assert not ablations.locked(7, wait=False) and ablations.locked(8, wait=False)
    other.communicate("")
    assert ablations.locked(7, wait=False)          # it died, and its lock with it
