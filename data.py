"""Corpus -> tokens -> batches: everything between a reader's text and `train.py`.

    text files --plan--> byte ranges --encode--> shards of ids (.bin, meta.json) --mmap--> windows (B, T)

Corpus      the source code of this Python's own standard library (nothing to download), a text file, a
            folder of text files, or token shards. Files are ordered by a hash of their relative path, so that
            the validation part, the last 5 %, is no alphabetical tail. If there are several files,
            <|endoftext|> follows each.
Tokenizer   "bytes", "bpe:1024" (trained here), "bpe:PATH", "gpt2", "gemma:PATH". All are byte-level BPE
            (Sennrich et al., arXiv 1508.07909; on bytes as in GPT-2) and run inside `tiktoken.Encoding`.
            Gemma 3, the tokenizer of the released ZAYA1 weights, is in gemma.py.
Shards      Text is always read through shards: `load` writes them into a cache folder whose name is a hash of
            what they were made from; `python data.py tokenize` writes them where you say, in parallel. A
            shard is written under another name, synced and renamed, and meta.json comes last: what is there
            is whole, and an interrupted run goes on where it stopped.
Order       Sample i of a run is a pure function of (seed, i): epoch = i // n, window = permutation(i % n), a
            new one for each epoch. It is a Feistel network on just enough bits; a result outside [0, n) is
            sent through again until it falls inside (cycle walking; Black and Rogaway, CT-RSA 2002). No
            shuffled list is stored, and a run resumes on another number of ranks with the very same batches.

Glossary
    piece       the bytes of one token, `Tokenizer.pieces[id]`; the lowest id merges first
    recipe      "bpe:NUMBER", a tokenizer still to be trained on the corpus at hand
    window      T + 1 neighbouring ids: x is the first T of them, y the last T
    slack       the ids that do not fill a window; a shift per epoch moves the windows within it

Left out: packing documents without cuts (model.py takes `segments` for packed rows), and de-duplication.
Commands: `python data.py` (demonstration), `python data.py tokenize SOURCE OUT --tokenizer SPEC --workers N`.
"""
import argparse
import base64
import codecs
import hashlib
import heapq
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import time
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import tiktoken
import torch
from tqdm import tqdm

EOT = "<|endoftext|>"
# Words keep the space, dot or underscore before them; a line break keeps the indentation after it: one token
# says "next line, two levels in". No look-around, so that the pattern stays in the linear-time regex engine.
PATTERN = r"\s*\n[ \t]*|[ _.]?[^\W\d_]+| ?_+| ?\d{1,3}| ?[^\w\s]+|[^\S\n]+"
FORMAT = 1                    # raise it when the same text would give other shards: caches then turn stale
BPE_SAMPLE = 1_000_000        # bytes that a BPE is trained on; twice as many gain 0.2 % of tokens
CHUNK = 4_000_000             # bytes encoded at a time: bounds the memory of one worker
CONTINUATION = bytes(range(0x80, 0xC0))       # UTF-8: the bytes of a character after its first
STDLIB_MIN = 2_000_000        # bytes; some systems ship Python with little or none of its standard library
GPT2_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"


# ----------------------------------------------------------------------------------------------- tokenizers

