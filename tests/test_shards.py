"""Token shards: the same for any number of workers, whole or absent, refused where they do not fit."""
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from corpus import find_corpus
import data
import shards
import tokenizer
from conftest import ROOT, make_folder, random_text


def read_all(folder):
    ds = data.load(folder)
    return np.concatenate([ds.train[:], ds.val[:]])


def shard_files(folder):
    return {path.name: path.read_bytes() for path in Path(folder).glob("*.bin")}


def test_shards_are_the_same_for_any_number_of_workers(tmp_path):
    make_folder(tmp_path / "src")
    corpus = find_corpus(tmp_path / "src")
    one = shards.tokenize(corpus, tmp_path / "one", "bpe:300", 1, shard_bytes=3000)
    three = shards.tokenize(corpus, tmp_path / "three", "bpe:300", 3, shard_bytes=3000)
    assert one == three and len(one["shards"]) > 5
    assert shard_files(tmp_path / "one") == shard_files(tmp_path / "three")
    ds = data.load(tmp_path / "one")
    assert ds.tokenizer.decode(read_all(tmp_path / "one")).count(tokenizer.EOT) == 40
    assert ds.name == corpus.name and ds.tokenizer.vocab_size == 300


def test_one_long_file_gives_many_shards_that_read_as_one(tmp_path):
    text = random_text(random.Random(3), 5000).replace("\x00", "")
    (tmp_path / "t.txt").write_bytes(text.encode())
    corpus = find_corpus(tmp_path / "t.txt")
    meta = shards.tokenize(corpus, tmp_path / "out", tokenizer.get_tokenizer("bytes"), shard_bytes=777)
    assert len(meta["shards"]) >= 10
    assert bytes(read_all(tmp_path / "out").tolist()) == text.encode()


def test_finished_shards_are_kept_and_half_written_ones_never_count(tmp_path):
    make_folder(tmp_path / "src")
    corpus, tok, out = find_corpus(tmp_path / "src"), tokenizer.get_tokenizer("bytes"), tmp_path / "out"
    shards.tokenize(corpus, tmp_path / "whole", tok, shard_bytes=2000)
    want = shard_files(tmp_path / "whole")
    out.mkdir()
    names = sorted(want)
    (out / names[0]).write_bytes(want[names[0]])                                 # finished before
    os.utime(out / names[0], (1, 1))
    (out / f"{names[1]}.77.tmp").write_bytes(want[names[1]][:100])               # died while writing
    with pytest.raises(ValueError, match="no meta.json"):
        data.load(out)
    shards.tokenize(corpus, out, tok, shard_bytes=2000)
    assert shard_files(out) == want
    assert (out / names[0]).stat().st_mtime == 1 and (out / names[1]).stat().st_mtime > 1


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
    corpus, out, tok = find_corpus(tmp_path / "src"), tmp_path / "out", tokenizer.get_tokenizer("bytes")
    meta = shards.tokenize(corpus, out, tok)
    assert shards.tokenize(corpus, out, tok) == meta
    with pytest.raises(ValueError, match="out holds the shards of other data"):
        shards.tokenize(corpus, out, "bpe:260")
    target = next(out.glob("*.bin"))
    target.write_bytes(b"\x01" + target.read_bytes()[1:])
    with pytest.raises(ValueError, match=f"{target.name} is damaged"):
        shards.tokenize(corpus, out, tok)


def write_shards(folder, ids, **changes):
    """Shards by hand, of any arrays, with a tokenizer of bytes."""
    folder.mkdir()
    tok = tokenizer.get_tokenizer("bytes")
    tok.save(folder / "tokenizer.json")
    entries = []
    for i, part in enumerate(ids):
        part.tofile(folder / f"{i}.bin")
        entries.append(dict(file=f"{i}.bin", length=len(part), crc32=shards.checksum(folder / f"{i}.bin")))
    meta = dict(format=1, key="k", name="by hand", tokenizer="bpe", digest=tok.digest(), vocab_size=257,
                dtype="uint16", training_shards=1, shards=entries)
    (folder / "meta.json").write_text(json.dumps({**meta, **changes}))
    return folder


def test_dtype_follows_the_vocabulary():
    assert [shards.dtype_of(n).itemsize for n in (257, 65_536, 65_537, 262_272)] == [2, 2, 4, 4]


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
    other = tokenizer.train_bpe("ab ab", 258).save(tmp_path / "other.json")
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
    joined, long = np.concatenate(parts), shards.LongArray(parts)
    assert len(long) == 16
    for start in range(-17, 18):
        for stop in [*range(-17, 18), None]:
            assert np.array_equal(long[start:stop], joined[start:stop]), (start, stop)
    assert len(shards.LongArray([])) == 0 and len(shards.LongArray([])[:]) == 0


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
