"""Sizes, loss, precision, determinism, experts, compilation and refusals of the whole model."""

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F

from conftest import assert_close
from model import ZAYA, ZAYAConfig, cross_entropy, tree, work_by_module


@pytest.mark.parametrize("preset, total, no_embedding, active", [
    ("zaya1_8b", 8_840_488_784, 8_303_355_728, 753_608_528),
    ("zaya1_74b", 74_793_953_144, 73_719_687_032, 4_262_012_792)])
def test_published_parameter_counts(preset, total, no_embedding, active):
    with torch.device("meta"):
        model = ZAYA(ZAYAConfig.preset(preset))
    assert model.num_parameters() == total
    assert model.num_parameters(embedding=False) == no_embedding
    assert model.num_parameters(active=True, embedding=False) == active


def test_parameters_by_group_as_published():
    with torch.device("meta"):
        model = ZAYA(ZAYAConfig.preset("zaya1_8b"))
    groups = dict.fromkeys(("embed", "conv", "experts", "gate", "residual", "norm", "attn"), 0)
    for name, p in model.named_parameters():
        key = next(
            k
            for k, words in (
                ("embed", ("embed",)),
                ("conv", ("conv_qk",)),
                ("experts", ("experts",)),
                ("gate", ("gate.",)),
                ("residual", ("_scale", "_bias")),
                ("norm", ("norm",)),
                ("attn", ("self_attn",)),
            )
            if any(word in name for word in words)
        )
        groups[key] += p.numel()
    assert groups == {"embed": 537_133_056, "conv": 13_312_000, "experts": 8_053_063_680, "gate": 26_439_424,
                      "residual": 659_456, "norm": 165_888, "attn": 209_715_280}


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_loss_equals_the_whole_one(chunk):
    g = torch.Generator().manual_seed(0)
    h, w = (
        torch.randn(23, 12, generator=g, requires_grad=True),
        torch.randn(37, 12, generator=g, requires_grad=True),
    )
    targets = torch.randint(0, 37, (23,), generator=g)
    targets[3:6] = -1
    expected = F.cross_entropy(h @ w.t(), targets, ignore_index=-1)
    expected_grads = torch.autograd.grad(expected * 3, (h, w))
    loss = cross_entropy(h, w, targets, chunk)
    assert_close(loss, expected, 1e-6, "loss")
    for name, grad, expected in zip(("h", "weight"), torch.autograd.grad(loss * 3, (h, w)), expected_grads):
        assert_close(grad, expected, 1e-5, f"gradient of {name}")


def test_loss_without_any_target_is_zero_and_finite():
    h, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    loss = cross_entropy(h, w, torch.full((3,), -1))
    loss.backward()
    assert loss == 0 and not h.grad.any() and not w.grad.any()


def test_loss_never_holds_all_logits():
    """The largest tensor that the loss makes for 512 tokens and 5000 classes is one chunk of logits or the
    weight's gradient."""
    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                Largest.size = max(Largest.size, out.numel())
            return out
    h, w = torch.randn(512, 8, requires_grad=True), torch.randn(5000, 8, requires_grad=True)
    with Largest():
        cross_entropy(h, w, torch.zeros(512, dtype=torch.int64), chunk=16).backward()
    assert Largest.size == 16 * 5000


def test_loss_equals_logits_of_the_forward(make, ids):
    model, x, y = make(), ids(2, 9), ids(2, 9, seed=1)
    logits, none = model(x)
    nothing, loss = model(x, y)
    assert none is None and nothing is None and logits.dtype == torch.float32 and logits.shape == (2, 9, 257)
    assert_close(loss, F.cross_entropy(logits.flatten(0, 1), y.flatten()), 1e-6, "loss")


def test_two_runs_are_bitwise_equal(ids):
    def run():
        torch.manual_seed(3)
        model = ZAYA(ZAYAConfig.preset("tiny")).train()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for seed in range(3):
            model(ids(3, 17, seed), ids(3, 17, seed + 9))[1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()
    first, second = run(), run()
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_no_tokens_at_all(make):
    model = make()
    assert model(torch.zeros(1, 0, dtype=torch.int64))[0].shape == (1, 0, 257)


def test_forty_blocks_under_autocast_keep_float32_where_it_matters(ids):
    torch.manual_seed(0)        # as initialised: random scales of up to 4 would overflow over 40 blocks
    model, seen = ZAYA(ZAYAConfig.preset("tiny", num_blocks=40, init_std=0.1)), []
    for block in model.blocks:
        block.mlp.gate.register_forward_hook(lambda module, args, out: seen.append(("p", out[0])))
        block.register_forward_hook(lambda module, args, out: seen.extend(zip(("residual", "EDA sum"), out)))
    with torch.no_grad():
        expected = model(ids(2, 15))[0]
        seen.clear()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids(2, 15))[0]
    for i, (name, t) in enumerate(seen):
        assert t.dtype == torch.float32, f"{name} of block {i // 3} is {t.dtype}"
        # stored so is not enough; block 0 has no sum, its router state is what a product in bfloat16 gave
        assert (t != t.bfloat16()).any() or i == 2, f"{name} of block {i // 3} was rounded to bfloat16"
    assert len(seen) == 120 and logits.dtype == torch.float32
    assert {block.mlp.gate.balancing_biases.dtype for block in model.blocks} == {torch.float32}
    error = ((logits - expected).norm() / expected.norm()).item()
    assert 1e-5 < error < 0.05, f"bfloat16 error over 40 blocks is {error:.3f}"


