"""Tokenizers, corpora, shards, order of samples. Nothing here needs a network; texts are small and seeded."""
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import data

ROOT = Path(data.__file__).parent
PYTHON = Path(data.__file__).read_text(encoding="utf-8")          # some text that is always here


@pytest.fixture(scope="module")
def bpe():
    return data.train_bpe(PYTHON, 600)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


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


def in_order(texts):
    return [texts[name] for name in sorted(texts, key=lambda n: data.hashlib.sha256(n.encode()).digest())]


# ------------------------------------------------------------------------------------------------- tokenizers

def test_bytes_tokenizer_has_256_ids_and_one_for_the_end():
    tok = data.get_tokenizer("bytes")
    assert (tok.vocab_size, tok.eot, tok.spec) == (257, 256, "bytes")
    assert tok.encode("aé\n") == [97, 0xC3, 0xA9, 10]
    assert tok.decode([97, 0xC3, 0xA9, 256]) == "aé<|endoftext|>"


@pytest.mark.parametrize("spec", ["bytes", "bpe"])
def test_any_text_survives_encoding(spec, bpe):
    tok, rng = bpe if spec == "bpe" else data.get_tokenizer(spec), random.Random(1)
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
    pieces = data.train_bpe(" ".join(w for w in words for _ in range(rng.randrange(2, 9))), 285).pieces
    assert len(set(pieces)) == 285


def slow_bpe(text, vocab_size):
    """The definition, word for word: count all pairs anew before each merge."""
    words = [[bytes([b]) for b in word.encode()] for word in re.findall(data.PATTERN, text)]
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
    assert data.train_bpe(text, 290).pieces[:-1] == slow_bpe(text, 290)


def test_bpe_of_code_equals_counting_everything_anew():
    text = PYTHON[:6000]
    assert data.train_bpe(text, 320).pieces[:-1] == slow_bpe(text, 320)
    assert data.train_bpe(text.encode(), 320).pieces == data.train_bpe(text, 320).pieces


def test_trained_words_are_encoded_as_training_merged_them(bpe):
    """tiktoken merges by rank; a frequent word must come out as one id."""
    for word in (" self", "\n    ", " for"):
        assert len(bpe.encode(word)) == 1, word
    assert len(bpe.encode(PYTHON)) < len(PYTHON) / 2


def test_special_tokens_come_from_text_only_on_request(bpe):
    for tok in (bpe, data.get_tokenizer("bytes")):
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
    again = data.get_tokenizer(spec)
    assert spec == bpe.spec == again.spec == f"bpe:{tmp_path / 'deep' / 'tokenizer.json'}"
    assert again.pieces == bpe.pieces and again.digest() == bpe.digest()
    assert again.encode(PYTHON) == bpe.encode(PYTHON)
    assert data.train_bpe(PYTHON, 601).digest() != bpe.digest()


@pytest.mark.parametrize("text, size, message", [
    ("abc", 256, "too small"), ("", 300, "0 characters .* vocabulary of 257, not 300"),
    ("ab ab cd", 300, "use the tokenizer bytes or bpe:258")])
def test_bpe_says_what_a_text_can_yield(text, size, message):
    with pytest.raises(ValueError, match=message):
        data.train_bpe(text, size)


@pytest.mark.parametrize("spec, error, message", [
    ("bpe:1024", ValueError, "saved"), ("bpe:no/file.json", FileNotFoundError, "no/file.json"),
    ("word", ValueError, "'word'"), ("gemma:no.json", FileNotFoundError, "no.json"),
    ("bpe:", ValueError, "unknown tokenizer"), ("", ValueError, "unknown")])
def test_wrong_specs_are_named(spec, error, message):
    with pytest.raises(error, match=message):
        data.get_tokenizer(spec)


def test_other_json_is_no_tokenizer(tmp_path):
    for content in ("{}", "[]", "nonsense", '{"kind": "zaya1-bpe"}'):
        (tmp_path / "t.json").write_text(content)
        with pytest.raises(ValueError, match="t.json was not saved by data.py"):
            data.get_tokenizer(f"bpe:{tmp_path / 't.json'}")


