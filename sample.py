"""Text from a trained model: a run of train.py, or the official ZAYA1 weights.

    python sample.py                                        the newest run under runs/
    python sample.py --run runs/001 --prompt "class Tree" --num-samples 3
    python sample.py --weights ZAYA1-8B --chat              a conversation; its cache lives from turn to turn
    python sample.py --weights ZAYA1-base --prompts FILE    a batch, one prompt a line
    python sample.py --weights ZAYA1-8B --self-check        are these the published weights, read rightly?

One step, for every row at once: next id ~ softmax(logits / temperature), cut to the top_k likeliest ids and
to the smallest set of probability top_p (nucleus sampling, Holtzman et al., arXiv 1904.09751). Prompts of
different lengths are padded on the left with segment -1, which attention, convolutions and delayed value all
leave out, so that a row's text does not depend on its neighbours. Long prompts go in by PREFILL tokens at a
time; then decode.Decoder takes token by token (`model.hidden` where it cannot).

The context is config.max_seq_len. A prompt that exceeds it is refused; text that reaches it ends there.
Nothing slides: the state of the convolutions for a token that fell out would be gone. Text of the user is
never read as a control token unless --special.

Glossary: row one text of a batch; turn a message between start-of-turn and end-of-turn tokens; stop ids end a
row, stop texts end what is printed. Letters: B rows, T time, V vocabulary.
"""

import codecs
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import checkpoint
import config as command_line
import data
import decode
import kernels_hip
import pretrained
from config import option
from model import ZAYA, ZAYAConfig, require

PREFILL = 2048                      # prompt tokens that are in flight at once
START_OF_TURN, END_OF_TURN = 105, 106   # ids in Gemma's tokenizer; the 8B model's file names them otherwise
CHECK_TEXT = "Hello! How can I assist you today?"
CHECK_IDS = [2, 9259, 236888, 2088, 740, 564, 6361, 611, 3124, 236881, 106]
CHECK_NEXT = [105, 9731, 107, 740, 564, 1601, 611, 236881, 236881, 107, 107]


@dataclass
class SampleConfig:
    """What to run and how; one flag a field."""

    run: str | None = option(None, "folder of a run; none: the newest under runs/")
    weights: str | None = option(None, "folder with official weights instead of a run")
    prompt: list | None = option(None, "text to continue; may be given several times")
    prompts: str | None = option(None, "file of prompts, one a line")
    num_samples: int = option(1, "texts for each prompt")
    max_new_tokens: int = option(200, "tokens to write, at most")
    temperature: float = option(0.7, "0 takes the likeliest id; above 1 is wilder")
    top_k: int = option(50, "only the k likeliest ids; 0: all")
    top_p: float = option(1.0, "only the likeliest ids that make up this probability")
    seed: int | None = option(None, "for a draw that repeats")
    stop: list | None = option(None, "text that ends a sample; may be given several times")
    special: bool = option(False, "read control tokens in the prompt as such")
    chat: bool = option(False, "a conversation, line by line")
    context: int = option(8192, "tokens that a conversation has room for")
    self_check: bool = option(False, "compare official weights with published behaviour")
    device: str = option("auto", "cpu, cuda, cuda:1, ...; auto: a GPU if there is one")
    dtype: str = option("auto", "of the weights; auto: as stored", ("auto", "float32", "bfloat16", "float16"))
    kernels: str = option("auto", "path of expert dispatch", kernels_hip.PATHS)

    def __post_init__(self):
        require(not (self.run and self.weights), "--run and --weights exclude each other")
        for name, least in dict(num_samples=1, max_new_tokens=1, context=1, top_k=0, temperature=0).items():
            value, flag = getattr(self, name), "--" + name.replace("_", "-")
            require(value >= least, f"{flag} is {value}, at least {least} is needed")
        require(0 <= self.top_p <= 1, f"--top-p is {self.top_p}, it must be between 0 and 1")
        require(self.temperature < float("inf"), "--temperature must be a finite number")
        require(0 <= (self.seed or 0) < 2**63, f"--seed is {self.seed}, it must be from 0 to 2^63 - 1")


# ------------------------------------------------------------------------------------------------ generation

