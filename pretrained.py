"""Official ZAYA1 weights in and out: ZAYA1-base, ZAYA1-8B and ZAYA1-74B-preview, from a folder on disk.

    model = pretrained.load("ZAYA1-8B")                             either released layout
    pretrained.save(model, "out", layout="transformers")            for transformers' ZayaForCausalLM
    python pretrained.py FOLDER                                     what a folder holds, without loading it

A folder has config.json and tensors in model.safetensors, or in shards with model.safetensors.index.json. Two
layouts exist:

  transformers   layer i is block i; the experts of a block are stacked in one tensor
  original       the first release: layer 2i is the CCA of block i, layer 2i + 1 its MoE; one tensor per
                 expert and projection; the residual scaling that ends a sublayer is stored with the layer
                 that comes after it

Names map one to one (`tensor_map`); numbers are never changed, only cast where another dtype is asked for.

Glossary: theirs, ours: a tensor's name in the folder and in the state dict of model.ZAYA; part: which expert
of our stack a tensor of theirs fills, None for all; config: their config.json, ZAYAConfig: ours; span: tokens
a windowed block sees.

What config.json gets wrong or says differently, and what is done (`read_original`, `read_transformers`):
- ZAYA1-base: num_hidden_layers is stale, zaya_layers counts; num_attention_heads counts uncompressed heads,
  cca_num_q_heads the real ones; per-layer lists hold 0 for layers of the other kind; rope_scaling is false.
- ffn_hidden_size is gate and up together. swa_layers holds, per layer, how many EARLIER tokens are seen, so
  the span is one more; transformers' sliding_window is the span itself, as is ours.
- The skip class gives p x in the original code and 0 in transformers; a folder means what the code of its
  layout computes, unless our own key skip_expert says otherwise. In released weights it never wins.

Safety: config.json is JSON, tensors are safetensors, and nothing else in the folder is opened, least of all
Python files. Memory: shards are memory-mapped and closed after each tensor, so the peak is the model and one
tensor. Papers: ZAYA1, arXiv 2511.17127; ZAYA1-8B, 2605.05365. Left out: quantised releases (FP8, MXFP4),
downloads.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from tqdm import tqdm

import config as command_line
import decode
from model import ZAYA, ZAYAConfig, require

LAYOUTS = ("transformers", "original")
SHARD_BYTES = 5_000_000_000
INSTALL = "official weights need safetensors: pip install safetensors"
SWITCHES = dict(attention_bias=False, lm_head_bias=False, add_bias_linear=False, clamp_temp=False, cca=True,
                zaya_use_eda=True, scale_residual_merge=True, gated_linear_unit=True,
                tie_word_embeddings=True)
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

# A block's names. Ours; transformers'; the original's, in its attention (A) or MoE layer (M); the leaves.
QKV, TQKV, OQKV = "self_attn.", "self_attn.qkv_proj.", "A.self_attn.qkv."
GATE, TGATE, OGATE = "mlp.gate.", "mlp.gate.router_mlp.", "M.zaya_block.router."
LEAVES = [(f"{ours}{leaf}", f"{theirs}{leaf}", f"{first}{leaf}") for ours, theirs, first, leaves in [
    ("input_layernorm", "input_layernorm", "A.input_norm", [".weight"]),
    (QKV + "q_proj", TQKV + "q_proj", OQKV + "linear_q", [".weight"]),
    (QKV + "k_proj", TQKV + "k_proj", OQKV + "linear_k", [".weight"]),
    (QKV + "v_proj_current", TQKV + "v_proj_current", OQKV + "val_proj1", [".weight"]),
    (QKV + "v_proj_delayed", TQKV + "v_proj_delayed", OQKV + "val_proj2", [".weight"]),
    (QKV + "conv_qk_depthwise", TQKV + "conv_qk_depthwise", OQKV + "conv_qk.0", [".weight", ".bias"]),
    (QKV + "conv_qk_grouped", TQKV + "conv_qk_grouped", OQKV + "conv_qk.1", [".weight", ".bias"]),
    (QKV + "temp", QKV + "qk_norm.temp", OQKV + "temp", [""]),
    (QKV + "o_proj", QKV + "o_proj", "A.self_attn.o_proj", [".weight"]),
    ("post_attention_layernorm", "post_attention_layernorm", "M.input_norm", [".weight"]),
    (GATE + "down_proj", GATE + "down_proj", OGATE + "down_proj", [".weight", ".bias"]),
    (GATE + "router_states_scale", GATE + "router_states_scale", OGATE + "router_states_scale", [""]),
    (GATE + "norm", TGATE + "norm", OGATE + "rmsnorm_eda", [".weight"]),
    (GATE + "fc1", TGATE + "fc1", OGATE + "router_mlp.0", [".weight", ".bias"]),
    (GATE + "fc2", TGATE + "fc2", OGATE + "router_mlp.2", [".weight", ".bias"]),
    (GATE + "out_proj", TGATE + "out_proj", OGATE + "router_mlp.4", [".weight"]),
    (GATE + "balancing_biases", GATE + "balancing_biases", OGATE + "balancing_biases", [""]),
] for leaf in leaves]
EXPERTS = [("mlp.experts.gate_up_proj", "linear_fc1"), ("mlp.experts.down_proj", "linear_fc2")]
SCALES = ("hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias")


# ----------------------------------------------------------------------------------------------------- names

def tensor_map(config, layout):
    """{theirs: (ours, part)} for every tensor of a checkpoint. config: ZAYAConfig; part: expert index or
    None."""
    original, last = layout == "original", config.num_blocks - 1
    names = {"model.embed_tokens.weight": ("embed_tokens.weight", None),
             "model.final_norm.weight" if original else "model.norm.weight": ("norm.weight", None)}
    for leaf in SCALES[:2]:
        theirs = f"model.layers.0.res_scale.{leaf}" if original else f"model.input_{leaf}"
        names[theirs] = (f"input_{leaf}", None)
    for i in range(config.num_blocks):
        for ours, theirs, first in LEAVES:
            if "router_states_scale" in ours and i == 0:
                continue
            layer, kind, first = 2 * i, *first.split(".", 1)
            theirs = f"{layer + (kind == 'M')}.{first}" if original else f"{i}.{theirs}"
            names[f"model.layers.{theirs}"] = (f"blocks.{i}.{ours}", None)
        following = "model" if i == last else f"model.layers.{2 * i + 2}"
        for leaf in SCALES:
            for ours, first in (("post_attention", f"model.layers.{2 * i + 1}"), ("post_mlp", following)):
                ours_leaf = f"{i}.{ours}_residual_scale.{leaf}"
                theirs = f"{first}.res_scale.{leaf}" if original else f"model.layers.{ours_leaf}"
                names[theirs] = (f"blocks.{ours_leaf}", None)
        for ours, first in EXPERTS:
            if not original:
                names[f"model.layers.{i}.{ours}"] = (f"blocks.{i}.{ours}", None)
            for e in range(config.num_experts if original else 0):
                theirs = f"model.layers.{2 * i + 1}.zaya_block.experts.local_experts.{e}.{first}.weight"
                names[theirs] = (f"blocks.{i}.{ours}", e)
    return names


# ---------------------------------------------------------------------------------------------- their config

def read_config(directory, layout):
    """ZAYAConfig of the folder's config.json. Raises FileNotFoundError or ValueError (another kind of
    model)."""
    theirs = read_json(directory)
    for name, needed in SWITCHES.items():
        require(theirs.get(name, needed) == needed,
                f"{directory}/config.json has {name} = {theirs.get(name)}; only {needed} is implemented here")
    ours = read_original(theirs) if layout == "original" else read_transformers(theirs)
    skip = theirs.get("skip_expert", "identity" if layout == "original" else "zero")
    ours |= dict(skip_expert=skip if theirs.get("zaya_use_mod", True) else "off",
                 conv_kernels=(theirs.get("cca_time0", 2), theirs.get("cca_time1", 2)),
                 max_seq_len=theirs.get("max_position_embeddings", 4096))
    return ZAYAConfig(vocab_size=theirs["vocab_size"], hidden_size=theirs["hidden_size"], **ours)


def read_json(directory):
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no config.json: name a folder with a ZAYA1 checkpoint")
    try:
        theirs = json.loads(path.read_text())
        assert theirs["vocab_size"] and theirs["hidden_size"] and theirs.get("model_type", "zaya") == "zaya"
        return theirs
    except (ValueError, KeyError, TypeError, AssertionError):
        raise ValueError(f"{path} is not the configuration of a ZAYA1 "
                         "(model_type zaya, vocab_size, hidden_size)") from None


def entry(value, default=None):
    """A scalar, or the first entry of a per-layer list that is a number and not 0: layers of the other kind
    hold 0 or "a"."""
    if isinstance(value, list):
        value = next((v for v in value if not isinstance(v, str) and v), None)
    return default if value is None else value


def read_original(theirs):
    """Fields of ZAYAConfig from a config of the first release. See the header for its traps."""
    layers = theirs.get("zaya_layers") or theirs["num_hidden_layers"]
    blocks = (len(layers) if isinstance(layers, list) else layers) // 2
    heads = theirs["num_attention_heads"]
    windows = theirs.get("swa_layers") or []
    windows = windows[::2] if len(windows) > blocks else windows        # one a layer; MoE layers have 0
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    require(rope.get("rope_type", rope.get("type", "default")) == "default",
            f"RoPE scaling {rope} is not implemented here")
    kv_heads = theirs.get("num_query_groups", theirs.get("num_key_value_heads"))
    return dict(
        num_blocks=blocks, num_heads=entry(theirs.get("cca_num_q_heads"), heads),
        num_kv_heads=entry(theirs.get("num_query_groups_list"), kv_heads),
        head_dim=theirs.get("head_dim") or theirs.get("kv_channels") or theirs["hidden_size"] // heads,
        num_experts=entry(theirs.get("zaya_layers"), theirs.get("num_experts")),
        top_k=theirs.get("moe_router_topk", 1),
        expert_hidden_size=entry(theirs.get("ffn_hidden_size_list"), theirs.get("ffn_hidden_size")) // 2,
        router_hidden_size=entry(theirs.get("zaya_mlp_expansion"), 256),
        norm_eps=theirs.get("norm_epsilon", 1e-5),
        rope_theta=float(rope.get("rope_theta") or theirs.get("rope_theta") or theirs["rotary_base"]),
        local_rope_theta=float(theirs.get("swa_rotary_base") or 10_000),
        rope_fraction=theirs.get("partial_rotary_factor", 0.5),
        **window_pattern([w + 1 if w else None for w in windows]))


def read_transformers(theirs):
    """Fields of ZAYAConfig from a config of the transformers layout."""
    blocks, ropes = theirs["num_hidden_layers"], theirs.get("rope_parameters") or {}
    kinds = theirs.get("layer_types") or ["hybrid"] * blocks
    require(len(kinds) == blocks, f"layer_types has {len(kinds)} entries for {blocks} layers")
    full, local = (ropes.get(kind) or {} for kind in ("hybrid", "hybrid_sliding"))
    for rope in (full, local):
        require(rope.get("rope_type", "default") == "default", f"RoPE scaling {rope} is not implemented here")
    return dict(
        num_blocks=blocks, num_heads=theirs["num_attention_heads"],
        num_kv_heads=theirs["num_key_value_heads"], head_dim=theirs["head_dim"],
        num_experts=theirs["num_experts"], top_k=theirs.get("num_experts_per_tok", 1),
        expert_hidden_size=theirs["moe_intermediate_size"], router_hidden_size=theirs["router_hidden_size"],
        norm_eps=theirs.get("rms_norm_eps", 1e-5), rope_theta=float(full.get("rope_theta", 5e6)),
        local_rope_theta=float(local.get("rope_theta", 1e4)),
        rope_fraction=full.get("partial_rotary_factor", 0.5),
        **window_pattern([theirs["sliding_window"] if kind == "hybrid_sliding" else None for kind in kinds]))


def window_pattern(spans):
    """sliding_window and window_every from the span of each block, None where a block sees everything."""
    sliding = [i for i, span in enumerate(spans) if span]
    if not sliding:
        return {}
    every = sliding[1] if len(sliding) > 1 else len(spans)
    require(sliding == list(range(0, len(spans), every)) and len({spans[i] for i in sliding}) == 1,
            f"sliding windows {spans} are not one width in every n-th block from block 0 on, as implemented")
    return dict(sliding_window=spans[0], window_every=every)


def write_config(c, layout, dtype):
    """Their config.json as a dict, for a ZAYAConfig."""
    sliding = [c.is_sliding(i) for i in range(c.num_blocks)]
    common = dict(
        architectures=["ZayaForCausalLM"], model_type="zaya", vocab_size=c.vocab_size,
        hidden_size=c.hidden_size, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim, num_experts=c.num_experts, cca_time0=c.conv_kernels[0],
        cca_time1=c.conv_kernels[1], max_position_embeddings=c.max_seq_len, tie_word_embeddings=True,
        skip_expert=c.skip_expert, pad_token_id=0, bos_token_id=None, eos_token_id=None)
    if layout == "original":
        return common | dict(
            torch_dtype=dtype, num_hidden_layers=2 * c.num_blocks, num_query_groups=c.num_kv_heads,
            moe_router_topk=c.top_k, ffn_hidden_size=2 * c.expert_hidden_size,
            zaya_mlp_expansion=c.router_hidden_size, norm_epsilon=c.norm_eps, rope_theta=c.rope_theta,
            partial_rotary_factor=c.rope_fraction, zaya_use_mod=True, rope_scaling=False,
            swa_layers=[c.sliding_window - 1 if here and layer == 0 else 0
                        for here in sliding for layer in (0, 1)] if any(sliding) else None,
            swa_rotary_base=c.local_rope_theta)
    rope = lambda theta: dict(rope_type="default", rope_theta=theta, partial_rotary_factor=c.rope_fraction)
    return common | dict(
        dtype=dtype, num_hidden_layers=c.num_blocks, num_experts_per_tok=c.top_k,
        moe_intermediate_size=c.expert_hidden_size, router_hidden_size=c.router_hidden_size,
        rms_norm_eps=c.norm_eps, sliding_window=c.sliding_window,
        layer_types=["hybrid_sliding" if here else "hybrid" for here in sliding],
        rope_parameters=dict(hybrid=rope(c.rope_theta), hybrid_sliding=rope(c.local_rope_theta)))


# --------------------------------------------------------------------------------------------------- reading

def load(directory, dtype=None, device=None):
    """A ZAYA in evaluation mode from a folder in either layout. dtype: of the weights, the stored one by
    default (balancing biases are always float32); device: "cpu" by default. No file of the folder is
    executed.

    Raises FileNotFoundError for absent files; ValueError that lists, by name, missing, unknown and misshapen
    tensors, before anything is copied.
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
    """(layout, ZAYAConfig, stored dtype) of a folder whose every tensor fits; ValueError that lists those
    that do not."""
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
    """{theirs: (file, shape, dtype as safetensors writes it)} of all shards, from their headers and the
    index."""
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
    """Shards, their index where there are several, then config.json. ready: what is written for a tensor,
    called when its shard is due."""
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
        print("names:", *list(tensor_map(model.config, "original").items())[3::17][:4], sep="\n  ")


if __name__ == "__main__":
    command_line.run(main)