def test_gpt2_says_what_to_fetch_and_opens_no_connection(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(socket, "socket", None)
    with pytest.raises(FileNotFoundError, match="curl .*zaya1/r50k_base.tiktoken https://"):
        data.get_tokenizer("gpt2")
    (tmp_path / "zaya1").mkdir()
    (tmp_path / "zaya1" / "r50k_base.tiktoken").write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(ValueError, match="incomplete .2 of 50256"):
        data.get_tokenizer("gpt2")


# ------------------------------------------------------------------------------------------------- corpora

def test_standard_library_is_found_and_has_no_tests_in_it():
    corpus = data.find_corpus()
    names = [name for name, _, _ in corpus.files]
    assert re.fullmatch(r"standard library of Python 3\.\d+\.\d+\S*, \d+\.\d MB", corpus.name)
    assert corpus.size > data.STDLIB_MIN and "argparse.py" in names and "json/decoder.py" in names
    assert not [n for n in names if n.startswith(("test", "encodings/", "site-packages/")) or "/test" in n]
    assert {name[0] for name in names[-60:]} > set("acs")                        # no alphabetical tail


def test_small_standard_library_points_to_data():
    with pytest.raises(ValueError, match=r"standard library of Python .* is under 1000.0 MB: .*--data FILE"):
        data.load(min_bytes=10**9)


def test_folder_skips_binary_and_hidden_files(tmp_path):
    texts = make_folder(tmp_path, 5)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\x00\x01")
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("[core]")
    (tmp_path / "cut.txt").write_bytes(("x" * 8191 + "é").encode())   # the first 8 KB end inside a character
    corpus = data.find_corpus(tmp_path)
    assert {name for name, _, _ in corpus.files} == {*texts, "cut.txt"}
    assert corpus.name == f"{tmp_path.name}, {corpus.size:,} bytes in 6 files"


@pytest.mark.parametrize("content, message", [
    (b"", "0 bytes"), (b"ab\x00", "not UTF-8"), (b"\xff\xfea", "not UTF-8")])
def test_files_without_text_are_named(tmp_path, content, message):
    (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        data.load(tmp_path / "x.txt", cache_dir=tmp_path / "cache")
    assert "x.txt" in str(error.value) and "\n" not in str(error.value)


def test_missing_paths_and_empty_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no-such"):
        data.load(tmp_path / "no-such", cache_dir=tmp_path)
    with pytest.raises(ValueError, match="has no text"):
        data.load(tmp_path, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("shard_bytes", [1, 7, 100, 1013, 10**6])
def test_plan_covers_every_byte_once_and_in_order(tmp_path, shard_bytes):
    texts = make_folder(tmp_path, 9)
    corpus = data.find_corpus(tmp_path)
    shards, training = data.plan(corpus, 0.3, shard_bytes)
    covered = [(path, i) for parts in shards for path, start, stop, _ in parts for i in range(start, stop)]
    assert covered == [(name, i) for name, size, _ in corpus.files for i in range(size)]
    assert all(0 < sum(stop - start for _, start, stop, _ in parts) <= shard_bytes for parts in shards)
    in_training = sum(stop - start for parts in shards[:training] for _, start, stop, _ in parts)
    assert abs(in_training / corpus.size - 0.7) <= 0.15
    assert in_training in np.cumsum([size for _, size, _ in corpus.files])       # no file in both parts
    assert corpus.size == sum(len(text.encode()) for text in texts.values())


@pytest.mark.parametrize("alphabet", ["ab\n", "é你😀", "😀", "\n", "x"])
def test_ranges_join_to_the_whole_text(tmp_path, alphabet):
    rng = random.Random(2)
    text = "".join(rng.choice(alphabet) for _ in range(300))
    (tmp_path / "t.txt").write_bytes(raw := text.encode())
    for step in (1, 2, 3, 5, 64, 299):
        with open(tmp_path / "t.txt", "rb") as file:
            parts = [data.read_range(file, i, min(i + step, len(raw)), len(raw))
                     for i in range(0, len(raw), step)]
        assert "".join(parts) == text, step


# ------------------------------------------------------------------------------------------------- the cache

def test_folder_loads_whole_and_in_hashed_order(tmp_path, cache):
    texts = in_order(make_folder(tmp_path))
    ds = data.load(tmp_path, "bytes", cache_dir=cache)
    joined = "".join(text + data.EOT for text in texts)
    assert ds.tokenizer.decode([*ds.train[:], *ds.val[:]]) == joined
    assert ds.train[-1:][0] == ds.val[-1:][0] == ds.tokenizer.eot                # cut at the end of a file
    assert 0.02 < len(ds.val) / (len(ds.train) + len(ds.val)) < 0.08
    assert ds.tokenizer.spec == "bytes"


def test_one_file_is_cut_at_a_line_and_ends_without_a_special_token(tmp_path, cache):
    text = "".join(f"line {i}\n" for i in range(2000))
    (tmp_path / "t.txt").write_text(text)
    ds = data.load(str(tmp_path / "t.txt"), "bpe:300", cache_dir=cache, val_fraction=0.1)
    train, val = ds.tokenizer.decode(ds.train[:]), ds.tokenizer.decode(ds.val[:])
    assert train + val == text and train.endswith("\n") and abs(len(val) / len(text) - 0.1) < 0.001
    assert ds.name == "t.txt, 18,890 bytes" and ds.tokenizer.vocab_size == 300


def test_bytes_per_token_is_that_of_the_validation_part(tmp_path, cache):
    (tmp_path / "t.txt").write_text("x y z 1\n" * 1000 + "return " * 80)
    ds = data.load(tmp_path / "t.txt", "bpe:264", cache_dir=cache)
    val_bytes = len(ds.tokenizer.decode_bytes(ds.val[:]))
    assert ds.bytes_per_token == pytest.approx(val_bytes / len(ds.val), rel=1e-12)
    assert ds.bytes_per_token != pytest.approx(data.bytes_per_token(ds.train, ds.tokenizer), rel=0.01)
    make_folder(tmp_path / "many")
    ds = data.load(tmp_path / "many", "bytes", cache_dir=cache)
    ends = np.mean(ds.val[:] == 256)                       # <|endoftext|> is a token without a byte of text
    assert ds.bytes_per_token == pytest.approx(1 - ends, rel=1e-12) and ends > 0


def test_bpe_sees_no_validation_text(tmp_path, cache):
    (tmp_path / "t.txt").write_text("ab cd ef gh\n" * 400 + "zqzq " * 240)         # zq is the commonest pair
    ds = data.load(tmp_path / "t.txt", "bpe:262", cache_dir=cache, val_fraction=0.2)
    assert "zq" not in ds.tokenizer.decode(ds.train[:]) and "zq" in ds.tokenizer.decode(ds.val[:])
    assert not [piece for piece in ds.tokenizer.pieces if b"zq" in piece]


def encoded_again(monkeypatch, *args, **kwargs):
    """Load, and say whether any text was encoded."""
    calls = []
    with monkeypatch.context() as patch:
        encode = data.encode_shard
        patch.setattr(data, "encode_shard", lambda *a: calls.append(a) or encode(*a))
        return data.load(*args, **kwargs), bool(calls)


def test_cache_is_used_and_notices_every_change(tmp_path, monkeypatch):
    texts, src, kept = make_folder(tmp_path / "src"), tmp_path / "src", tmp_path / "kept"
    first, encoded = encoded_again(monkeypatch, src, "bpe:300", kept)
    assert encoded
    second, encoded = encoded_again(monkeypatch, src, "bpe:300", kept)
    assert not encoded and np.array_equal(second.train[:], first.train[:])
    name = next(iter(texts))
    before = (src / name).stat().st_mtime_ns
    (src / name).write_bytes(texts[name].encode().replace(b"file", b"FILE"))     # the same length
    os.utime(src / name, ns=(before + 1, before + 1))
    third, encoded = encoded_again(monkeypatch, src, "bpe:300", kept)
    assert encoded and "FILE" in third.tokenizer.decode([*third.train[:], *third.val[:]])
    assert len(list(kept.iterdir())) == 1                                        # the old one is gone
    assert encoded_again(monkeypatch, src, "bytes", kept)[1] and len(list(kept.iterdir())) == 2
    assert encoded_again(monkeypatch, src, "bpe:300", kept, val_fraction=0.2)[1]
    monkeypatch.setattr(data, "FORMAT", -1)
    assert encoded_again(monkeypatch, src, "bytes", kept)[1]


def test_cache_notices_another_tokenizer_behind_the_same_name(tmp_path, monkeypatch):
    make_folder(tmp_path / "src")
    spec = data.train_bpe("ab " * 99 + "cd " * 98, 260).save(tmp_path / "t.json")
    assert encoded_again(monkeypatch, tmp_path / "src", spec, tmp_path / "kept")[1]
    assert not encoded_again(monkeypatch, tmp_path / "src", spec, tmp_path / "kept")[1]
    data.train_bpe("ef " * 99 + "gh " * 98, 260).save(tmp_path / "t.json")
    assert encoded_again(monkeypatch, tmp_path / "src", spec, tmp_path / "kept")[1]


@pytest.mark.parametrize("damage", ["flip", "cut", "lose", "meta"])
def test_damaged_cache_is_made_again(tmp_path, monkeypatch, capsys, damage):
    make_folder(tmp_path / "src")
    first, _ = encoded_again(monkeypatch, tmp_path / "src", "bytes", tmp_path / "kept")
    want, target = [*first.train[:]], next((tmp_path / "kept").glob("*/*-00000.bin"))
    raw = target.read_bytes()
    if damage == "meta":
        (target.parent / "meta.json").write_text("{")
    elif damage == "lose":
        target.unlink()
    else:
        target.write_bytes(raw[:-1] if damage == "cut" else raw[:9] + bytes([raw[9] ^ 1]) + raw[10:])
    again, encoded = encoded_again(monkeypatch, tmp_path / "src", "bytes", tmp_path / "kept")
    assert encoded and [*again.train[:]] == want
    assert "the cached tokens are made again" in capsys.readouterr().out


def test_cache_folder_that_cannot_be_written_is_named(tmp_path):
    make_folder(tmp_path / "src", 3)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="file.*XDG_CACHE_HOME"):
        data.load(tmp_path / "src", "bytes", cache_dir=tmp_path / "file")


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    make_folder(tmp_path / "src", 3)
    data.load(tmp_path / "src", "bytes")
    assert list((tmp_path / "xdg" / "zaya1").glob("src-*/meta.json"))


def test_default_corpus_loads_without_a_network(monkeypatch, cache):
    monkeypatch.setattr(socket, "socket", None)
    ds = data.load(cache_dir=cache)
    assert ds.tokenizer.vocab_size == 1024 and 2.3 < ds.bytes_per_token < 3.3
    assert 0.04 < len(ds.val) / (len(ds.train) + len(ds.val)) < 0.06
    assert int(ds.train[:].max()) <= ds.tokenizer.eot and ds.tokenizer.eot in ds.val[:]
    assert "def " in ds.tokenizer.decode(ds.val[:5000])


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5])
def test_validation_share_is_checked(fraction, tmp_path):
    with pytest.raises(ValueError, match="val_fraction"):
        data.load(cache_dir=tmp_path, val_fraction=fraction)


