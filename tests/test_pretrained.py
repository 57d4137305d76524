"""Official checkpoints: both layouts in and out, damage, memory. The oracle is transformers' own ZAYA."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

import pretrained
from benchmarks.peers import transformers_twin
from conftest import ROOT, assert_close
from layouts import LAYOUTS
from model import ZAYA, ZAYAConfig
from sample import generate

pytest.importorskip("safetensors", reason="pip install safetensors")


def tensors_of(folder):
    from safetensors.torch import load_file
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def write_tensors(folder, tensors):
    from safetensors.torch import save_file
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder, **changes):
    path = folder / "config.json"
    theirs = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in theirs.items() if value != "delete"}))


def assert_same(a, b):
    other = b.state_dict()
    for name, tensor in a.state_dict().items():
        same = tensor.dtype == other[name].dtype and torch.equal(tensor, other[name])
        assert same, f"{name} came back differently"


SHAPES = {"published": dict(num_blocks=3),
          "74B": dict(num_blocks=4, sliding_window=6, num_experts=6, num_heads=6),
          "every block windowed": dict(num_blocks=3, sliding_window=4, window_every=1)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_layouts_give_every_tensor_back_bit_for_bit(layout, shape, make, tmp_path):
    model = make(**SHAPES[shape], rope_theta=5e6)
    pretrained.save(model, tmp_path, layout, shard_bytes=40_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    again = pretrained.load(tmp_path)
    assert_same(model, again)
    assert again.config == model.config


def test_both_layouts_give_identical_logits(make, ids, tmp_path):
    model, x = make(num_blocks=3), ids(2, 11)
    logits = []
    for layout in LAYOUTS:
        pretrained.save(model, tmp_path / layout, layout)
        logits.append(pretrained.load(tmp_path / layout)(x)[0])
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], model(x)[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_shards_that_transformers_wrote_give_its_logits_and_tokens(shape, make, ids, tmp_path):
    pytest.importorskip("transformers")
    theirs = transformers_twin(make(3, skip_expert="zero", rope_theta=5e6, **SHAPES[shape]))
    theirs.eval().save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    ours, x = pretrained.load(tmp_path), ids(2, 19).clamp(min=1)      # transformers takes id 0 for padding
    with torch.no_grad():
        assert_close(ours(x)[0], theirs(x).logits, 1e-5, "logits")
    expected = theirs.generate(x[:1], max_new_tokens=20, do_sample=False, pad_token_id=0)[0, 19:].tolist()
    assert generate(ours, x[:1].tolist(), 20, temperature=0)[0] == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_loads_what_we_wrote(shape, make, ids, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = make(**SHAPES[shape], skip_expert="zero", rope_theta=3e4, local_rope_theta=500.0)
    pretrained.save(model, tmp_path, shard_bytes=40_000)
    theirs, info = transformers.ZayaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        assert_close(theirs.eval()(ids(2, 13)).logits, model(ids(2, 13))[0], 1e-5, "logits")


def test_tensors_that_do_not_fit_are_listed_by_name_and_shape(make, tmp_path):
    pretrained.save(make(num_blocks=3), tmp_path)
    tensors = tensors_of(tmp_path)
    scale = "model.layers.1.mlp.gate.router_states_scale"
    tensors[scale] = torch.ones(1)
    tensors["model.layers.9.norm.weight"] = torch.ones(3)
    tensors.pop("model.layers.2.self_attn.qk_norm.temp")
    write_tensors(tmp_path, tensors)
    with pytest.raises(ValueError) as error:
        pretrained.load(tmp_path)
    for part in (f"{scale} is (1,), the model wants (24,)", "model.layers.9.norm.weight is unknown",
                 "model.layers.2.self_attn.qk_norm.temp is missing"):
        assert part in str(error.value)


def test_a_stored_head_must_equal_the_embedding(make, tmp_path):
    model = make()
    pretrained.save(model, tmp_path)
    tensors = tensors_of(tmp_path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    write_tensors(tmp_path, tensors)
    assert_same(model, pretrained.load(tmp_path))
    tensors["lm_head.weight"][5, 7] += 1
    write_tensors(tmp_path, tensors)
    with pytest.raises(ValueError, match="lm_head.weight differs from the embedding"):
        pretrained.load(tmp_path)


def test_half_copied_folders_are_refused_before_anything_runs(make, tmp_path):
    pretrained.save(make(), tmp_path / "whole", shard_bytes=40_000)
    shard = sorted((tmp_path / "whole").glob("*.safetensors"))[1]
    for name in ("lost", "cut", "blank"):
        shutil.copytree(tmp_path / "whole", tmp_path / name)
    (tmp_path / "lost" / shard.name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{shard.name} missing"):
        pretrained.load(tmp_path / "lost")
    cut = tmp_path / "cut" / shard.name
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{shard.name} is damaged or cut short"):
        pretrained.load(tmp_path / "cut")
    (tmp_path / "blank" / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="no config.json"):
        pretrained.load(tmp_path / "blank")
    with pytest.raises(FileNotFoundError, match="not a folder"):
        pretrained.load(tmp_path / "nowhere")


def test_a_save_that_dies_leaves_no_folder_that_loads(make, tmp_path, monkeypatch):
    pretrained.save(make(0), tmp_path)
    monkeypatch.setattr(pretrained.os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pretrained.save(make(1), tmp_path)
    with pytest.raises(FileNotFoundError, match="no config.json"):
        pretrained.load(tmp_path)


def test_dtype_is_the_stored_one_or_the_asked_one_and_biases_stay_float32(make, tmp_path):
    pretrained.save(make().bfloat16(), tmp_path)
    for dtype, expected in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        model = pretrained.load(tmp_path, dtype)
        assert {p.dtype for p in model.parameters()} == {expected}
        assert all(block.mlp.gate.balancing_biases.dtype == torch.float32 for block in model.blocks)
        assert all(block.mlp.gate.load.sum() == 0 for block in model.blocks) and not model.training


def test_ablations_are_refused_by_save(make, tmp_path):
    for layout, change in (("original", dict(qk_mean=False)), ("original", dict(skip_expert="off")),
                           ("transformers", dict(top_k=2))):
        with pytest.raises(ValueError):
            pretrained.save(make(**change), tmp_path, layout)
    with pytest.raises(ValueError, match="layout 'hf' is unknown"):
        pretrained.save(make(), tmp_path, "hf")


def test_code_in_the_folder_is_never_run(make, tmp_path):
    pretrained.save(make(), tmp_path)
    for name in ("modeling_zaya.py", "configuration_zaya.py", "__init__.py"):
        (tmp_path / name).write_text("raise SystemExit('run')")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    edit_config(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_zaya.ZayaForCausalLM"})
    assert pretrained.load(tmp_path).config.num_blocks == 2


MEASURE = """
import re, sys, torch
import pretrained
status = lambda: open("/proc/self/status").read()       # ru_maxrss would count the parent process too
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status())[1])
import safetensors.torch
with torch.device("meta"):      # what torch loads for that is no part of the weights
    pretrained.ZAYA(pretrained.ZAYAConfig.preset("tiny"))
before = peak()
model = pretrained.load(sys.argv[1])
size = sum(t.numel() * t.element_size() for t in model.state_dict().values())
print((peak() - before) / size, size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loading_takes_little_more_memory_than_the_weights(layout, tmp_path):
    config = ZAYAConfig.preset("tiny", vocab_size=20_000, hidden_size=256, num_blocks=6, num_experts=16,
                               expert_hidden_size=704)
    torch.manual_seed(0)
    pretrained.save(ZAYA(config), tmp_path, layout, shard_bytes=100_000_000)
    done = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    ratio, size = map(float, done.stdout.split())
    assert size > 200e6 and ratio <= 1.15, f"peak memory {ratio:.3f} times the weights, allowed 1.15"


def test_pretrained_command_describes_a_folder_and_refuses_another(make, tmp_path):
    pretrained.save(make(), tmp_path)
    command = [sys.executable, ROOT / "pretrained.py"]
    run = lambda *args: subprocess.run([*command, *args], capture_output=True, text=True)
    assert "transformers layout, 67 tensors" in run(tmp_path).stdout
    done = run(tmp_path / "nowhere")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "not a folder" in done.stderr
