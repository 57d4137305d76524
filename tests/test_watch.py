"""Watching the router: kinds of tokens, the table, marks, and the experts it names."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import watch


@pytest.mark.parametrize("piece, expected", [
    (b" def", "keyword"), (b"_name", "name"), (b" 12", "number"), (b"):", "punctuation"), (b"\n  ", "space"),
    (b"x1", "other"), (b"\xc3", "other"), ("\u00e9".encode(), "name")])
def test_kind_of_a_token(piece, expected):
    assert watch.kind(piece) == expected


def test_liking_is_the_share_of_a_kind_over_its_share_of_all():
    counts, ratio = watch.liking(["name", "name", "space", "number"], np.array([0, 0, 0, 2]), 3)
    assert counts.sum(1).tolist() == [3, 0, 1] and counts[0].tolist() == [0, 2, 0, 0, 1, 0]
    assert ratio[0, 1] == pytest.approx((2 / 3) / (2 / 4)) and ratio[2, 2] == pytest.approx(1 / (1 / 4))
    assert np.isnan(ratio[1]).all()


def test_marks_stand_under_the_first_character_of_their_tokens():
    assert watch.marked([b"def", b" f", b"\n  ", b"x"], [0, 11, 4, 2], 4).split("\n") == [
        "def f", "0  b ", "  x", "- 2"]


def test_colours_hide_no_character():
    shown = watch.coloured([b"a", b"b\nc", b"d"], [0, 1, 2], 2)
    assert re.sub("\033\\[[0-9;]*m", "", shown) == "expert 0 expert 1 expert -\nab\ncd"


def test_routes_are_the_argmax_of_p_plus_bias_in_every_window(make):
    model = make(max_seq_len=16)
    ids = torch.randint(0, 257, (37,), generator=torch.Generator().manual_seed(3))
    gate, inputs = model.blocks[1].mlp.gate, []
    gate.out_proj.weight.data *= 20         # or the biases alone would decide
    hook = gate.register_forward_pre_hook(lambda gate, given: inputs.append(given))
    found = watch.routes(model, ids.tolist(), 1)
    hook.remove()
    scores = [gate.probabilities(*given)[0] + gate.balancing_biases for given in inputs]
    assert len(inputs) == 3 and found.tolist() == torch.cat(scores).argmax(1).tolist()
    assert len(set(found.tolist())) > 1


def test_folder_without_a_run_and_a_block_that_is_not_there_are_refused(tmp_path, make, monkeypatch):
    with pytest.raises(FileNotFoundError, match="config.json"):
        watch.main([str(tmp_path), "--text", __file__])
    speaker = SimpleNamespace(model=make(), tokenizer=None)
    monkeypatch.setattr(watch, "open_run", lambda *args: speaker)
    with pytest.raises(ValueError, match="--block 2: the model has 2 blocks"):
        watch.main([str(tmp_path), "--text", __file__, "--block", "2"])
