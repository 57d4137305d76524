"""The sheet against the real modules: parameters, FLOPs, memory, traffic; and the published run."""

import contextlib
import dataclasses
import math

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import optim
import train
from model import ZAYA, ZAYAConfig
from operations import step_operations
from plan import PlanConfig, plan
from sheet import bound, matrix_shapes, mean_keys, newton_schulz_flops

# Every size its own, so that no two letters of a formula can stand for each other unseen.
ODD = dict(vocab_size=320, hidden_size=48, num_blocks=3, num_heads=6, num_kv_heads=2, head_dim=16,
           num_experts=5, expert_hidden_size=80, router_hidden_size=24)


def paper(batch, seq_len, config, **changes):
    """The plan of one process that computes one micro-step of batch x seq_len tokens."""
    cfg = PlanConfig(gpus=1, seq_len=seq_len, batch_tokens=batch * seq_len, micro_batch=batch,
                     **{"dtype": "float32", **changes})
    return plan(cfg, config)


# ------------------------------------------------------------------------------------------------ parameters

def test_counts_of_the_published_models():
    p = plan(PlanConfig(), ZAYAConfig.preset("zaya1_8b"))
    assert (p["total"], p["active_no_embedding"]) == (8_840_488_784, 753_608_528)
    assert p["total_no_embedding"] == 8_303_355_728
    names = ("embedding", "attention", "convolutions", "experts", "routers", "scaling", "norms")
    assert [p[name] for name in names] == [537_133_056, 209_715_280, 13_312_000, 8_053_063_680, 26_439_424,
                                           659_456, 165_888]
    big = plan(PlanConfig(micro_batch=1), ZAYAConfig.preset("zaya1_74b"))
    assert (big["total"], big["active_no_embedding"]) == (74_793_953_144, 4_262_012_792)


@pytest.mark.parametrize("changes", [
    {}, dict(router="linear"), dict(eda=False), dict(residual_scaling=False), dict(skip_expert="off"),
    dict(conv_kernels=(3,)), dict(conv_kernels=()), dict(conv_kernels=(2, 3)), dict(top_k=2)])
def test_counts_equal_the_modules_to_the_parameter(changes):
    config = ZAYAConfig(**{**ODD, **changes})
    p = plan(PlanConfig(micro_batch=1), config)
    with torch.device("meta"):
        model = ZAYA(config)
    assert p["total"] == model.num_parameters()
    assert p["active"] == model.num_parameters(active=True)
    assert p["matrices"] == sum(w.numel() for _, w in optim.groups(model)["muon"])
    muon = optim.Muon(optim.groups(model)["muon"], 0.1)
    assert matrix_shapes(config) == {tuple(b.parameters[0].shape[-2:]): b.total for b in muon.batches}


# ------------------------------------------------------------------------------------------------ FLOPs

def grouped(a, b, *args, out_shape=None, **kwargs):
    return 2 * math.prod(a) * b[-1]


def attention(back):
    def flops(*shapes, out_shape=None, **kwargs):
        B, H, T, K = shapes[back]
        products = 5 if back else 2
        return 2 * products * B * H * T * shapes[1 + back][2] * K
    return flops


ATEN = torch.ops.aten
# torch's counter knows neither our grouped products nor the CPU's attention; the formulas are those it uses
# for their relatives.
EXTRA = {torch.ops.zaya1.grouped_product: grouped,
         ATEN._scaled_dot_product_flash_attention_for_cpu: attention(0),
         ATEN._scaled_dot_product_flash_attention_for_cpu_backward: attention(1)}


@pytest.mark.parametrize("changes", [{}, dict(top_k=2), dict(router="linear"),
                                     dict(conv_kernels=(2,), eda=False)])
def test_flops_equal_the_counter_on_the_real_modules(changes):
    config, B, T = ZAYAConfig(**{**ODD, **changes}), 4, 96
    p, model = paper(B, T, config), ZAYA(config)
    tokens = torch.randint(320, (B, T), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False, custom_mapping=EXTRA) as counter:
        model(tokens, tokens)[1].backward()
    counts = {str(op): n / (B * T) for op, n in counter.get_flop_counts()["Global"].items()}
    experts = sum(n for op, n in counts.items() if "grouped" in op)
    square = sum(n for op, n in counts.items() if "scaled_dot" in op)       # the counter's, of T x T
    scores = square * p["keys"] / (p["L"] * T)
    rest = sum(n for op, n in counts.items() if "grouped" not in op and "scaled_dot" not in op)
    assert experts == pytest.approx(3 * p["f_experts"], rel=0.01)
    assert scores == pytest.approx(3.5 * p["f_scores"], rel=0.01)
    products = p["f_projections"] + p["f_convolutions"] + p["f_routers"] + p["f_head"]
    assert rest == pytest.approx(3 * products, rel=0.01)
    assert experts + scores + rest == pytest.approx(p["f_step"], rel=0.01)