# ------------------------------------------------------------------------------------------------- shards

def read_all(folder):
    ds = data.load(folder)
    return np.concatenate([ds.train[:], ds.val[:]])


def shard_files(folder):
    return {path.name: path.read_bytes() for path in Path(folder).glob("*.bin")}


def test_shards_are_the_same_for_any_number_of_workers(tmp_path):
    make_folder(tmp_path / "src")
    corpus = data.find_corpus(tmp_path / "src")
    one = data.tokenize(corpus, tmp_path / "one", "bpe:300", 1, shard_bytes=3000)
    three = data.tokenize(corpus, tmp_path / "three", "bpe:300", 3, shard_bytes=3000)
    assert one == three and len(one["shards"]) > 5
    assert shard_files(tmp_path / "one") == shard_files(tmp_path / "three")
    ds = data.load(tmp_path / "one")
    assert ds.tokenizer.decode(read_all(tmp_path / "one")).count(data.EOT) == 40
    assert ds.name == corpus.name and ds.tokenizer.vocab_size == 300


def test_one_long_file_gives_many_shards_that_read_as_one(tmp_path):
    text = random_text(random.Random(3), 5000).replace("\x00", "")
    (tmp_path / "t.txt").write_bytes(text.encode())
    corpus = data.find_corpus(tmp_path / "t.txt")
    meta = data.tokenize(corpus, tmp_path / "out", data.get_tokenizer("bytes"), shard_bytes=777)
    assert len(meta["shards"]) >= 10
    assert bytes(read_all(tmp_path / "out").tolist()) == text.encode()


