"""CCA: decoding in chunks, segments, padding, causality, sliding windows, the ablations."""

import itertools

import pytest
import torch

from attention import Context, attention_mask
from conftest import assert_close
from model import ZAYA, ZAYAConfig


def chunked(model, tokens, sizes, segments=None):
    """Logits of tokens (B, T) fed to a cache in chunks of these sizes."""
    cache, parts, at = model.new_cache(len(tokens), tokens.shape[1]), [], 0
    for size in sizes:
        part = slice(at, at + size)
        parts.append(
            model(tokens[:, part], segments=None if segments is None else segments[:, part], cache=cache)[0]
        )
        at += size
    assert cache.length == tokens.shape[1]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("sizes", [(1, 8), (3, 3, 3), (8, 1), (1,) * 9, (2, 7), (4, 0, 5)])
@pytest.mark.parametrize("window", [None, 3])
def test_cache_in_chunks_equals_one_piece(make, ids, sizes, window):
    model = make(num_blocks=3, sliding_window=window)
    tokens = ids(2, 9)
    with torch.no_grad():
        assert_close(chunked(model, tokens, sizes), model(tokens)[0], 1e-5, f"logits in chunks {sizes}")


def test_cached_q_k_v_equal_the_uncached_ones(make, ids):
    model = make()
    cca, config = model.blocks[0].self_attn, model.config
    x = torch.randn(2, 9, config.hidden_size)
    whole = cca.qkv(x, Context(config, (2, 9), 0, None, x.device))
    state = model.new_cache(2, 9).blocks[0]
    parts = [
        cca.qkv(x[:, a:b], Context(config, (2, b - a), a, None, x.device), state)
        for a, b in ((0, 1), (1, 5), (5, 9))
    ]
    for name, expected, pieces in zip("qkv", whole, zip(*parts)):
        assert_close(torch.cat(pieces, dim=2), expected, 1e-5, name)


@pytest.mark.parametrize("T", [1, 2, 3])
def test_sequences_shorter_than_the_convolutions_leave_a_state_of_full_width(make, ids, T):
    model = make()
    cache = model.new_cache(1, 8)
    model(ids(1, T), cache=cache)
    for state in cache.blocks:
        assert state.z.shape == (1, 2, (4 + 2) * 16) and state.v_next.shape == (1, 1, 16)
    tokens = ids(1, 8)
    assert_close(chunked(model, tokens, (T, 8 - T)), model(tokens)[0], 1e-5,
                 f"logits after a first chunk of {T}")


def test_delayed_value_of_the_first_token_is_the_projection_of_zeros(make, ids):
    model = make()
    cca, config = model.blocks[0].self_attn, model.config
    x = torch.randn(1, 5, config.hidden_size)
    v = cca.qkv(x, Context(config, (1, 5), 0, None, x.device))[2]
    assert (v[:, 1, 0] == 0).all(), "kv head 1 carries the previous token's value: none at t = 0"
    x[:, -1] += 1
    moved = cca.qkv(x, Context(config, (1, 5), 0, None, x.device))[2]
    assert torch.equal(v[:, :, :4], moved[:, :, :4]) and not torch.equal(v[:, 0, 4], moved[:, 0, 4])
    assert_close(v[:, 1, 1:], (x @ cca.v_proj_delayed.weight.t())[:, :4], 1e-5, "delayed value")


def test_no_token_sees_a_later_one(make, ids):
    model = make(num_blocks=3, sliding_window=4)
    a, b = ids(1, 11), ids(1, 11)
    b[0, 7] = (b[0, 7] + 1) % 257
    with torch.no_grad():
        before, after = model(a)[0], model(b)[0]
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(dim=-1).all(), (
        "the changed token must reach itself and all later ones"
    )


def test_later_chunk_is_causal_behind_cached_tokens(make, ids):
    model = make()
    tokens = ids(1, 8)
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 257
    with torch.no_grad():
        a, b = (chunked(model, t, (5, 3)) for t in (tokens, changed))
    assert torch.equal(a[:, :7], b[:, :7]) and not torch.equal(a[:, 7], b[:, 7])


