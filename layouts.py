"""The two layouts of official ZAYA1 checkpoints: what they call our tensors, and how their config.json reads.

  transformers   layer i is block i; the experts of a block are stacked in one tensor
  original       the first release: layer 2i is the CCA of block i, layer 2i + 1 its MoE; one tensor per
                 expert and projection; the residual scaling that ends a sublayer is stored with the layer
                 that comes after it

Names map one to one (`tensor_map`), `read_config` and `write_config` translate the configuration.

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

Left out: quantised releases (FP8, MXFP4). Run: `python layouts.py`.
"""

import json
from pathlib import Path

from model import ZAYAConfig, require

LAYOUTS = ("transformers", "original")
SWITCHES = dict(attention_bias=False, lm_head_bias=False, add_bias_linear=False, clamp_temp=False, cca=True,
                zaya_use_eda=True, scale_residual_merge=True, gated_linear_unit=True,
                tie_word_embeddings=True)

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


def tensor_map(config, layout):
    """{theirs: (ours, part)} for every tensor of a checkpoint. config: ZAYAConfig; layout: one of LAYOUTS."""
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


def read_config(directory, layout):
    """ZAYAConfig of the folder's config.json. FileNotFoundError, or ValueError for another kind of model."""
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
    """A scalar, or a per-layer list's first number that is not 0: layers of the other kind hold 0 or "a"."""
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


def demonstrate():
    """Some names of a tiny model in both layouts, and what its config.json says in each."""
    config = ZAYAConfig.preset("tiny", sliding_window=5)
    for layout in LAYOUTS:
        names, theirs = tensor_map(config, layout), write_config(config, layout, "float32")
        print(f"{layout}: {len(names)} tensors; num_hidden_layers {theirs['num_hidden_layers']}, "
              f"windows {theirs.get('swa_layers') or theirs['layer_types']}")
        for name, (ours, part) in list(names.items())[3::len(names) // 4]:
            print(f"  {name:64} {ours}" + (f", expert {part}" if part is not None else ""))


if __name__ == "__main__":
    demonstrate()