class Tokenizer:
    """Byte-level BPE. pieces: list of bytes by id, with all 256 single bytes. EOT takes the id after them.

    `spec` is the string that `get_tokenizer` rebuilds it from; None until a trained one is saved.
    """

    def __init__(self, pieces, pattern=PATTERN, spec=None):
        self.pieces, self.pattern, self.spec, self.eot = [*pieces, EOT.encode()], pattern, spec, len(pieces)
        self.vocab_size, self.specials = len(self.pieces), {EOT: self.eot}
        self.encoding = tiktoken.Encoding(spec or "bpe", pat_str=pattern, special_tokens=self.specials,
                                          mergeable_ranks={piece: i for i, piece in enumerate(pieces)})

    def encode(self, text, allow_special=False):
        """text -> list of ids. Special tokens in the text are plain text unless allow_special.

        With allow_special, text that looks like a special token and is none is a ValueError.
        """
        if not allow_special:
            return self.encoding.encode_ordinary(text)
        refuse_unknown_specials(text, self.specials)
        return self.encoding.encode(text, allowed_special="all")

    def decode_bytes(self, ids):
        """ids -> bytes. An id that the vocabulary does not have (padded embedding) becomes U+FFFD."""
        return b"".join(self.pieces[i] if 0 <= i < self.vocab_size else b"\xef\xbf\xbd" for i in ids)

    def decode(self, ids):
        """ids -> str; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def digest(self):
        """Hash of the vocabulary: under equal digests an id means the same."""
        pieces = [piece.decode("latin-1") for piece in self.pieces]
        return hashlib.sha256(json.dumps([self.pattern, pieces]).encode()).hexdigest()[:16]

    def save(self, path):
        """Write the vocabulary as json -> "bpe:PATH", then its `spec` unless it has a name of its own."""
        pieces = [piece.decode("latin-1") for piece in self.pieces[:-1]]     # one character for each byte
        saved = {"kind": "zaya1-bpe", "pattern": self.pattern, "pieces": pieces}
        write_atomically(path, json.dumps(saved).encode())
        self.spec = self.spec if self.spec in ("bytes", "gpt2") else f"bpe:{path}"
        return f"bpe:{path}"


def refuse_unknown_specials(text, known):
    """ValueError if the text holds something of the form <|name|> that is no special token."""
    for name in re.findall(r"<\|\w+\|>", text):
        if name not in known:
            raise ValueError(f"unknown special token {name} in the text: this tokenizer knows "
                             f"{', '.join(list(known)[:8])}")


def get_tokenizer(spec):
    """Tokenizer by spec: "bytes", "bpe:PATH", "gpt2" or "gemma:PATH/tokenizer.json".

    FileNotFoundError for a missing file, with what to fetch for gpt2; ValueError for another spec or content.
    """
    kind, _, path = spec.partition(":")
    if spec == "bytes":
        return Tokenizer([bytes([i]) for i in range(256)], spec="bytes")
    if spec == "gpt2":
        return load_gpt2(cache_folder() / "r50k_base.tiktoken")
    if is_recipe(spec):
        raise ValueError(f"tokenizer {spec} is trained on a corpus; here give bpe:PATH of one that was saved")
    if kind not in ("bpe", "gemma") or not path:
        raise ValueError(f"unknown tokenizer {spec!r}: use bytes, bpe:1024, bpe:PATH, gpt2 or gemma:PATH")
    if not Path(path).is_file():
        raise FileNotFoundError(f"tokenizer {spec}: no such file: {path}")
    if kind == "gemma":
        from gemma import GemmaTokenizer
        return GemmaTokenizer(path)
    return load_bpe(path)


def is_recipe(spec):
    return isinstance(spec, str) and re.fullmatch(r"bpe:\d+", spec) is not None


def load_bpe(path):
    try:
        saved = json.loads(Path(path).read_bytes())
        if saved["kind"] != "zaya1-bpe":
            raise ValueError
        pieces = [piece.encode("latin-1") for piece in saved["pieces"]]
        return Tokenizer(pieces, saved["pattern"], f"bpe:{path}")
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} was not saved by data.py (a Gemma tokenizer.json is gemma:PATH)") from None


def load_gpt2(path):
    """GPT-2's 50,256 pieces. The file is not downloaded here: tiktoken's own download knows no time-out."""
    if not path.is_file():
        raise FileNotFoundError(f"tokenizer gpt2 needs one file: curl --create-dirs -o {path} {GPT2_URL}")
    from tiktoken_ext.openai_public import r50k_pat_str
    lines = [line.split() for line in path.read_bytes().splitlines()]
    if [int(line[-1]) for line in lines] != list(range(50256)):
        raise ValueError(f"{path} is incomplete ({len(lines)} of 50256 lines): fetch {GPT2_URL} again")
    return Tokenizer([base64.b64decode(piece) for piece, _ in lines], r50k_pat_str, "gpt2")


def train_bpe(text, vocab_size):
    """text (str or bytes) -> Tokenizer of exactly vocab_size ids: 256 bytes, merges, EOT.

    Sennrich et al., algorithm 1: merge the most frequent pair of neighbours, again and again. Only unique
    words are kept, with their number. Counts in the heap go out of date: a wrong one is put back right.
    ValueError if the text runs out of pairs that occur twice.
    """
    if vocab_size < 257:
        raise ValueError(f"a BPE vocabulary of {vocab_size} is too small: 256 bytes and {EOT} make 257")
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    counted = Counter(re.findall(PATTERN, text))
    words, number = [list(word.encode("utf-8", "replace")) for word in counted], list(counted.values())
    pairs, places = Counter(), defaultdict(set)       # pair -> its count; pair -> words that hold it
    for i, word in enumerate(words):
        _count_pairs(i, word, number[i], pairs, places)
    heap = [(-count, pair) for pair, count in pairs.items()]     # of equal counts the lower ids
    heapq.heapify(heap)
    pieces = [bytes([i]) for i in range(256)]
    bar = tqdm(total=vocab_size - 257, desc="training the tokenizer", unit="merge", delay=1)
    while len(pieces) < vocab_size - 1:
        count, pair = heapq.heappop(heap) if heap else (0, None)
        if pair and -count != pairs[pair]:
            heapq.heappush(heap, (-pairs[pair], pair))
            continue
        if count > -2:
            raise ValueError(f"{len(text):,} characters of text yield a vocabulary of {len(pieces) + 1}, not "
                             f"{vocab_size}: use the tokenizer bytes or bpe:{len(pieces) + 1}, or more text")
        pieces.append(pieces[pair[0]] + pieces[pair[1]])
        bar.update()
        new = set()
        for i in places.pop(pair):
            _count_pairs(i, words[i], -number[i], pairs, {})
            words[i] = _merge(words[i], pair, len(pieces) - 1)
            new.update(_count_pairs(i, words[i], number[i], pairs, places))
        for pair in new:                              # a fallen count shows when popped, a risen one here
            heapq.heappush(heap, (-pairs[pair], pair))
    bar.close()
    return Tokenizer(pieces)


def _count_pairs(i, word, number, pairs, places):
    found = list(zip(word, word[1:]))
    for pair in found:
        pairs[pair] += number
        places.setdefault(pair, set()).add(i)
    return found


def _merge(word, pair, new):
    out, i = [], 0
    while i < len(word):
        hit = tuple(word[i:i + 2]) == pair
        out.append(new if hit else word[i])
        i += 2 if hit else 1
    return out


# ----------------------------------------------------------------------------------------------- the text

@dataclass
class Corpus:
    """Text files in reading order. files: list of (path relative to root, bytes, time of change in ns)."""
    root: Path
    files: list
    name: str
    size: int                 # bytes


def find_corpus(source="stdlib", min_bytes=STDLIB_MIN):
    """"stdlib", a text file, or a folder (all its text files, hidden ones left out) -> Corpus.

    FileNotFoundError for a missing path; ValueError for no text, or a standard library under min_bytes.
    """
    root = path = Path(sysconfig.get_path("stdlib") if source == "stdlib" else source)
    if source == "stdlib":
        found = [p for p in path.rglob("*.py") if _wanted(p.relative_to(path))]
    elif path.is_dir():
        visible = (p for p in path.rglob("*") if not any(s[0] == "." for s in p.relative_to(path).parts))
        found = [p for p in tqdm(visible, desc=f"looking through {path}", unit="file", delay=1) if is_text(p)]
    elif path.is_file():
        if path.stat().st_size and not is_text(path):
            raise ValueError(f"{path} is not UTF-8 text (name token shards by their folder, with meta.json)")
        root, found = path.parent, [path]
    else:
        raise FileNotFoundError(f"no such file or folder: {source}")
    names = sorted((p.relative_to(root).as_posix() for p in found),
                   key=lambda name: hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest())
    files = [(name, s.st_size, s.st_mtime_ns) for name in names if (s := (root / name).stat()).st_size]
    size = sum(size for _, size, _ in files)
    amount = f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size:,} bytes"
    if source == "stdlib":
        name = f"standard library of Python {platform.python_version()}, {amount}"
        if size < max(min_bytes, 1):
            raise ValueError(f"the {name}, is under {min_bytes / 1e6:.1f} MB: give a text with --data FILE")
    elif not size:
        raise ValueError(f"{source} has no text in it (0 bytes in {len(found)} text files): give some text")
    else:
        name = f"{path.name}, {amount}" + (f" in {len(files)} files" if path.is_dir() else "")
    return Corpus(root, files, name, size)


def _wanted(relative):
    """Not tests, other people's packages, tables of characters, or what the build of this Python wrote."""
    skip = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
    return not any(part in skip or part.startswith(("test", "_sysconfigdata")) for part in relative.parts)


