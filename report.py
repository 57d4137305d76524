"""A plan for people: its figures with units, what bounds the step, and the sizing rules of MI300X.

The rules are those by which the makers of ZAYA1 chose its dimensions (arXiv 2511.17127): tile-friendly sides,
products large enough to reach their rate, rows enough for every expert, whole nodes. Each says why, and what
to change. The published shape passes them.

Run: `python report.py` (the published run's rules); plan.py prints the whole.
"""

import dataclasses
import math

from sheet import SHEET, bound, figures


def report(cfg, config, p, given):
    """The verdict, then the sheet as text, with rules and the bound; formulas where cfg.explain."""
    lines = verdict(cfg, config, p)
    for row in SHEET:
        if isinstance(row, str):
            lines.append(f"\n{row}")
            continue
        name, unit, formula, meaning = row
        lines.append(f"  {name:26}{show(p[name], unit):>22}  {meaning}")
        if cfg.explain:
            lines.append(f"  {'':26}{'':>22}  = {'measured on this machine' if name in given else formula}")
    name, share = bound(p)
    lines.append(f"\nThe planned step of {show(p['planned_s'], 's')} is bound by {name}, {share:.0%} of it. "
                 f"Micro-batch {p['micro_batch']} of {cfg.own_sequences} sequences a GPU.")
    if cfg.step_seconds:
        lines.append(f"Of the given step of {show(p['step_s'], 's')}, "
                     f"{p['unexplained_s'] / p['step_s']:.0%} lie outside the planned "
                     f"terms: its products reach {p['f_step'] * p['tokens_per_s_gpu'] / p['card'].peak:.1%} "
                     f"of the peak over the step.")
    lines.append(f"\nSizing rules ({cfg.machine or cfg.card_name})")
    for good, what, value, why, change in rules(cfg, config, p):
        lines.append(f"  {'ok    ' if good else 'CHANGE'}  {what} {value}: {why}"
                     + ("" if good else f". Take {change}"))
    return "\n".join(lines)


def verdict(cfg, config, p):
    """What a reader asks first, a line each: does it fit, how long, is the shape good for the card."""
    fits = (f"fits, a GPU has {show(p['left'], 'B')} of {show(p['memory'], 'B')} left" if p["left"] >= 0
            else f"does NOT fit, a GPU lacks {show(-p['left'], 'B')} of {show(p['used'], 'B')}")
    change = [what.split(",")[0] for good, what, *_ in rules(cfg, config, p) if not good]
    return [f"{show(p['total'], '')} parameters on {cfg.gpus:,} x {cfg.machine or cfg.card_name}: {fits}",
            f"a step of {show(p['step_s'], 's')}, {show(p['tokens_per_s'], 'tokens/s')}; "
            f"{cfg.tokens:.4g} tokens take {show(p['days'], 'days')}",
            "sizing rules, at the end: " + (f"change {', '.join(change)}" if change else "all kept")]


