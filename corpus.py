"""Which text, in which order, and where it may be cut: a corpus as byte ranges of its files.

    find_corpus(source)                        the files of a source, in reading order
    plan_shards(corpus, val_fraction, size)    byte ranges of at most `size`, the last ones for validation
    read_range(file, start, stop, size)        the text of a range, cut where it does no harm

A source is "stdlib" (the source code of this Python's own standard library: always there, nothing to
download), a text file, or a folder of text files. Files are ordered by a hash of their relative path, so that
the validation part, the end, is no alphabetical tail. Ranges of one file meet at the same place, because
both of their ends move by the same rule: joined they give the whole text.

Left out: de-duplication, and any filter of quality. Run: `python corpus.py`.
"""
import codecs
import hashlib
import platform
import sysconfig
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from tqdm import tqdm

STDLIB_MIN = 2_000_000        # bytes; some systems ship Python with little or none of its standard library
CONTINUATION = bytes(range(0x80, 0xC0))       # UTF-8: the bytes of a character after its first


@dataclass
class Corpus:
    """Text files in reading order. files: list of (path relative to root, bytes, time of change in ns)."""
    root: Path
    files: list
    name: str
    size: int                 # bytes


def find_corpus(source="stdlib"):
    """"stdlib", a text file, or a folder (all its text files, hidden ones left out) -> Corpus.

    FileNotFoundError for a missing path; ValueError for no text, or a standard library under STDLIB_MIN.
    """
    if not str(source):
        raise ValueError("the data has no name: name a text file, a folder, or stdlib")
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
        if size < STDLIB_MIN:
            raise ValueError(f"the {name}, is under {STDLIB_MIN / 1e6:.1f} MB: give a text with --data FILE")
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


def plan_shards(corpus, val_fraction, shard_bytes):
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


def first_text(corpus, shards, size):
    """The first `size` bytes of some shards, as text."""
    text, left = [], size
    for path, start, stop, file_size in (part for parts in shards for part in parts):
        if left > 0:
            with open(corpus.root / path, "rb") as file:
                text.append(read_range(file, start, min(stop, start + left), file_size))
            left -= stop - start
    return "".join(text)


def demonstrate():
    """The default corpus: how much text, and where the training part ends."""
    corpus = find_corpus()
    print(f"{corpus.name}, {len(corpus.files)} files, from {corpus.files[0][0]} to {corpus.files[-1][0]}")
    shards, training = plan_shards(corpus, 0.05, 1_000_000)
    last, first = shards[training - 1][-1], shards[training][0]
    print(f"{len(shards)} shards of up to 1 MB, {training} for training, to byte {last[2]:,} of {last[0]}")
    with open(corpus.root / first[0], "rb") as file:
        text = read_range(file, *first[1:])
    print(f"validation begins with {first[0]}: {text[:60]!r}")


if __name__ == "__main__":
    demonstrate()