def is_text(path):
    """Whether the first 8 KB of a file are UTF-8 without NUL. An empty file is no text."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        head = file.read(8192)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)     # the cut at 8 KB may fall into a character
    except UnicodeDecodeError:
        return False
    return bool(head) and b"\0" not in head


def plan(corpus, val_fraction, shard_bytes):
    """-> shards, each a list of (path, start, stop, size of the file), and how many of them are for training.

    Validation begins at the end of the file nearest to its share, unless that is off by more than half of it.
    """
    cut = round(corpus.size * (1 - val_fraction))
    ends = list(accumulate(size for _, size, _ in corpus.files))
    nearest = min(ends[:-1], key=lambda end: abs(end - cut), default=0)
    if abs(nearest - cut) <= val_fraction * corpus.size / 2:
        cut = nearest
    edges = [*range(0, cut, shard_bytes), *range(cut, corpus.size, shard_bytes), corpus.size]
    shards = []
    for low, high in zip(edges, edges[1:]):
        span = slice(bisect_right(ends, low), bisect_right(ends, high - 1) + 1)
        shards.append([(path, max(low - end + size, 0), min(high - end + size, size), size)
                       for (path, size, _), end in zip(corpus.files[span], ends[span])])
    return shards, len(range(0, cut, shard_bytes))


def read_range(file, start, stop, size):
    """Text of the bytes [start, stop) of a file, both ends moved forward to where a cut does no harm."""
    start, stop = _align(file, start, size), _align(file, stop, size)
    file.seek(start)
    return file.read(stop - start).decode("utf-8", "replace")


def _align(file, position, size):
    """To the next beginning of a line if there is one within 4 KB, else of a character. Monotonic."""
    if position in (0, size):
        return position
    file.seek(position - 1)
    ahead = file.read(4096)
    line = ahead.find(b"\n")
    inside = len(ahead[1:]) - len(ahead[1:].lstrip(CONTINUATION))
    return position + (line if line >= 0 else inside)


# ----------------------------------------------------------------------------------------------- shards

_worker = {}                  # a worker process keeps its tokenizer here


def tokenize(corpus, out, tokenizer="bpe:1024", workers=1, val_fraction=0.05, shard_bytes=64_000_000):
    """Write the token shards of a Corpus into the folder `out` -> contents of its meta.json.

    tokenizer: a recipe or a tokenizer. Finished shards of an interrupted call are kept; a complete folder is
    verified against its checksums and left as it is. ValueError if `out` holds the shards of other data.
    """
    out, key = Path(out), content_key(corpus, tokenizer, val_fraction, shard_bytes)
    if (out / "meta.json").exists():
        meta, _ = open_shards(out, verify=True)
        if meta["key"] != key:
            raise ValueError(f"{out} holds the shards of other data ({meta['name']}): use a new folder")
        return meta
    shards, training = plan(corpus, val_fraction, shard_bytes)
    if is_recipe(tokenizer):
        tokenizer = train_bpe(bpe_sample(corpus, shards[:training] or shards), int(tokenizer[4:]))
    spec, dtype = tokenizer.save(out / "tokenizer.json"), dtype_of(tokenizer.vocab_size)
    eot = [tokenizer.eot] if len(corpus.files) > 1 and tokenizer.eot is not None else []
    jobs = [(corpus.root, parts, eot, out / f"{key[:8]}-{i:05d}.bin", dtype)
            for i, parts in enumerate(shards)]
    meta = dict(format=FORMAT, key=key, name=corpus.name, tokenizer=spec.partition(":")[0],
                digest=tokenizer.digest(), vocab_size=tokenizer.vocab_size, dtype=str(dtype),
                training_shards=training, shards=run_jobs(jobs, tokenizer, spec, workers, corpus))
    write_atomically(out / "meta.json", json.dumps(meta, indent=1).encode())
    return meta


def content_key(corpus, tokenizer, *settings):
    """Changes with any file's path, size or time of change, the tokenizer, the settings, and FORMAT."""
    tokenizer = tokenizer if isinstance(tokenizer, str) else tokenizer.digest()
    content = [FORMAT, PATTERN, BPE_SAMPLE, corpus.files, tokenizer, *settings]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]


