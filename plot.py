"""Pictures of a run, or of several in one, from their log.csv alone.

    python plot.py runs/001                     writes runs/001/plot.png
    python plot.py runs/001 runs/002 --out both.svg

Panels: loss against tokens and against time; the schedule, with the phases; how even the experts are (busiest
expert over the mean in the worst block; entropy of the shares over log E, mean of the blocks); step time. One
run alone also gets what differs by block: where its tokens went, the RMS of the residual stream, and residual
scaling's mean factors. Time is that of the training steps; validation and saving are not in it.

Runs and blocks differ by line style and marker as well as by colour, so a picture works printed in grey; it
brings its white background along, so it works on a dark page. Needs matplotlib.
"""

import argparse
import csv
import json
from pathlib import Path

import numpy as np

import config
from model import require

STYLES, MARKERS = ("-", "--", ":", "-."), "os^Dv<>P"
TEXT = ("phase", "mfu", "load", "residual_rms", "residual_scale", "hidden_states_scale")


def read(run):
    """(header dict, {column: list}) of a run's log.csv; numbers as floats, empty cells as NaN. Raises
    ValueError if there is none."""
    file = Path(run) / "log.csv"
    require(file.exists(), f"{run} holds no log.csv: name the folder of a run, as in runs/001")
    text = file.read_text(errors="replace")
    # Without a last row that is being written.
    comment, *lines = text[:text.rfind("\n") + 1].splitlines() or [""]
    rows = list(csv.DictReader(lines))
    require(rows, f"{file} has no row yet")
    number = lambda text: float(text) if text else float("nan")
    try:
        columns = {k: [r[k] if k in TEXT else number(r[k]) for r in rows] for k in rows[0]}
        return json.loads(comment[2:]), columns
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from None


def by_block(cells):
    """Cells such as "1 2|3 4" as an array (steps, blocks, 2); None where the run does not have them."""
    if not cells[0]:
        return None
    return np.array([[[float(n) for n in block.split()] for block in cell.split("|")] for cell in cells])


def loads(columns):
    """Share of each block's tokens by class: (steps, blocks, classes)."""
    counts = by_block(columns["load"])
    return counts / counts.sum(-1, keepdims=True).clip(1)


def minutes(columns):
    """Training time at each row: the step time of a row stands for all steps since the row before."""
    steps = np.diff(columns["step"], prepend=0)
    return np.cumsum(steps * np.array(columns["step_ms"])) / 60e3


def draw_loss(axis, x, columns, name, style, marker):
    """Training loss thin, validation loss with markers, in bits a byte (nats a token before a validation)."""
    val, train = np.array(columns["val_bits_per_byte"]), np.array(columns["train_loss"])
    seen = ~np.isnan(val)
    scale = (val / np.array(columns["val_loss"]))[seen][0] if seen.any() else 1.0
    axis.plot(x, train * scale, style, color="tab:gray", linewidth=0.9, label=f"{name}, training")
    axis.plot(x[seen], val[seen], style, marker=marker, markersize=4, label=f"{name}, validation")
    axis.set(ylabel="bits a byte" if seen.any() else "nats a token")


def draw_run(panels, name, columns, style, marker):
    """One run's curves in the panels that runs share."""
    millions = np.array(columns["tokens"]) / 1e6
    draw_loss(panels["loss"], millions, columns, name, style, marker)
    draw_loss(panels["time"], minutes(columns), columns, name, style, marker)
    curves = {"rate": "lr", "max": "load_max", "entropy": "load_entropy", "step": "step_ms"}
    for panel, column in curves.items():
        panels[panel].plot(millions, columns[column], style, label=name)
    phases = columns["phase"]
    for i in [0] + [i for i in range(1, len(phases)) if phases[i] != phases[i - 1]]:
        x = millions[i - 1] if i else 0.0
        panels["rate"].axvline(x, color="tab:gray", linewidth=0.8, linestyle=":")
        panels["rate"].annotate(phases[i], (x, 0), (3, 3), textcoords="offset points", fontsize=8,
                                rotation=90)


