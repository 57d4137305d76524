"""A model that speaks: with its tokenizer, its stop ids, its turns, from a run or from official weights.

    speaker = open_run("runs/001", None, "cpu")             the newest whole checkpoint of a run of train.py
    speaker = open_weights("ZAYA1-8B", None, "cpu")         official weights and their tokenizer.json
    speaker.encode(text), speaker.turn(text, first=True)    ids to continue, ids of a message in a chat

A turn of the official models is <start>user, the text, <end>, and <start> with the name of the reply, each on
its line. The two control tokens have fixed ids; their names, and the reply's ("model" or "assistant"), differ
between releases, so the folder's template is read as text, and never run. Text of the user is not read as a
control token unless asked.

Glossary: turn a message between start-of-turn and end-of-turn ids; stop ids end a row, stop texts end what is
printed. Left out: system prompts and tools. Run: `python speaker.py`.
"""

import codecs
import json
from dataclasses import dataclass
from pathlib import Path

import torch

import checkpoint
import pretrained
from layouts import read_json
from model import ZAYA, ZAYAConfig, require
from tokenizer import get_tokenizer

START_OF_TURN, END_OF_TURN = 105, 106   # ids in Gemma's tokenizer; the 8B model's file names them otherwise
CHECK_TEXT = "Hello! How can I assist you today?"
CHECK_IDS = [2, 9259, 236888, 2088, 740, 564, 6361, 611, 3124, 236881, 106]
CHECK_NEXT = [105, 9731, 107, 740, 564, 1601, 611, 236881, 236881, 107, 107]


@dataclass
class Speaker:
    """A model with what belongs to it."""

    model: ZAYA
    tokenizer: object
    name: str
    stop: tuple                     # ids that end a text
    start: tuple = ()               # the beginning-of-text id, where the model knows one
    reply: str | None = None        # role of the model in a turn; None: it knows no turns
    default: str = "\n"             # the prompt if none is given

    def encode(self, text, special=False):
        return [*self.start, *self.tokenizer.encode(text, allow_special=special)]

    def turn(self, text, first):
        """Ids of a user's message and of the beginning of the reply, in the model's own template."""
        encode = self.tokenizer.encode
        if self.reply is None:
            return encode(text)
        before = [*self.start] if first else [END_OF_TURN, *encode("\n")]
        return [*before, START_OF_TURN, *encode(f"user\n{text}"), END_OF_TURN, *encode("\n"), START_OF_TURN,
                *encode(f"{self.reply}\n")]


class Text:
    """Ids of one row into text as they come. Holds back half a character, and what may become a stop."""

    def __init__(self, tokenizer, stops=()):
        self.tokenizer, self.stops, self.held, self.done = tokenizer, [s for s in stops if s], "", False
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids, final=False):
        """The text that is certain now. After a stop text `done` is True and nothing more comes."""
        if self.done:
            return ""
        self.held += self.decoder.decode(self.tokenizer.decode_bytes(ids), final)
        ends = [self.held.find(s) for s in self.stops if s in self.held]
        if ends:
            self.done = True
            return self.held[:min(ends)]
        begun = [n for s in self.stops for n in range(1, len(s)) if self.held.endswith(s[:n])]
        keep = 0 if final else max(begun, default=0)
        ready, self.held = self.held[:len(self.held) - keep], self.held[len(self.held) - keep:]
        return ready


def newest_run(folder="runs"):
    """The numbered run folder that train.py made last, or None."""
    numbered = [f for f in Path(folder).glob("*") if f.name.isdigit() and (f / "config.json").exists()]
    return max(numbered, key=lambda f: int(f.name), default=None)


def read_run(folder):
    """config.json of a run of train.py, a dict. FileNotFoundError or ValueError: it is not there, or
    damaged."""
    if not (Path(folder) / "config.json").is_file():
        raise FileNotFoundError(f"{folder} is not the folder of a run: it has no config.json")
    try:
        saved = json.loads((Path(folder) / "config.json").read_text())
    except ValueError as error:
        raise ValueError(f"{folder}/config.json is damaged: {error}") from None
    require(isinstance(saved, dict) and isinstance(saved.get("model"), dict) and "tokenizer_file" in saved,
            f"{folder}/config.json is not of train.py; for official weights use --weights {folder}")
    return saved


def open_run(folder, dtype, device):
    """Speaker of a run of train.py. FileNotFoundError or ValueError: no run, or no whole checkpoint in it."""
    if folder is None:
        raise FileNotFoundError("no run under runs/: train one (python train.py), or name --run or --weights")
    folder, saved = Path(folder), read_run(folder)
    meta, weights = checkpoint.load_weights(folder)
    try:
        model = ZAYA(ZAYAConfig(**saved["model"]))
        model.load_state_dict(weights)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[-1].strip()        # of many tensors that do not fit, one
        raise ValueError(f"{folder}/config.json is not that of its weights: {reason}") from None
    tokenizer = get_tokenizer(f"{saved['tokenizer_file']}:{folder / 'tokenizer.json'}")
    return Speaker(model.to(device=device, dtype=dtype), tokenizer, f"{folder}, step {meta.get('step')}",
                   (tokenizer.eot,), default="def " if saved.get("data") == "stdlib" else "\n")


def open_weights(folder, dtype, device):
    """Speaker of a folder with official weights and their tokenizer.json."""
    folder = Path(folder)
    theirs = read_json(folder)
    tokenizer = get_tokenizer(f"gemma:{folder / 'tokenizer.json'}")
    model = pretrained.load(folder, dtype, device)
    files = [folder / "chat_template.jinja", folder / "tokenizer_config.json"]     # read as text, never run
    template = "".join(f.read_text() for f in files if f.is_file()) or str(tokenizer.specials)
    reply = "model" if "start_of_turn" in template else "assistant"
    eos = theirs.get("eos_token_id")
    stop = {tokenizer.eot, END_OF_TURN, *(eos if isinstance(eos, list) else [eos] if eos is not None else [])}
    return Speaker(model, tokenizer, str(folder), tuple(stop), (tokenizer.bos,), reply)


@torch.inference_mode()
def self_check(speaker):
    """Ids and greedy next ids of a known text against those published for ZAYA1-8B; else ValueError."""
    ids = [*speaker.encode(CHECK_TEXT), END_OF_TURN]
    require(ids == CHECK_IDS,
            f"tokenizer.json is not that of ZAYA1-8B: it gives {ids}, published are {CHECK_IDS}")
    tokens = torch.tensor([ids], device=speaker.model.embed_tokens.weight.device)
    found = speaker.model(tokens)[0][0].argmax(-1).tolist()
    require(found == CHECK_NEXT,
            f"the likeliest next ids are {found}, published are {CHECK_NEXT} (ZAYA1-8B, bfloat16)")
    print(f"self-check passed: {len(ids)} ids and the likeliest id after each are the published ones")


def demonstrate():
    """A text arrives byte by byte: half a character and the beginning of a stop text are held back."""
    tokenizer = get_tokenizer("bytes")
    text, ids = Text(tokenizer, stops=("###",)), tokenizer.encode("né #1 ## ### never seen")
    print("stop text ###, by byte:", " ".join(repr(text.feed([i])) for i in ids))


if __name__ == "__main__":
    demonstrate()