def bpe_sample(corpus, shards):
    """The first BPE_SAMPLE bytes of some shards, as text."""
    text, left = [], BPE_SAMPLE
    for path, start, stop, size in (part for parts in shards for part in parts):
        if left > 0:
            with open(corpus.root / path, "rb") as file:
                text.append(read_range(file, start, min(stop, start + left), size))
            left -= stop - start
    return "".join(text)


def dtype_of(vocab_size):
    """The smallest unsigned type that holds every id."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def run_jobs(jobs, tokenizer, spec, workers, corpus):
    """Encode the shards, in this process or in several -> their entries of meta.json, in order."""
    bar = tqdm(total=corpus.size, desc=f"tokenising {corpus.name}", unit="B", unit_scale=True, delay=1)
    entries, workers = [None] * len(jobs), min(workers, len(jobs))

    def done(i, entry):
        entries[i] = entry
        bar.update(sum(stop - start for _, start, stop, _ in jobs[i][1]))

    if workers == 1:
        _worker["tokenizer"] = tokenizer
        for i, job in enumerate(jobs):
            done(i, encode_shard(*job))
    else:
        with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(spec,)) as pool:
            futures = {pool.submit(encode_shard, *job): i for i, job in enumerate(jobs)}
            try:
                for future in as_completed(futures):
                    done(futures[future], future.result())
            except BaseException:            # Ctrl-C or a broken file: do not work off the queue first
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    bar.close()
    return entries


def _start_worker(spec):
    _worker["tokenizer"] = get_tokenizer(spec)


def encode_shard(root, parts, eot, path, dtype):
    """Encode byte ranges into one file of raw ids, unless it is there already -> its entry of meta.json."""
    if not path.exists():
        ids = []
        for name, start, stop, size in parts:
            with open(root / name, "rb") as file:
                for low in range(start, stop, CHUNK):
                    text = read_range(file, low, min(low + CHUNK, stop), size)
                    ids.append(np.array(_worker["tokenizer"].encode(text), dtype))
            ids.append(np.array(eot if stop == size else [], dtype))
        write_atomically(path, np.concatenate(ids).tobytes())
    return dict(file=path.name, length=path.stat().st_size // dtype.itemsize, crc32=checksum(path))


def write_atomically(path, data):
    """The file is whole or not there, whatever happens; two processes that write the same may meet."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(half, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())          # before the rename: no power cut leaves a name without data
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)


