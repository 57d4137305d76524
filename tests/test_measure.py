"""Measuring this machine: the command, its file and its pictures."""

import json
import subprocess
import sys

import pytest

from conftest import ROOT


@pytest.mark.slow
def test_measure_command_writes_file_and_pictures(tmp_path):
    here = tmp_path / "here.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(ROOT / "plan.py"),
               *"--measure --preset tiny --seq-len 64 --micro-batch 2 --machine".split(), str(here)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(here.read_text())
    assert found["ranks"] == 2 and len(found["allreduce"]) > 5 and found["link"] > 0
    assert all(rate > 0 for row in found["products"] for rate in row[3:]) and found["checkpoint"]["read"] > 0
    assert (tmp_path / "here-products.png").exists() and (tmp_path / "here-bandwidth.png").exists()
