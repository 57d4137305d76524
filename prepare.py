"""What a training run starts from, all of it checked before the first step: folder, sources, device, weights.

    run_folder       where it lives; never one that holds another run
    saved_config     with --resume: what it was started with, as defaults of the flags
    open_sources     the text or token shards of --data, and one stream of samples for each phase
    pick_device      device and compute type, by the flags and what the machine has
    check_memory     whether the model can fit at all
    build_model      the same initial weights on every rank, from the seed or from --init
    resolve_compile  whether torch.compile works here, and for which contexts it pays

Whatever cannot be trained ends in a ValueError of one line that says what is wrong and what to do.
Run: `python prepare.py`.
"""

import ctypes
import dataclasses
import os
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
import data
from model import ZAYA, ZAYAConfig, require
from recipe import TrainConfig, plan
from speaker import newest_run, read_run


# -------------------------------------------------------------------------------- the folder

def run_folder(cfg, rank, world):
    """The run's folder, made. Raises ValueError where another run would be lost."""
    found = [cfg.out]
    if rank == 0 and cfg.out is None:
        last = newest_run("runs")
        found = [last if last and cfg.resume else Path("runs") / f"{int(last.name) + 1 if last else 1:03d}"]
    if world > 1:
        dist.broadcast_object_list(found)
    out = Path(found[0])
    if rank == 0 and not cfg.resume:
        if (out / "log.csv").exists():
            raise ValueError(f"{out} holds a run already: go on with --resume auto, or take another --out")
        require(not out.is_dir() or not any(out.iterdir()), f"--out {out} is not empty: take another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be made: {error.strerror}") from None
    require(os.access(out, os.W_OK), f"--out {out} is not writable: take another folder")
    return out