def checksum(path):
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


class LongArray:
    """Several 1-D arrays that read as one: len, and slices, which give an ndarray."""

    def __init__(self, parts):
        self.parts = list(parts)
        self.ends = list(accumulate(len(part) for part in self.parts))     # Python integers never wrap

    def __len__(self):
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, span):
        start, stop, step = span.indices(len(self))
        assert step == 1, f"slices of step 1 only, got {step}"
        found, i = [], bisect_right(self.ends, start)
        while start < stop:
            part, end = self.parts[i], self.ends[i]
            found.append(part[start - end + len(part):min(stop, end) - end + len(part)])
            start, i = end, i + 1
        return found[0] if len(found) == 1 else np.concatenate(found or [np.zeros(0, np.uint16)])


def open_shards(folder, verify=False):
    """Folder -> (contents of meta.json, list of memory-mapped arrays). ValueError if the two do not agree."""
    folder, parts = Path(folder), []
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        dtype, vocab = np.dtype(meta["dtype"]), meta["vocab_size"]
        entries = [(folder / entry["file"], entry["length"], entry["crc32"]) for entry in meta["shards"]]
        [meta[field] for field in ("training_shards", "tokenizer", "digest", "name", "key")]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'meta.json'} does not describe token shards ({error!r})") from None
    if dtype.kind != "u" or vocab > np.iinfo(dtype).max + 1:
        raise ValueError(f"{folder}: ids of a vocabulary of {vocab} do not fit into {dtype}: tokenise again")
    for path, length, crc in entries:
        need = length * dtype.itemsize
        size = path.stat().st_size if path.exists() else 0
        if size != need:
            raise ValueError(f"{path} has {size} bytes, but meta.json says {length} ids of {dtype}, "
                             f"which is {need}: tokenise again")
        if verify and checksum(path) != crc:
            raise ValueError(f"{path} is damaged (wrong checksum): delete it and meta.json, tokenise again")
        parts.append(np.asarray(np.memmap(path, dtype, "r")) if size else np.zeros(0, dtype))
    return meta, parts


