"""Dispatch and combine: the twin against loops and gradcheck, the kernels (shim, GPU) against the twin."""
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import kernels_build
import kernels_hip
from kernels_build import load_shim
from kernels_hip import combine, combine_ref, dispatch, dispatch_ref

ROOT = Path(kernels_hip.__file__).parent
SOURCE = kernels_hip.KERNELS + kernels_hip.LAUNCHERS
TYPES = [torch.float32, torch.float16, torch.bfloat16]
SCHEDULES = [(lanes, order) for lanes in (64, 32) for order in ("forward", "reverse", "random")]
# name: tokens, choices, experts, width, and how the experts are chosen
CASES = {
    "empty": (0, 1, 3, 8, "random"), "one token": (1, 2, 4, 5, "random"), "prime": (7, 1, 3, 13, "random"),
    "one past a wave": (65, 1, 5, 16, "skips"), "one past a block": (257, 1, 16, 40, "skips"),
    "one past a chunk": (1025, 1, 6, 3, "random"), "idle experts": (90, 2, 7, 24, "idle"),
    "all to one": (130, 1, 9, 33, "one"), "all skipped": (50, 2, 3, 8, "all skipped"),
    "three choices": (101, 3, 5, 8, "skips"), "four choices": (67, 4, 12, 520, "skips"),
    "one expert": (33, 1, 1, 32, "skips"), "scan loops": (1030, 1, 600, 4, "skips"),
}


