"""Names of the released tensors, and the traps of their config.json."""

import pytest

import pretrained
from layouts import LAYOUTS, tensor_map
from model import ZAYAConfig
from test_pretrained import assert_same, edit_config


def test_counts_of_the_released_tensors_match_those_of_the_8b():
    config = ZAYAConfig.preset("zaya1_8b")
    assert [len(tensor_map(config, layout)) for layout in LAYOUTS] == [1283, 2483]


def test_the_base_models_stale_and_uncompressed_numbers_are_seen_through(make, tmp_path):
    model = make(num_blocks=3)
    c = model.config
    pretrained.save(model, tmp_path, "original")
    edit_config(tmp_path, num_hidden_layers=120, num_attention_heads=2 * c.num_heads, rope_scaling=False,
                kv_channels=c.head_dim, head_dim="delete", num_query_groups="delete",
                num_key_value_heads="delete", num_experts="delete", zaya_layers=["a", c.num_experts] * 3,
                cca_num_q_heads=[c.num_heads, 0] * 3, num_query_groups_list=[2, 0] * 3,
                ffn_hidden_size="delete", ffn_hidden_size_list=[0, 2 * c.expert_hidden_size] * 3,
                zaya_mlp_expansion=[0, c.router_hidden_size] * 3, swa_layers="delete", skip_expert="delete")
    again = pretrained.load(tmp_path)
    assert again.config == c
    assert_same(model, again)


def test_a_window_of_w_earlier_tokens_is_a_span_of_one_more(make, tmp_path):
    pretrained.save(make(num_blocks=4, sliding_window=6), tmp_path, "original")
    edit_config(tmp_path, swa_layers=[7, 0, 0, 0, 7, 0, 0, 0], swa_rotary_base=123)
    config = pretrained.load(tmp_path).config
    assert (config.sliding_window, config.window_every, config.local_rope_theta) == (8, 2, 123.0)
    edit_config(tmp_path, swa_layers=[0, 0, 7, 0, 7, 0, 0, 0])
    with pytest.raises(ValueError, match="sliding windows"):
        pretrained.load(tmp_path)


def test_the_skip_class_means_what_the_code_of_its_layout_computes(make, tmp_path):
    for layout, meaning in (("original", "identity"), ("transformers", "zero")):
        pretrained.save(make(), tmp_path / layout, layout)
        edit_config(tmp_path / layout, skip_expert="delete")
        assert pretrained.load(tmp_path / layout).config.skip_expert == meaning


@pytest.mark.parametrize("change, complaint", [
    (dict(rope_scaling={"type": "yarn", "factor": 4}), "RoPE scaling"),
    (dict(attention_bias=True), "attention_bias"), (dict(scale_residual_merge=False), "scale_residual_merge"),
    (dict(model_type="llama"), "not the configuration of a ZAYA1"),
    (dict(tie_word_embeddings=False), "tie_word_embeddings")])
def test_what_is_not_implemented_is_refused_by_name(change, complaint, make, tmp_path):
    pretrained.save(make(), tmp_path, "original")
    edit_config(tmp_path, **change)
    with pytest.raises(ValueError, match=complaint):
        pretrained.load(tmp_path)