def test_finished_shards_are_kept_and_half_written_ones_never_count(tmp_path):
    make_folder(tmp_path / "src")
    corpus, tok, out = data.find_corpus(tmp_path / "src"), data.get_tokenizer("bytes"), tmp_path / "out"
    data.tokenize(corpus, tmp_path / "whole", tok, shard_bytes=2000)
    want = shard_files(tmp_path / "whole")
    out.mkdir()
    names = sorted(want)
    (out / names[0]).write_bytes(want[names[0]])                                 # finished before
    os.utime(out / names[0], (1, 1))
    (out / f"{names[1]}.77.tmp").write_bytes(want[names[1]][:100])               # died while writing
    with pytest.raises(ValueError, match="no meta.json"):
        data.load(out)
    data.tokenize(corpus, out, tok, shard_bytes=2000)
    assert shard_files(out) == want
    assert (out / names[0]).stat().st_mtime == 1 and (out / names[1]).stat().st_mtime > 1


def test_files_are_synced_before_they_get_their_name(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: calls.append(name) or real(*a))
    data.write_atomically(tmp_path / "a" / "x", b"new")
    assert calls == ["fsync", "replace"] and (tmp_path / "a" / "x").read_bytes() == b"new"
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        data.write_atomically(tmp_path / "a" / "x", b"newer")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["x"]
    assert (tmp_path / "a" / "x").read_bytes() == b"new"