def generate(model, prompts, max_new_tokens, temperature=1.0, top_k=None, top_p=None, stop=(), seed=None,
             **more):
    """New tokens for each prompt, list[list[int]], prompts and stop ids excluded.

    prompts: lists of ids, of any lengths of at least 1. temperature 0 is greedy; top_k and top_p cut the
    tail. A row ends at an id in `stop`, after max_new_tokens, or where the batch fills config.max_seq_len.
    seed: for a repeatable draw. more: as for `stream`. Raises ValueError for an empty prompt, one longer than
    the context, ids outside the vocabulary, or parameters out of range.
    """
    rows = [[] for _ in prompts]
    for ids in stream(model, prompts, max_new_tokens, temperature, top_k, top_p, stop, seed, **more):
        for row, i in zip(rows, ids):
            if i is not None:
                row.append(i)
    return rows


@torch.inference_mode()
def stream(model, prompts, max_new_tokens, temperature=1.0, top_k=None, top_p=None, stop=(), seed=None, *,
           vocab_size=None, cache=None, cached=True):
    """Yields, token by token, one id per prompt, or None for a row that has ended. Arguments as for
    `generate`, and vocab_size: ids from there on are never drawn (an embedding is padded); cache: one that
    earlier turns have filled, the prompts go on behind them; cached=False: every step computes the whole text
    again, the plain twin of decoding.
    """
    check(model, prompts, temperature, top_k, top_p)
    width, device = max(map(len, prompts), default=0), model.embed_tokens.weight.device
    past, limit = 0, model.config.max_seq_len
    if cache is not None:
        past, limit = cache.length, min(limit, cache.max_len)
    require(past + width <= limit, f"text of {past + width} tokens exceeds the context of {limit}")
    steps = min(max_new_tokens, limit - past - width)
    if not prompts or steps < 1:
        return
    was_training, running = model.training, [True] * len(prompts)
    generator = torch.Generator(device).manual_seed(seed) if seed is not None else None
    if cached:
        next_logits = cached_logits(model, cache or model.new_cache(len(prompts), width + steps))
    else:
        next_logits = plain_logits(model)
    tokens, segments = pad_left(prompts, width, device)
    model.eval()
    try:
        for _ in range(steps):
            logits = next_logits(tokens, segments)[:, :vocab_size]
            tokens, segments = pick(logits, temperature, top_k, top_p, generator)[:, None], None
            ids = tokens[:, 0].tolist()
            running = [alive and i not in stop for alive, i in zip(running, ids)]
            yield [i if alive else None for alive, i in zip(running, ids)]
            if not any(running):
                return
    finally:
        model.train(was_training)


def pad_left(prompts, width, device):
    """tokens (B, T), and segments (B, T) that are -1 on padding, or None where nothing is padded: all rows
    end together."""
    tokens = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    if all(len(p) == width for p in prompts):
        return tokens, None
    return tokens, torch.tensor([[-1] * (width - len(p)) + [0] * len(p) for p in prompts], device=device)


def cached_logits(model, cache):
    """next_logits(tokens (B, T), segments) -> logits (B, V) behind what the cache has seen and these."""
    decoder = None
    autocast = torch.is_autocast_enabled(model.embed_tokens.weight.device.type)     # a Decoder has one dtype

    def next_logits(tokens, segments):
        nonlocal decoder
        if decoder is not None:
            return decoder.logits(tokens[:, 0])
        for start in range(0, tokens.shape[1], PREFILL):
            part = slice(start, start + PREFILL)
            part_segments = None if segments is None else segments[:, part]
            h = model.hidden(tokens[:, part], segments=part_segments, cache=cache)
        if decode.supports(model.config) and not autocast:
            decoder = decode.Decoder(model, cache)
        return model.logits(h[:, -1])
    return next_logits


def plain_logits(model):
    """The same without a cache: all tokens so far, again and again."""
    seen = []

    def next_logits(tokens, segments):
        seen.append((tokens, segments))
        tokens, segments = torch.cat([t for t, _ in seen], 1), seen[0][1]
        if segments is not None:
            segments = torch.nn.functional.pad(segments, (0, tokens.shape[1] - segments.shape[1]))
        return model.logits(model.hidden(tokens, segments=segments)[:, -1])
    return next_logits


def check(model, prompts, temperature, top_k, top_p):
    require(all(len(p) for p in prompts), "a prompt is empty: give at least one token")
    ids = [i for p in prompts for i in p]
    V = model.config.vocab_size
    require(all(0 <= i < V for i in ids), f"a prompt holds an id outside the vocabulary of {V}")
    require(temperature >= 0, f"temperature is {temperature}, it must be 0 (greedy) or more")
    require(top_k is None or top_k >= 0, f"top_k is {top_k}, it must be 0 (all) or more")
    require(top_p is None or 0 <= top_p <= 1, f"top_p is {top_p}, it must be between 0 and 1")


