"""Which expert each token of a text goes to, and what kinds of tokens each expert likes.

    python router.py runs/001 --text model.py               the last block
    python router.py runs/001 --text model.py --block 0 --picture experts.png

On a terminal every token has the colour of its expert. With NO_COLOR set, or into a file, a line of marks
stands under each line of text instead: the expert's digit (then letter) under the first character of its
token, "-" for the skip class. The table counts tokens by kind: the part of an expert's tokens that are of the
kind, over the part that all tokens have; above 1 it likes them. The kinds are guessed from the token's
own text, so half a name is a name. With top_k above 1 the first choice is shown.

Glossary: piece the bytes of one token. Left out: keywords of other languages than Python. The picture needs
matplotlib.
"""

import argparse
import keyword
import os
import sys
from pathlib import Path

import numpy as np
import torch

import config
from model import require
from plot import pyplot
from speaker import open_run

KINDS = ("keyword", "name", "number", "punctuation", "space", "other")
MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"
PALETTE = (39, 208, 77, 199, 226, 51, 135, 250, 196, 34, 27, 220, 213, 45, 130, 159)    # of 256 colours


def kind(piece):
    """One of KINDS for the bytes of a token."""
    text = piece.decode("utf-8", "replace")
    word = text.strip()
    if not word:
        return "space"
    if keyword.iskeyword(word):
        return "keyword"
    if word.replace("_", "a").isalpha():
        return "name"
    if word.isdigit():
        return "number"
    return "other" if any(c.isalnum() or ord(c) > 127 for c in word) else "punctuation"


@torch.no_grad()
def routes(model, ids, block):
    """First choice of the router of `block` for each id (int64 array); the ids are read window by window."""
    chosen, window = [], model.config.max_seq_len
    gate = model.blocks[block].mlp.gate
    hook = gate.register_forward_hook(lambda gate, given, out: chosen.append(out[1][:, 0]))
    try:
        for start in range(0, len(ids), window):
            model.hidden(torch.tensor([ids[start:start + window]]))
    finally:
        hook.remove()
    return torch.cat(chosen).numpy()


def liking(kinds, experts, classes):
    """(counts (classes, KINDS), counts over what an indifferent expert would have; NaN for an idle one)."""
    counts = np.zeros((classes, len(KINDS)))
    np.add.at(counts, (experts, [KINDS.index(k) for k in kinds]), 1)
    expected = counts.sum(1, keepdims=True) * counts.sum(0) / max(len(kinds), 1)
    with np.errstate(invalid="ignore"):
        return counts, counts / expected


def mark(expert, num_experts):
    return "-" if expert == num_experts else MARKS[expert % len(MARKS)]


def coloured(pieces, experts, num_experts):
    """The text, each token in its expert's colour; the skip class is underlined."""
    code = lambda e: "4" if e == num_experts else f"38;5;{PALETTE[e % len(PALETTE)]}"
    paint = lambda text, e: "\n".join(f"\033[{code(e)}m{part}\033[0m" for part in text.split("\n"))
    legend = " ".join(paint(f"expert {mark(e, num_experts)}", e) for e in sorted(set(experts)))
    return legend + "\n" + "".join(paint(p.decode("utf-8", "replace"), e) for p, e in zip(pieces, experts))


def marked(pieces, experts, num_experts):
    """The text without colour: under each line its tokens' marks, each below its token's first character."""
    line, marks, out = "", "", []
    for piece, e in zip(pieces, experts):
        for i, part in enumerate(piece.decode("utf-8", "replace").replace("\t", " ").split("\n")):
            if i:
                out, line, marks = [*out, line, marks], "", ""
            if part:
                line, marks = line + part, marks + mark(e, num_experts) + " " * (len(part) - 1)
    return "\n".join([*out, line, marks])


def table(counts, ratio, num_experts):
    """Expert, its tokens, and how much it likes each kind."""
    lines = ["expert  tokens  " + "".join(f"{k:>12s}" for k in KINDS)]
    for e, (own, row) in enumerate(zip(counts, ratio)):
        cells = "".join(f"{'' if np.isnan(r) else format(r, '.2f'):>12s}" for r in row)
        lines.append(f"{mark(e, num_experts):>6s}  {own.sum():6.0f}  {cells}")
    total = "".join(f"{n:12.0f}" for n in counts.sum(0))
    return "\n".join([*lines, f"   all  {counts.sum():6.0f}  {total}"])


def picture(ratio, num_experts, title, out):
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 0.4 * len(ratio) + 1.5), layout="constrained", facecolor="white")
    image = axis.imshow(ratio, cmap="cividis", vmin=0, vmax=3, aspect="auto")
    axis.set_xticks(range(len(KINDS)), KINDS)
    names = [f"expert {mark(e, num_experts)}" if e < num_experts else "skip class" for e in range(len(ratio))]
    axis.set_yticks(range(len(ratio)), names)
    axis.set_title(title, fontsize=11)
    for e, k in np.argwhere(~np.isnan(ratio)):
        axis.text(k, e, f"{ratio[e, k]:.1f}", ha="center", va="center", fontsize=9,
                  color="white" if ratio[e, k] < 1.5 else "black")
    figure.colorbar(image, ax=axis, label="times as often as in the text")
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main(argv):
    parser = config.Parser(prog="router.py", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of a run of train.py")
    parser.add_argument("--text", required=True, help="file to read")
    parser.add_argument("--block", type=int, default=-1, help="block to watch (default: the last)")
    parser.add_argument("--show", type=int, default=400, help="tokens to print; the table counts all")
    parser.add_argument("--picture", help="file for the table as a picture, .png or .svg")
    args = parser.parse_args(argv)
    speaker = open_run(args.run, None, "cpu")
    model, E = speaker.model, speaker.model.config.num_experts
    require(-len(model.blocks) <= args.block < len(model.blocks),
            f"--block {args.block}: the model has {len(model.blocks)} blocks")
    ids = speaker.tokenizer.encode(Path(args.text).read_text(errors="replace"))
    require(ids, f"--text {args.text} is empty")
    pieces, block = [speaker.tokenizer.decode_bytes([i]) for i in ids], args.block % len(model.blocks)
    experts = routes(model, ids, block)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    show = coloured if colour else marked
    print(show(pieces[:args.show], experts[:args.show].tolist(), E))
    counts, ratio = liking([kind(p) for p in pieces], experts, model.config.num_classes)
    print(f"\nblock {block} of {speaker.name}; 1 is as often as in the whole text\n{table(counts, ratio, E)}")
    if args.picture:
        picture(ratio, E, f"what the experts of block {block} like", args.picture)
        print(f"wrote {args.picture}")


if __name__ == "__main__":
    config.run(main)
