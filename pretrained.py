"""Official ZAYA1 weights in and out: ZAYA1-base, ZAYA1-8B and ZAYA1-74B-preview, from a folder on disk.

    model = pretrained.load("ZAYA1-8B")                             either released layout
    pretrained.save(model, "out", layout="transformers")            for transformers' ZayaForCausalLM
    python pretrained.py FOLDER                                     what a folder holds, without loading it

A folder has config.json and tensors in model.safetensors, or in shards with model.safetensors.index.json.
layouts.py knows the names of its tensors and how to read its config.json; here the tensors are read and
written. Numbers are never changed, only cast where another dtype is asked for.

Safety: config.json is JSON, tensors are safetensors, and nothing else in the folder is opened, least of all
Python files. Memory: shards are memory-mapped and closed after each tensor, so the peak is the model and one
tensor. Papers: ZAYA1, arXiv 2511.17127; ZAYA1-8B, 2605.05365. Glossary: theirs, ours, part: as in layouts.py.
Left out: quantised releases (FP8, MXFP4), downloads.
"""

import json
import os
import tempfile
from pathlib import Path

import torch
from tqdm import tqdm

import config as command_line
import decode
from layouts import LAYOUTS, read_config, tensor_map, write_config
from model import ZAYA, ZAYAConfig, require

SHARD_BYTES = 5_000_000_000
INSTALL = "official weights need safetensors: pip install safetensors"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


# --------------------------------------------------------------------------------------------------- reading

def load(directory, dtype=None, device=None):
    """A ZAYA in evaluation mode from a folder in either layout. No file of the folder is executed.

    dtype: of the weights, the stored one by default (balancing biases are always float32). device: "cpu" by
    default. FileNotFoundError for absent files; ValueError that lists, by name, missing, unknown and
    misshapen tensors, before anything is copied.
    """
    directory = Path(directory)
    files = list_tensors(directory)
    layout, config, stored = inspect(directory, files)
    names = tensor_map(config, layout)
    with torch.device("meta"):
        model = ZAYA(config)
    state = model.to(dtype or stored).to_empty(device=device or "cpu").eval().state_dict()
    bar = tqdm(names.items(), f"load {directory.name}", leave=False, delay=1, unit="tensor")
    for theirs, (ours, part) in bar:
        target = state[ours] if part is None else state[ours][part]
        with open_shard(files[theirs][0]) as shard:     # anew for each tensor: closing gives its pages back
            target.copy_(shard.get_tensor(theirs))
    for block in model.blocks:
        block.mlp.gate.load.zero_()
    return model


def inspect(directory, files):
    """(layout, ZAYAConfig, stored dtype) of a folder; ValueError that lists the tensors that do not fit."""
    require("model.final_norm.weight" in files or "model.norm.weight" in files,
            f"{directory} holds no ZAYA1: no final norm")
    layout = "original" if "model.final_norm.weight" in files else "transformers"
    config = read_config(directory, layout)
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in ZAYA(config).state_dict().items()}
    names = tensor_map(config, layout)
    head = files.pop("lm_head.weight", None)
    wrong = [f"{n} is missing" for n in names if n not in files]
    wrong += [f"{n} is unknown" for n in files if n not in names]
    for n in names.keys() & files.keys():
        ours, part = names[n]
        wanted, (_, shape, kind) = shapes[ours] if part is None else shapes[ours][1:], files[n]
        if shape != wanted:
            wrong.append(f"{n} is {shape}, the model wants {wanted}")
        elif kind not in DTYPES:
            wrong.append(f"{n} is stored as {kind}, which is not implemented here ({', '.join(DTYPES)} are)")
    listed = "; ".join(sorted(wrong)[:20]) + (f"; and {len(wrong) - 20} more" if len(wrong) > 20 else "")
    require(not wrong, f"{directory} ({layout} layout) does not fit its config.json: {listed}")
    embedding = files["model.embed_tokens.weight"]
    require(head is None or same_tensor(head[0], "lm_head.weight", embedding[0], "model.embed_tokens.weight"),
            f"{directory}: lm_head.weight differs from the embedding; an untied head is not implemented here")
    return layout, config, DTYPES[embedding[2]]


def same_tensor(file, name, other_file, other_name):
    with open_shard(file) as a, open_shard(other_file) as b:
        return torch.equal(a.get_tensor(name), b.get_tensor(other_name))


