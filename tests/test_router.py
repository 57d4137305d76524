"""The router's gradient path, selection biases, EDA, skip class and the balancing step."""

import copy

import pytest
import torch

from conftest import assert_close
from model import ZAYA, ZAYAConfig
from router import Balancer, balance_health, choose, count
from sample import generate


def biases(model):
    return torch.stack([b.mlp.gate.balancing_biases for b in model.blocks])


def train_once(model, balancer, batches):
    """One optimizer step's worth of forwards and the balancing step."""
    model.train()
    for tokens in batches:
        model(tokens, tokens)[1].backward()
    return balancer.step()


def test_language_model_loss_alone_teaches_the_router(make, ids):
    model = make(num_blocks=3)
    model(ids(3, 13), ids(3, 13, seed=1))[1].backward()
    for i, block in enumerate(model.blocks):
        for name, p in block.mlp.gate.named_parameters():
            assert p.grad.norm() > 1e-6, f"block {i}: {name} has no gradient"


def test_weight_of_the_expert_is_its_raw_probability(make):
    router = make().blocks[0].mlp.gate
    x = torch.randn(50, 32)
    p_NK, experts_NK, _ = router(x)
    full, _ = router.probabilities(x, None)
    assert torch.equal(p_NK, full.gather(1, experts_NK)) and p_NK.max() < 1
    assert p_NK.dtype == torch.float32


def test_equal_shift_of_all_biases_changes_nothing(make, ids):
    model, tokens = make(), ids(2, 9)
    before = model(tokens)[0]
    for block in model.blocks:
        block.mlp.gate.balancing_biases += 0.5
    assert torch.equal(before, model(tokens)[0]), "the biases choose; they must not enter the output"
    assert not any("balancing" in name for name, _ in model.named_parameters())


def test_bias_that_flips_no_choice_changes_nothing(make, ids):
    """A softmax over p + bias would hide from an equal shift, and not from a shift of one class."""
    model, tokens = make(skip_expert="off"), ids(2, 9)
    before = model(tokens)[0]
    for block in model.blocks:
        block.mlp.gate.balancing_biases[2] += 10.0              # expert 2 wins everywhere
    forced = model(tokens)[0]
    for block in model.blocks:
        block.mlp.gate.balancing_biases[torch.tensor([0, 1, 3])] += torch.tensor([0.3, -0.2, 0.1])
    assert not torch.equal(before, forced) and torch.equal(forced, model(tokens)[0])


def test_bias_decides_near_ties_and_ties_go_to_the_lower_index():
    p = torch.tensor([[0.30, 0.30, 0.25, 0.15], [0.30, 0.29, 0.26, 0.15]])
    assert choose(p, 1).tolist() == [[0], [0]]
    assert choose(p + torch.tensor([0, 0.02, 0, 0]), 1).tolist() == [[1], [1]]
    assert choose(p, 3).tolist() == [[0, 1, 2], [0, 1, 2]]


def test_router_state_is_summed_over_blocks_as_the_equation_says(make):
    """Equation (1) by hand over three blocks."""
    model, x = make(num_blocks=3), torch.randn(7, 32)
    r = expected = None
    for block in model.blocks:
        gate = block.mlp.gate
        _, _, r = gate(x, r)
        own = x @ gate.down_proj.weight.t() + gate.down_proj.bias
        expected = own if expected is None else own + gate.router_states_scale * expected
        assert_close(r, expected, 1e-5, "r")
    assert model.blocks[0].mlp.gate.router_states_scale is None, "block 0 has no EDA"


@pytest.mark.parametrize("mode", ["identity", "zero"])
def test_skip_class_forced_to_win(make, mode):
    model = make(skip_expert=mode)
    moe = model.blocks[0].mlp
    moe.gate.balancing_biases[-1] = 10.0
    x = torch.randn(2, 6, 32)
    p_NK, experts_NK, _ = moe.gate(x.flatten(0, 1))
    y, _, _ = moe(x)
    expected = p_NK * x.flatten(0, 1) if mode == "identity" else torch.zeros(12, 32)
    assert_close(y.flatten(0, 1), expected, 1e-6, f"output of the skip class ({mode})")
    assert count(experts_NK, 5).tolist() == [0, 0, 0, 0, 12]


def test_some_skipped_tokens_and_top_2_equal_the_loop(make):
    for skip, top_k in (("identity", 2), ("zero", 3), ("off", 2)):
        moe = make(skip_expert=skip, top_k=top_k).blocks[0].mlp
        if skip != "off":
            moe.gate.balancing_biases[-1] = 0.1
        x = torch.randn(3, 11, 32)
        p_NK, experts_NK, _ = moe.gate(x.flatten(0, 1))
        expected = torch.zeros(33, 32)
        for n, row in enumerate(x.flatten(0, 1)):
            for p, e in zip(p_NK[n], experts_NK[n].tolist()):
                if e < 4:
                    gate, up = (moe.experts.gate_up_proj[e] @ row).chunk(2)
                    expected[n] += p * (moe.experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up))
                elif skip == "identity":
                    expected[n] += p * row
        assert (experts_NK == 4).any() or skip == "off"
        assert_close(moe(x)[0].flatten(0, 1), expected, 1e-5, f"MoE output, skip {skip}, top {top_k}")


