"""Corpora: which files, in which order, cut where."""
import random
import re

import numpy as np
import pytest

from corpus import STDLIB_MIN, find_corpus, plan_shards, read_range
import data
from conftest import make_folder


def test_standard_library_is_found_and_has_no_tests_in_it():
    corpus = find_corpus()
    names = [name for name, _, _ in corpus.files]
    assert re.fullmatch(r"standard library of Python 3\.\d+\.\d+\S*, \d+\.\d MB", corpus.name)
    assert corpus.size > STDLIB_MIN and "argparse.py" in names and "json/decoder.py" in names
    assert not [n for n in names if n.startswith(("test", "encodings/", "site-packages/")) or "/test" in n]
    assert {name[0] for name in names[-60:]} > set("acs")                        # no alphabetical tail


def test_small_standard_library_points_to_data(monkeypatch):
    monkeypatch.setattr("corpus.STDLIB_MIN", 10**9)
    with pytest.raises(ValueError, match=r"standard library of Python .* is under 1000.0 MB: .*--data FILE"):
        data.load()


def test_folder_skips_binary_and_hidden_files(tmp_path):
    texts = make_folder(tmp_path, 5)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\x00\x01")
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("[core]")
    (tmp_path / "cut.txt").write_bytes(("x" * 8191 + "é").encode())   # the first 8 KB end inside a character
    corpus = find_corpus(tmp_path)
    assert {name for name, _, _ in corpus.files} == {*texts, "cut.txt"}
    assert corpus.name == f"{tmp_path.name}, {corpus.size:,} bytes in 6 files"


@pytest.mark.parametrize("shard_bytes", [1, 7, 100, 1013, 10**6])
def test_plan_covers_every_byte_once_and_in_order(tmp_path, shard_bytes):
    texts = make_folder(tmp_path, 9)
    corpus = find_corpus(tmp_path)
    shards, training = plan_shards(corpus, 0.3, shard_bytes)
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
            parts = [read_range(file, i, min(i + step, len(raw)), len(raw))
                     for i in range(0, len(raw), step)]
        assert "".join(parts) == text, step
