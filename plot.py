"""Pictures of a run, or of several in one, from their log.csv alone.

    python plot.py runs/001                     writes runs/001/plot.png
    python plot.py runs/001 runs/002 --out both.svg

Panels: loss against tokens; how even the experts are (busiest over mean, entropy); learning rate with the
phases; and, for one run, where each block's tokens went over time. Needs matplotlib.
"""

import argparse
import csv
import json
from pathlib import Path

import numpy as np

import config
from model import require

STYLES = ("-", "--", ":", "-.")     # runs differ by line style too, so that the picture works without colour


def read(run):
    """(header dict, {column: list}) of a run's log.csv; numbers as floats, empty cells as NaN. Raises
    ValueError if there is none."""
    file = Path(run) / "log.csv"
    require(file.exists(), f"{run} holds no log.csv: name the folder of a run, as in runs/001")
    comment, *lines = file.read_text().splitlines()
    rows = list(csv.DictReader(lines))
    require(rows, f"{file} has no row yet")
    number = lambda text: float(text) if text else float("nan")
    text_columns = ("phase", "mfu", "load")
    return json.loads(comment[2:]), {
        k: [r[k] if k in text_columns else number(r[k]) for r in rows] for k in rows[0]
    }


def loads(columns):
    """Share of each block's tokens by class: (steps, blocks, classes)."""
    counts = np.array(
        [[[int(n) for n in block.split()] for block in cell.split("|")] for cell in columns["load"]],
        dtype=float,
    )
    return counts / counts.sum(-1, keepdims=True).clip(1)


def draw_curves(axes, name, columns, style):
    loss, even, rate = axes
    millions = np.array(columns["tokens"]) / 1e6
    val = np.array(columns["val_bits_per_byte"])
    seen = ~np.isnan(val)
    per_nat = (val / np.array(columns["val_loss"]))[seen]
    if len(per_nat):
        loss.plot(
            millions,
            np.array(columns["train_loss"]) * per_nat[0],
            style,
            color="tab:gray",
            linewidth=0.8,
            label=f"{name}, training",
        )
    loss.plot(
        millions[seen],
        val[seen],
        style,
        color="tab:blue",
        marker="o",
        markersize=3,
        label=f"{name}, validation",
    )
    even.plot(
        millions, columns["load_max"], style, color="tab:red", label=f"{name}, busiest expert over the mean"
    )
    even.plot(
        millions,
        columns["load_entropy"],
        style,
        color="tab:green",
        label=f"{name}, entropy of the shares (1 is even)",
    )
    rate.plot(millions, columns["lr"], style, color="tab:blue", label=name)
    phases = columns["phase"]
    for i in range(1, len(phases)):
        if phases[i] != phases[i - 1]:
            for axis in axes:
                axis.axvline(millions[i - 1], color="tab:gray", linewidth=0.6, linestyle=":")


def draw_loads(axis, figure, columns):
    """Heat map: a row for each expert of each block, time to the right."""
    share = loads(columns)
    steps, blocks, classes = share.shape
    image = axis.imshow(
        share.reshape(steps, -1).T * (classes - 1),
        aspect="auto",
        cmap="viridis",
        vmin=0,
        vmax=3,
        interpolation="nearest",
        extent=(0, columns["tokens"][-1] / 1e6, blocks * classes, 0),
    )
    for b in range(1, blocks):
        axis.axhline(b * classes, color="white", linewidth=1)
    axis.set_yticks([(b + 0.5) * classes for b in range(blocks)], [f"block {b}" for b in range(blocks)])
    axis.set(
        xlabel="tokens (millions)", title="load of every class (the skip class last), over an even share"
    )
    figure.colorbar(image, ax=axis)


def draw(runs, out):
    """One picture of these run folders, written to out (.png or .svg)."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("pictures need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    read_runs = {Path(run).name: read(run)[1] for run in runs}
    figure, axes = plt.subplots(2, 2, figsize=(12, 7.5), layout="constrained", facecolor="white")
    loss, even, rate, heat = axes.flat
    for (name, columns), style in zip(read_runs.items(), STYLES * len(runs)):
        draw_curves((loss, even, rate), name, columns, style)
    loss.set(ylabel="bits a byte", title="loss")
    even.set(title="balance of the experts, worst block", yscale="log")
    rate.set(ylabel="learning rate", title="schedule; dotted lines part the phases")
    for axis in (loss, even, rate):
        axis.set_xlabel("tokens (millions)")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    if len(read_runs) == 1:
        draw_loads(heat, figure, next(iter(read_runs.values())))
    else:
        heat.axis("off")
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main(argv):
    parser = argparse.ArgumentParser(
        prog="plot.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", help="folders of runs")
    parser.add_argument("--out", help="file to write, .png or .svg (default: plot.png in the first run)")
    args = parser.parse_args(argv)
    out = args.out or str(Path(args.runs[0]) / "plot.png")
    draw(args.runs, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    config.run(main)
