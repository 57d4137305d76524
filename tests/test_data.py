"""Loading, its cache, and the order of samples. Nothing here needs a network; texts are small and seeded."""
import hashlib
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch

import data
import shards
import tokenizer
from conftest import ROOT, make_folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


# ------------------------------------------------------------------------------------------------- loading

def in_order(texts):
    return [texts[name] for name in sorted(texts, key=lambda n: hashlib.sha256(n.encode()).digest())]


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
    with pytest.raises(ValueError, match="no name"):            # and not all texts of the current folder
        data.load("", cache_dir=tmp_path / "cache")


def test_folder_loads_whole_and_in_hashed_order(tmp_path, cache):
    texts = in_order(make_folder(tmp_path))
    ds = data.load(tmp_path, "bytes", cache_dir=cache)
    joined = "".join(text + tokenizer.EOT for text in texts)
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
        encode = shards.encode_shard
        patch.setattr(shards, "encode_shard", lambda *a: calls.append(a) or encode(*a))
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
    monkeypatch.setattr(shards, "FORMAT", -1)
    assert encoded_again(monkeypatch, src, "bytes", kept)[1]


def test_cache_notices_another_tokenizer_behind_the_same_name(tmp_path, monkeypatch):
    make_folder(tmp_path / "src")
    spec = tokenizer.train_bpe("ab " * 99 + "cd " * 98, 260).save(tmp_path / "t.json")
    assert encoded_again(monkeypatch, tmp_path / "src", spec, tmp_path / "kept")[1]
    assert not encoded_again(monkeypatch, tmp_path / "src", spec, tmp_path / "kept")[1]
    tokenizer.train_bpe("ef " * 99 + "gh " * 98, 260).save(tmp_path / "t.json")
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


def test_demonstration_shows_the_corpus(tmp_path):
    done = run(XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "standard library of Python" in done.stdout and "a window" in done.stdout