def test_killed_command_goes_on_and_ends_the_same(tmp_path):
    rng = random.Random(4)
    text = "".join(rng.choice(["def ", "x = 1\n", "return ", "é", "(a, b)", "    "]) for _ in range(600_000))
    (tmp_path / "t.txt").write_text(text, encoding="utf-8")
    command = [sys.executable, str(ROOT / "data.py"), "tokenize", str(tmp_path / "t.txt"),
               str(tmp_path / "out"), "--tokenizer", "bytes", "--workers", "1", "--shard-mb", "0.05"]
    victim = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.time() + 60
    while len(list((tmp_path / "out").glob("*.bin"))) < 3 and time.time() < deadline:
        time.sleep(0.002)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    early = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.bin")}
    assert early and not (tmp_path / "out" / "meta.json").exists(), "it was over before the kill"
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / "out" / name).stat().st_mtime_ns == when for name, when in early.items())
    assert bytes(read_all(tmp_path / "out").tolist()) == text.encode()
    assert "shards of uint16" in done.stdout


def test_complete_folder_is_verified_and_other_data_refused(tmp_path):
    make_folder(tmp_path / "src", 6)
    corpus, out, tok = data.find_corpus(tmp_path / "src"), tmp_path / "out", data.get_tokenizer("bytes")
    meta = data.tokenize(corpus, out, tok)
    assert data.tokenize(corpus, out, tok) == meta
    with pytest.raises(ValueError, match="out holds the shards of other data"):
        data.tokenize(corpus, out, "bpe:260")
    target = next(out.glob("*.bin"))
    target.write_bytes(b"\x01" + target.read_bytes()[1:])
    with pytest.raises(ValueError, match=f"{target.name} is damaged"):
        data.tokenize(corpus, out, tok)


def write_shards(folder, ids, **changes):
    """Shards by hand, of any arrays, with a tokenizer of bytes."""
    folder.mkdir()
    tok = data.get_tokenizer("bytes")
    tok.save(folder / "tokenizer.json")
    shards = []
    for i, part in enumerate(ids):
        part.tofile(folder / f"{i}.bin")
        shards.append(dict(file=f"{i}.bin", length=len(part), crc32=data.checksum(folder / f"{i}.bin")))
    meta = dict(format=1, key="k", name="by hand", tokenizer="bpe", digest=tok.digest(), vocab_size=257,
                dtype="uint16", training_shards=1, shards=shards)
    (folder / "meta.json").write_text(json.dumps({**meta, **changes}))
    return folder


def test_dtype_follows_the_vocabulary():
    assert [data.dtype_of(n).itemsize for n in (257, 65_536, 65_537, 262_272)] == [2, 2, 4, 4]