def pick(logits, temperature, top_k, top_p, generator):
    """One id per row from logits (B, V). The likeliest id always stays, whatever top_k and top_p are; top_k 0
    means all."""
    require(
        logits.isfinite().all(),
        "the model's logits are not finite: its weights are damaged or its training diverged",
    )
    if temperature < 1e-5 or top_p == 0 or top_k == 1:
        return logits.argmax(-1)
    nucleus = top_p is not None and top_p < 1
    count = min(top_k or logits.shape[-1], logits.shape[-1])
    index = None
    if nucleus or count < logits.shape[-1]:
        logits, index = logits.topk(count)                                          # likeliest first
    logits = logits.double()            # a temperature of 1e-5 then divides differences, not rounding errors
    p = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if nucleus:
        p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0)                 # likelier ids make up top_p already
    drawn = torch.multinomial(p, 1, generator=generator)
    return (drawn if index is None else index.gather(-1, drawn))[:, 0]


# ------------------------------------------------------------------------------------------------------ text

class Text:
    """Ids of one row into text as they come. Holds back half a UTF-8 character, and what may turn out to be a
    stop text."""

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


@dataclass
class Source:
    """A model with what belongs to it: its tokenizer, stop ids, what precedes a text, and the reply's name in
    a chat."""

    model: ZAYA
    tokenizer: object
    name: str
    stop: tuple
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


def newest_run(folder="runs"):
    """The numbered run folder that train.py made last, or None."""
    numbered = [f for f in Path(folder).glob("*") if f.name.isdigit() and (f / "config.json").exists()]
    return max(numbered, key=lambda f: int(f.name), default=None)


