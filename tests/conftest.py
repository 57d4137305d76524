"""Shared by all tests: the repository on the path, one thread (two processes share two cores), small random
models."""

import os
import random
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"     # before torch is imported
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = str(ROOT)    # for the processes that tests start

import pytest  # noqa: E402
import torch  # noqa: E402

from model import ZAYA, ZAYAConfig  # noqa: E402

torch.set_num_threads(1)


def randomised(model, seed=0):
    """Give every parameter and balancing bias a value of trained-like size, none of them special, and return
    the model.

    Temperatures 0.8 to 12, residual scales 0.05 to 4, non-zero biases and uneven balancing, as in released
    weights.
    """
    g = torch.Generator().manual_seed(seed)
    uniform = lambda p, low, high: p.copy_(torch.rand(p.shape, generator=g) * (high - low) + low)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("temp"):
                uniform(p, 0.8, 12.0)
            elif name.endswith("_scale"):
                uniform(p, 0.05, 4.0) if "residual" in name or "hidden" in name else uniform(p, 0.2, 1.5)
            elif name.endswith("bias"):
                p.copy_(torch.randn(p.shape, generator=g) * 0.1)
            elif p.dim() == 1:
                uniform(p, 0.5, 1.5)
            else:
                p.copy_(torch.randn(p.shape, generator=g) * (0.5 if ".conv_" in name else 0.15))
        for block in model.blocks:
            biases = block.mlp.gate.balancing_biases
            biases[:model.config.num_experts] = torch.randn(model.config.num_experts, generator=g) * 0.05
    return model


def random_text(rng, length):
    """Letters, spaces, line breaks, digits and characters of 2, 3 and 4 bytes."""
    return "".join(rng.choice("ab _.\n\t 12(é)你😀\u0301\r\x00") for _ in range(length))


def make_folder(root, number=40, seed=0):
    """Files of uneven length in several folders -> {relative path: text}."""
    rng, texts = random.Random(seed), {}
    for i in range(number):
        name = f"d{i % 3}/f{i:02d}.txt"
        texts[name] = f"file {i}\n" + random_text(rng, rng.randrange(1, 900))
        texts[name] = texts[name].replace("\x00", "")
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    return texts


class Turns:
    """A stand-in for Gemma's tokenizer: bytes shifted behind the ids of its control tokens."""
    vocab_size, bos, eot, specials = 256, 2, 1, {"<|im_start|>": 105, "<|im_end|>": 106}

    def encode(self, text, allow_special=False):
        return [110 + b % 140 for b in text.encode()]

    def decode_bytes(self, ids):
        return bytes(i % 128 for i in ids)


@pytest.fixture
def make():
    """make(seed=0, **changes): a randomised model of the tiny preset with fields changed."""
    def build(seed=0, preset="tiny", **changes):
        torch.manual_seed(seed)
        return randomised(ZAYA(ZAYAConfig.preset(preset, **changes)), seed).eval()
    return build


@pytest.fixture
def ids():
    """ids(B, T, seed=0): random token ids of the tiny vocabulary."""
    def draw(B, T, seed=0):
        return torch.randint(0, 257, (B, T), generator=torch.Generator().manual_seed(seed))
    return draw


def assert_close(actual, expected, tolerance, name):
    """Largest error relative to the largest expected value; the message names the tensor, the error and what
    was allowed."""
    error = (actual - expected).abs().max().item() / max(expected.abs().max().item(), 1e-30)
    assert actual.shape == expected.shape, (
        f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    assert error <= tolerance, f"{name}: relative error {error:.3g}, allowed {tolerance:.3g}"
