"""Removes each __syncthreads() of the kernels in turn, runs the rest through the CPU shim, demands a failure.

    python tests/barrier_mutants.py

A barrier whose removal nobody notices is either not needed or not tested; both are defects, and the script
exits 1. Each mutant runs in a process of its own, for it may well write anywhere. "numbers" means that
kernels_hip.check found a difference from the twin, "crash" that the process died.
"""
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import kernels_hip  # noqa: E402

BARRIER = "__syncthreads();"
SCHEDULES = [(lanes, order) for order in ("reverse", "forward", "random") for lanes in (64, 32)]


def without(number):
    """The kernels without barrier `number` (from 0), all of them for -1."""
    parts = kernels_hip.KERNELS.split(BARRIER)
    if number < 0:
        return kernels_hip.KERNELS
    return BARRIER.join(parts[:number + 1]) + ";" + BARRIER.join(parts[number + 1:])


def run(number):
    """Exit status 0 if every schedule agrees with the twin, 1 if one does not."""
    for lanes, order in SCHEDULES:
        try:
            kernels_hip.select("shim", lanes=lanes, schedule=order, kernels=without(number))
            kernels_hip.check()
        except (ValueError, RuntimeError) as error:
            print(f"{lanes} lanes, {order}: {error}")
            sys.exit(3 if "cannot run" in str(error) else 1)


def main():
    barriers, bad = kernels_hip.KERNELS.count(BARRIER), 0
    for number in range(-1, barriers):
        done = subprocess.run([sys.executable, __file__, str(number)], capture_output=True, text=True)
        outcome = {0: "passes", 1: "numbers", 3: "does not compile"}.get(done.returncode, "crash")
        right = outcome == "passes" if number < 0 else outcome in ("numbers", "crash")
        bad += not right
        name = "all barriers" if number < 0 else f"without barrier {number + 1} of {barriers}"
        print(f"{name:<26}{outcome:<10}{'' if right else 'NOT CAUGHT  '}{done.stdout.strip()}", flush=True)
    print(f"{bad} of {barriers + 1} went wrong" if bad else f"every one of the {barriers} barriers is needed")
    sys.exit(bool(bad))


if __name__ == "__main__":
    run(int(sys.argv[1])) if len(sys.argv) > 1 else main()
