"""Sampling: decoding against plain recomputation, batches against single rows, draws."""

import pytest
import torch

import decode
import sample
from conftest import assert_close
from sample import generate, pick

PROMPTS = [[5, 9, 200, 31, 7, 7, 90], [3], [250, 1]]


def decoded(model, tokens, segments=None, prefill=1):
    """Last hidden states from `prefill` on, (B, T, D): the model is fed a prefill, a Decoder the rest."""
    cache = model.new_cache(*tokens.shape)
    with torch.inference_mode():
        part = None if segments is None else segments[:, :prefill]
        first = model.hidden(tokens[:, :prefill], segments=part, cache=cache)
        step = decode.Decoder(model, cache)
        return torch.stack([first[:, -1], *(step(t) for t in tokens[:, prefill:].unbind(1))], 1)


SHAPES = {"published": dict(num_blocks=3), "windows": dict(num_blocks=4, sliding_window=4),
          "one kv head": dict(num_kv_heads=1), "heads alone": dict(num_heads=3, num_kv_heads=3),
          "wider convolutions": dict(conv_kernels=(3, 4)), "skip zero": dict(skip_expert="zero"),
          "no skip": dict(skip_expert="off"), "two experts": dict(top_k=2, num_experts=5)}


@pytest.mark.parametrize("batch", [1, 3, 11])
@pytest.mark.parametrize("shape", SHAPES)
def test_decoder_equals_the_model_at_every_position(shape, batch, make, ids):
    model, tokens = make(**SHAPES[shape]), ids(batch, 13)
    with torch.no_grad():
        expected = model.hidden(tokens)
    for prefill in (1, 2, 6):
        hidden = decoded(model, tokens, prefill=prefill)
        assert_close(hidden, expected[:, prefill - 1:], 2e-5, f"hidden states after {prefill} tokens")


@pytest.mark.parametrize("skip", ["identity", "zero"])
def test_decoder_follows_a_skip_class_that_wins(skip, make, ids):
    model, tokens = make(skip_expert=skip, num_blocks=3), ids(1, 9)
    for block in model.blocks[::2]:
        block.mlp.gate.balancing_biases[-1] = 2.0
    with torch.no_grad():
        assert_close(decoded(model, tokens), model.hidden(tokens), 2e-5, "hidden states")


def test_decoder_in_bfloat16_stays_within_rounding(make, ids):
    model, tokens = make(num_blocks=3).bfloat16(), ids(1, 12)
    with torch.no_grad():
        plain = model.hidden(tokens).float()
        exact = model.float().hidden(tokens)
        error = (decoded(model.bfloat16(), tokens).float() - exact).norm() / exact.norm()
    assert error <= 2 * (plain - exact).norm() / exact.norm(), f"relative error {error:.3g}"


@pytest.mark.parametrize("padding", [1, 2, 5])
@pytest.mark.parametrize("length", [1, 2, 6])
def test_left_padding_does_not_reach_the_text(padding, length, make, ids):
    model, pad, tokens = make(num_blocks=3, sliding_window=4), ids(1, padding, seed=5), ids(1, length + 7)
    segments = torch.tensor([[-1] * padding + [0] * length])
    hidden = decoded(model, torch.cat([pad, tokens], 1), segments, prefill=padding + length)
    with torch.no_grad():
        assert_close(hidden, model.hidden(tokens)[:, length - 1:], 2e-5, "hidden states of the real tokens")


@pytest.mark.parametrize("rows", [(0, 1), (1, 2), (2, 0), (0, 1, 2), (0, 0, 1, 1, 2, 2)])
def test_prompts_of_different_lengths_give_what_each_gives_alone(rows, make):
    model = make(10, num_blocks=3)
    alone = [generate(model, [p], 12, temperature=0)[0] for p in PROMPTS]
    assert generate(model, [PROMPTS[i] for i in rows], 12, temperature=0) == [alone[i] for i in rows]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_shorter_than_the_convolutions_and_empty_continuations_work(length, make):
    model = make()
    assert len(generate(model, [[4] * length], 5)[0]) == 5
    assert generate(model, [[4] * length], 0) == [[]] and generate(model, [], 5) == []
    cache = model.new_cache(1, 8)
    model.hidden(torch.tensor([[4] * length]), cache=cache)
    assert all(s.z.shape[1] == model.config.taps - 1 and s.v_next.shape[1] == 1 for s in cache.blocks)


@pytest.mark.parametrize("settings", [dict(temperature=0), dict(), dict(top_k=7),
                                      dict(top_p=0.8, temperature=1.5), dict(top_k=20, top_p=0.5)])
def test_cached_and_uncached_sampling_write_the_same(settings, make):
    model = make(10, num_blocks=3, sliding_window=5)       # of this seed greedy text does not repeat one id
    for prompts in ([PROMPTS[0]], PROMPTS):
        cached = generate(model, prompts, 30, seed=11, **settings)
        assert cached == generate(model, prompts, 30, seed=11, cached=False, **settings)
        assert any(len(set(row)) > 1 for row in cached)


@pytest.mark.parametrize("change", [dict(qk_mean=False), dict(router="linear"), dict(conv_kernels=()),
                                    dict(residual_scaling=False), dict(eda=False), dict(value_shift=False)])