def saved_config(argv):
    """config.json of the run that --resume goes on with, as defaults; {} for a new run."""
    out = flag(argv, "--out") or newest_run("runs")
    file = Path(out or "") / "config.json"
    if not flag(argv, "--resume") or out is None or not file.exists():
        return {}
    known = {f.name for f in dataclasses.fields(TrainConfig)} - {"resume", "init", "dry_run"}
    saved = {name: value for name, value in read_run(out).items() if name in known} | {"out": str(out)}
    try:
        TrainConfig(**saved), ZAYAConfig(**saved["model"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    asked, has = flag(argv, "--preset"), saved.get("preset")
    require(asked in (None, has), f"--preset {asked}: {out} is a run of --preset {has}; take another --out")
    return saved


def flag(argv, name):
    """Value of a flag that decides on the defaults of the others, before the real parse."""
    for i, word in enumerate(argv):
        if word.startswith(name + "="):
            return word.split("=", 1)[1]
        if word == name and i + 1 < len(argv):
            return argv[i + 1]


# -------------------------------------------------------------------------------- the data

def open_sources(cfg, phases):
    """Dataset of the first source of --data, and one training stream per phase. Raises ValueError for names
    that the mix lacks, and for text that is too short."""
    parts = cfg.data.split(",") if "=" in cfg.data else [f"text={cfg.data}"]
    paths = dict(part.split("=", 1) for part in parts)
    first = data.load(next(iter(paths.values())), cfg.tokenizer)
    sets = {name: first if i == 0 else data.load(path, first.tokenizer.spec)
            for i, (name, path) in enumerate(paths.items())}
    streams = []
    for _, _, p in phases:
        mix = p.mix if len(sets) > 1 else dict.fromkeys(sets, 1.0)      # a single source serves every phase
        missing = ", ".join(sorted(set(mix) - set(sets)))
        require(not missing, f"phase {p.name!r} mixes {', '.join(mix)}, but --data names no {missing}")
        trains = [sets[name].train for name in mix]
        stream = data.Mix(trains, list(mix.values())) if len(mix) > 1 else trains[0]
        data.check_length(stream, p.seq_len, f"the training part of {cfg.data}")
        data.check_length(first.val, p.seq_len, f"the validation part of {cfg.data}")
        streams.append(stream)
    return first, streams


# -------------------------------------------------------------------------------- the machine

def pick_device(cfg, local_rank):
    """torch.device and compute dtype, as the flags and the machine allow."""
    require(cfg.device != "cuda" or torch.cuda.is_available(), "--device cuda: torch sees no GPU")
    kind = cfg.device if cfg.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        torch.set_flush_denormal(True)      # a denormal costs a CPU a hundred times a normal number
        keep_freed_memory()
        return torch.device("cpu"), torch.bfloat16 if cfg.dtype == "bfloat16" else torch.float32
    torch.cuda.set_device(local_rank)
    torch.backends.cuda.matmul.allow_tf32 = True
    return torch.device("cuda", local_rank), torch.float32 if cfg.dtype == "float32" else torch.bfloat16


def keep_freed_memory():
    """glibc returns large freed blocks to the system at once, and every step would fault its activations in
    again."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-1, 2**31 - 1)         # M_TRIM_THRESHOLD
        libc.mallopt(-3, 2**31 - 1)         # M_MMAP_THRESHOLD


EARNS = 300     # steps at one context length from which compiling for it (half a minute, if new) comes back


def resolve_compile(cfg, phases):
    """Context lengths to compile for, and what became of the wish in words. The whole plan decides, not what
    is left of it: a run that goes on computes like the undisturbed one. Tried on a small function first,
    since a compiler may be there and not work."""
    steps = Counter()
    for _, count, p in phases:
        steps[p.seq_len] += count
    lengths = {T for T, count in steps.items() if cfg.compile == "on" or count >= EARNS}
    if cfg.compile == "off" or not lengths:
        return set(), "off" if cfg.compile == "off" else "off (the run is short)"
    # Or torch compiles a program for each vector instruction set to ask for it; the trial has the same flags.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(64))
        where = f" for context {', '.join(map(str, sorted(lengths)))}" * (lengths < set(steps))
        return lengths, f"on{where}, up to a minute at its first step"
    except Exception as error:  # whatever the compiler's trouble is: a run without it gives the same numbers
        reason = f"no working compiler: {str(error).strip().splitlines()[0][:80]}"
        require(cfg.compile == "auto", f"--compile on: {reason}")
        return set(), f"off ({reason})"


# -------------------------------------------------------------------------------- the model

def complete(cfg, phases, tokenizer):
    """The model's shape with what data and phases decide: vocabulary (a multiple of 64), context, RoPE
    base."""
    return dataclasses.replace(
        cfg.model or ZAYAConfig.preset(cfg.preset), vocab_size=-(-tokenizer.vocab_size // 64) * 64,
        max_seq_len=max(p.seq_len for _, _, p in phases), rope_theta=phases[-1][2].rope_theta)


def check_memory(config, device):
    """Raises ValueError where weights, gradients and momentum alone are more than the memory: the system
    would kill the process minutes later, without a word."""
    with torch.device("meta"):
        needed = 12 * ZAYA(config).num_parameters()
    total = (torch.cuda.get_device_properties(device).total_memory if device.type == "cuda"
             else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    require(needed <= total, f"weights, gradients and momentum of this model need {needed / 1e9:.0f} GB, "
            f"and {device} has {total / 1e9:.0f}: take a smaller --preset, or --dry-run for the plan")


def build_model(cfg, device):
    """The model on its device, the same on every rank: initialised from the seed, or from --init."""
    torch.manual_seed(cfg.seed)
    model = ZAYA(cfg.model)
    if cfg.init:
        load_weights(model, cfg.init)
    model.recompute = cfg.recompute
    return model.to(device)


def load_weights(model, path):
    """Fill a model from an exported file or a run. Raises ValueError that lists every name or shape that does
    not fit."""
    _, weights = checkpoint.load_weights(path)
    own = model.state_dict()
    wrong = [f"{n} missing" for n in own.keys() - weights.keys()]
    wrong += [f"{n} unknown" for n in weights.keys() - own.keys()]
    wrong += [f"{n} is {tuple(w.shape)}, the model wants {tuple(own[n].shape)}"
              for n, w in weights.items() if n in own and w.shape != own[n].shape]
    require(not wrong, f"{path} is of another configuration: {'; '.join(sorted(wrong)[:8])}")
    model.load_state_dict(weights)


def demonstrate():
    """What the default run would start from on this machine."""
    cfg = TrainConfig()
    phases = plan(cfg)
    dataset, streams = open_sources(cfg, phases)
    device, dtype = pick_device(cfg, 0)
    cfg.model = complete(cfg, phases, dataset.tokenizer)
    print(f"{dataset.name}: a stream of {len(streams[0]):,} tokens for each of {len(phases)} phases")
    print(f"{device}, {dtype}, compile {resolve_compile(cfg, phases)[1]}")
    model = build_model(cfg, device)
    print(f"{model.num_parameters():,} parameters; the same on every rank: their sum is "
          f"{sum(p.double().sum().item() for p in model.parameters()):.6f}")


if __name__ == "__main__":
    demonstrate()
