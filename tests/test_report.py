"""Sizing rules, and the plan as text and as JSON."""

import json

import plan as planner
from model import ZAYAConfig
from plan import PlanConfig, plan
from report import rules
from sheet import SHEET, bound, figures


def test_rules_pass_for_the_published_shape_and_say_what_to_change_for_others():
    cfg, config = PlanConfig(), ZAYAConfig.preset("zaya1_8b")
    assert [r for r in rules(cfg, config, plan(cfg, config)) if not r[0]] == []
    cfg = PlanConfig(gpus=4, batch_tokens=4 * 4096, micro_batch=1)
    config = ZAYAConfig.preset("zaya1_8b", hidden_size=2000, head_dim=80, vocab_size=262_145,
                               expert_hidden_size=700, num_experts=64)
    wrong = {what: change for good, what, _, _, change in rules(cfg, config, plan(cfg, config)) if not good}
    assert {"hidden_size", "head_dim", "vocab_size", "expert_hidden_size", "query channels",
            "rows of an expert", "shortest contraction", "GPUs of a node"} <= wrong.keys()
    assert wrong["hidden_size"] == "--hidden-size 2048" and wrong["vocab_size"] == "--vocab-size 262208"
    assert wrong["rows of an expert"].startswith("--micro-batch of at least 4")


def test_explained_formulas_are_the_ones_computed(capsys):
    planner.main(["--explain"])
    text = capsys.readouterr().out
    for name, _, formula, _ in figures():
        assert name in text and f"= {formula}" in text
    planner.main(["--json"])
    data = json.loads(capsys.readouterr().out)
    p = plan(PlanConfig(), ZAYAConfig.preset("zaya1_8b"))
    assert data["figures"]["planned_s"]["value"] == p["planned_s"] and data["bound"] == bound(p)[0]
    assert data["figures"].keys() == {row[0] for row in figures()}


def test_report_of_one_gpu_names_no_link(capsys):
    planner.main(["--gpus", "1", "--batch-tokens", "4096", "--gpu", "mi250x"])
    text = capsys.readouterr().out
    assert "no limit" in text and "bound by newton_schulz_s" in text


def test_a_plan_begins_with_its_verdict_and_has_every_heading(capsys):
    planner.main([])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("8,840,488,784 parameters on 1,024 x MI300X: fits, a GPU has 7.8")
    assert lines[1].endswith("1.2e+13 tokens take 7.687 days")
    assert lines[2] == "sizing rules, at the end: all kept"
    assert {heading for heading in SHEET if isinstance(heading, str)} <= set(lines)
    planner.main(["--gpus", "8", "--micro-batch", "64"])
    lines = capsys.readouterr().out.splitlines()
    assert "does NOT fit, a GPU lacks 1.26" in lines[0] and lines[2].endswith("change memory left")
