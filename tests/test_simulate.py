"""The simulator against closed forms, and against the planner."""

import dataclasses
import math

import pytest

import simulate
from model import ZAYAConfig
from plan import PlanConfig, plan

JOB = simulate.Job(forward=0.31, backward=0.29, after=0.05, gradients=3.5e9, straggle=0.0)


def queue(job, gpus):
    """The buckets one after the other, as the header tells it."""
    count = math.ceil(job.gradients / job.bucket)
    clock = 0.0
    for i in range(count):
        ready = job.forward + job.backward * (i + 1) / count
        clock = max(clock, ready) + simulate.bucket_seconds(job, job.gradients / count, gpus)
    return clock


@pytest.mark.parametrize("changes", [{}, dict(nic=2.0), dict(gpus=8, batch_tokens=32 * 4096),
                                     dict(gpus=1, batch_tokens=4096)])
def test_planned_and_simulated_steps_are_the_same(changes):
    cfg = PlanConfig(**changes)
    p = plan(cfg, ZAYAConfig.preset("zaya1_8b"))
    job = dataclasses.replace(simulate.job_of(p, cfg), straggle=0.0)
    assert simulate.simulate_steps(job, cfg.gpus, steps=2) == pytest.approx(p["planned_s"], rel=1e-6)


@pytest.mark.parametrize("gpus", [1, 8, 64, 100_000])
@pytest.mark.parametrize("between", [50e9, 0.5e9])
def test_step_equals_the_queue_of_buckets(gpus, between):
    job = dataclasses.replace(JOB, between=between)
    assert float(simulate.finish(job, gpus)) == pytest.approx(queue(job, gpus), rel=1e-9)


def test_step_with_infinite_bandwidth_is_compute():
    job = dataclasses.replace(JOB, inside=math.inf, between=math.inf, latency=0.0)
    for gpus in (1, 8, 4096, 100_000):
        assert simulate.simulate_steps(job, gpus) == pytest.approx(0.65)
    assert simulate.simulate_steps(JOB, 1) == pytest.approx(0.65)


def test_single_node_needs_no_network_between_nodes():
    slow = dataclasses.replace(JOB, between=1.0)
    assert simulate.simulate_steps(slow, 8) == pytest.approx(simulate.simulate_steps(JOB, 8))
    no_wait = dataclasses.replace(JOB, latency=0.0)
    assert simulate.bucket_seconds(no_wait, 8e6, 8) == pytest.approx(2 * 8e6 * 7 / 8 / 448e9)


def test_stragglers_cost_the_expected_maximum():
    job = dataclasses.replace(JOB, straggle=0.02, inside=math.inf, between=math.inf, latency=0.0)
    for nodes in (1, 10, 1000):
        largest = 0.02 * sum(1 / i for i in range(1, nodes + 1))    # mean of the largest draw: harmonic
        steps = simulate.simulate_steps(job, 8 * nodes, steps=20_000)
        assert steps.mean() == pytest.approx(0.05 + 0.6 * (1 + largest), rel=2e-3)


@pytest.mark.parametrize("gpus", [1, 1024, 16_384])
def test_goodput_equals_the_closed_form(gpus):
    for factor in (0.3, 1.0, 4.0):
        interval = factor * simulate.young(JOB, gpus)
        drawn = simulate.simulate_failures(JOB, gpus, interval, failures=200_000)
        assert drawn == pytest.approx(simulate.goodput(JOB, gpus, interval), rel=0.01)


def test_without_failures_only_saving_costs():
    job = dataclasses.replace(JOB, mtbf=1e15)
    assert simulate.goodput(job, 1, 95.0) == pytest.approx(95 / 100)
    assert simulate.simulate_failures(job, 1, 95.0, failures=100) == pytest.approx(95 / 100)


@pytest.mark.parametrize("gpus", [64, 1024, 16_384, 100_000])
def test_best_interval_is_young_and_dalys(gpus):
    """The optimum is flat: what Young's and Daly's intervals give must agree, the interval itself roughly."""
    interval, best = simulate.best_interval(JOB, gpus)
    assert 0.6 < interval / simulate.daly(JOB, gpus) < 1.6
    assert simulate.simulate_failures(JOB, gpus, simulate.daly(JOB, gpus)) == pytest.approx(best, rel=5e-3)
    assert simulate.daly(JOB, gpus) == pytest.approx(simulate.young(JOB, gpus), rel=0.1)


def test_goodput_falls_with_size_and_clusters_of_failures_change_it():
    rows = simulate.scale(dataclasses.replace(JOB, straggle=0.01))
    goodputs, steps = [r["goodput"] for r in rows], [r["step"] for r in rows]
    assert goodputs == sorted(goodputs, reverse=True) and steps == sorted(steps)
    assert rows[0]["efficiency"] > 0.97 > rows[-1]["efficiency"]
    clustered = dataclasses.replace(JOB, shape=0.5)
    interval = 4 * simulate.young(JOB, 16_384)
    drawn, exact = (f(job, 16_384, interval) for f, job in (
        (simulate.simulate_failures, clustered), (simulate.goodput, JOB)))
    assert abs(drawn - exact) > 0.01