@pytest.mark.parametrize("rows, cols, count", [(24, 40, 3), (40, 24, 2), (32, 32, 1)])
def test_newton_schulz_flops_equal_the_counter(rows, cols, count):
    with FlopCounterMode(display=False) as counter:
        optim.newton_schulz(torch.randn(count, rows, cols))
    assert counter.get_total_flops() == count * newton_schulz_flops(rows, cols)


def test_model_flops_are_those_of_train():
    config = ZAYAConfig(**ODD)
    with torch.device("meta"):
        model = ZAYA(config)
    assert paper(2, 64, config)["f_model"] == train.flops_per_token(model, 64)


@pytest.mark.parametrize("window", [1, 5, 12, 40])
def test_mean_keys_equals_counting_them(window):
    T = 12
    seen = [min(t + 1, window) for t in range(T)]
    assert mean_keys(T, window) == pytest.approx(sum(seen) / T)
    assert mean_keys(T, None) == (T + 1) / 2


# ------------------------------------------------------------------------------------------------ memory

class Ledger(TorchDispatchMode):
    """Bytes of every storage that an operation made and that somebody still holds."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def live(self):
        return sum(size for reference, size in self.storages.values() if not reference.expired())


# Shapes in which one term or another outweighs the rest, so that an error in any of them shows.
SHAPES = [dict(num_blocks=5, num_experts=7), dict(hidden_size=240),
          dict(expert_hidden_size=400, num_experts=2), dict(num_experts=40), dict(head_dim=64)]


@pytest.mark.parametrize("changes", SHAPES)
@pytest.mark.parametrize("dtype, recompute", [("float32", False), ("bfloat16", False), ("float32", True)])
def test_memory_equals_what_a_training_step_allocates(dtype, recompute, changes):
    config, B, T = ZAYAConfig(**{**ODD, **changes}), 8, 96
    p = paper(B, T, config, dtype=dtype, recompute=recompute)
    tokens = torch.randint(320, (B, T), generator=torch.Generator().manual_seed(0))
    autocast = torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else contextlib.nullcontext()
    with Ledger() as ledger:
        model = ZAYA(config)
        model.recompute = recompute
        weights = ledger.live()
        optimizers = optim.build(model, "muon", 0.01)
        momentum = ledger.live() - weights
        with autocast:
            loss = model(tokens, tokens)[1]
        forward = ledger.live() - weights - momentum
        loss.backward()
        del loss
        gradients = ledger.live() - weights - momentum
        before = ledger.live()
        for optimizer in optimizers:
            optimizer.step()
        state = momentum + ledger.live() - before
    kept_of_loss = 4 * p["V"] * p["D"]          # of the logits only the head's gradient outlives the forward
    if recompute:                               # the block that backward recomputes is not there yet
        planned = p["activations"] - p["N"] * p["a_block"] - p["a_folded"] + kept_of_loss
    else:
        planned = p["activations"] + kept_of_loss + p["copies"]
    assert weights == pytest.approx(p["weights"], rel=0.05)
    assert gradients == pytest.approx(p["gradients"], rel=0.05)
    assert state == pytest.approx(p["optimizer_state"], rel=0.05)
    assert forward == pytest.approx(planned, rel=0.06 if recompute else 0.03), (forward, planned)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_element_wise_traffic_is_what_the_modules_move(dtype):
    """A token's in a block: difference of two depths and two batches. The rest is for the block's weights."""
    config = ZAYAConfig(**{**ODD, "num_experts": 60})

    def moved(blocks, batch):
        shape = dataclasses.replace(config, num_blocks=blocks)
        counts, _ = step_operations(shape, batch, 64, "muon", dtype)
        return sum(n * op.work for (phase, op), n in counts.items()
                   if phase != "optimizer" and not op.dims and "scaled_dot" not in op.name)
    few, many = moved(3, 4) - moved(2, 4), moved(3, 8) - moved(2, 8)
    p = paper(4, 64, config, dtype=str(dtype).split(".")[1])
    assert p["t_block"] == pytest.approx((many - few) / (4 * 64), rel=0.02)
    if dtype == torch.bfloat16:
        assert p["t_weights"] / p["L"] == pytest.approx(2 * few - many, rel=0.2)    # CCA's folding aside


# ------------------------------------------------------------------------------------------ the published run

def published(**changes):
    return plan(PlanConfig(**{"step_seconds": 2.5, **changes}), ZAYAConfig.preset("zaya1_8b"))


def test_published_step_gives_the_published_rates():
    p = published()
    assert p["tokens_per_s_gpu"] == pytest.approx(6_553.6)
    assert p["days"] == pytest.approx(20.7, abs=0.05)
    assert p["mfu"] == pytest.approx(100 * (6 * (753_608_528 + 537_133_056) + 6 * 40 * 1024 * 4096) * 6_553.6
                                     / 1307e12)
    assert p["left"] > 0 and p["micro_batch"] == 4 and p["kv_saving"] == 8


def test_bound_names_the_largest_term():
    p = published()
    assert bound(p) == ("elementwise_s", p["elementwise_s"] / p["planned_s"])
    assert p["unexplained_s"] == pytest.approx(2.5 - p["planned_s"])
    assert bound(plan(PlanConfig(share=0.2), ZAYAConfig.preset("zaya1_8b")))[0] == "products_s"
    slow = plan(PlanConfig(nic=0.5), ZAYAConfig.preset("zaya1_8b"))
    assert bound(slow)[0] == "exposed_s"
    alone = plan(PlanConfig(gpus=1, batch_tokens=4096), ZAYAConfig.preset("zaya1_8b"))
    assert bound(alone)[0] == "newton_schulz_s"


def test_all_reduce_by_hand():
    p = published()
    S = 4 * 8_840_488_784
    assert p["allreduce_s"] == pytest.approx(2 * S * 7 / 8 / (7 * 64e9) + 2 * S / 8 * 127 / 128 / 50e9
                                             + math.ceil(S / (25 * 2**20)) * 2 * 10e-6 * 10)
    assert published(gpus=8, batch_tokens=8 * 4096)["between_s"] == 0
    alone = published(gpus=1, batch_tokens=4096)
    assert alone["allreduce_s"] == alone["exposed_s"] == alone["gather_s"] == alone["buckets"] == 0
    assert published(bucket_view=False)["buckets"] == S
    assert p["exposed_s"] < p["allreduce_s"] < p["flat_s"]


def test_newton_schulz_shared_out_is_never_less_than_its_share():
    for gpus in (1, 8, 640, 1024):
        p = published(gpus=gpus, batch_tokens=gpus * 4096)
        assert p["newton_schulz_whole_s"] / gpus <= p["newton_schulz_s"] <= p["newton_schulz_whole_s"]
    assert p["newton_schulz_s"] < 0.01 * p["newton_schulz_whole_s"]
    one_each = sum(newton_schulz_flops(*shape) for shape in matrix_shapes(ZAYAConfig.preset("zaya1_8b")))
    # More ranks than matrices of any shape: the first rank has one of each.
    assert p["newton_schulz_s"] == pytest.approx(one_each / (p["share"] * 1307e12))


def test_optimizer_state_of_a_rank_is_what_muon_gives_it():
    config, ranks = ZAYAConfig(**{**ODD, "num_heads": 8}), 7
    shapes = {}
    for name, w in optim.groups(ZAYA(config))["muon"]:
        shapes.setdefault(tuple(w.shape[-2:]), []).append((name, w))
    first = sum(optim.Batch(group, 0, ranks).momentum.numel() for group in shapes.values())
    p = plan(PlanConfig(gpus=ranks, batch_tokens=ranks * 4096, micro_batch=1), config)
    assert p["optimizer_state"] == 4 * first + 8 * p["vectors"]


def test_context_even_is_where_scores_cost_as_much_as_the_rest():
    T = round(published()["context_even"])
    p = published(seq_len=T, gpus=1, batch_tokens=T, micro_batch=1)
    assert p["f_scores"] == pytest.approx(p["f_forward"] / 2, rel=1e-3)


def test_checkpointing_trades_memory_for_work():
    whole, again = published(micro_batch=4), published(micro_batch=4, recompute=True)
    assert again["activations"] < 0.2 * whole["activations"]
    assert again["f_step"] == pytest.approx(whole["f_step"] + whole["f_forward"] - whole["f_head"])


def test_storage_formula():
    p = published(page_kb=4)
    assert p["reads_packed"] == pytest.approx(2 * 4096 * 4096 * 4 / (4096 * 2.5))        # sigma G s b / (P t)
    assert p["reads_scattered"] == 4 * p["reads_packed"]
    assert p["id_bytes"] == 4 and paper(2, 64, ZAYAConfig(**ODD))["id_bytes"] == 2


def test_caches_equal_the_models_own():
    config, batch, length = ZAYAConfig(**ODD), 3, 40
    p = paper(1, length, config)
    cache = ZAYA(config).new_cache(batch, length)
    held = sum(getattr(block, name).numel() for block in cache.blocks for name in ("k", "v", "z", "v_next"))
    assert 2 * held == batch * (length * p["kv_cca"] + p["kv_fixed"])
