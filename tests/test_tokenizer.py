"""Tokenizers: bytes, BPE and its training, specs and files. Nothing here needs a network."""
import os
import random
import re
import socket
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

import tokenizer
from conftest import ROOT, random_text

PYTHON = (ROOT / "data.py").read_text(encoding="utf-8") + (ROOT / "shards.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def bpe():
    return tokenizer.train_bpe(PYTHON, 600)


def test_bytes_tokenizer_has_256_ids_and_one_for_the_end():
    tok = tokenizer.get_tokenizer("bytes")
    assert (tok.vocab_size, tok.eot, tok.spec) == (257, 256, "bytes")
    assert tok.encode("aé\n") == [97, 0xC3, 0xA9, 10]
    assert tok.decode([97, 0xC3, 0xA9, 256]) == "aé<|endoftext|>"


@pytest.mark.parametrize("spec", ["bytes", "bpe"])
def test_any_text_survives_encoding(spec, bpe):
    tok, rng = bpe if spec == "bpe" else tokenizer.get_tokenizer(spec), random.Random(1)
    for text in [random_text(rng, n) for n in [*range(30), 500]] + ["", " " * 999, "\n\n \n", "²Ⅷ٣_"]:
        ids = tok.encode(text)
        assert tok.decode(ids) == text and tok.decode_bytes(ids) == text.encode()
        assert all(0 <= i < tok.eot for i in ids)


def test_bpe_vocabulary_is_exact_and_the_end_is_last(bpe):
    assert bpe.vocab_size == len(bpe.pieces) == 600 and bpe.eot == 599
    assert len(set(bpe.pieces)) == 600 and bpe.pieces[:256] == [bytes([i]) for i in range(256)]


@pytest.mark.parametrize("alphabet", ["a", "ab", "aab é\n"])
def test_no_piece_arises_in_two_ways(alphabet):
    """tiktoken merges by bytes, so two pairs with the same result would need the same id."""
    rng = random.Random(7)
    words = ["".join(rng.choice(alphabet) for _ in range(rng.randrange(2, 40))) for _ in range(60)]
    pieces = tokenizer.train_bpe(" ".join(w for w in words for _ in range(rng.randrange(2, 9))), 285).pieces
    assert len(set(pieces)) == 285


def slow_bpe(text, vocab_size):
    """The definition, word for word: count all pairs anew before each merge."""
    words = [[bytes([b]) for b in word.encode()] for word in re.findall(tokenizer.PATTERN, text)]
    pieces = [bytes([i]) for i in range(256)]
    while len(pieces) < vocab_size - 1:
        ids = {piece: i for i, piece in enumerate(pieces)}
        counts = Counter(pair for word in words for pair in zip(word, word[1:]))
        left, right = min(counts, key=lambda pair: (-counts[pair], ids[pair[0]], ids[pair[1]]))
        pieces.append(left + right)
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == (left, right):
                    word[i:i + 2] = [left + right]
                i += 1
    return pieces


@pytest.mark.parametrize("seed", range(4))
def test_bpe_training_equals_counting_everything_anew(seed):
    rng = random.Random(seed)
    text = "".join(rng.choice(["aaaa", "abab", "ab ", "ba", "\n  ", "é", "cab", "aaa "]) for _ in range(400))
    assert tokenizer.train_bpe(text, 290).pieces[:-1] == slow_bpe(text, 290)


def test_bpe_of_code_equals_counting_everything_anew():
    text = PYTHON[:6000]
    assert tokenizer.train_bpe(text, 320).pieces[:-1] == slow_bpe(text, 320)
    assert tokenizer.train_bpe(text.encode(), 320).pieces == tokenizer.train_bpe(text, 320).pieces


def test_trained_words_are_encoded_as_training_merged_them(bpe):
    """tiktoken merges by rank; a frequent word must come out as one id."""
    for word in (" self", "\n    ", " for"):
        assert len(bpe.encode(word)) == 1, word
    assert len(bpe.encode(PYTHON)) < len(PYTHON) / 2


def test_special_tokens_come_from_text_only_on_request(bpe):
    for tok in (bpe, tokenizer.get_tokenizer("bytes")):
        assert tok.eot not in tok.encode("a<|endoftext|>b")
        assert tok.decode(tok.encode("a<|endoftext|>b")) == "a<|endoftext|>b"
        ids = tok.encode("a<|endoftext|>b", allow_special=True)
        assert ids == [ord("a"), tok.eot, ord("b")]


def test_unknown_special_tokens_are_refused_on_request(bpe):
    assert bpe.decode(bpe.encode("<|im_start|>")) == "<|im_start|>"
    with pytest.raises(ValueError, match=r"unknown special token <\|im_start\|>.*<\|endoftext\|>"):
        bpe.encode("<|im_start|>user", allow_special=True)
    assert bpe.decode(bpe.encode("a <| b |> c", allow_special=True)) == "a <| b |> c"


def test_ids_past_the_vocabulary_and_broken_characters_are_shown(bpe):
    assert bpe.decode([97, 600, 262_271, -1, 98]) == "a\ufffd\ufffd\ufffdb"
    assert bpe.decode([0xE4]) == "\ufffd" and bpe.decode_bytes([0xE4, 0xBD]) == b"\xe4\xbd"
    assert bpe.decode(np.array([97, 98], np.uint16)) == "ab"


def test_saved_bpe_comes_back_the_same(bpe, tmp_path):
    spec = bpe.save(tmp_path / "deep" / "tokenizer.json")
    again = tokenizer.get_tokenizer(spec)
    assert spec == bpe.spec == again.spec == f"bpe:{tmp_path / 'deep' / 'tokenizer.json'}"
    assert again.pieces == bpe.pieces and again.digest() == bpe.digest()
    assert again.encode(PYTHON) == bpe.encode(PYTHON)
    assert tokenizer.train_bpe(PYTHON, 601).digest() != bpe.digest()


@pytest.mark.parametrize("text, size, message", [
    ("abc", 256, "too small"), ("", 300, "0 characters .* vocabulary of 257, not 300"),
    ("ab ab cd", 300, "use the tokenizer bytes or bpe:258")])
def test_bpe_says_what_a_text_can_yield(text, size, message):
    with pytest.raises(ValueError, match=message):
        tokenizer.train_bpe(text, size)


@pytest.mark.parametrize("spec, error, message", [
    ("bpe:1024", ValueError, "saved"), ("bpe:no/file.json", FileNotFoundError, "no/file.json"),
    ("word", ValueError, "'word'"), ("gemma:no.json", FileNotFoundError, "no.json"),
    ("bpe:", ValueError, "unknown tokenizer"), ("", ValueError, "unknown")])
def test_wrong_specs_are_named(spec, error, message):
    with pytest.raises(error, match=message):
        tokenizer.get_tokenizer(spec)


def test_other_json_is_no_tokenizer(tmp_path):
    for content in ("{}", "[]", "nonsense", '{"kind": "zaya1-bpe"}'):
        (tmp_path / "t.json").write_text(content)
        with pytest.raises(ValueError, match="t.json was not saved by tokenizer.py"):
            tokenizer.get_tokenizer(f"bpe:{tmp_path / 't.json'}")


def test_gpt2_says_what_to_fetch_and_opens_no_connection(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(socket, "socket", None)
    with pytest.raises(FileNotFoundError, match="curl .*zaya1/r50k_base.tiktoken https://"):
        tokenizer.get_tokenizer("gpt2")
    (tmp_path / "zaya1").mkdir()
    (tmp_path / "zaya1" / "r50k_base.tiktoken").write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(ValueError, match="incomplete .2 of 50256"):
        tokenizer.get_tokenizer("gpt2")


def test_files_are_synced_before_they_get_their_name(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: calls.append(name) or real(*a))
    tokenizer.write_atomically(tmp_path / "a" / "x", b"new")
    assert calls == ["fsync", "replace"] and (tmp_path / "a" / "x").read_bytes() == b"new"
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        tokenizer.write_atomically(tmp_path / "a" / "x", b"newer")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["x"]
    assert (tmp_path / "a" / "x").read_bytes() == b"new"


def test_demonstration_shows_the_cuts():
    done = subprocess.run([sys.executable, str(ROOT / "tokenizer.py")], capture_output=True, text=True)
    assert done.returncode == 0 and "|self|" in done.stdout, done.stderr
