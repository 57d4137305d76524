"""What a run writes: log.csv (a row a logged step), events.jsonl (what happened, a JSON line each), the
screen.

Every picture of plot.py is drawn from log.csv alone. Its first line is a comment: a JSON record of what made
the log (versions, device, commit, configuration). Values by block are joined by "|", within a block by
blanks:

    step, tokens, phase, lr                          at the end of the step; phase by name
    train_loss, val_loss (nats a token), val_bits_per_byte, grad_norm (before clipping)
    step_ms, tokens_per_s, mfu                       model FLOPs utilisation of the active parameters
    load_max, load_entropy, skip_share, load         router.balance_health; tokens by block and class
    residual_rms                                     of the residual stream behind each block, on one row
    residual_scale, hidden_states_scale              means of residual scaling's vectors: attention's, MoE's

Run: `python log.py`.
"""

import csv
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

import guard
from cards import CARDS
from router import balance_health
from tokenizer import write_atomically


class Log:
    """A run's files and the screen; only rank 0 writes."""

    def __init__(self, out, rank, header, step=0):
        """header: the record for the comment. step: see `rewind`."""
        self.out, self.rank, self.header, self.table = out, rank, header, out / "log.csv"
        self.rewind(step)

    def rewind(self, step):
        """Drops the rows past this step: they will be made again."""
        if self.rank == 0:
            old = self.table.read_text(errors="replace") if self.table.exists() else ""
            whole = old[:old.rfind("\n") + 1].splitlines()      # a killed run may have left half a row
            number = lambda row: int(n) if (n := row.split(",")[0]).isdecimal() else step + 1
            kept = [row for row in whole if row.startswith("step,") or number(row) <= step]
            comment = next((row for row in whole if row.startswith("# ")), f"# {json.dumps(self.header)}")
            write_atomically(self.table, "\n".join([comment, *kept, ""]).encode())
            self.titled = bool(kept)

    def say(self, text):
        if self.rank == 0:
            tqdm.write(text)

    def event(self, what, **facts):
        if self.rank == 0:
            record = {"time": round(time.time(), 3), "rank": 0, "what": what, **facts}
            guard.append(self.out / "events.jsonl", record)

    def row(self, row):
        if self.rank == 0:
            with open(self.table, "a", newline="") as file:
                writer = csv.DictWriter(file, row, lineterminator="\n")
                if not self.titled:
                    writer.writeheader()
                    self.titled = True
                writer.writerow(row)


def describe(cfg, device):
    """What made a log: versions, device, commit, configuration."""
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True,
                         cwd=Path(__file__).parent)
    name = (torch.cuda.get_device_name(device) if device.type == "cuda"
            else f"cpu, {torch.get_num_threads()} threads")
    return {"python": sys.version.split()[0], "torch": torch.__version__, "device": name,
            "commit": git.stdout.strip() or None, "config": dataclasses.asdict(cfg)}


# -------------------------------------------------------------------------------- what the columns hold

def balance_columns(load_LC, num_experts):
    """The columns of one step's loads (blocks, classes)."""
    health = balance_health(load_LC, num_experts)
    return {"load_max": f"{health['load_max'].max():.3f}", "load_entropy": f"{health['entropy'].mean():.4f}",
            "skip_share": f"{health['skip'].mean():.4f}", "load": by_block(load_LC.int().tolist(), "{}")}


def residual_columns(model, tokens):
    """The columns of the residual stream, for tokens (1, T). It costs one forward of one row."""
    pairs = [(b.post_attention_residual_scale, b.post_mlp_residual_scale) for b in model.blocks]
    means = lambda name: by_block(
        [[getattr(scaling, name).mean().item() for scaling in pair] for pair in pairs], "{:.4f}")
    learned = model.config.residual_scaling
    return {"residual_rms": by_block([[rms] for rms in residual_rms(model, tokens)], "{:.4g}"),
            "residual_scale": means("residual_scale") if learned else "",
            "hidden_states_scale": means("hidden_states_scale") if learned else ""}


def by_block(rows, form):
    return "|".join(" ".join(form.format(value) for value in row) for row in rows)


@torch.no_grad()
def residual_rms(model, tokens):
    """Root mean square of the residual stream behind each block, for tokens (1, T): a list of floats."""
    seen = []
    hooks = [b.register_forward_hook(lambda block, given, out: seen.append(out[0].square().mean().sqrt()))
             for b in model.blocks]
    try:
        model.hidden(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return [rms.item() for rms in seen]


def flops_per_token(model, seq_len):
    """Forward and backward: 6 for each active weight (the head counts, the lookup does not), and attention's
    products."""
    c = model.config
    attention = 6 * c.num_blocks * c.num_heads * c.head_dim * seq_len       # causal: half of 12
    return 6 * model.num_parameters(active=True) + attention


def mfu(flops_per_second, device, world):
    """Model FLOPs utilisation as text, "n/a" on a device whose peak is not listed."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = next((card.peak for key, card in CARDS.items() if key in name), None)
    return f"{flops_per_second / world / peak:.1%}" if peak else "n/a"


def demonstrate():
    """The columns of an untrained tiny model."""
    from model import ZAYA, ZAYAConfig
    torch.manual_seed(0)
    model = ZAYA(ZAYAConfig.preset("tiny"))
    tokens = torch.randint(0, 256, (1, 64))
    model(tokens)
    load = torch.stack([b.mlp.gate.load for b in model.blocks])
    columns = balance_columns(load, model.config.num_experts) | residual_columns(model, tokens)
    for name, value in columns.items():
        print(f"{name:20} {value}")
    print(f"{flops_per_token(model, 64):,} FLOPs a token")


if __name__ == "__main__":
    demonstrate()
