"""What a run trains through: its configuration and its recipe, a list of phases.

A phase has its own number of tokens, context length, RoPE base, learning rates and mix of sources (ZAYA1,
arXiv 2511.17127; ZAYA1-8B, 2605.05365). Two recipes: "laptop" makes a readable model in minutes, "zaya1" is
the published one, with a comment at everything that is not published. `plan` turns recipe and flags into
numbers of steps:

    plan(TrainConfig(tokens=1e6))                        [(first step, steps, Phase), ...]

    python recipe.py                                     both recipes as tables
"""

import dataclasses
import math
from dataclasses import dataclass

import torch

import plan as planner
from config import option
from model import PRESETS, ZAYA, ZAYAConfig, require


@dataclass
class TrainConfig:
    """A run. Fields that a recipe also sets (tokens, seq_len, lr) scale all its phases alike."""

    recipe: str = option("laptop", "phases to train through", ("laptop", "zaya1"))
    data: str = option("stdlib", "text file, folder of text or of token shards, or stdlib (the running "
                       "Python's library); several sources as name=PATH,name=PATH, with the names of the "
                       "recipe's mix")
    tokenizer: str | None = option(None, "bytes, bpe:SIZE, bpe:PATH, gpt2, gemma:PATH/tokenizer.json; "
                                   "none: bpe:1024 for text")
    out: str | None = option(None, "folder of the run (config.json, log.csv, events.jsonl, checkpoints/, "
                             "tokenizer.json); none: the next number under runs/")
    resume: str | None = option(None, "auto: go on from the newest whole checkpoint of --out, or start "
                                "if there is none", ("auto",))
    init: str | None = option(None, "weights to start from: an exported .pt or a run; the optimizer starts "
                              "fresh")
    tokens: float | None = option(None, "tokens of the whole run; none: the recipe's")
    seq_len: int | None = option(None, "context of the first phase in tokens; none: the recipe's")
    lr: float | None = option(None, "peak learning rate of the first phase; none: the recipe's")
    batch_tokens: int | None = option(None, "tokens of one optimizer step, over all ranks; none: the "
                                     "recipe's")
    micro_tokens: int = option(4096, "most tokens that one rank computes at once; the rest of a batch is "
                               "accumulated")
    optimizer: str = option("muon", "muon (with AdamW for what is no matrix) or adamw for all",
                            ("muon", "adamw"))
    weight_decay: float = option(0.1, "decoupled decay of matrices, embedding and convolutions")
    ns_steps: int = option(5, "Newton-Schulz steps of Muon")
    grad_clip: float = option(1.0, "largest gradient norm")
    balance_lr: float = option(0.02, "learning rate of the balancing biases, following the schedule; 0: no "
                               "balancing")
    seed: int = option(1337, "of the initial weights and of the order of the data")
    eval_every: int = option(100, "steps between validations; 0: only at the end")
    eval_tokens: int = option(32_768, "tokens of a validation while training; the last one reads four times "
                              "as many")
    sample_every: int = option(200, "steps between samples on the screen; 0: only at the end")
    save_every: int = option(200, "steps between checkpoints; 0: only at the end")
    keep: int = option(2, "newest checkpoints to keep, beside the best")
    log_every: int = option(10, "steps between rows of log.csv and lines on the screen")
    device: str = option("auto", "auto, cpu or cuda (ROCm's GPUs are called cuda too)",
                         ("auto", "cpu", "cuda"))
    dtype: str = option("auto", "compute type; auto: bfloat16 on a GPU, float32 on a CPU",
                        ("auto", "float32", "bfloat16"))
    compile: str = option("auto", "torch.compile; auto: if a compiler works and the run is long",
                          ("auto", "on", "off"))
    kernels: str = option("auto", "expert dispatch: HIP kernels or plain torch", ("auto", "hip", "plain"))
    recompute: bool = option(False, "activation checkpointing: less memory, a third more compute, the same "
                             "result")
    dry_run: bool = option(False, "print the plan and stop")
    preset: str = option("laptop", "shape of the model; single fields of it are flags too", tuple(PRESETS))
    model: ZAYAConfig | None = option(None, None)       # the shape itself; none: the preset

    def __post_init__(self):
        least = dict(eval_tokens=1, micro_tokens=1, ns_steps=1, keep=1, log_every=1, eval_every=0,
                     save_every=0, sample_every=0, seed=0, balance_lr=0, weight_decay=0)
        for name, bound in least.items():
            value = getattr(self, name)
            require(value >= bound, f"{flag_of(name)} {value}: it must be at least {bound}")
        for name in ("tokens", "seq_len", "lr", "batch_tokens", "grad_clip"):
            value = getattr(self, name)
            require(value is None or 0 < value < math.inf,
                    f"{flag_of(name)} {value}: it must be a number above 0")
        require(self.seed < 2**63, f"--seed {self.seed}: it must be below 2^63")


def flag_of(name):
    return "--" + name.replace("_", "-")


@dataclass
class Phase:
    """A part of a run. tokens: of the phase; batch_tokens: of one step; seq_len: the context. The learning
    rate goes by cosine from lr to lr_end after `warmup`, a fraction of the phase. mix: {source: weight}."""
    name: str
    tokens: float
    batch_tokens: int
    seq_len: int
    rope_theta: float
    lr: float
    lr_end: float
    warmup: float
    mix: dict