def test_recomputation_changes_no_gradient(make, ids):
    grads = []
    for recompute in (False, True):
        model = make(num_blocks=3).train()
        model.recompute = recompute
        model(ids(2, 9), ids(2, 9, seed=1))[1].backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(grads[0][k], grads[1][k]) for k in grads[0])


@pytest.mark.slow
def test_every_block_is_one_graph_at_each_of_many_shapes(make, ids, monkeypatch):
    """First blocks, windowed and other ones at four lengths: beyond a limit dynamo quietly gives up."""
    from torch._dynamo.utils import counters
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager", fullgraph=True))
    torch._dynamo.reset()
    counters.clear()
    model = make(num_blocks=3, sliding_window=5).train()
    for n in range(1, 5):
        model.compile_blocks()
        model(ids(2, 8 + n), ids(2, 8 + n, seed=1))[1].backward()
        assert counters["stats"]["unique_graphs"] == 3 * n


@pytest.mark.slow
def test_compiled_blocks_give_the_same_numbers(make, ids):
    results = []
    for compiled in (False, True):
        model = make(num_blocks=3).train()
        if compiled:
            model.compile_blocks()
        _, loss = model(ids(2, 9), ids(2, 9, seed=1))
        loss.backward()
        results.append(
            (loss, {name: p.grad for name, p in model.named_parameters()},
             [b.mlp.gate.load for b in model.blocks])
        )
    assert_close(results[1][0], results[0][0], 1e-6, "loss")
    for name in results[0][1]:
        assert_close(results[1][1][name], results[0][1][name], 1e-4, f"gradient of {name}")
    assert all(torch.equal(a, b) for a, b in zip(results[0][2], results[1][2]))


@pytest.mark.parametrize("changes, words", [
    (dict(num_heads=5), "num_heads 5"), (dict(head_dim=6), "must be even"), (dict(top_k=5),
    "top_k 5 exceeds"),
    (dict(num_experts=0), "at least 1"), (dict(skip_expert="maybe"), "identity, zero, off"),
    (dict(sliding_window=0), "sliding_window"),
    (dict(conv_kernels=(2, 2, 2)), "up to two"), (dict(router="softmax"), "zaya1, linear"),
    (dict(rope_fraction=1.5), "rope_fraction is 1.5"),
    (dict(num_kv_heads=1, head_dim=5, rope_fraction=0.4, num_heads=1), "value shift halves")])
def test_impossible_configurations_are_refused_in_words(changes, words):
    with pytest.raises(ValueError, match=words):
        ZAYAConfig.preset("tiny", **changes)


def test_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match="tiny, laptop, zaya1_8b, zaya1_74b"):
        ZAYAConfig.preset("zaya2")


@pytest.mark.parametrize("changes", [dict(router="linear"), dict(eda=False), dict(residual_scaling=False),
                                     dict(skip_expert="off")])
def test_ablations_train_every_parameter(changes, ids):
    torch.manual_seed(0)
    model = ZAYA(ZAYAConfig.preset("tiny", **changes))
    model(ids(4, 33), ids(4, 33, seed=1))[1].backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, f"{name} is unused with {changes}"


def test_config_survives_a_round_trip():
    config = ZAYAConfig.preset("zaya1_74b", top_k=2)
    assert ZAYAConfig(**dataclasses.asdict(config)) == config


def test_tree_shows_every_parameter_and_work_adds_up(make):
    model = make()
    lines = list(tree(model, {}))
    counts = [int(line.split()[-1].replace(",", "")) for line in lines]
    shown = sum(n for n, line in zip(counts, lines) if "(" in line)         # leaves have a shape
    assert counts[0] == model.num_parameters()
    other = sum(p.numel() for p in model.blocks[0].parameters())            # block 1 stands for both
    assert shown + other == model.num_parameters()
    work, L = work_by_module(model.config, 16), model.config.num_blocks
    blocks = L * (work["self_attn"] + work["gate"] + work["experts"])
    assert work["ZAYA"] == pytest.approx(blocks + work["embed_tokens"])