def test_ablations_decode_without_the_decoder(change, make):
    model = make(**change)
    assert not decode.supports(model.config)
    plain = generate(model, [PROMPTS[0]], 15, seed=2, cached=False)
    assert generate(model, [PROMPTS[0]], 15, seed=2) == plain


def test_seed_repeats_a_draw_and_another_seed_changes_it(make):
    draw = lambda seed: generate(make(), [PROMPTS[0]], 30, seed=seed)
    assert draw(1) == draw(1) != draw(2)


def test_prefill_in_uneven_chunks_gives_the_same_token(make, ids, monkeypatch):
    model, prompt = make(num_blocks=3, sliding_window=5), ids(2, 41).tolist()
    whole = generate(model, [prompt[0], prompt[1][:17]], 6, temperature=0)
    for size in (1, 7, 40):
        monkeypatch.setattr(sample, "PREFILL", size)
        assert generate(model, [prompt[0], prompt[1][:17]], 6, temperature=0) == whole


def test_generation_changes_nothing_in_the_model(make):
    model = make().train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    loads = [block.mlp.gate.load.clone() for block in model.blocks]
    generate(model, PROMPTS, 5)
    assert model.training and all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(torch.equal(block.mlp.gate.load, load) for block, load in zip(model.blocks, loads))


def test_a_cache_cannot_be_rewound(make):
    cache = make().new_cache(1, 8)
    with pytest.raises(AttributeError):
        cache.length = 0


def test_autocast_falls_back_to_the_model(make):
    with torch.autocast("cpu", torch.bfloat16):
        assert len(generate(make(), [PROMPTS[0]], 9)[0]) == 9


# --------------------------------------------------------------------------------------------------- drawing

def test_temperature_zero_is_greedy_and_near_zero_is_finite():
    logits = torch.tensor([[0.0, 3.0, 2.999, -1.0]])
    for temperature in (0, 1e-6, 1e-4):
        assert pick(logits, temperature, None, None, None).item() == 1
    assert pick(logits * 1e30, 1e-3, 0, 1.0, None).item() == 1


@pytest.mark.parametrize("top_k", [0, 1, 4, 14, None])
@pytest.mark.parametrize("top_p", [0, 0.5, 1, None])
def test_extreme_cuts_always_leave_an_id(top_k, top_p):
    logits = torch.tensor([[1e5, -1e5, 5.0, 4.0], [0.0, 0.0, 0.0, 0.0]])
    for seed in range(20):
        drawn = pick(logits, 1.0, top_k, top_p, torch.Generator().manual_seed(seed))
        assert drawn[0] == 0 and 0 <= drawn[1] <= 3


def test_cuts_keep_exactly_the_likeliest_ids():
    p = torch.tensor([[0.05, 0.4, 0.1, 0.3, 0.15]])
    g = torch.Generator().manual_seed(0)
    drawn = lambda top_k, top_p: {pick(p.log(), 1.0, top_k, top_p, g).item() for _ in range(400)}
    assert drawn(2, None) == {1, 3} and drawn(None, 0.69) == {1, 3} and drawn(None, 0.71) == {1, 3, 4}
    assert drawn(3, 0.9) == {1, 3, 4} and drawn(0, 1.0) == {0, 1, 2, 3, 4}


def test_draws_follow_the_probabilities():
    p, g = torch.tensor([[0.1, 0.6, 0.3]]), torch.Generator().manual_seed(0)
    drawn = pick(p.log().expand(6000, 3), 1.0, None, None, g).bincount(minlength=3) / 6000
    assert (drawn - p[0]).abs().max() < 0.03
    hot = pick(p.log().expand(6000, 3), 2.0, None, None, g).bincount(minlength=3) / 6000
    assert (hot - p[0].sqrt() / p[0].sqrt().sum()).abs().max() < 0.03


def test_padding_of_the_vocabulary_is_never_drawn(make):
    model = make()
    rows = generate(model, [[1]] * 8, 40, temperature=5.0, seed=0)
    assert max(map(max, rows)) > 200
    rows = generate(model, [[1]] * 8, 40, temperature=5.0, seed=0, vocab_size=200)
    assert max(map(max, rows)) < 200


def test_stop_ids_end_a_row_and_are_not_returned(make):
    model = make()
    free = generate(model, PROMPTS, 20, temperature=0)
    stop = free[0][7]
    cut = [row[:row.index(stop)] if stop in row else row for row in free]
    assert generate(model, PROMPTS, 20, temperature=0, stop=(stop,)) == cut and len(cut[0]) <= 7


def test_text_ends_where_the_context_does_and_longer_prompts_are_refused(make):
    model = make(max_seq_len=12)
    assert len(generate(model, [[1] * 9], 20)[0]) == 3 and generate(model, [[1] * 12], 20) == [[]]
    with pytest.raises(ValueError, match="13 tokens exceeds the context of 12"):
        generate(model, [[1] * 13], 1)


@pytest.mark.parametrize("prompts, settings, complaint", [
    ([[]], {}, "empty"), ([[300]], {}, "outside the vocabulary"), ([[-1]], {}, "outside the vocabulary"),
    ([[1]], dict(temperature=-1), "temperature"), ([[1]], dict(top_k=-1), "top_k"),
    ([[1]], dict(top_p=1.1), "top_p")])
def test_impossible_arguments_are_named(prompts, settings, complaint, make):
    with pytest.raises(ValueError, match=complaint):
        generate(make(), prompts, 3, **settings)
