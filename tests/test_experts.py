"""The MoE sublayer: grouped products, idle experts, one graph for a compiler."""

import pytest
import torch

import experts
import kernels_hip
from conftest import assert_close
from experts import MoE, grouped_linear
from model import ZAYAConfig


def test_idle_experts_have_exactly_zero_gradient_and_busy_ones_move(make, ids):
    model = make(num_blocks=1, num_experts=6)
    model.blocks[0].mlp.gate.balancing_biases[torch.tensor([0, 3, 5])] = -5.0       # first, middle, last
    model.train()(ids(2, 15), ids(2, 15, seed=1))[1].backward()
    stacked, load = model.blocks[0].mlp.experts, model.blocks[0].mlp.gate.load
    before = stacked.gate_up_proj.detach().clone()
    torch.optim.SGD(model.parameters(), 1.0).step()
    for e in range(6):
        grad, moved = stacked.gate_up_proj.grad[e], not torch.equal(before[e], stacked.gate_up_proj[e])
        assert bool(grad.any()) == bool(load[e] > 0) == moved, f"expert {e} had {load[e]} tokens"
    assert (load[[0, 3, 5]] == 0).all() and load.sum() == 30


@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 9, 0), (0, 4, 4, 0), (0, 0, 0, 0)])
def test_grouped_product_equals_the_loop(counts, monkeypatch):
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(11, 8, generator=g), torch.randn(4, 12, 8, generator=g)
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    used, results = offsets[-1], []
    for works in (True, False):
        monkeypatch.setattr(experts, "grouped_product_works", lambda *_: works)
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = grouped_linear(a, b, offsets)[:used]
        y.square().sum().backward() if used else None
        results.append((y, a.grad[:used] if used else y, b.grad if used else y))
    for name, fast, slow in zip(("y", "gradient of x", "gradient of the weights"), *results):
        assert torch.allclose(fast, slow, atol=1e-5), name


@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 0, 0)])
def test_shapes_told_to_a_compiler_are_the_real_ones(counts):
    x, w, offsets = torch.randn(11, 8), torch.randn(4, 12, 8), torch.tensor(counts).cumsum(0).to(torch.int32)
    for a, b in ((x, w.transpose(1, 2)), (x.t(), torch.randn(11, 16))):
        real = torch.ops.zaya1.grouped_product(a, b, offsets)
        fake = torch.ops.zaya1.grouped_product(a.to("meta"), b.to("meta"), offsets.to("meta"))
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


@pytest.mark.parametrize("path", ["plain", pytest.param("shim", marks=pytest.mark.slow)])
@pytest.mark.parametrize("skip_expert", ["identity", "zero"])
def test_a_compiler_gets_the_sublayer_whole_unless_kernels_serve_it(path, skip_expert):
    """The numbers are the same; plain operations make one graph, calls of kernels end graphs."""
    torch.manual_seed(0)
    moe = MoE(ZAYAConfig.preset("tiny", skip_expert=skip_expert))
    for p in moe.parameters():
        torch.nn.init.normal_(p, std=0.3)
    moe.gate.balancing_biases[-1] = 0.0
    x, results = torch.randn(2, 20, 32), []
    kernels_hip.select(path)
    try:
        for run in (moe, torch.compile(moe, backend="aot_eager", fullgraph=path == "plain")):
            leaf = x.clone().requires_grad_()
            y, _, chosen = run(leaf)
            y.square().sum().backward()
            results.append({"y": y, "x": leaf.grad, **{n: p.grad for n, p in moe.named_parameters()}})
            moe.zero_grad()
    finally:
        kernels_hip.select("auto")
    assert (chosen == moe.num_experts).any() and (chosen < moe.num_experts).any()
    for name in results[0]:
        assert_close(results[1][name], results[0][name], 1e-5, name)