@pytest.mark.parametrize("changes, message", [
    (dict(vocab_size=262_272), "262272 do not fit into uint16"),
    (dict(dtype="uint32"), "has 20 bytes, .* 10 ids of uint32"),
    (dict(dtype="int16"), "do not fit into int16"),
    (dict(shards=[dict(file="9.bin", length=3, crc32=0)]), "9.bin has 0 bytes"),
    (dict(digest="other"), "another tokenizer"), (dict(dtype="string"), "does not describe"),
    (dict(shards=None), "does not describe")])
def test_shards_that_do_not_fit_their_description_are_refused(tmp_path, changes, message):
    folder = write_shards(tmp_path / "s", [np.arange(n, dtype=np.uint16) for n in (10, 5)], **changes)
    with pytest.raises(ValueError, match=message) as error:
        data.load(folder)
    assert str(folder) in str(error.value)


def test_ids_past_the_vocabulary_are_refused(tmp_path):
    folder = write_shards(tmp_path / "s", [np.array([1, 257], np.uint16), np.arange(5, dtype=np.uint16)])
    with pytest.raises(ValueError, match="id 257, past its vocabulary of 257"):
        data.load(folder)


def test_shards_bring_their_tokenizer_and_refuse_another(tmp_path):
    folder = write_shards(tmp_path / "s", [np.arange(10, dtype=np.uint16), np.arange(5, dtype=np.uint16)])
    for spec in (None, "bytes", "bpe:257", f"bpe:{folder / 'tokenizer.json'}"):
        assert data.load(folder, spec).tokenizer.vocab_size == 257
    other = data.train_bpe("ab ab", 258).save(tmp_path / "other.json")
    for spec in ("bpe:1024", other):
        with pytest.raises(ValueError, match=f"another tokenizer than {re.escape(spec)}, with 257 ids"):
            data.load(folder, spec)


def test_foreign_bin_files_are_explained(tmp_path):
    (tmp_path / "train.bin").write_bytes(b"\x01\x00")
    with pytest.raises(ValueError, match="no meta.json.*data.py tokenize"):
        data.load(tmp_path)


def test_long_array_slices_as_the_joined_array():
    rng = np.random.default_rng(5)
    parts = [rng.integers(0, 999, n).astype(np.uint16) for n in (3, 0, 1, 7, 0, 5)]
    joined, long = np.concatenate(parts), data.LongArray(parts)
    assert len(long) == 16
    for start in range(-17, 18):
        for stop in [*range(-17, 18), None]:
            assert np.array_equal(long[start:stop], joined[start:stop]), (start, stop)
    assert len(data.LongArray([])) == 0 and len(data.LongArray([])[:]) == 0


def test_offsets_past_4_gb_do_not_wrap(tmp_path):
    """Two sparse files, ids at the far end, past 2^32 bytes and 2^31 ids."""
    first, second, marks = 2**31 + 5, 3 * 10**8, np.arange(1, 201, dtype=np.uint16)
    folder = write_shards(tmp_path / "s", [np.zeros(0, np.uint16)])
    for name, length in (("0.bin", first), ("1.bin", second)):
        with open(folder / name, "wb") as file:
            file.truncate(2 * length)                     # a hole: takes no room
    with open(folder / "0.bin", "r+b") as file:
        file.seek(2 * (first - 100))
        file.write(marks[:100].tobytes())
    with open(folder / "1.bin", "r+b") as file:
        file.write(marks[100:].tobytes())
    meta = json.loads((folder / "meta.json").read_text())
    meta.update(training_shards=2, shards=[dict(file="0.bin", length=first, crc32=0),
                                           dict(file="1.bin", length=second, crc32=0)])
    (folder / "meta.json").write_text(json.dumps(meta))
    train = data.load(folder).train
    assert len(train) == first + second
    assert np.array_equal(train[first - 100:first + 100], marks)
    T = 10_007    # find the samples that read the marks, read them
    samples = np.arange((len(train) - 1) // T)
    starts = data.window_starts(len(train), samples, T, seed=3)
    assert starts.min() >= 0 and 2**31 + 10**8 < starts.max() < len(train) - T
    near = np.flatnonzero(np.abs(starts - first) < 2 * T)
    x, _ = data.windows(train, samples[near], T, seed=3)
    assert sorted(x[x > 0].tolist()) == marks.tolist()


# ------------------------------------------------------------------------------------------------- order

@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097])
def test_permutation_hits_every_place_once(n):
    place = data.permute(np.arange(n), n, 7, 0)
    assert np.array_equal(np.sort(place), np.arange(n))
    if n > 60:
        assert not np.array_equal(place, data.permute(np.arange(n), n, 8, 0)), "the seed changes nothing"
        assert not np.array_equal(place, data.permute(np.arange(n), n, 7, 1)), "the epoch changes nothing"
        assert abs(np.corrcoef(np.arange(n), place)[0, 1]) < 5 / n**0.5


