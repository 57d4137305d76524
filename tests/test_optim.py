"""Muon: singular values, each expert by itself, the size of its update; groups; schedule; sharing the work
over ranks."""

import math
import subprocess
import sys

import pytest
import torch

import optim
from conftest import ROOT, assert_close
from model import ZAYA, ZAYAConfig


@pytest.mark.parametrize("rows, cols", [(8, 16), (16, 8), (12, 12), (17, 5), (32, 32), (2, 16), (64, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_newton_schulz_brings_all_singular_values_near_one(rows, cols, dtype):
    """Small multiples of every shape in the 8B model. The band is that of the published coefficients; they
    never settle at 1."""
    g = torch.Generator().manual_seed(rows * cols)
    U = torch.randn(5, rows, cols, generator=g)
    values = torch.linalg.svdvals(optim.newton_schulz(U, dtype=dtype).float())
    # a square random matrix has a few singular values so small that five steps cannot lift them
    low = torch.linalg.svdvals(U)[:, :1] * 0.02 < torch.linalg.svdvals(U)
    assert values.max() < 1.25 and values[low].min() > 0.6, f"{values.min():.3f} to {values.max():.3f}"


def test_newton_schulz_keeps_the_singular_vectors():
    g = torch.Generator().manual_seed(0)
    U = torch.randn(1, 9, 14, generator=g)
    left, _, right = torch.linalg.svd(U[0], full_matrices=False)
    turned = left.T @ optim.newton_schulz(U)[0] @ right.T
    assert (turned - torch.diag(turned.diag())).abs().max() < 1e-4


def test_batched_experts_equal_one_by_one():
    g = torch.Generator().manual_seed(0)
    stack = torch.randn(6, 10, 7, generator=g)
    together, alone = optim.newton_schulz(stack), torch.cat([optim.newton_schulz(m[None]) for m in stack])
    assert_close(together, alone, 1e-5, "orthogonalised experts")


def test_step_follows_the_equations():
    """Two steps of Muon on a matrix and a stack, against the equations written out."""
    g = torch.Generator().manual_seed(0)
    params = {"matrix": torch.randn(6, 4, generator=g), "stack": torch.randn(3, 4, 5, generator=g)}
    params = {name: torch.nn.Parameter(p) for name, p in params.items()}
    optimizer = optim.Muon(params.items(), lr=0.1, momentum=0.9, weight_decay=0.2)
    expected, buffers = {n: p.detach().clone() for n, p in params.items()}, dict.fromkeys(params, 0)
    for _ in range(2):
        for name, p in params.items():
            p.grad = torch.randn(p.shape, generator=g)
            buffers[name] = 0.9 * buffers[name] + p.grad
            update = p.grad + 0.9 * buffers[name]
            X = optim.newton_schulz(update.view(-1, *p.shape[-2:]), dtype=optim.fast_dtype(p.device))
            X = X.view_as(p).float()
            expected[name] = expected[name] * (1 - 0.1 * 0.2) - 0.1 * 0.2 * math.sqrt(max(p.shape[-2:])) * X
        optimizer.step()
    for name in params:
        assert_close(params[name], expected[name], 1e-5, name)


def test_update_has_the_rms_of_a_typical_adamw_update():
    g = torch.Generator().manual_seed(0)
    for shape in ((48, 48), (96, 48), (32, 128)):
        p = torch.nn.Parameter(torch.zeros(shape))
        p.grad = torch.randn(shape, generator=g)
        optim.Muon([("p", p)], lr=1.0, weight_decay=0.0).step()
        assert 0.15 < p.detach().square().mean().sqrt() < 0.25, (
            f"{shape}: {p.detach().square().mean().sqrt():.3f}"
        )


def test_every_parameter_is_in_exactly_one_group():
    model = ZAYA(ZAYAConfig.preset("tiny"))
    lists = optim.groups(model)
    names = [name for group in lists.values() for name, _ in group]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters()) and len(names) == len(
        set(names)
    )
    muon = {name.split("blocks.0.")[-1] for name, _ in lists["muon"] if "blocks.0" in name}
    assert muon == {"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj_current.weight",
                    "self_attn.v_proj_delayed.weight", "self_attn.o_proj.weight", "mlp.gate.down_proj.weight",
                    "mlp.gate.fc1.weight", "mlp.gate.fc2.weight", "mlp.gate.out_proj.weight",
                    "mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    decayed = {name for name, _ in lists["adamw"]}
    assert decayed == {"embed_tokens.weight", *(f"blocks.{i}.self_attn.conv_qk_{c}.weight" for i in range(2)
                                                for c in ("depthwise", "grouped"))}
    for kind, sizes in (("muon", 2), ("adamw", 1)):
        optimizers = optim.build(model, kind, 1e-3)
        held = [id(p) for o in optimizers for group in o.param_groups for p in group["params"]]
        assert len(optimizers) == sizes and sorted(held) == sorted(map(id, model.parameters()))
        plain = optimizers[-1].param_groups[1]
        assert plain["weight_decay"] == 0 and all(p.dim() < 2 for p in plain["params"])


def test_schedule_at_its_corners():
    lr = lambda progress: optim.lr_at(progress, 6e-4, 2e-4, 0.1)
    assert lr(0) == 0 and lr(0.05) == pytest.approx(3e-4) and lr(0.1) == pytest.approx(6e-4)
    assert lr(0.55) == pytest.approx(4e-4) and lr(1.0) == pytest.approx(2e-4)
    assert optim.lr_at(0.0, 1.0, 0.5) == 1.0


@pytest.mark.slow
def test_ranks_share_the_work_and_get_the_weights_of_one(tmp_path):
    """Same gradients on 1, 2 and 3 ranks: bitwise equal weights, each matrix's momentum on one rank alone."""
    program = tmp_path / "share.py"
    program.write_text("""import os, sys, torch, torch._dynamo, torch.distributed as dist, optim
if int(os.environ.get("WORLD_SIZE", 1)) > 1: dist.init_process_group("gloo")
g = torch.Generator().manual_seed(0)
shapes = [(6, 4), (3, 6, 4), (5, 8), (2, 5, 8)]
params = {f"p{i}": torch.nn.Parameter(torch.randn(s, generator=g)) for i, s in enumerate(shapes)}
muon = optim.Muon(params.items(), 0.1)
for _ in range(3):
    for p in params.values(): p.grad = torch.randn(p.shape, generator=g)
    muon.step()
owned = [sorted(muon.named_state())]
if dist.is_initialized():
    owned = [None] * dist.get_world_size()
    dist.all_gather_object(owned, sorted(muon.named_state()))
if int(os.environ.get("RANK", 0)) == 0: torch.save((dict(params), owned), sys.argv[1])
if dist.is_initialized(): dist.destroy_process_group()
""")
    results = {}
    for ranks in (1, 2, 3):
        out = tmp_path / f"{ranks}.pt"
        launch = (
            [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        )
        command = [sys.executable, *launch, str(program), str(out)]
        done = subprocess.run(command, timeout=100, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        results[ranks] = torch.load(out, weights_only=True)
    for ranks in (2, 3):
        params, owned = results[ranks]
        assert all(torch.equal(params[name], results[1][0][name]) for name in params)
        assert sorted(sum(owned, [])) == sorted(results[1][1][0]) and all(owned), "each matrix has one owner"
