"""A training run at scale: how long a step takes when nodes straggle, how much of the time survives failures.

  step(n)   = slowest node's forward and backward, the all-reduce that backward does not hide, optimizer
  goodput   = time of steps that were kept / time that passed

A step. Backward yields its gradients bucket by bucket, evenly over its time, the last layers first. A bucket
may start when the slowest node has it and the links have finished the bucket before; it takes

  (1)  t = 2 S (g-1)/g / inside + 2 (S/g) (m-1)/m / between + 2 latency log2(n)

with reduce-scatter and all-gather inside a node of g GPUs, and between the m nodes one rail for each GPU of a
node. Bandwidth is that of a ring, latency that of a tree: libraries take the better for each size. Each node
and step is slower by a factor 1 + x, x exponential: the mean of the slowest of m nodes grows like straggle *
ln m.

Failures come at rate n / mtbf for n GPUs. After one, nothing happens for `restart` seconds and work goes on
from the last checkpoint; saving holds training up for `save` seconds every `interval` seconds of work. For
exponential failures, M = mtbf / n:

  (2)  goodput = interval / (M exp(restart / M) (exp((interval + save) / M) - 1))   Daly 2006, equation 13
  (3)  best interval = sqrt(2 save M)                                               Young 1974
       sqrt(2 save M) (1 + sqrt(save/2M)/3 + save/18M) - save, or M if save > 2M    Daly 2006, eq. 37

The simulation draws failures (Weibull: shape below 1 means that they come in clusters) and does not use (2);
the tests hold it to (2) and (3) where these are exact. Paper: ZAYA1, arXiv 2511.17127 (network, resilience).

Left out: failures of a part of the network that only slow it, silent errors, spare nodes that are not there,
the gather of Muon's updates overlapping with anything. Weak scaling: each GPU keeps its tokens, so the batch
grows with the number of GPUs.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model import require
from plot import pyplot

GPUS = (1, 8, 64, 256, 1024, 4096, 16_384, 65_536, 100_000)


@dataclass
class Job:
    """What one GPU does in a step, and what its surroundings do to it. Seconds, bytes, bytes a second."""
    forward: float                  # all micro-steps but the last one's backward
    backward: float                 # of the last micro-step: what the all-reduce can hide behind
    after: float                    # Newton-Schulz, optimizer, gather of the updates
    gradients: float                # bytes to all-reduce
    bucket: float = 25 * 2**20      # bytes of a bucket
    inside: float = 448e9           # of a GPU to the others of its node
    between: float = 50e9           # of a GPU on its rail
    per_node: int = 8
    latency: float = 10e-6          # of one hop
    straggle: float = 0.01          # mean relative slowness of a node in a step, 0: none
    mtbf: float = 50_000 * 3600     # of one GPU
    shape: float = 1.0              # of the Weibull distribution of times between failures
    save: float = 5.0               # that a checkpoint holds training up
    restart: float = 600.0          # from a failure to the first step


def bucket_seconds(job, size, gpus):
    """Equation (1) for a bucket of `size` bytes."""
    if gpus == 1:
        return 0.0
    g = min(gpus, job.per_node)
    m = gpus / g
    inside = 2 * size * (g - 1) / g / job.inside
    return inside + 2 * size / g * (m - 1) / m / job.between + 2 * job.latency * math.log2(gpus)


def finish(job, gpus, slowest=1.0):
    """Seconds from a step's start to its last reduced bucket.

    slowest: how many times its normal compute the slowest node needs; a number, or one for each step.
    """
    count = max(1, math.ceil(job.gradients / job.bucket))
    each = bucket_seconds(job, job.gradients / count, gpus)
    # Bucket i is ready at forward + backward (i + 1) / count. With equal buckets the links either wait for
    # the last one, or have been busy ever since the first: no bucket in between can be the last to have made
    # them wait, as both grow evenly.
    slowest = np.asarray(slowest)
    waiting = slowest * (job.forward + job.backward) + each
    busy = slowest * (job.forward + job.backward / count) + count * each
    return np.maximum(waiting, busy)


def simulate_steps(job, gpus, steps=400):
    """Seconds of each of `steps` steps on `gpus` GPUs, (steps,) float64."""
    require(gpus >= 1, f"{gpus} GPUs: at least 1")
    nodes, random = math.ceil(gpus / job.per_node), np.random.default_rng(0)
    # The largest of m exponential draws, by inverting its distribution: no array of steps x nodes.
    slowest = -np.log1p(-random.random(steps) ** (1 / nodes)) * job.straggle
    return finish(job, gpus, 1 + slowest) + job.after


def simulate_failures(job, gpus, interval, failures=20_000):
    """Goodput, kept work over time: a checkpoint every `interval` seconds of work, failures drawn."""
    mean, random = job.mtbf / gpus, np.random.default_rng(0)
    between = random.weibull(job.shape, failures) * mean / math.gamma(1 + 1 / job.shape)
    segments = np.floor(np.maximum(between - job.restart, 0) / (interval + job.save))
    return segments.sum() * interval / between.sum()


def goodput(job, gpus, interval):
    """Equation (2), exact for exponential failures."""
    mean = job.mtbf / gpus
    exponents = (job.restart / mean, (interval + job.save) / mean)
    if max(exponents) > 500:        # never reaches the next checkpoint; exp would overflow
        return 0.0
    return interval / (mean * math.exp(exponents[0]) * math.expm1(exponents[1]))


def young(job, gpus):
    """Best interval by equation (3), first line, seconds."""
    return math.sqrt(2 * job.save * job.mtbf / gpus)


def daly(job, gpus):
    """Best interval by equation (3), second line, seconds."""
    mean = job.mtbf / gpus
    if job.save >= 2 * mean:
        return mean
    ratio = job.save / (2 * mean)
    return math.sqrt(2 * job.save * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - job.save


def best_interval(job, gpus):
    """(interval, goodput) of the best of 61 intervals around Young's, all with the same failures."""
    middle = young(job, gpus)
    tried = [middle * 10 ** (i / 30) for i in range(-30, 31)]
    return max(((t, simulate_failures(job, gpus, t)) for t in tried), key=lambda pair: pair[1])


