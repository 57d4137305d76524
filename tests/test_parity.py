"""Against somebody else's implementation of this model: transformers' ZayaForCausalLM, float32, logits and
every gradient."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.peers import their_name, transformers_twin
from conftest import assert_close, randomised
from model import ZAYA, ZAYAConfig
from sample import generate

transformers = pytest.importorskip(
    "transformers", reason="pip install transformers==5.24.0 for the parity tests"
)


def twins(seed=0, **changes):
    """Our model and theirs with the same weights of trained-like size."""
    ours = randomised(ZAYA(ZAYAConfig.preset("tiny", rope_theta=5e6, **changes)), seed)
    return ours, transformers_twin(ours)


SHAPES = {"published layout": dict(num_blocks=3),
          "one kv head": dict(num_kv_heads=1, num_heads=6, head_dim=8),
          "sliding windows": dict(num_blocks=4, sliding_window=6),
          "wider convolutions": dict(conv_kernels=(3, 4)),
          "more experts": dict(num_experts=11, expert_hidden_size=20, hidden_size=40)}


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_every_gradient_equal_transformers(name, ids):
    ours, theirs = twins(skip_expert="zero", **SHAPES[name])
    x, y = ids(3, 17), ids(3, 17, seed=1)
    expected = theirs(x).logits
    assert_close(ours(x)[0], expected, 1e-5, "logits")
    ours(x, y)[1].backward()
    F.cross_entropy(expected.flatten(0, 1), y.flatten()).backward()
    gradients = dict(theirs.named_parameters())
    for key, p in ours.named_parameters():
        assert_close(p.grad, gradients[their_name(key)].grad, 1e-4, f"gradient of {key}")


def test_skip_as_identity_equals_transformers_while_skip_never_wins(ids):
    ours, theirs = twins(skip_expert="identity")
    for block, layer in zip(ours.blocks, theirs.model.layers):
        block.mlp.gate.balancing_biases[-1] = layer.mlp.gate.balancing_biases[-1] = -2.0
    assert_close(ours(ids(2, 13))[0], theirs(ids(2, 13)).logits, 1e-5, "logits")


@pytest.mark.parametrize("window", [None, 5])
def test_cached_generation_equals_transformers_token_by_token(window, ids):
    ours, theirs = twins(num_blocks=3, sliding_window=window, skip_expert="zero")
    prompt = ids(1, 7)
    expected = theirs.eval().generate(prompt, max_new_tokens=25, do_sample=False, pad_token_id=0)[0, 7:]
    assert generate(ours, prompt.tolist(), 25, temperature=0)[0] == expected.tolist()


def test_folded_convolution_equals_two_plain_ones(ids):
    """The two convolutions folded into one, against torch's conv1d one after the other on a padded
    sequence."""
    ours, _ = twins()
    cca = ours.blocks[0].self_attn
    z = torch.randn(2, 9, (cca.H + cca.G) * cca.K)
    plain = cca.conv_qk_grouped(cca.conv_qk_depthwise(F.pad(z.transpose(1, 2), (cca.taps - 1, 0))))
    _, w_taps, b_taps = cca.folded()
    folded = cca.convolve(z, z.new_zeros(2, cca.taps - 1, z.shape[-1]), None, w_taps, b_taps)
    assert_close(folded.transpose(2, 3).flatten(1, 2), plain, 1e-5, "convolution")
