"""Token shards: text on disk becomes ids on disk, in parallel, complete or absent.

    tokenize(corpus, "out", "bpe:1024", workers=8)      encode a corpus -> out/*.bin, out/meta.json
    meta, parts = open_shards("out")                    memory-mapped; `LongArray(parts)` reads as one array

A folder holds the tokenizer (tokenizer.json), shards of raw ids (.bin, the smallest unsigned type that fits
the vocabulary) and meta.json: for each shard its length and CRC-32, how many of them are for training, the
tokenizer's digest, and a key, the hash of all that the ids were made from. A shard is written under another
name, synced and renamed, and meta.json comes last: what is there is whole, and an interrupted run goes on
where it stopped. If the corpus has several files, <|endoftext|> follows each. A BPE that is still to be
trained sees the training part only. Shards begin and end where corpus.plan_shards says, so the result does
not depend on the number of workers.

Left out: compression (ids are read at random), and shards in other machines' byte order.
Run: `python shards.py` (demonstration), `python data.py tokenize SOURCE OUT --tokenizer SPEC --workers N`.
"""
import argparse
import hashlib
import json
import os
import tempfile
import zlib
from bisect import bisect_right
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import accumulate
from pathlib import Path

import numpy as np
from tqdm import tqdm

from config import Parser
from corpus import find_corpus, first_text, plan_shards, read_range
from tokenizer import PATTERN, get_tokenizer, is_recipe, train_bpe, write_atomically

BPE_SAMPLE = 1_000_000        # bytes that a BPE is trained on; twice as many gain 0.2 % of tokens
FORMAT = 1                    # raise it when the same text would give other shards: caches then turn stale
CHUNK = 4_000_000             # bytes encoded at a time: bounds the memory of one worker
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
    shards, training = plan_shards(corpus, val_fraction, shard_bytes)
    if is_recipe(tokenizer):
        sample = first_text(corpus, shards[:training] or shards, BPE_SAMPLE)
        tokenizer = train_bpe(sample, int(tokenizer[4:]))
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


def checksum(path):
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


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


def command(argv):
    """What `python data.py tokenize` does. ValueError and OSError for the user's mistakes."""
    parser = Parser(
        "data.py tokenize", formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Write token shards, in parallel; called again it goes on where it was interrupted.")
    parser.add_argument("source", help="a text file, a folder of text files, or stdlib")
    parser.add_argument("out", help="folder for the shards")
    parser.add_argument("--tokenizer", default="bpe:1024", help="bytes, bpe:N, bpe:PATH, gpt2, gemma:PATH")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--shard-mb", type=float, default=64, help="megabytes of text in a shard")
    parser.add_argument("--val", type=float, default=0.05, help="share of the text, its end, for validation")
    args = parser.parse_args(argv)
    if args.workers < 1 or args.shard_mb < 0.001 or not 0 < args.val < 1:
        parser.error("--workers must be 1 or more, --shard-mb 0.001 or more, --val between 0 and 1")
    made = args.tokenizer if is_recipe(args.tokenizer) else get_tokenizer(args.tokenizer)
    shard_bytes = round(args.shard_mb * 1e6)
    meta = tokenize(find_corpus(args.source), args.out, made, args.workers, args.val, shard_bytes)
    total = sum(entry["length"] for entry in meta["shards"])
    print(f"{args.out}: {total:,} tokens of {meta['name']}, {len(meta['shards'])} shards of {meta['dtype']}")


def demonstrate():
    """A text of one file in small shards: what lies in the folder, and that the ids read as one array."""
    with tempfile.TemporaryDirectory() as folder:
        source = find_corpus(os.__file__)
        meta = tokenize(source, folder, "bpe:512", shard_bytes=10_000)
        print(f"{source.name}: {meta['training_shards']} shards for training, then validation")
        for entry in meta["shards"]:
            print(f"  {entry['file']}  {entry['length']:6,} ids of {meta['dtype']}, CRC {entry['crc32']:08x}")
        ids, tokenizer = LongArray(open_shards(folder)[1]), get_tokenizer(f"bpe:{folder}/tokenizer.json")
        print(f"{len(ids):,} ids decode to the file's own text: "
              f"{tokenizer.decode(ids[:]) == Path(os.__file__).read_text(encoding='utf-8')}")


if __name__ == "__main__":
    demonstrate()
