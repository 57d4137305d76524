"""Pictures from a run's log."""

import numpy as np
import pytest

import plot

HEAD = (
    "step,tokens,phase,lr,train_loss,val_loss,val_bits_per_byte,grad_norm,step_ms,tokens_per_s,mfu,load_max,"
    "load_entropy,skip_share,load,residual_rms,residual_scale,hidden_states_scale"
)
ROWS = [
    "10,100,one,0.1,3.5,,,1,3000,20,n/a,1.5,0.9,0.1,3 5 2|9 1 0,1.5|2.5,1 1.1|1.2 1.3,0.9 0.8|0.7 0.6",
    "30,200,two,0.05,3.0,2.5,1.25,1,6000,9,n/a,1.2,0.9,0.0,4 6 0|5 5 0,1.6|2.6,1 1.2|1.2 1.4,0.9 0.7|0.7 0.5",
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
    assert plot.by_block(columns["residual_rms"])[:, 1, 0].tolist() == [2.5, 2.6]
    assert plot.by_block(columns["residual_scale"])[0].tolist() == [[1, 1.1], [1.2, 1.3]]


def test_time_counts_the_steps_between_rows(run):
    assert plot.minutes(plot.read(run)[1]).tolist() == [0.5, 2.5]       # 10 steps of 3 s, then 20 of 6 s


def test_curves_of_blocks_are_the_logs(run):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    axis, columns = pyplot.figure().add_subplot(), plot.read(run)[1]
    plot.draw_blocks(axis, columns, {"residual_scale": "-", "hidden_states_scale": ":"})
    drawn = [line.get_ydata().tolist() for line in axis.lines]
    assert np.allclose(drawn, [[1.05, 1.1], [1.25, 1.3], [0.85, 0.8], [0.65, 0.6]])
    assert len({line.get_marker() for line in axis.lines}) == 2         # blocks differ without colour too


def test_run_without_residual_scaling_or_validation_is_drawn(run, tmp_path):
    pytest.importorskip("matplotlib")
    row = "10,100,one,0.1,3.5,,,1,5,20,n/a,1.5,0.9,0.1,3 5 2|9 1 0,1.5|2.5,,"
    (run / "log.csv").write_text("\n".join(["# {}", HEAD, row]) + "\n")
    plot.draw([run], tmp_path / "a.png")
    assert plot.by_block(plot.read(run)[1]["residual_scale"]) is None


@pytest.mark.slow
@pytest.mark.parametrize("ending, start", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_picture_of_one_run_and_of_several(run, tmp_path, ending, start):
    pytest.importorskip("matplotlib")
    for runs in ([run], [run, run]):
        file = tmp_path / f"{len(runs)}.{ending}"
        plot.draw(runs, file)
        assert file.read_bytes().startswith(start) and file.stat().st_size > 10_000


def test_half_a_row_is_left_out_and_a_damaged_log_is_named(run):
    whole, log = plot.read(run)[1], run / "log.csv"
    text = log.read_text()
    log.write_text(text + "40,300,two,0.0")
    assert str(plot.read(run)[1]) == str(whole)
    for damage in (text.replace("0.05", "x"), text.replace("# {", "# "), text.replace("3.5", "\xff")):
        log.write_text(damage, encoding="latin-1")
        with pytest.raises(ValueError, match="log.csv is damaged"):
            plot.read(run)
    log.write_text("")
    with pytest.raises(ValueError, match="no row yet"):
        plot.read(run)


def test_folder_without_a_log_is_refused(tmp_path):
    with pytest.raises(ValueError, match="log.csv"):
        plot.main([str(tmp_path)])


def test_a_folder_is_no_picture(run, tmp_path):
    with pytest.raises(ValueError, match="is a folder: name a file in it"):
        plot.main([str(run), "--out", str(tmp_path)])
