"""Corpus -> tokens -> batches: everything between a reader's text and `train.py`.

    text files --corpus.py--> byte ranges --tokenizer.py, shards.py--> ids on disk --mmap--> windows (B, T)

Load        `load(source, tokenizer)` gives a Dataset from a text or from token shards. Text is always read
            through shards, kept in a cache folder whose name is a hash of what they were made from: a change
            of the text, the tokenizer or the code makes new ones. The last 5 % are for validation.
Order       Sample i of a run is a pure function of (seed, i): epoch = i // n, window = permutation(i % n), a
            new one for each epoch. It is a Feistel network on just enough bits; a result outside [0, n) is
            sent through again until it falls inside (cycle walking; Black and Rogaway, CT-RSA 2002). No
            shuffled list is stored, and a run resumes on another number of ranks with the very same batches.
Mix         Several sources with weights, read as one.

Glossary
    window      T + 1 neighbouring ids: x is the first T of them, y the last T
    slack       the ids that do not fill a window; a shift per epoch moves the windows within it

Left out: packing documents without cuts (model.py takes `segments` for packed rows), and de-duplication.
Run: `python data.py` (demonstration), `python data.py tokenize SOURCE OUT --tokenizer SPEC --workers N`.
"""
import hashlib
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import shards
from config import Parser, run
from corpus import find_corpus
from shards import LongArray, content_key, open_shards, tokenize
from tokenizer import cache_folder, get_tokenizer, is_recipe



@dataclass
class Dataset:
    """train, val: 1-D ids, memory-mapped. bytes_per_token: of val, turns nats a token into bits a byte."""
    train: LongArray
    val: LongArray
    tokenizer: object
    bytes_per_token: float
    name: str


def load(source="stdlib", tokenizer=None, cache_dir=None, val_fraction=0.05):
    """Corpus and tokenizer -> Dataset.

    source: "stdlib", a text file, a folder of text files, or a folder of token shards (these bring their own
    tokenizer and validation part). tokenizer: a `get_tokenizer` spec or a recipe; None is bpe:1024 for text,
    their own for shards. cache_dir: where the tokens are kept, by default the user's cache folder.
    FileNotFoundError, ValueError, one line: a missing path, no text, data that does not fit together.
    """
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction is {val_fraction}, and must lie between 0 and 1")
    if (Path(source) / "meta.json").is_file():
        return open_dataset(source, tokenizer)
    if any(Path(source).glob("train*.bin")) or any(Path(source).glob("*-[0-9]*.bin")):
        raise ValueError(f"{source} has shards and no meta.json: finish it, python data.py tokenize TEXT OUT")
    corpus, tokenizer = find_corpus(source), tokenizer or "bpe:1024"
    made = tokenizer if is_recipe(tokenizer) else get_tokenizer(tokenizer)
    settings = dict(val_fraction=val_fraction, shard_bytes=16_000_000)
    origin = hashlib.sha256(repr((os.path.abspath(corpus.root), source, tokenizer)).encode()).hexdigest()[:8]
    stem = f"{re.sub('[^a-zA-Z0-9]+', '-', Path(source).name)}-{origin}"
    folder = Path(cache_dir or cache_folder()) / f"{stem}-{content_key(corpus, made, *settings.values())}"
    if not cache_is_sound(folder, corpus):
        try:
            tokenize(corpus, folder, made, **settings)
        except OSError as error:
            raise ValueError(f"cannot keep tokens in {folder.parent} ({error.strerror or error}): "
                             "set XDG_CACHE_HOME to another folder") from None
    for old in folder.parent.glob(f"{stem}-*"):
        if old != folder:                    # the same source and tokenizer, before the source changed
            shutil.rmtree(old, ignore_errors=True)
    return open_dataset(folder, made)