def show(value, unit):
    """A figure for people: 3 to 4 digits, with its unit; whole counts in full."""
    if value is None or value == math.inf:
        return "n/a" if value is None else "no limit"
    if unit in ("", "tokens", "sequences") and abs(value) < 1e15:
        return f"{value:,.0f} {unit}".strip() if value == int(value) else f"{value:,.4g} {unit}".strip()
    if unit == "s":
        return f"{value * 1e3:,.4g} ms" if 0 < abs(value) < 1 else f"{value:,.4g} s"
    if unit in ("%", "days", "MWh", "x"):
        return f"{value:,.4g} {unit}"
    if unit == "1/s":
        return f"{value:,.0f} /s"
    power = min(max(int(math.log10(abs(value) or 1) // 3), 0), 6)
    return f"{value / 1000**power:,.4g} {' kMGTPE'[power].strip()}{unit}"


def as_json(cfg, config, p, given):
    """The figures, the bound and the rules as plain types."""
    found = {name: dict(value=None if p[name] == math.inf else p[name], unit=unit,
                        formula="measured" if name in given else formula, meaning=meaning)
             for name, unit, formula, meaning in figures()}
    checks = [dict(zip(("passes", "what", "value", "why", "change"), row)) for row in rules(cfg, config, p)]
    return dict(figures=found, bound=bound(p)[0], rules=checks, plan=dataclasses.asdict(cfg),
                model=dataclasses.asdict(config))


def rules(cfg, config, p):
    """Checks of a shape against how MI300X behaves: list of (passes, what, value, why, what to change)."""
    c, card = config, p["card"]
    rows, tile = p["N"] * c.top_k / c.num_experts, 256
    products = block_products(p)
    big = card.saturating and sum(f for f in products if f >= card.saturating)
    big = card.saturating and round(100 * big / sum(products))
    units = card.units or 1
    tiles = c.num_experts * math.ceil(rows / tile) * math.ceil(2 * c.expert_hidden_size / tile)
    filled = tiles / (math.ceil(tiles / units) * units)
    query = c.num_heads * c.head_dim
    narrowest = min(c.hidden_size, c.expert_hidden_size, query)
    up = lambda value, of: math.ceil(value / of) * of
    return [
        (c.hidden_size % 256 == 0, "hidden_size", c.hidden_size,
         "is a side of every product: whole tiles of 256", f"--hidden-size {up(c.hidden_size, 256)}"),
        (c.expert_hidden_size % 128 == 0, "expert_hidden_size", c.expert_hidden_size,
         "gate and up are then whole tiles", f"--expert-hidden-size {up(c.expert_hidden_size, 128)}"),
        (c.head_dim % 64 == 0, "head_dim", c.head_dim,
         "attention kernels work on 64 channels, a wavefront, at a time", f"--head-dim {up(c.head_dim, 64)}"),
        (c.vocab_size % 64 == 0, "vocab_size", c.vocab_size,
         "the widest product; odd widths lose its fast path", f"--vocab-size {up(c.vocab_size, 64)}"),
        (query % 256 == 0, "query channels", query,
         "rows of q_proj, columns of o_proj: whole tiles", f"num_heads * head_dim = {up(query, 256)}"),
        (narrowest >= 1024, "shortest contraction", narrowest,
         "below 1024 contracted channels a product does not reach its rate at any size", "a wider model"),
        (rows >= tile, "rows of an expert", round(rows), "they must fill a tile of 256, or it is wasted",
         f"--micro-batch of at least {math.ceil(tile * c.num_experts / c.top_k / cfg.seq_len)}"),
        (big is None or big >= 50, "work in saturated products, %", "n/a" if big is None else big,
         "a product reaches its rate from about 200 GFLOP: half of a block's work should lie in such",
         "a larger --micro-batch or a wider model"),
        (card.units is None or filled >= 0.75, "compute units filled by gate and up, %", round(100 * filled),
         f"{tiles:,} tiles of 256 x 256 run on {units} units in whole waves",
         "another --micro-batch or --expert-hidden-size"),
        (cfg.gpus == 1 or not card.mesh or p["g"] == cfg.gpus_per_node, "GPUs of a node", p["g"],
         "bandwidth inside a node grows with (g - 1) links: use all or do not split",
         f"--gpus {cfg.gpus_per_node}, or 1"),
        (p["left"] >= 0, "memory left, GB", round(p["left"] / 1e9, 1), "what training holds must fit",
         "a smaller --micro-batch, --recompute, or fewer experts"),
    ]


def block_products(p):
    """FLOPs of each forward product of one block at N tokens (a list), with a block's part of the head."""
    N, D, H, G, K, F, rows = *(p[letter] for letter in "NDHGKF"), p["N"] * p["k"]
    return [2 * N * D * (H + 2 * G) * K, 2 * N * D * H * K, 2 * N * (H + G) * K * K * p["taps"],
            4 * rows * D * F, 2 * rows * D * F, 2 * N * D * p["R"], 2 * N * D * p["V"] / p["L"]]


if __name__ == "__main__":
    from model import ZAYAConfig
    from plan import PlanConfig, plan
    cfg, config = PlanConfig(), ZAYAConfig.preset("zaya1_8b")
    print(report(cfg, config, plan(cfg, config), {}).split("\n\n")[-1])
