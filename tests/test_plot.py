"""Pictures from a run's log."""

import subprocess
import sys

import numpy as np
import pytest

import plot
from conftest import ROOT

HEAD = (
    "step,tokens,phase,lr,train_loss,val_loss,val_bits_per_byte,grad_norm,step_ms,tokens_per_s,mfu,load_max,"
    "load_entropy,skip_share,load"
)
ROWS = [
    "10,100,one,0.1,3.5,,,1,5,20,n/a,1.5,0.9,0.1,3 5 2|9 1 0",
    "20,200,two,0.05,3.0,2.5,1.25,1,5,20,n/a,1.2,0.95,0.0,4 6 0|5 5 0",
]


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "007"
    folder.mkdir()
    (folder / "log.csv").write_text("\n".join(['# {"torch": "x"}', HEAD, *ROWS]) + "\n")
    return folder


def test_log_is_read_as_it_was_written(run):
    header, columns = plot.read(run)
    assert header == {"torch": "x"} and columns["tokens"] == [100.0, 200.0]
    assert columns["phase"] == ["one", "two"]
    assert np.isnan(columns["val_loss"][0]) and columns["val_loss"][1] == 2.5
    share = plot.loads(columns)
    assert share.shape == (2, 2, 3)
    assert share[0, 0].tolist() == [0.3, 0.5, 0.2] and share[1, 1].tolist() == [0.5, 0.5, 0]


@pytest.mark.parametrize("ending, start", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_picture_of_one_run_and_of_several(run, tmp_path, ending, start):
    pytest.importorskip("matplotlib")
    for runs in ([run], [run, run]):
        file = tmp_path / f"{len(runs)}.{ending}"
        plot.draw(runs, file)
        assert file.read_bytes().startswith(start) and file.stat().st_size > 10_000


def test_folder_without_a_log_is_refused_in_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "plot.py"), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "log.csv" in done.stderr