def open_run(folder, dtype, device):
    """Source of a run of train.py. Raises FileNotFoundError or ValueError for what is no run or has no whole
    checkpoint."""
    if folder is None:
        raise FileNotFoundError("no run under runs/: train one (python train.py), or name --run or --weights")
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} is not the folder of a run: it has no config.json")
    try:
        saved = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ValueError(f"{folder}/config.json is damaged: {error}") from None
    require(isinstance(saved.get("model"), dict) and "tokenizer_file" in saved,
            f"{folder}/config.json is not of train.py; for official weights use --weights {folder}")
    meta, weights = checkpoint.load_weights(folder)
    try:
        model = ZAYA(ZAYAConfig(**saved["model"]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder}/config.json holds no possible model: {error}") from None
    model.load_state_dict(weights)
    tokenizer = data.get_tokenizer(f"{saved['tokenizer_file']}:{folder / 'tokenizer.json'}")
    return Source(model.to(device=device, dtype=dtype), tokenizer, f"{folder}, step {meta.get('step')}",
                  (tokenizer.eot,), default="def " if saved.get("data") == "stdlib" else "\n")


def open_weights(folder, dtype, device):
    """Source of a folder with official weights and their tokenizer.json."""
    folder = Path(folder)
    theirs = pretrained.read_json(folder)
    tokenizer = data.get_tokenizer(f"gemma:{folder / 'tokenizer.json'}")
    model = pretrained.load(folder, dtype, device)
    files = [folder / "chat_template.jinja", folder / "tokenizer_config.json"]     # read as text, never run
    template = "".join(f.read_text() for f in files if f.is_file()) or str(tokenizer.specials)
    reply = "model" if "start_of_turn" in template else "assistant"
    eos = theirs.get("eos_token_id")
    stop = {tokenizer.eot, END_OF_TURN, *(eos if isinstance(eos, list) else [eos] if eos is not None else [])}
    return Source(model, tokenizer, str(folder), tuple(stop), (tokenizer.bos,), reply)


# -------------------------------------------------------------------------------------------------- commands

class Meter:
    """Time to the first token, speed after it, and peak memory of what goes through `over`."""

    def __init__(self, model):
        self.device, self.began = model.embed_tokens.weight.device, time.perf_counter()
        self.first = self.last = self.tokens = 0

    def over(self, steps):
        for step in steps:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.tokens += sum(i is not None for i in step) if self.last > self.first else 0
            yield step

    def line(self):
        if not self.first:
            return "nothing written: the context is full"
        speed = f"{self.tokens / (self.last - self.first):.1f} tokens/s" if self.tokens else "no second token"
        return (f"first token after {self.first - self.began:.2f} s, then {speed}; "
                f"peak memory {peak_memory(self.device):.2f} GB")


def peak_memory(device):
    """Of this process, or of the GPU that it uses, in GB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    try:
        import resource
    except ImportError:             # Windows
        return float("nan")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)


def write(source, cfg, prompts):
    """Samples of all prompts as one batch. The first row is printed as it comes, the others after it."""
    prompts = [p for p in prompts for _ in range(cfg.num_samples)]
    texts, rest = [Text(source.tokenizer, cfg.stop or ()) for _ in prompts], [""] * len(prompts)
    ids, meter = [source.encode(p, cfg.special) for p in prompts], Meter(source.model)
    print(prompts[0], end="", flush=True)
    for step in meter.over(sample(source, cfg, ids)):
        for row, i in enumerate(step):
            piece = texts[row].feed([] if i is None else [i])
            rest[row] += piece
            if row == 0:
                print(piece, end="", flush=True)
        if all(text.done for text in texts):
            break
    for row, text in enumerate(texts):
        tail = text.feed([], final=True)
        print(tail if row == 0 else f"{'-' * 40}\n{prompts[row]}{rest[row]}{tail}")
    print(meter.line(), file=sys.stderr)


def sample(source, cfg, ids, cache=None):
    return stream(source.model, ids, cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p, source.stop,
                  cfg.seed, vocab_size=source.tokenizer.vocab_size, cache=cache)


def chat(source, cfg, lines=sys.stdin):
    """Turn by turn until the input ends. Each turn feeds only what is new; the cache keeps everything before
    it."""
    room = min(cfg.context, source.model.config.max_seq_len)
    cache, left_over, first = source.model.new_cache(1, room), [], True
    print(f"room for {room} tokens; an empty line or the end of the input leaves", file=sys.stderr)
    prompt = "> " if sys.stdin.isatty() else ""
    while line := ask(prompt, lines):
        text, meter = Text(source.tokenizer, cfg.stop or ()), Meter(source.model)
        ids = left_over + source.turn(line, first)
        left_over, first = [], False
        for (i,) in meter.over(sample(source, cfg, [ids], cache)):
            left_over = [] if i is None else [i]        # the last id drawn is not in the cache yet
            print(text.feed(left_over), end="", flush=True)
            if text.done:
                break
        print(text.feed([], final=True))
        print(f"{meter.line()}; {cache.length} of {room} tokens", file=sys.stderr)


def ask(prompt, lines):
    print(prompt, end="", flush=True)
    return lines.readline().rstrip("\n")


@torch.inference_mode()
def self_check(source):
    """Compare ids and greedy next ids of a known text with those published for ZAYA1-8B. Raises ValueError
    where they differ."""
    ids = [*source.encode(CHECK_TEXT), END_OF_TURN]
    require(ids == CHECK_IDS,
            f"tokenizer.json is not that of ZAYA1-8B: it gives {ids}, published are {CHECK_IDS}")
    tokens = torch.tensor([ids], device=source.model.embed_tokens.weight.device)
    found = source.model(tokens)[0][0].argmax(-1).tolist()
    require(found == CHECK_NEXT,
            f"the likeliest next ids are {found}, published are {CHECK_NEXT} (ZAYA1-8B, bfloat16)")
    print(f"self-check passed: {len(ids)} ids and the likeliest id after each are the published ones")


def main(argv):
    cfg, = command_line.parse("sample.py", __doc__, argv, SampleConfig)
    device = pick_device(cfg.device)
    kernels_hip.select(cfg.kernels)
    dtype = None if cfg.dtype == "auto" else getattr(torch, cfg.dtype)
    if cfg.weights:
        source = open_weights(cfg.weights, dtype, device)
    else:
        source = open_run(cfg.run or newest_run(), dtype, device)
    model = source.model
    path = "one-token decoder" if decode.supports(model.config) else "plain decoding (an ablation is on)"
    print(f"{source.name}: {model.num_parameters():,} parameters, {device}, "
          f"{model.embed_tokens.weight.dtype}; {path}; {kernels_hip.status()}", file=sys.stderr)
    if cfg.self_check:
        return self_check(source)
    if cfg.chat:
        return chat(source, cfg)
    prompts = list(cfg.prompt or ())
    if cfg.prompts:
        try:
            prompts += [line for line in Path(cfg.prompts).read_text().splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--prompts {cfg.prompts} cannot be read as text: {error}") from None
        require(prompts, f"--prompts {cfg.prompts} holds no line of text")
    write(source, cfg, prompts or [source.default])


def pick_device(name):
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError:
        raise ValueError(f"--device {name} is unknown: cpu, cuda, cuda:1, ... or auto") from None
    require(device.type != "cuda" or torch.cuda.is_available(), f"--device {name}: torch sees no GPU")
    return device


if __name__ == "__main__":
    command_line.run(main)