def list_tensors(directory):
    """{theirs: (file, shape, dtype as safetensors writes it)} of all shards, by their headers and index."""
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a folder with a checkpoint")
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        listed = json.loads(index.read_text())["weight_map"]
        shards = sorted(set(listed.values()))
    else:
        listed, shards = {}, sorted(f.name for f in directory.glob("model*.safetensors"))
    absent = [s for s in shards if not (directory / s).is_file()] if shards else ["model.safetensors"]
    if absent:
        raise FileNotFoundError(f"{directory} is incomplete: {', '.join(absent)} missing; "
                                "copy or download it again")
    files = {}
    for name in shards:
        with open_shard(directory / name) as shard:
            for key in shard.keys():
                part = shard.get_slice(key)
                files[key] = directory / name, tuple(part.get_shape()), part.get_dtype()
    lost = sorted(listed.keys() - files.keys())
    require(not lost, f"{directory}: the index names tensors that no shard holds: {', '.join(lost[:20])}")
    return files


def open_shard(path):
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ValueError(INSTALL) from None
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short ({error}): copy or download it again") from None


# --------------------------------------------------------------------------------------------------- writing

def save(model, directory, layout="transformers", shard_bytes=SHARD_BYTES):
    """Write a ZAYA as safetensors shards with config.json, in either layout; every tensor keeps its bits.

    config.json comes last: a folder with one is whole. Raises ValueError for what the layout cannot say
    (ablations; more than one expert a token, or no skip class, in the transformers layout).
    """
    c = model.config
    require(layout in LAYOUTS, f"layout {layout!r} is unknown, it must be one of {', '.join(LAYOUTS)}")
    require(decode.supports(c) and c.skip_expert != "off",
            "a model with ablation switches has no official layout: python checkpoint.py RUN --export FILE")
    require(layout == "original" or c.top_k == 1,
            f"transformers' ZAYA takes one expert a token, this model {c.top_k}")
    state = model.state_dict()
    pick = lambda ours, part: state[ours] if part is None else state[ours][part]
    tensors = {theirs: pick(*source) for theirs, source in tensor_map(c, layout).items()}
    dtype = str(model.embed_tokens.weight.dtype).removeprefix("torch.")
    write_folder(directory, tensors, write_config(c, layout, dtype), shard_bytes)


def write_folder(directory, tensors, theirs, shard_bytes,
                 ready=lambda name, t: t.detach().cpu().contiguous()):
    """Shards, their index where there are several, then config.json. ready: gives what is written for a
    tensor, called when its shard is due."""
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ValueError(INSTALL) from None
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    index_file = directory / "model.safetensors.index.json"
    for stale in (directory / "config.json", index_file, *directory.glob("model*.safetensors")):
        stale.unlink(missing_ok=True)
    shards, weight_map = split_shards(tensors, shard_bytes), {}
    for number, part in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = name if len(shards) > 1 else "model.safetensors"
        save_file({n: ready(n, t) for n, t in part.items()}, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(map(num_bytes, tensors.values()))}, "weight_map": weight_map}
        index_file.write_text(json.dumps(index, indent=1))
    half = directory / "config.json.tmp"
    half.write_text(json.dumps(theirs, indent=1))
    os.replace(half, directory / "config.json")


def num_bytes(tensor):
    return tensor.numel() * tensor.element_size()


def split_shards(tensors, limit):
    """Dicts of tensors of up to `limit` bytes each (more where a single tensor is larger), in order."""
    shards, size = [{}], 0
    for name, tensor in tensors.items():
        if shards[-1] and size + num_bytes(tensor) > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += num_bytes(tensor)
    return shards


# ---------------------------------------------------------------------------------------------- command line

def describe(directory):
    """What a folder holds, from its headers alone: one text of a few lines. Raises as `load` does."""
    directory = Path(directory)
    files = list_tensors(directory)
    layout, config, dtype = inspect(directory, files)
    size = sum(file.stat().st_size for file in {file for file, _, _ in files.values()})
    with torch.device("meta"):
        model = ZAYA(config)
    total, active = model.num_parameters(), model.num_parameters(active=True)
    return (f"{directory}: {layout} layout, {len(files)} tensors, {size / 1e9:.2f} GB, {dtype}; all fit\n"
            f"{total:,} parameters, {active:,} active for a token\n{config}")


def main(argv):
    if len(argv) > 1 or argv[:1] in (["-h"], ["--help"]):
        raise ValueError("usage: python pretrained.py [FOLDER] (describes it; alone, a demonstration)")
    if argv:
        return print(describe(argv[0]))
    with tempfile.TemporaryDirectory() as folder:
        model = ZAYA(ZAYAConfig.preset("tiny", sliding_window=5))
        for layout in LAYOUTS:
            save(model, Path(folder, layout), layout, shard_bytes=200_000)
            again = load(Path(folder, layout)).state_dict()
            same = all(torch.equal(t, again[n]) for n, t in model.state_dict().items())
            print(describe(Path(folder, layout)).splitlines()[0])
            print(f"  every tensor back bit for bit: {same}")


if __name__ == "__main__":
    command_line.run(main)