def test_evaluation_and_generation_leave_balancing_alone(make, ids):
    model = make().train()
    balancer = Balancer(model, 1e-3)
    train_once(model, balancer, [ids(2, 9)])
    before = copy.deepcopy((biases(model), balancer.optimizer.state_dict()))
    model.eval()
    for seed in range(10):
        model(ids(2, 9, seed), ids(2, 9, seed))
    generate(model, [[1, 2, 3]], 4, temperature=0)
    model.train()
    with torch.no_grad():
        model(ids(2, 9))
    assert torch.equal(biases(model), before[0]) and not any(b.mlp.gate.load.any() for b in model.blocks)
    for key, value in before[1]["state"].items():
        assert all(torch.equal(value[k], balancer.optimizer.state_dict()["state"][key][k]) for k in value)


def test_micro_batches_make_one_step_of_their_sum(make, ids):
    tokens, results = ids(8, 9), []
    for batches in ([tokens], tokens.split(2)):
        model = make()
        balancer = Balancer(model, 1e-3)
        load = train_once(model, balancer, batches)
        results.append((load, biases(model)))
        assert all(int(s["step"]) == 1 for s in balancer.optimizer.state.values()), (
            "one update per optimizer step"
        )
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_recomputed_blocks_count_once(make, ids):
    model = make().train()
    model.recompute = True
    balancer = Balancer(model, 1e-3)
    load = train_once(model, balancer, [ids(2, 9)])
    assert load.sum(1).tolist() == [18, 18]


def test_first_step_moves_busy_down_idle_up_and_leaves_skip(make, ids):
    model = make()
    before = biases(model)
    load = train_once(model, Balancer(model, 1e-3), [ids(4, 16)])
    moved = biases(model) - before
    # AdamW's first step has the size of its rate
    expected = -1e-3 * (load / load.sum(1, keepdim=True) - 1 / 4).sign()
    assert (moved[:, 4] == 0).all() and (biases(model)[:, 4] == -1).all()
    assert_close(moved[:, :4], expected[:, :4], 1e-3, "first balancing step")


def test_rate_zero_keeps_biases(make, ids):
    model = make()
    before = biases(model).clone()
    train_once(model, Balancer(model, 0.0), [ids(2, 9)])
    assert torch.equal(before, biases(model))


def test_skipped_step_forgets_its_loads(make, ids):
    model = make()
    balancer, before = Balancer(model, 1e-3), biases(model).clone()
    model.train()(ids(2, 9), ids(2, 9))
    balancer.discard()
    balancer.step()
    assert torch.equal(before, biases(model)) and not balancer.optimizer.state


def test_biases_stay_float32_through_casts(make, ids):
    model, kept = make(), biases(make())
    assert torch.equal(biases(model.bfloat16()), kept), "a cast must not round them either"
    assert all(b.mlp.gate.balancing_biases.dtype == torch.float32 for b in model.blocks)
    before = biases(model).clone()
    train_once(model, Balancer(model, 1e-3), [ids(2, 9)])
    assert ((biases(model) - before)[:, :4].abs() > 5e-4).all(), "steps of 1e-3 must not be rounded away"
    router, x = model.blocks[0].mlp.gate, torch.randn(3, 32, dtype=torch.bfloat16)
    assert router(x)[2].dtype == torch.float32
    p, _ = router.probabilities(x, None)
    router.balancing_biases[:] = 1 - p[1].detach()      # token 1: all classes level,
    router.balancing_biases[3] += 1e-4                  # 3 ahead by less than bfloat16 can show
    assert router(x)[1][1].item() == 3
    with torch.no_grad():
        assert model(ids(1, 5))[0].isfinite().all()


def test_health_of_known_loads():
    load = torch.tensor([[5, 5, 5, 5, 0], [20, 0, 0, 0, 0], [9, 3, 0, 0, 8]])
    health = balance_health(load, 4)
    assert health["load_max"].tolist() == [1.0, 4.0, 3.0]
    assert_close(health["entropy"], torch.tensor([1.0, 0.0, 0.40563906], dtype=torch.float64), 1e-6,
                 "entropy")
    assert_close(health["skip"], torch.tensor([0.0, 0.0, 0.4], dtype=torch.float64), 1e-6, "skip share")


def balanced_run(rate, steps=200):
    """Largest share of an expert and smallest, over the last quarter of a tiny training on random text with
    structure."""
    torch.manual_seed(0)
    model = ZAYA(ZAYAConfig.preset("tiny", vocab_size=64)).train()
    optimizer, balancer = torch.optim.AdamW(model.parameters(), 3e-3), Balancer(model, rate)
    generator, loads = torch.Generator().manual_seed(1), 0
    table = torch.randint(0, 64, (64, 3), generator=generator)
    for step in range(steps):
        tokens = torch.randint(0, 64, (8, 33), generator=generator)
        for t in range(1, 33):
            tokens[:, t] = table[tokens[:, t - 1], torch.randint(0, 3, (8,), generator=generator)]
        model(tokens[:, :-1], tokens[:, 1:])[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        load = balancer.step()
        loads = loads + load * (step >= steps * 3 // 4)
    share = loads[:, :4] / loads.sum(1, keepdim=True)
    return share


@pytest.mark.slow
def test_balancing_keeps_every_expert_alive():
    on, off = balanced_run(0.01), balanced_run(0.0)
    assert on.max() < 2 / 4 and on.min() > 0.5 / 4, f"shares with balancing: {on.tolist()}"
    assert off.max() > on.max() + 0.1, f"without balancing the test would prove nothing: {off.tolist()}"
