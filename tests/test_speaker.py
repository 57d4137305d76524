"""A model with its tokenizer: text as it comes, turns, the check against published behaviour."""

import pytest
import torch

import speaker
from conftest import Turns
from speaker import Speaker, Text
from tokenizer import get_tokenizer


def test_text_holds_back_incomplete_characters():
    tokenizer, text, said = get_tokenizer("bytes"), "aé漢🙂!", []
    writer = Text(tokenizer)
    said = [writer.feed([i]) for i in tokenizer.encode(text)]
    assert "".join(said) == text and "\ufffd" not in "".join(said) and said[1] == "" and said[2] == "é"
    writer = Text(tokenizer)
    assert writer.feed(list("🙂".encode())[:3]) == "" and writer.feed([], final=True) == "\ufffd"


def test_text_stops_before_a_stop_text_even_across_tokens():
    tokenizer = get_tokenizer("bytes")
    writer, said = Text(tokenizer, ["END", "\n\n"]), []
    for i in tokenizer.encode("the EN, then\n one ENDless"):
        said.append(writer.feed([i]))
    assert "".join(said) == "the EN, then\n one " and writer.done and writer.feed([65]) == ""
    writer = Text(tokenizer, ["END"])
    assert writer.feed(tokenizer.encode("x EN")) == "x " and writer.feed([], final=True) == "EN"


def test_ids_past_the_tokenizer_are_shown_not_fatal():
    assert Text(get_tokenizer("bytes")).feed([65, 999, 66]) == "A\ufffdB"


def test_a_turn_follows_the_template_and_text_never_becomes_control_tokens():
    toy = Speaker(None, Turns(), "toy", (1, 106), (2,), "assistant")
    e = Turns().encode
    turn = [105, *e("user\nhi"), 106, *e("\n"), 105, *e("assistant\n")]
    assert toy.turn("hi", True) == [2, *turn] and toy.turn("hi", False) == [106, *e("\n"), *turn]
    assert not {105, 106} & set(toy.turn("<|im_end|>", True)[2:-15])


def test_self_check_compares_ids_and_tokens(make, capsys):
    class Published(Turns):
        def encode(self, text, allow_special=False):
            return speaker.CHECK_IDS[1:-1]
    class Model(torch.nn.Module):
        embed_tokens, next_ids = torch.nn.Embedding(1, 1), speaker.CHECK_NEXT
        def forward(self, tokens):
            assert tokens.tolist() == [speaker.CHECK_IDS]
            return torch.nn.functional.one_hot(torch.tensor([self.next_ids]), 237_000), None
    model = Model()
    speaker.self_check(Speaker(model, Published(), "toy", (), (2,)))
    assert "passed" in capsys.readouterr().out
    model.next_ids = [104, *speaker.CHECK_NEXT[1:]]
    with pytest.raises(ValueError, match="likeliest next ids are .104"):
        speaker.self_check(Speaker(model, Published(), "toy", (), (2,)))
    with pytest.raises(ValueError, match="tokenizer.json is not that of ZAYA1-8B"):
        speaker.self_check(Speaker(model, Turns(), "toy", (), (2,)))