# ----------------------------------------------------------------------------------------------- load

@dataclass
class Dataset:
    """train, val: 1-D ids, memory-mapped. bytes_per_token: of val, turns nats a token into bits a byte."""
    train: LongArray
    val: LongArray
    tokenizer: object
    bytes_per_token: float
    name: str


def load(source="stdlib", tokenizer=None, cache_dir=None, val_fraction=0.05, min_bytes=STDLIB_MIN):
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
    corpus, tokenizer = find_corpus(source, min_bytes), tokenizer or "bpe:1024"
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


def cache_folder():
    """The user's cache folder for this project, by the custom of the system."""
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache"
    return Path(base) / "zaya1"


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


# ----------------------------------------------------------------------------------------------- order

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
    """The default corpus and tokenizer: how large, how fast, and where the cuts fall in a line of code."""
    corpus = find_corpus()
    print(f"corpus      {corpus.name}, {len(corpus.files)} files")
    start = time.perf_counter()
    tokenizer = train_bpe(bpe_sample(corpus, plan(corpus, 0.05, 16_000_000)[0]), 1024)
    print(f"tokenizer   1024 ids, trained on 1 MB in {time.perf_counter() - start:.2f} s")
    start = time.perf_counter()
    data = load()
    print(f"tokens      {len(data.train):,} for training, {len(data.val):,} for validation, "
          f"{data.bytes_per_token:.3f} bytes a token")
    print(f"            loaded in {time.perf_counter() - start:.2f} s, kept in {cache_folder()}")
    line = "    def __init__(self, name, default=None):\n        self.name = name"
    print("cuts        " + "|".join(repr(tokenizer.decode([i]))[1:-1] for i in tokenizer.encode(line)))
    x, y = windows(data.train, [0], 12, seed=0)
    print(f"a window    x {data.tokenizer.decode(x[0].tolist())!r}")
    print(f"            y {data.tokenizer.decode(y[0].tolist())!r}")


def main():
    parser = argparse.ArgumentParser(description="Without a command: a demonstration on the default corpus.")
    command = parser.add_subparsers(dest="command").add_parser(
        "tokenize", formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="write token shards, in parallel; called again it goes on where it was interrupted")
    command.add_argument("source", help="a text file, a folder of text files, or stdlib")
    command.add_argument("out", help="folder for the shards")
    command.add_argument("--tokenizer", default="bpe:1024", help="bytes, bpe:N, bpe:PATH, gpt2, gemma:PATH")
    command.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    command.add_argument("--shard-mb", type=float, default=64, help="megabytes of text in a shard")
    command.add_argument("--val", type=float, default=0.05, help="share of the text, its end, for validation")
    args = parser.parse_args()
    if args.command is None:
        return demonstrate()
    if args.workers < 1 or args.shard_mb < 0.001 or not 0 < args.val < 1:
        parser.error("--workers must be 1 or more, --shard-mb 0.001 or more, --val between 0 and 1")
    made = args.tokenizer if is_recipe(args.tokenizer) else get_tokenizer(args.tokenizer)
    shard_bytes = round(args.shard_mb * 1e6)
    meta = tokenize(find_corpus(args.source), args.out, made, args.workers, args.val, shard_bytes)
    total = sum(entry["length"] for entry in meta["shards"])
    print(f"{args.out}: {total:,} tokens of {meta['name']}, {len(meta['shards'])} shards of {meta['dtype']}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"data.py: {error}", file=sys.stderr)
        sys.exit(2)
