"""transformers' ZAYA with the weights of one of ours: the oracle of the parity tests, the peer of the speed
comparison."""


def their_name(name):
    """Our parameter name in transformers' words."""
    name = name.replace("blocks.", "layers.").replace("self_attn.temp", "self_attn.qk_norm.temp")
    for leaf in ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed", "conv_qk_depthwise",
                 "conv_qk_grouped"):
        name = name.replace(f"self_attn.{leaf}", f"self_attn.qkv_proj.{leaf}")
    for leaf in ("norm", "fc1", "fc2", "out_proj"):
        name = name.replace(f"gate.{leaf}", f"gate.router_mlp.{leaf}")
    return "model." + name


def transformers_twin(ours, **settings):
    """Their model with our shape and weights. settings: as experts_implementation, for their constructor."""
    import transformers
    c = ours.config
    rope = lambda theta: {
        "rope_type": "default",
        "rope_theta": theta,
        "partial_rotary_factor": c.rope_fraction,
    }
    config = transformers.ZayaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_hidden_layers=c.num_blocks,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        num_experts=c.num_experts,
        rms_norm_eps=c.norm_eps,
        moe_intermediate_size=c.expert_hidden_size,
        router_hidden_size=c.router_hidden_size,
        sliding_window=c.sliding_window,
        cca_time0=c.conv_kernels[0],
        cca_time1=c.conv_kernels[1],
        max_position_embeddings=c.max_seq_len,
        eos_token_id=None,
        rope_parameters={"hybrid": rope(c.rope_theta), "hybrid_sliding": rope(c.local_rope_theta)},
        layer_types=["hybrid_sliding" if c.is_sliding(i) else "hybrid" for i in range(c.num_blocks)],
    )
    theirs = transformers.ZayaForCausalLM._from_config(config, **settings)
    missing, unexpected = theirs.load_state_dict(
        {their_name(k): v for k, v in ours.state_dict().items()}, strict=False
    )
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    return theirs