def cache_is_sound(folder, corpus):
    """Whether a complete cache is there. A damaged one is removed, one in the making left to be completed."""
    if not (folder / "meta.json").exists():
        return False
    try:
        open_shards(folder, verify=corpus.size < 5e8)            # half a GB of text: a third of a second
        return True
    except ValueError as error:
        print(f"the cached tokens are made again: {error}")
        shutil.rmtree(folder)
        return False


def open_dataset(folder, tokenizer=None):
    """Folder of shards, and the tokenizer (or its spec, or recipe) that must have made them -> Dataset."""
    meta, parts = open_shards(folder)
    asked = tokenizer
    if tokenizer is None or is_recipe(tokenizer):
        tokenizer = f"{meta['tokenizer']}:{Path(folder) / 'tokenizer.json'}"
    if isinstance(tokenizer, str):
        tokenizer = get_tokenizer(tokenizer)
    if is_recipe(asked) and int(asked[4:]) != meta["vocab_size"] or tokenizer.digest() != meta["digest"]:
        asked = asked if isinstance(asked, str) else tokenizer.spec
        raise ValueError(f"{folder} was made with another tokenizer than {asked}, with {meta['vocab_size']} "
                         "ids: name no tokenizer, which takes its own, or tokenise again")
    cut = meta["training_shards"]
    train, val = LongArray(parts[:cut]), LongArray(parts[cut:])
    for ids in (train[:1_000_000], val[:1_000_000]):
        if len(ids) and ids.max() >= tokenizer.vocab_size:
            raise ValueError(f"{folder} has an id {ids.max()}, past its vocabulary of {tokenizer.vocab_size}")
    rate = bytes_per_token(val if len(val) else train, tokenizer)
    return Dataset(train, val, tokenizer, rate, meta["name"])


def bytes_per_token(tokens, tokenizer):
    """Mean length in bytes of the text of a token, over the first 10 million; special tokens have none."""
    lengths = np.array([len(piece) for piece in tokenizer.pieces], np.float64)
    lengths[list(tokenizer.specials.values())] = 0
    ids = tokens[:10_000_000]
    return float(np.bincount(ids, minlength=len(lengths)) @ lengths / max(len(ids), 1))


# ------------------------------------------------------------------------------------------------------ order

def check_length(tokens, T, name):
    """ValueError if the tokens (an array or a Mix) do not fill one window of T + 1."""
    if isinstance(tokens, Mix):
        for i, source in enumerate(tokens.sources):
            check_length(source, T, f"{name}, source {i}")
    elif len(tokens) < T + 1:
        raise ValueError(f"{name} is {len(tokens):,} tokens long, but a block of {T} needs at least {T + 1}: "
                         "give more text or a smaller block")


def windows(tokens, indices, T, seed=0):
    """tokens (1-D or a Mix), indices (M,) global sample numbers -> x, y int64 (M, T); y is x one id later."""
    indices = np.asarray(indices, np.int64)
    if isinstance(tokens, Mix):
        return tokens.windows(indices, T, seed)
    check_length(tokens, T, "the data")
    rows = np.empty((len(indices), T + 1), np.int64)
    for row, start in zip(rows, window_starts(len(tokens), indices, T, seed).tolist()):
        row[:] = tokens[start:start + T + 1]
    rows = torch.from_numpy(rows)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def window_starts(length, indices, T, seed):
    """indices (M,) -> first positions (M,) in `length` tokens: each window once an epoch, in a new order."""
    n, slack = divmod(length - 1, T)                           # length - 1: the last y reads one id more
    epoch, index = np.divmod(indices, n)
    shift = hash64(seed, epoch, 1) % np.uint64(slack + 1)      # at shift == slack the very last id is read
    return shift.astype(np.int64) + T * permute(index, n, seed, epoch)