def test_permutation_of_a_trillion_needs_no_memory_and_has_no_collision():
    n = 10**12 + 39
    place = data.permute(np.arange(n - 100_000, n), n, 1)
    assert len(np.unique(place)) == 100_000 and place.min() >= 0 and place.max() < n
    assert abs(place.mean() / n - 0.5) < 0.01 and abs(place.std() / n - 12**-0.5) < 0.01


def test_permutation_prefers_no_place():
    """Over 4,000 keys the first of 5 elements goes to each place 800 times, within 6 standard deviations."""
    counts = np.bincount([int(data.permute(np.array([0]), 5, seed)[0]) for seed in range(4000)], minlength=5)
    assert np.abs(counts - 800).max() < 6 * (4000 * 0.2 * 0.8)**0.5, counts


def test_windows_are_neighbouring_ids_and_y_is_one_later():
    tokens = np.arange(100, 1123, dtype=np.uint16)
    x, y = data.windows(tokens, np.arange(37), 11, seed=2)
    assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (37, 11)
    assert x.is_contiguous() and y.is_contiguous()
    assert torch.equal(y, x + 1) and torch.equal(x, x[:, :1] + torch.arange(11))


def test_an_epoch_reads_every_window_once_and_epochs_differ():
    tokens, T = np.arange(1000, dtype=np.uint16), 13
    n = 999 // T
    epochs = [data.windows(tokens, np.arange(n) + e * n, T, seed=4)[0] for e in range(3)]
    for x in epochs:
        ids = x.flatten().sort().values
        assert len(ids.unique()) == n * T and ids[-1] - ids[0] == n * T - 1
    orders = [x[:, 0] - x.min() for x in epochs]                                 # without the shift
    assert not torch.equal(orders[0], orders[1]) and not torch.equal(orders[1], orders[2])
    assert len({int(x.min()) for x in epochs}) > 1, "the shift within the slack never moves"
    assert not torch.equal(epochs[0], data.windows(tokens, np.arange(n), T, seed=5)[0])


def test_samples_depend_on_seed_and_index_alone():
    """However a batch is shared out over ranks, and after a resume, sample i is the same."""
    tokens, T = np.random.default_rng(6).integers(0, 500, 5000).astype(np.uint16), 17
    together = data.windows(tokens, np.arange(600), T, seed=9)
    for ranks in (2, 3):
        for rank in range(ranks):
            x, y = data.windows(tokens, np.arange(rank, 600, ranks), T, seed=9)
            assert torch.equal(x, together[0][rank::ranks]) and torch.equal(y, together[1][rank::ranks])
    assert torch.equal(data.windows(tokens, [599], T, seed=9)[0][0], together[0][599])


def test_order_is_the_same_on_every_machine():
    """Written down once: a change here would silently change what a resumed run reads."""
    assert data.hash64(1, 2)[0] == 13608149317741381227
    assert data.permute(np.arange(10), 10, 3, 0).tolist() == [2, 1, 3, 9, 8, 0, 6, 7, 5, 4]
    assert data.window_starts(1003, np.array([0, 1, 2, 150]), 10, 5).tolist() == [901, 381, 471, 250]


@pytest.mark.parametrize("extra", [1, 2, 3, 7, 8, 9])
def test_the_last_token_is_reachable(extra):
    T = 7
    tokens = np.arange(T + extra)
    x, y = data.windows(tokens, np.arange(400), T, seed=1)
    assert int(y.max()) == len(tokens) - 1 and int(x.min()) == 0