def scale(job):
    """One row for each number of GPUs: step and its parts (s), failures a day, intervals (s), goodput.

    efficiency: kept work of one GPU over that of a GPU alone which never fails or waits.
    """
    rows, alone = [], job.forward + job.backward + job.after
    for gpus in GPUS:
        step = simulate_steps(job, gpus).mean()
        interval, kept = best_interval(job, gpus)
        calm = float(finish(job, gpus))
        rows.append(dict(gpus=gpus, step=step, exposed=calm - job.forward - job.backward,
                         straggling=step - calm - job.after, failures_a_day=86400 * gpus / job.mtbf,
                         interval=interval, young=young(job, gpus), daly=daly(job, gpus), goodput=kept,
                         closed_form=goodput(job, gpus, interval), efficiency=kept * alone / step))
    return rows


def job_of(p, cfg):
    """The Job of a plan (plan.plan's figures), for any number of GPUs: the shared-out optimizer is that of
    cfg.gpus, the links are those of a whole node of this card."""
    compute = p["products_s"] + p["elementwise_s"]
    link = p["link"] or 0
    inside = link * (cfg.gpus_per_node - 1 if p["mesh"] else 1)
    return Job(forward=compute - p["backward_s"], backward=p["backward_s"],
               after=p["newton_schulz_s"] + p["optimizer_s"] + p["gather_s"],
               gradients=4 * p["total"], bucket=p["bucket"], inside=inside or math.inf, between=p["nic"],
               per_node=cfg.gpus_per_node, latency=p["latency"], mtbf=cfg.mtbf_hours * 3600,
               save=p["save_s"] + cfg.stall, restart=cfg.restart)


def table(rows):
    head = ("     GPUs      step   exposed straggling  failures/day   interval   (Young     Daly)   goodput "
            " (eq. 2)  efficiency")
    return "\n".join([head] + [
        f"{r['gpus']:9,} {r['step']:8.3f}s {r['exposed']:8.3f}s {r['straggling']:9.3f}s "
        f"{r['failures_a_day']:13.2f} {r['interval']:9.0f}s {r['young']:8.0f}s {r['daly']:7.0f}s "
        f"{r['goodput']:9.2%} {r['closed_form']:8.2%} {r['efficiency']:11.1%}" for r in rows])


def draw(job, rows, file):
    """Goodput and efficiency over GPUs; goodput over the checkpoint interval at three sizes."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    gpus = [r["gpus"] for r in rows]
    left.plot(gpus, [100 * r["goodput"] for r in rows], "o-", label="goodput (failures, checkpoints)")
    left.plot(gpus, [100 * r["efficiency"] for r in rows], "s-", label="efficiency (links, stragglers too)")
    left.set(xscale="log", xlabel="GPUs", ylabel="%", ylim=(0, 103), title="What is left of the time")
    left.legend(loc="lower left")
    for n in (1024, 16_384, 100_000):
        around = np.geomspace(young(job, n) / 20, young(job, n) * 20, 60)
        line, = right.plot(around, [100 * simulate_failures(job, n, t) for t in around], label=f"{n:,} GPUs")
        right.plot(young(job, n), 100 * goodput(job, n, young(job, n)), "o", color=line.get_color())
    right.set(xscale="log", xlabel="seconds of work between checkpoints", ylabel="%", ylim=(0, 103),
              title="Goodput over the interval (dot: Young's)")
    right.legend(loc="lower left")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=100)
    plt.close(figure)


def main(cfg, config):
    """plan.py --simulate: the planned step on 1 to 100,000 GPUs, as a table and simulate.png."""
    from plan import plan
    p = plan(cfg, config)
    job = job_of(p, cfg)
    rows = scale(job)
    print(f"{cfg.preset} on {cfg.card_name}: {job.forward + job.backward:.3f} s of compute a step, "
          f"{job.gradients / 1e9:.1f} GB of gradients; a GPU fails every {cfg.mtbf_hours:,.0f} h, "
          f"a checkpoint takes {job.save:.2f} s, a restart {job.restart:.0f} s")
    print(table(rows))
    try:
        draw(job, rows, Path("simulate.png"))
        print("written: simulate.png")
    except ValueError as error:
        print(f"no picture: {error}")


def demo():
    job = Job(forward=0.3, backward=0.3, after=0.05, gradients=35e9)
    print(f"a step of 0.65 s of compute with 35 GB of gradients, {job.straggle:.0%} straggling, "
          "one failure in 50,000 GPU hours:")
    print(table(scale(job)))


if __name__ == "__main__":
    demo()