PUBLISHED_RANKS = 1024      # 128 nodes of 8 MI300X
ANY = {"text": 1.0}
RECIPES = {
    # The published form in minutes: two phases at a short context, then a longer one with a larger RoPE base.
    "laptop": [
        Phase("pretrain 1", 1.1e6, 4096, 128, 1e4, 0.024, 0.016, 0.05, ANY),
        Phase("pretrain 2", 0.5e6, 4096, 128, 1e4, 0.016, 0.006, 0.0, ANY),
        Phase("midtrain", 0.4e6, 4096, 256, 4e4, 0.006, 0.0006, 0.0, ANY)],
    # Published: tokens, contexts, RoPE bases, 6e-4 to 2e-4 in phase 1, 4096 sequences a step, the midtraining
    # mix. Open, hence ours: warm-up, the later rates, the batch of midtraining (one sequence for each of
    # 1,024 GPUs: it has no context parallelism here), and the weights inside phases 1 and 2.
    "zaya1": [
        Phase("pretrain 1", 8e12, 4096 * 4096, 4096, 1e4, 6e-4, 2e-4, 0.001,
              {"web": 0.6, "code": 0.2, "math": 0.1, "multilingual": 0.1}),
        Phase("pretrain 2", 4e12, 4096 * 4096, 4096, 1e4, 2e-4, 1e-4, 0.0,
              {"web": 0.3, "code": 0.25, "math": 0.2, "reasoning": 0.15, "instruction": 0.1}),
        Phase("midtrain", 1.2e12, 1024 * 32768, 32768, 1e6, 1e-4, 1e-5, 0.0,
              {"reasoning": 0.861, "web": 0.057, "code": 0.03, "math": 0.03, "instruction": 0.014,
               "long": 0.008})],
}


def plan(cfg):
    """Phases of a run, the flags applied: [(first step, number of steps, Phase)].

    tokens, batch_tokens, seq_len and lr of the flags scale every phase alike. ValueError for a batch that
    does not divide or a run without a step.
    """
    recipe = RECIPES[cfg.recipe]
    first, total = recipe[0], sum(p.tokens for p in recipe)
    scale = lambda flag, own: flag / own if flag else 1
    tokens, rate = scale(cfg.tokens, total), scale(cfg.lr, first.lr)
    batches, length = scale(cfg.batch_tokens, first.batch_tokens), scale(cfg.seq_len, first.seq_len)
    phases, start, due = [], 0, 0
    for p in recipe:
        batch, seq_len = max(1, round(p.batch_tokens * batches)), max(1, round(p.seq_len * length))
        due += p.tokens * tokens
        steps = round(due / batch)  # from all that is due so far: rounding phase by phase would lose steps
        due -= steps * batch
        require(batch % seq_len == 0,
                f"a batch of {batch} tokens is no multiple of the context {seq_len} of phase {p.name!r}: "
                f"take --batch-tokens {max(1, batch // seq_len) * seq_len}")
        if steps:
            phase = dataclasses.replace(p, tokens=steps * batch, batch_tokens=batch, seq_len=seq_len,
                                        lr=p.lr * rate, lr_end=p.lr_end * rate)
            phases.append((start, steps, phase))
            start += steps
    require(phases, f"--tokens {cfg.tokens} is less than one step of {first.batch_tokens * batches:g} tokens")
    return phases


def micro_steps(phase, world, micro_tokens):
    """(micro-steps, sequences in each) of one rank: phase.batch_tokens a step for any number of ranks."""
    seq_len, sequences = phase.seq_len, phase.batch_tokens // phase.seq_len
    require(sequences % world == 0, f"{sequences} sequences a step do not divide among {world} ranks: "
                                    f"take --batch-tokens {math.ceil(sequences / world) * world * seq_len}")
    own = sequences // world
    size = next(m for m in range(own, 0, -1) if own % m == 0 and (m * seq_len <= micro_tokens or m == 1))
    return own // size, size


def print_plan(cfg, phases, world):
    """What --dry-run shows: phases, steps, parameters, memory of one MI300X under plain data parallelism."""
    with torch.device("meta"):
        model = ZAYA(cfg.model)
    total, active = model.num_parameters(), model.num_parameters(active=True, embedding=False)
    print(f"model   {total:,} parameters, {active:,} active for a token (without the embedding); "
          f"{world:,} ranks")
    for first, steps, p in phases:
        accumulate, size = micro_steps(p, world, cfg.micro_tokens)
        print(f"{p.name}: {p.tokens:.4g} tokens, steps {first:,} to {first + steps:,} of {p.batch_tokens:,} "
              f"tokens")
        print(f"        context {p.seq_len:,}, RoPE base {p.rope_theta:g}, lr {p.lr:g} to {p.lr_end:g}, "
              f"a rank takes {accumulate} micro-steps of {size} sequences (--micro-tokens)")
        print(f"        mix {', '.join(f'{name} {share:g}' for name, share in p.mix.items())}")
        print("        " + memory(cfg, p, size, world))


def memory(cfg, phase, sequences, world):
    """One line: what an MI300X would hold in this phase, by the planner's formulas."""
    own = planner.PlanConfig(gpus=world, seq_len=phase.seq_len, batch_tokens=phase.batch_tokens,
                             micro_batch=sequences, optimizer=cfg.optimizer, recompute=cfg.recompute)
    sheet = planner.plan(own, cfg.model)
    parts = ("weights", "copies", "gradients", "optimizer_state", "optimizer_scratch", "activations",
             "logits", "used", "left")
    shown = ", ".join(f"{name.replace('_', ' ')} {sheet[name] / 1e9:.3g}" for name in parts)
    advice = "fewer --micro-tokens" if cfg.recompute else "--recompute"
    return f"GB of 192: {shown}" + (f"; does not fit: {advice}" if sheet["left"] < 0 else "")


if __name__ == "__main__":
    for name, world in (("laptop", 1), ("zaya1", PUBLISHED_RANKS)):
        config = TrainConfig(recipe=name, preset={"zaya1": "zaya1_8b"}.get(name, name))
        config.model = ZAYAConfig.preset(config.preset)
        print(f"recipe {name}")
        print_plan(config, plan(config), world)
