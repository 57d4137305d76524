"""What log.csv holds: the residual stream's columns, and that looking at it changes nothing."""

import pytest
import torch

import log
import plot
from attention import Context


def test_residual_rms_is_that_of_the_stream_behind_each_block(make):
    model, tokens = make(num_blocks=3), torch.randint(0, 257, (1, 13))
    with torch.no_grad():
        stream, r, expected = model.embed_tokens(tokens), None, []
        stream = (stream + model.input_hidden_states_bias) * model.input_hidden_states_scale
        context = Context(model.config, tokens.shape, 0, None, tokens.device)
        for block in model.blocks:
            stream, r, _ = block(stream, r, context)
            expected.append(stream.double().pow(2).mean().sqrt().item())
    assert log.residual_rms(model, tokens) == pytest.approx(expected, rel=1e-5)
    assert len({round(e, 3) for e in expected}) == 3


def test_columns_are_read_back_by_block_and_sublayer(make):
    model = make(num_blocks=3)
    columns = log.residual_columns(model, torch.randint(0, 257, (1, 13)))
    for name in ("residual_scale", "hidden_states_scale"):
        found = plot.by_block([columns[name]])
        assert found.shape == (1, 3, 2)
        for block, (attention, moe) in zip(model.blocks, found[0]):
            assert attention == pytest.approx(
                getattr(block.post_attention_residual_scale, name).mean().item(), abs=1e-4)
            assert moe == pytest.approx(getattr(block.post_mlp_residual_scale, name).mean().item(), abs=1e-4)
    assert plot.by_block([columns["residual_rms"]]).shape == (1, 3, 1)
    without = log.residual_columns(make(residual_scaling=False), torch.randint(0, 257, (1, 13)))
    assert without["residual_scale"] == without["hidden_states_scale"] == "" and without["residual_rms"]


def test_looking_at_the_stream_disturbs_nothing(make):
    model = make().train()
    tokens, before = torch.randint(0, 257, (1, 13)), torch.get_rng_state()
    model(tokens, tokens)[1].backward()
    everything = lambda: [*model.state_dict().values(), *(p.grad for p in model.parameters()),
                          *(block.mlp.gate.load for block in model.blocks)]
    state = [t.clone() for t in everything()]
    log.residual_columns(model, tokens)
    assert all(torch.equal(a, b) for a, b in zip(state, everything(), strict=True)) and model.training
    assert torch.equal(before, torch.get_rng_state())
    assert not any(block._forward_hooks for block in model.blocks)