@pytest.fixture(autouse=True)
def spoiled_memory_and_default_path():
    """torch.empty gives NaN and the largest ints: a place that no kernel writes cannot pass by luck."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    kernels_hip.select("auto")


def choose(tokens, top_k, num_experts, kind, seed=0):
    random = torch.Generator().manual_seed(seed)
    experts = torch.randint(num_experts + (kind == "skips"), (tokens, top_k), generator=random)
    if kind == "idle":                              # the first, the last and two in the middle get nothing
        experts = torch.tensor([1, 2, num_experts - 2])[experts % 3]
    if kind in ("one", "all skipped"):
        experts.fill_(num_experts if kind == "all skipped" else 4)
    return experts


def tensors(name, dtype=torch.float32, seed=0):
    tokens, top_k, num_experts, width, kind = CASES[name]
    random = torch.Generator().manual_seed(seed)
    x, grad = torch.randn(2, tokens, width, generator=random).to(dtype)
    weights = torch.rand(tokens, top_k, generator=random)
    rows = torch.randn(tokens * top_k, width, generator=random).to(dtype)
    return x, grad, weights, rows, choose(tokens, top_k, num_experts, kind), num_experts


def same(name, ours, twin, error=0.0):
    """Same dtype and shape, equal to `error` relative to the largest entry (bitwise by default); no NaN."""
    assert ours.dtype == twin.dtype and ours.shape == twin.shape, f"{name}: {ours.dtype} {tuple(ours.shape)}"
    if ours.numel():
        largest = (ours.double() - twin.double()).abs().max().item()
        allowed = error * max(1.0, twin.double().abs().max().item())
        assert largest <= allowed, f"{name}: largest difference {largest:.3e}, allowed {allowed:.3e}"


# ---------------------------------------------------------------------------------- the twin, by loops


@pytest.mark.parametrize("name", CASES)
def test_dispatch_orders_rows_as_a_loop_does(name):
    x, _, _, _, experts, num_experts = tensors(name)
    rows, offsets, positions = dispatch(x, experts, num_experts)
    flat, order = experts.flatten().tolist(), []
    for expert in range(num_experts):
        order += [slot for slot, chosen in enumerate(flat) if chosen == expert]
        assert offsets[expert] == len(order), f"end of expert {expert}"
    same("rows", rows[:len(order)], x[[slot // experts.shape[1] for slot in order]])
    expected = torch.full((len(flat),), -1)
    for row, slot in enumerate(order):
        expected[slot] = row
    assert torch.equal(positions.flatten(), expected)
    assert rows.shape == (len(flat), x.shape[1])
    assert (offsets.dtype, positions.dtype) == (torch.int32, torch.int64)


@pytest.mark.parametrize("identity", [True, False], ids=["identity", "zero"])
@pytest.mark.parametrize("path", ["plain", "shim"])
def test_combine_weighs_rows_and_skipped_tokens_as_a_loop_does(path, identity):
    kernels_hip.select(path)
    x, _, weights, values, experts, num_experts = tensors("three choices")
    _, offsets, positions = dispatch(x, experts, num_experts)
    values[offsets[-1]:] = float("nan")                         # the tail must never be used
    y = combine(values, weights, positions, x if identity else None)
    for n in range(len(x)):
        expected = sum(weights[n, k] * (values[positions[n, k]] if positions[n, k] >= 0 else x[n] * identity)
                       for k in range(3))
        same(f"token {n}", y[n], expected, 1e-6)


def test_skip_forced_everywhere_gives_p_times_x_and_no_load():
    x, _, weights, _, _, _ = tensors("prime")
    rows, offsets, positions = dispatch(x, torch.full((7, 1), 3), 3)
    assert offsets.tolist() == [0, 0, 0] and (positions == -1).all()
    same("identity", combine(rows, weights, positions, x), weights * x)
    same("zero", combine(rows, weights, positions), torch.zeros_like(x))


@pytest.mark.parametrize("kind", ["random", "skips", "all skipped"])
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("identity", [True, False], ids=["identity", "zero"])
def test_gradcheck_in_float64(kind, top_k, identity):
    random = torch.Generator().manual_seed(top_k)
    experts = choose(5, top_k, 4, kind, seed=2)
    x = torch.randn(5, 3, generator=random, dtype=torch.float64).requires_grad_()
    weights = torch.rand(5, top_k, generator=random, dtype=torch.float64).requires_grad_()

    def layer(x, weights):
        rows, offsets, positions = dispatch(x, experts, 4)
        valid = (torch.arange(len(rows)) < offsets[-1])[:, None]
        rows = torch.where(valid, rows * rows, float("nan"))
        return combine(rows, weights, positions, x if identity else None)

    assert torch.autograd.gradcheck(layer, (x, weights))


def test_moe_equals_the_loop_and_idle_experts_get_zero_gradients():
    x, grad, weights, _, experts, num_experts = tensors("idle experts")
    matrices = torch.randn(num_experts, 24, 24, generator=torch.Generator().manual_seed(5))
    grads = []
    for by_kernel in (True, False):
        leaves = [t.clone().requires_grad_() for t in (x, weights, matrices)]
        if by_kernel:
            rows, offsets, positions = dispatch(leaves[0], experts, num_experts)
            parts = torch.tensor_split(rows, offsets[:-1].long())
            y = combine(torch.cat([part @ m for part, m in zip(parts, leaves[2])]), leaves[1], positions)
        else:
            tokens, p, m = leaves
            y = torch.stack([sum(p[n, k] * (tokens[n] @ m[experts[n, k]]) for k in range(2))
                             for n in range(len(x))])
        grads.append((y, *torch.autograd.grad(y, leaves, grad)))
    for name, ours, loop in zip(("y", "x", "weights", "matrices"), *grads):
        same(name, ours, loop, 1e-5)
    for idle in (0, 3, 4, 6):
        assert grads[0][3][idle].abs().max() == 0, f"idle expert {idle} has a gradient"


def test_tail_rows_get_zero_gradients():
    for path in ("plain", "shim"):
        kernels_hip.select(path)
        x, grad, weights, rows, experts, num_experts = tensors("one past a block")
        _, offsets, positions = dispatch(x, experts, num_experts)
        rows.requires_grad_()
        got, = torch.autograd.grad(combine(rows, weights, positions, x), rows, grad * float("inf"))
        assert 0 < offsets[-1] < len(rows) and (got[offsets[-1]:] == 0).all(), path


# ---------------------------------------------------------------------------- the kernels, by the twin


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_twin_in_every_schedule(name, dtype):
    x, grad, weights, rows, experts, num_experts = tensors(name, dtype)
    expected_rows, offsets, positions = dispatch_ref(x, experts, num_experts)
    end = int(offsets[-1])
    with torch.no_grad():
        identity, zero, ones = (combine_ref(rows, p, positions, skipped)
                                for p, skipped in ((weights, x), (weights, None), (None, None)))
        backward = kernels_hip.combine_backward_ref(grad, rows, weights, positions, x)
        backward_zero = kernels_hip.combine_backward_ref(grad, rows, weights, positions, None)
    for lanes, order in SCHEDULES:
        library, at = load_shim(SOURCE, lanes, order), f"{lanes} lanes, {order}: "
        got = kernels_hip._dispatch_hip(library, x, experts, num_experts)
        same(at + "positions", got[2], positions)
        same(at + "offsets", got[1], offsets)
        same(at + "rows", got[0][:end], expected_rows[:end])
        same(at + "combine", kernels_hip._combine_hip(library, rows, weights, positions, x), identity)
        same(at + "combine, zero", kernels_hip._combine_hip(library, rows, weights, positions), zero)
        same(at + "dispatch, backward", kernels_hip._combine_hip(library, rows, None, positions), ones)
        got = kernels_hip._combine_backward_hip(library, grad, rows, weights, positions, x)
        got_zero = kernels_hip._combine_backward_hip(library, grad, rows, weights, positions, None)
        same(at + "grad of rows", got[0], backward[0])
        same(at + "grad of weights", got[1], backward[1], 1e-5)       # another order of summation
        same(at + "grad of x", got[2], torch.zeros_like(x) if backward[2] is None else backward[2],
             0 if experts.shape[1] == 1 else 4 * torch.finfo(dtype).eps)
        same(at + "grad of weights, zero", got_zero[1], backward_zero[1], 1e-5)
        assert got_zero[2] is None


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("tokens, width", [(1, 1), (9, 13), (40, 64), (3, 2056)])
def test_swiglu_kernel_is_no_worse_than_torch(dtype, tokens, width):
    random = torch.Generator().manual_seed(width)
    h, grad = (3 * torch.randn(tokens, n, generator=random) for n in (2 * width, width))
    h, grad = h.to(dtype), grad.to(dtype)
    leaf = h.double().requires_grad_()
    exact = kernels_hip.swiglu_ref(leaf)
    exact_grad, = torch.autograd.grad(exact, leaf, grad.double())
    twin = h.clone().requires_grad_()
    plain = kernels_hip.swiglu_ref(twin)
    plain_grad, = torch.autograd.grad(plain, twin, grad)
    for lanes, order in SCHEDULES:
        kernels_hip.select("shim", lanes=lanes, schedule=order)
        ours = h.clone().requires_grad_()
        out = kernels_hip.swiglu(ours)
        out_grad, = torch.autograd.grad(out, ours, grad)
        compared = ("out", out, plain, exact), ("grad", out_grad, plain_grad, exact_grad)
        for name, got, torchs, truth in compared:
            error, allowed = ((t.double() - truth).abs().max().item() for t in (got, torchs))
            assert error <= 2 * allowed + 1e-7, f"{name}: error {error:.2e}, torch's own {allowed:.2e}"


def test_bfloat16_rounds_as_torch_does():
    bits = torch.arange(-2**15, 2**15, dtype=torch.int16).view(torch.bfloat16)      # every value there is
    y = kernels_hip._combine_hip(load_shim(SOURCE), bits[:, None].expand(-1, 8).contiguous(),
                                 torch.full((len(bits), 1), 1.0037), torch.arange(len(bits))[:, None])
    expected = (bits.float() * torch.tensor(1.0037)).bfloat16()
    assert torch.equal(y[:, 3].isnan(), expected.isnan())
    same("products", y[:, 3].nan_to_num(), expected.nan_to_num())


def test_unaligned_tensors_take_the_narrow_copy():
    kernels_hip.select("shim")
    x, grad, weights, rows, experts, num_experts = tensors("one past a block")
    shifted = torch.cat([torch.zeros(1), x.flatten()])[1:].view_as(x)
    assert shifted.data_ptr() % 16 != 0 and shifted.is_contiguous()
    rows, twins = dispatch(shifted, experts, num_experts)[0], dispatch_ref(x, experts, num_experts)[0]
    same("rows", rows[:200], twins[:200])


def test_gradients_repeat_bitwise_in_any_order_of_threads():
    x, grad, weights, rows, experts, num_experts = tensors("four choices")
    positions = dispatch_ref(x, experts, num_experts)[2]
    runs = []
    for order, seed in (("forward", 1), ("reverse", 1), ("random", 2), ("random", 3)):
        library = load_shim(SOURCE, 64, order, seed)
        runs.append(kernels_hip._combine_backward_hip(library, grad, rows, weights, positions, x))
    for run in runs[1:]:
        for name, first, again in zip(("rows", "weights", "x"), runs[0], run):
            same(name, first, again)


@pytest.mark.parametrize("where, with_, message", [
    ("    __syncthreads();\n    for (int i",
     "    if (threadIdx.x < 5) __syncthreads();\n    for (int i", "barrier"),
    ("first = SHUFFLE(first, leader);", "if (rank == 0) first = SHUFFLE(first, leader);", "wave operation"),
])
def test_shim_reports_divergence(where, with_, message):
    assert where in kernels_hip.KERNELS
    kernels_hip.select("shim", kernels=kernels_hip.KERNELS.replace(where, with_, 1))
    with pytest.raises(RuntimeError, match=message):
        kernels_hip.check()


def train_curve(path, steps=12):
    """Losses of a toy MoE (router, six experts, skip class) under Adam, its rows moved by `path`."""
    kernels_hip.select(path)
    random = torch.Generator().manual_seed(3)
    router, w1, w2 = (torch.randn(*s, generator=random).mul(0.3).requires_grad_()
                      for s in ((8, 7), (6, 8, 20), (6, 10, 8)))
    optimizer, losses = torch.optim.Adam([router, w1, w2], lr=0.02), []
    for _ in range(steps):
        x = torch.randn(70, 8, generator=random)
        p, e = (x @ router).softmax(-1).max(-1, keepdim=True)
        rows, offsets, positions = dispatch(x, e, 6)
        parts = torch.tensor_split(rows, offsets.long())[:6]
        done = [kernels_hip.swiglu(part @ a) @ b for part, a, b in zip(parts, w1, w2)]
        out = torch.cat(done + [rows.new_zeros(len(rows) - int(offsets[-1]), 8)])
        loss = (combine(out, p, positions, x) - x.roll(1, -1).tanh()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_through_the_shim_follows_the_twin():
    plain, shim = train_curve("plain"), train_curve("shim")
    assert plain[-1] < 0.9 * plain[0] and plain == train_curve("plain")
    assert shim == pytest.approx(plain, rel=1e-5)


def test_model_trains_through_the_shim_as_through_the_twin():
    import model
    curves = []
    for path in ("plain", "shim"):
        kernels_hip.select(path)
        torch.manual_seed(0)
        net = model.ZAYA(model.ZAYAConfig.preset("tiny"))
        optimizer, curve = torch.optim.Adam(net.parameters(), lr=1e-2), []
        tokens = torch.randint(0, net.config.vocab_size, (2, 9))
        for _ in range(4):
            loss = net(tokens[:, :-1], tokens[:, 1:])[1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(curve)
    assert curves[0][-1] < curves[0][0] and curves[1] == pytest.approx(curves[0], rel=1e-4)


# ----------------------------------------------------------------------------- autograd's surroundings


def test_half_precision_rows_take_float32_weights():
    for path in ("plain", "shim"):
        kernels_hip.select(path)
        x, grad, weights, _, experts, num_experts = tensors("three choices", torch.bfloat16)
        leaves = x.requires_grad_(), weights.requires_grad_()
        rows, _, positions = dispatch(x, experts, num_experts)
        y = combine(rows, weights, positions, x)
        grads = torch.autograd.grad(y, leaves, grad)
        assert [t.dtype for t in (rows, y, *grads)] == 3 * [torch.bfloat16] + [torch.float32], path
        halves = weights.detach().bfloat16().requires_grad_()
        y = combine(rows, halves, positions, x)
        same(path, y, combine_ref(rows, halves.float(), positions, x))
        assert torch.autograd.grad(y, halves, grad)[0].dtype == torch.bfloat16


def test_no_grad_inference_mode_and_expanded_gradients_work():
    x, _, weights, _, experts, num_experts = tensors("prime")
    for path in ("plain", "shim"):
        kernels_hip.select(path)
        outputs = []
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                rows, _, positions = dispatch(x, experts, num_experts)
                outputs.append(combine(rows, weights, positions, x))
        assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
        leaf = x.clone().requires_grad_()
        rows, _, positions = dispatch(leaf, experts, num_experts)
        same("rows alone", torch.autograd.grad(rows.sum(), leaf, retain_graph=True)[0], torch.ones_like(x))
        combine(rows, weights, positions).sum().backward()
        same("grad of x", leaf.grad, weights.expand_as(x), 1e-6)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_layer_gives_the_same_numbers(backend):
    x, grad, weights, _, experts, num_experts = tensors("three choices")

    def layer(x, weights):
        rows, _, positions = dispatch(x * 2, experts, num_experts)
        return combine(rows.sin() + 1, weights, positions, x) * 3

    results = []
    for run in (layer, torch.compile(layer, backend=backend)):
        leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = run(*leaves)
        results.append((y, *torch.autograd.grad(y, leaves, grad)))
    for name, eager, compiled in zip(("y", "x", "weights"), *results):
        same(name, compiled, eager, 0 if backend == "eager" else 1e-6)


def test_import_does_not_load_the_compiler():
    code = "import sys, kernels_hip; kernels_hip.status(); sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# ------------------------------------------------------------------------ choosing, building, mistakes


def test_mistakes_are_named_in_one_line():
    x, _, weights, rows, experts, num_experts = tensors("prime")
    with pytest.raises(ValueError, match=r"int64 of shape \(7, K\), got torch.int32"):
        dispatch(x, experts.int(), num_experts)
    with pytest.raises(ValueError, match=r"weights \(7, 1\), positions \(7, 1\) and 6 rows"):
        combine(rows[:6], weights, experts)
    with pytest.raises(ValueError, match="--kernels fast: choose one of auto, hip, plain"):
        kernels_hip.select("fast")
    kernels_hip.select("shim")
    with pytest.raises(ValueError, match="--kernels shim: no kernel for torch.float64"):
        dispatch(x.double(), experts, num_experts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_without_a_gpu_auto_is_plain_and_hip_is_an_error():
    kernels_hip.select("auto")
    assert kernels_hip.status() == "kernels: plain torch operations (no GPU is visible to torch)"
    with pytest.raises(ValueError, match="--kernels hip cannot run: no GPU is visible to torch"):
        kernels_hip.select("hip")
    kernels_hip.select("plain")
    assert kernels_hip.status() == "kernels: plain torch operations (chosen)"


@pytest.mark.parametrize("missing", ["ninja", "c++"])
def test_missing_build_tool_means_plain_or_an_error(missing, tmp_path, monkeypatch):
    for tool in {"ninja", "c++"} - {missing}:
        (tmp_path / tool).symlink_to("/bin/true")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels_hip, "_resolved", {})
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.delenv("CXX", raising=False)
    settings = {"PATH": tmp_path, "TORCH_CUDA_ARCH_LIST": "9.0", "TORCH_EXTENSIONS_DIR": tmp_path}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    kernels_hip.select("auto")
    assert kernels_hip.status() == ("kernels: plain torch operations "
                                    f"({missing} is not on PATH: install it to compile the kernels)")
    x, _, _, _, experts, num_experts = tensors("prime")
    assert len(dispatch(x, experts, num_experts)[0]) == 7
    with pytest.raises(ValueError, match="--kernels hip cannot run: .* is not on PATH"):
        kernels_hip.select("hip")


def test_failed_compilation_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(ValueError) as error:
        kernels_hip.select("shim", kernels="this is no kernel;" + kernels_hip.KERNELS)
    assert "error:" in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.glob("zaya1_kernels/*")) == [], "a failed build left something behind"


def test_stale_lock_and_folder_with_spaces_do_not_stop_a_build(tmp_path, monkeypatch):
    folder = tmp_path / "a folder" / "zaya1_kernels"
    (folder / "build-killed").mkdir(parents=True)
    for place in (folder, folder / "build-killed"):
        (place / "lock").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "a folder"))
    start = time.monotonic()
    kernels_hip.select("shim")
    assert time.monotonic() - start < 60 and len(list(folder.glob("*.so"))) == 1
    assert kernels_hip.check() < 1e-4


def test_two_processes_build_at_once(tmp_path):
    code = "import kernels_hip as k; k.select('shim'); print(k.check() < 1e-4)"
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE)
            for _ in range(2)]
    assert [process.communicate()[0].strip() for process in both] == [b"True", b"True"]
    assert [path.suffix for path in (tmp_path / "zaya1_kernels").iterdir()] == [".so"]


def test_lane_counts_are_no_literals_in_the_device_code():
    code = re.sub(r"//.*", "", SOURCE)
    assert not re.findall(r"\b(31|32|63|64|0xffffffffu?|warpSize)\b", code)
    for name, here in (("THREADS", kernels_build.THREADS), ("CHUNK", kernels_hip.CHUNK),
                       ("MAX_EXPERTS", kernels_hip.MAX_EXPERTS)):
        assert int(re.search(rf"#define {name} (\d+)", code)[1]) == here, name


# ----------------------------------------------------------------------------------- slow, or on a GPU


@pytest.mark.slow
def test_every_barrier_is_needed():
    command = [sys.executable, "tests/barrier_mutants.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible to torch")


@needs_gpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gpu_kernels_equal_the_twin(name, dtype):
    kernels_hip.select("hip")
    x, grad, weights, rows, experts, num_experts = (
        t.cuda() if isinstance(t, torch.Tensor) else t for t in tensors(name, dtype))
    expected_rows, offsets, positions = dispatch_ref(x, experts, num_experts)
    library, end = kernels_hip._library_for(x), int(offsets[-1])
    got = kernels_hip._dispatch_hip(library, x, experts, num_experts)
    for key, ours, twin in zip(("rows", "offsets", "positions"), got, (expected_rows, offsets, positions)):
        same(key, ours[:end] if key == "rows" else ours, twin[:end] if key == "rows" else twin)
    fused = 4 * torch.finfo(dtype).eps                       # a GPU joins products and sums
    with torch.no_grad():
        same("combine", kernels_hip._combine_hip(library, rows, weights, positions, x),
             combine_ref(rows, weights, positions, x), fused)
        twins = kernels_hip.combine_backward_ref(grad, rows, weights, positions, x)
    runs = []
    for _ in range(2):
        ours = kernels_hip._combine_backward_hip(library, grad, rows, weights, positions, x)
        for key, got, twin in zip(("grad of rows", "grad of weights", "grad of x"), ours, twins):
            same(key, got, twin, fused if key != "grad of weights" else 1e-5)
        runs.append(ours)
    assert all(torch.equal(a, b) for a, b in zip(*runs)), "two runs differ"


@needs_gpu
@pytest.mark.slow
def test_gpu_kernels_reach_the_copy_bandwidth():
    from benchmarks import kernels
    kernels_hip.select("hip")
    peak, bytes_moved = kernels.copy_bandwidth(), kernels.traffic(**kernels.LAYER)
    for name, (ours, torchs) in kernels.works(**kernels.LAYER).items():
        fast, slow = kernels.seconds(ours), kernels.seconds(torchs)
        if "backward" in name or name == "combine":
            share = bytes_moved[name][0] / fast / peak
            assert share >= 0.85, f"{name}: {share:.0%} of the copy bandwidth"
        assert fast < slow, f"{name}: {fast * 1e6:.0f} us, torch's operations {slow * 1e6:.0f} us"