def draw_loads(axis, figure, columns):
    """Heat map: a row for each class of each block, time to the right."""
    share = loads(columns)
    steps, blocks, classes = share.shape
    edges = np.append(0, columns["tokens"]) / 1e6
    image = axis.pcolormesh(edges, range(blocks * classes + 1), share.reshape(steps, -1).T * (classes - 1),
                            cmap="cividis", vmin=0, vmax=3)
    for b in range(1, blocks):
        axis.axhline(b * classes, color="white", linewidth=1.5)
    axis.set_yticks([(b + 0.5) * classes for b in range(blocks)], [f"block {b}" for b in range(blocks)])
    axis.invert_yaxis()
    figure.colorbar(image, ax=axis, label="over an even share")


def draw_blocks(axis, columns, wanted):
    """One curve a block and column, the blocks with their own markers. wanted: {column: line style}."""
    millions = np.array(columns["tokens"]) / 1e6
    for column, style in wanted.items():
        values = by_block(columns.get(column, [""]))
        for b in range(0 if values is None else values.shape[1]):
            axis.plot(millions, values[:, b].mean(-1), style, color=f"C{b % 10}",
                      label=f"block {b}" if column == "residual_rms" else None,
                      marker=MARKERS[b % len(MARKERS)], markevery=max(1, len(millions) // 8), markersize=4)


TITLES = {
    "loss": "loss against tokens", "time": "loss against time", "rate": "learning rate and phases",
    "max": "busiest expert over the mean, worst block", "step": "step time",
    "entropy": "entropy of the experts' shares (1 is even)", "rms": "RMS of the residual stream",
    "scale": "mean residual scales (dotted: sublayer; blocks as left)",
    "heat": "load of every class (skip class last)"}


def pyplot():
    """matplotlib.pyplot, drawing to files. ValueError where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("pictures need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def draw(runs, out):
    """One picture of these run folders, written to out (.png or .svg)."""
    plt = pyplot()
    read_runs = [(Path(run).name, read(run)[1]) for run in runs]
    names = list(TITLES) if len(runs) == 1 else list(TITLES)[:6]
    figure, axes = plt.subplots(len(names) // 3, 3, figsize=(14, 3.4 * len(names) // 3), layout="constrained",
                                facecolor="white")
    panels = dict(zip(names, axes.flat))
    for i, (name, columns) in enumerate(read_runs):
        draw_run(panels, name, columns, STYLES[i % len(STYLES)], MARKERS[i % len(MARKERS)])
    if len(runs) == 1:
        columns = read_runs[0][1]
        draw_loads(panels["heat"], figure, columns)
        draw_blocks(panels["rms"], columns, {"residual_rms": "-"})
        draw_blocks(panels["scale"], columns, {"residual_scale": "-", "hidden_states_scale": ":"})
    finish(panels)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def finish(panels):
    """Titles, units, grids and legends."""
    for name, axis in panels.items():
        axis.set_title(TITLES[name], fontsize=11)
        axis.set_xlabel("minutes of training steps" if name == "time" else "tokens (millions)")
        if name != "heat":
            axis.grid(alpha=0.3)
        if not axis.get_legend() and axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize=8)
    panels["max"].set_yscale("log", base=2)
    panels["max"].yaxis.set_major_formatter("{x:g}")
    panels["step"].set(ylabel="ms", ylim=(0, None))


def main(argv):
    parser = config.Parser(prog="plot.py", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of runs")
    parser.add_argument("--out", help="file to write, .png or .svg (default: plot.png in the first run)")
    args = parser.parse_args(argv)
    out = Path(args.out or Path(args.runs[0]) / "plot.png")
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder: name a file in it, .png or .svg")
    draw(args.runs, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    config.run(main)