@pytest.mark.parametrize("window", [None, 3])
def test_left_padding_changes_nothing(make, ids, window):
    model = make(num_blocks=3, sliding_window=window)
    prompt = ids(1, 7)
    expected = model(prompt)[0]
    for pad in range(1, 6):
        padded = torch.cat([ids(1, pad, seed=pad), prompt], dim=1)
        segments = torch.cat([torch.full((1, pad), -1), torch.zeros(1, 7, dtype=torch.int64)], dim=1)
        assert_close(model(padded, segments=segments)[0][:, pad:], expected, 1e-5,
                     f"logits behind {pad} pads")
        assert_close(chunked(model, padded, (2, pad + 5), segments)[:, pad:], expected, 1e-5,
                     f"cached logits behind {pad} pads")


@pytest.mark.parametrize("conv_kernels", [(2, 2), (3, 4), (2,), ()])
def test_packed_documents_equal_separate_runs(make, ids, conv_kernels):
    model = make(conv_kernels=conv_kernels, num_blocks=3)
    lengths = (5, 1, 6, 2)
    documents = [ids(1, n, seed=n) for n in lengths]
    segments = torch.cat([torch.full((1, n), i) for i, n in enumerate(lengths)], dim=1)
    packed = model(torch.cat(documents, dim=1), segments=segments)[0].split(lengths, dim=1)
    for i, (document, logits) in enumerate(zip(documents, packed)):
        assert_close(logits, model(document)[0], 1e-5, f"document {i}")


def test_padding_is_no_load(make, ids):
    model = make().train()
    segments = torch.tensor([[-1, -1, -1, 0, 0], [0, 0, 1, 1, 1]])
    model(ids(2, 5), segments=segments)
    assert [int(b.mlp.gate.load.sum()) for b in model.blocks] == [7, 7]


def test_window_counts_the_current_token():
    mask = attention_mask(0, torch.arange(6), 3, None)
    assert mask.sum(1).tolist() == [1, 2, 3, 3, 3, 3]
    assert attention_mask(0, torch.arange(3), 3, None) is None, "a window as wide as the context is no window"


def test_cache_refuses_what_it_cannot_hold(make, ids):
    model = make()
    cache = model.new_cache(2, 6)
    model(ids(2, 4), cache=cache)
    for tokens in (ids(2, 3), ids(1, 1)):
        with pytest.raises(ValueError, match="new_cache"):
            model(tokens, cache=cache)
    with pytest.raises(AttributeError):
        cache.length = 2        # no rewinding: the convolution state of an earlier token is gone
    with pytest.raises(ValueError, match="segments"):
        model(ids(2, 1), segments=torch.zeros(2, 1, dtype=torch.int64), cache=cache)


@pytest.mark.parametrize("changes", [dict(conv_kernels=()), dict(conv_kernels=(2,)), dict(qk_mean=False),
                                     dict(value_shift=False),
                                     dict(num_kv_heads=4), dict(conv_kernels=(),
                                     qk_mean=False, value_shift=False)])
def test_ablations_change_the_result_and_still_decode(make, ids, changes):
    model, plain = make(**changes), make()
    tokens = ids(2, 9)
    assert_close(chunked(model, tokens, (4, 5)), model(tokens)[0], 1e-5, f"logits with {changes}")
    assert not torch.allclose(model(tokens)[0], plain(tokens)[0], atol=1e-3)


def test_every_attention_parameter_learns_from_the_first_step(ids):
    torch.manual_seed(0)
    model = ZAYA(ZAYAConfig.preset("tiny"))
    model(ids(2, 11), ids(2, 11, seed=1))[1].backward()
    named = [b.self_attn.named_parameters(prefix=f"block {i}") for i, b in enumerate(model.blocks)]
    for name, p in itertools.chain(*named):
        assert p.grad.abs().max() > 0, f"{name} has no gradient at the start"
