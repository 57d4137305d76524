"""Tokenizers: byte-level BPE, trained here or read from a file, run by `tiktoken.Encoding`.

    get_tokenizer(spec)     "bytes", "bpe:PATH", "gpt2", "gemma:PATH/tokenizer.json" (gemma.py) -> Tokenizer
    train_bpe(text, 1024)   a vocabulary of exactly that size, in about a second for a megabyte

BPE (Sennrich et al., arXiv 1508.07909; on bytes as in GPT-2): text is cut into words by a pattern, a word
into bytes, and the most frequent pair of neighbours becomes a new piece, again and again. Encoding replays
the merges in their order: of all neighbours in a word, those whose joined piece has the lowest id go first.

Glossary
    piece       the bytes of one token, `Tokenizer.pieces[id]`; the lowest id merges first
    recipe      "bpe:NUMBER", a tokenizer still to be trained on the corpus at hand
    EOT         <|endoftext|>, the one special token, with the last id

Left out: any normalisation of the text, so that decoding gives back its very bytes.
Run: `python tokenizer.py`.
"""
import base64
import hashlib
import heapq
import json
import os
import re
import time
from collections import Counter, defaultdict
from pathlib import Path

import tiktoken
from tqdm import tqdm

EOT = "<|endoftext|>"
# Words keep the space, dot or underscore before them; a line break keeps the indentation after it: one token
# says "next line, two levels in". No look-around, so that the pattern stays in the linear-time regex engine.
PATTERN = r"\s*\n[ \t]*|[ _.]?[^\W\d_]+| ?_+| ?\d{1,3}| ?[^\w\s]+|[^\S\n]+"
GPT2_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"


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
        raise ValueError(f"{path} was not saved by tokenizer.py (for Gemma's give gemma:PATH)") from None


def load_gpt2(path):
    """GPT-2's 50,256 pieces. The file is not downloaded here: tiktoken's own download knows no time-out."""
    if not path.is_file():
        raise FileNotFoundError(f"tokenizer gpt2 needs one file: curl --create-dirs -o {path} {GPT2_URL}")
    from tiktoken_ext.openai_public import r50k_pat_str
    lines = [line.split() for line in path.read_bytes().splitlines()]
    if [int(line[-1]) for line in lines] != list(range(50256)):
        raise ValueError(f"{path} is incomplete ({len(lines)} of 50256 lines): fetch {GPT2_URL} again")
    return Tokenizer([base64.b64decode(piece) for piece, _ in lines], r50k_pat_str, "gpt2")


def cache_folder():
    """The user's cache folder for this project, by the custom of the system."""
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache"
    return Path(base) / "zaya1"


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


# --------------------------------------------------------------------------------------------------- training

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


def demonstrate():
    """Two vocabularies from the standard library's os.py, and where they cut a line of code."""
    text = Path(os.__file__).read_text(encoding="utf-8")
    line = "    def __init__(self, name, default=None):\n        self.name = name"
    for size in (300, 1024):
        start = time.perf_counter()
        tokenizer = train_bpe(text, size)
        print(f"{size} ids, trained on {len(text):,} characters in {time.perf_counter() - start:.2f} s; "
              f"{len(line)} characters of code are {len(tokenizer.encode(line))} tokens:")
        print("   " + "|".join(repr(tokenizer.decode([i]))[1:-1] for i in tokenizer.encode(line)))
    print(f"{EOT} is {tokenizer.encode(EOT)} as text, {tokenizer.encode(EOT, allow_special=True)} on request")


if __name__ == "__main__":
    demonstrate()