def permute(index, n, *keys):
    """index (M,) in [0, n) -> place (M,) under a pseudo-random permutation of [0, n), one for each key.

    Feistel: a round maps (left, right) to (right, left xor hash(right)), which can be undone: no two collide.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask, place, todo = np.uint64(2**half - 1), index.astype(np.uint64), np.arange(len(index))
    key = np.broadcast_to(hash64(*keys), index.shape)
    while len(todo):
        left, right = place[todo] >> np.uint64(half), place[todo] & mask
        for r in range(4):
            left, right = right, left ^ (hash64(key[todo], r, right) & mask)
        place[todo] = left << np.uint64(half) | right
        todo = todo[place[todo] >= np.uint64(n)]               # outside: walk on, the cycle leads back inside
    return place.astype(np.int64)


def hash64(*keys):
    """Integers or arrays (they broadcast) -> uint64 array, by splitmix64 (Steele et al., OOPSLA 2014)."""
    h = np.zeros(1, np.uint64)
    for key in keys:
        h = (h ^ np.asarray(key).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        h = h ^ (h >> np.uint64(31))
    return h


class Mix:
    """Several token arrays read as one: each has a fixed number of every `block` samples, in shuffled order.

    weights: relative shares, in samples, rounded to whole samples a block (largest remainder). Each source is
    read without repetition until its epoch ends. ValueError for weights that leave a source without a sample.
    """

    def __init__(self, sources, weights, block=1000):
        weights = np.asarray(weights, np.float64)
        if len(weights) != len(sources) or not (np.isfinite(weights) & (weights > 0)).all():
            raise ValueError(f"a mix of {len(sources)} sources needs as many weights above 0, got {weights}")
        exact = weights / weights.sum() * block
        self.quota = np.floor(exact).astype(np.int64)
        self.quota[np.argsort(self.quota - exact, kind="stable")[:block - self.quota.sum()]] += 1
        if not self.quota.all():
            raise ValueError(f"the weights {weights} leave a source without a sample in {block}: drop it")
        self.sources, self.block, self.first = list(sources), block, np.cumsum(self.quota) - self.quota

    def __len__(self):
        return sum(len(source) for source in self.sources)

    def locate(self, indices, seed):
        """indices (M,) -> which source (M,), and the sample number within it (M,)."""
        block, slot = np.divmod(indices, self.block)
        slot = permute(slot, self.block, seed, block)
        which = np.searchsorted(self.first, slot, "right") - 1
        return which, block * self.quota[which] + slot - self.first[which]

    def windows(self, indices, T, seed):
        """As the function `windows`, which calls this."""
        which, local = self.locate(indices, seed)
        x, y = (torch.empty(len(indices), T, dtype=torch.int64) for _ in range(2))
        for s in np.unique(which):
            mine, own_seed = torch.from_numpy(which == s), hash64(seed, s + 1).astype(np.int64)
            x[mine], y[mine] = windows(self.sources[s], local[which == s], T, own_seed)
        return x, y


# ----------------------------------------------------------------------------------------------- commands

def demonstrate():
    """The default corpus and tokenizer: how many tokens, how fast, and one window of them."""
    start = time.perf_counter()
    data = load()
    print(f"corpus      {data.name}")
    print(f"tokens      {len(data.train):,} for training, {len(data.val):,} for validation, "
          f"{data.bytes_per_token:.3f} bytes a token")
    print(f"            loaded in {time.perf_counter() - start:.2f} s, kept in {cache_folder()}")
    x, y = windows(data.train, [0], 12, seed=0)
    print(f"a window    x {data.tokenizer.decode(x[0].tolist())!r}")
    print(f"            y {data.tokenizer.decode(y[0].tolist())!r}")


def main(argv):
    if argv[:1] == ["tokenize"]:                # here, where a reader who has a text looks first
        return shards.command(argv[1:])
    parser = Parser("data.py", description="Without a command: a demonstration.")
    parser.add_argument("command", nargs="?", choices=["tokenize"], help="token shards; has its own --help")
    parser.parse_args(argv)
    demonstrate()


if __name__ == "__main__":
    run(main)