def test_too_short_data_is_named_with_its_length_and_the_need():
    for length in (0, 1, 8):
        with pytest.raises(ValueError, match=f"t.txt is {length} tokens long, but a block of 8 needs .* 9"):
            data.check_length(np.arange(length), 8, "t.txt")
        with pytest.raises(ValueError, match="at least 9"):
            data.windows(np.arange(length), [0], 8)
    for length in (9, 10):
        data.check_length(np.arange(length), 8, "t.txt")
        assert data.windows(np.arange(length), [0, 1], 8)[0].shape == (2, 8)


def test_no_samples_give_empty_batches():
    x, y = data.windows(np.arange(50), np.zeros(0, np.int64), 8)
    assert x.shape == y.shape == (0, 8)


# ------------------------------------------------------------------------------------------------- mix

def sources():
    return [np.arange(0, 700), np.arange(1000, 1900), np.arange(2000, 2400)]


def test_mix_has_its_quota_in_every_block():
    mix = data.Mix(sources(), [5, 3, 2], block=50)
    assert mix.quota.tolist() == [25, 15, 10]
    for block in (0, 1, 77):
        which, _ = mix.locate(np.arange(50) + 50 * block, seed=3)
        assert np.bincount(which, minlength=3).tolist() == [25, 15, 10]
    orders = [mix.locate(np.arange(50) + 50 * block, seed=3)[0].tolist() for block in range(3)]
    assert orders[0] != orders[1] != orders[2]
    assert mix.locate(np.arange(50), seed=4)[0].tolist() != orders[0]


def test_mix_rounds_by_largest_remainder():
    assert data.Mix(sources(), [1, 1, 1], block=1000).quota.tolist() == [334, 333, 333]
    assert data.Mix(sources(), [86.4, 5.8, 7.8], block=100).quota.tolist() == [86, 6, 8]


def test_mix_reads_each_source_without_repetition():
    mix = data.Mix(sources(), [5, 3, 2], block=50)
    which, local = mix.locate(np.arange(500), seed=6)
    for s, quota in enumerate((250, 150, 100)):
        assert np.array_equal(np.sort(local[which == s]), np.arange(quota)), s


def test_mix_windows_are_those_of_its_sources_whatever_the_ranks():
    mix, T = data.Mix(sources(), [5, 3, 2], block=50), 9
    x, y = data.windows(mix, np.arange(200), T, seed=8)
    which, _ = mix.locate(np.arange(200), seed=8)
    assert torch.equal(x[:, 0] // 1000, torch.from_numpy(which)) and torch.equal(y, x + 1)
    odd, _ = data.windows(mix, np.arange(1, 200, 2), T, seed=8)
    assert torch.equal(odd, x[1::2])
    rows = x[which == 2][:39]                                             # less than an epoch of this source
    assert len(rows.unique()) == rows.numel()


@pytest.mark.parametrize("weights, message", [
    ([1, 2], "mix of 3 sources"), ([1, 0, 1], "above 0"), ([1, float("nan"), 1], "above 0"),
    ([1, 1, 1e-9], "without a sample")])
def test_mix_refuses_weights_that_cannot_be(weights, message):
    with pytest.raises(ValueError, match=message):
        data.Mix(sources(), weights)


def test_mix_checks_the_length_of_each_source():
    mix = data.Mix([np.arange(50), np.arange(8)], [1, 1])
    with pytest.raises(ValueError, match="corpus, source 1 is 8 tokens"):
        data.check_length(mix, 8, "corpus")
    data.check_length(mix, 7, "corpus")


# ------------------------------------------------------------------------------------------------- commands

def run(*args, **env):
    return subprocess.run([sys.executable, str(ROOT / "data.py"), *map(str, args)], capture_output=True,
                          text=True, env={**os.environ, **env})


def test_command_reports_mistakes_in_one_line_with_status_2(tmp_path):
    for args, message in [(("tokenize", tmp_path / "nothing", tmp_path / "out"), "nothing"),
                          (("tokenize", ROOT / "data.py", tmp_path / "out", "--tokenizer", "nope"), "'nope'"),
                          (("tokenize", ROOT / "data.py", tmp_path / "out", "--workers", "0"), "--workers")]:
        done = run(*args)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert not (tmp_path / "out").exists()


def test_demonstration_shows_the_corpus_and_the_cuts(tmp_path):
    done = run(XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "standard library of Python" in done.stdout and "|self|" in done.stdout
