"""The command line of sample.py: texts that go on from prompts, or a conversation; commands in its header.

The first row of a batch is printed as it comes, the others after it. In a conversation a turn feeds only what
is new: everything before it stays in the cache, which has room for --context tokens and is never cut. Speed
and memory go to standard error, text to standard output. Text of the user is never read as a control token
unless --special.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import config as command_line
import decode
import kernels_hip
from config import option
from model import require
from sample import __doc__ as sampling
from sample import stream
from speaker import Text, newest_run, open_run, open_weights, self_check


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
        require(self.num_samples <= 10_000, f"--num-samples is {self.num_samples}, at most 10000 fit a batch")
        require(0 <= self.top_p <= 1, f"--top-p is {self.top_p}, it must be between 0 and 1")
        require(self.temperature < float("inf"), "--temperature must be a finite number")
        require(0 <= (self.seed or 0) < 2**63, f"--seed is {self.seed}, it must be from 0 to 2^63 - 1")


def write(speaker, cfg, prompts):
    """Samples of all prompts as one batch. The first row is printed as it comes, the others after it."""
    prompts = [p for p in prompts for _ in range(cfg.num_samples)]
    texts, rest = [Text(speaker.tokenizer, cfg.stop or ()) for _ in prompts], [""] * len(prompts)
    ids, meter = [speaker.encode(p, cfg.special) for p in prompts], Meter(speaker.model)
    print(prompts[0], end="", flush=True)
    for step in meter.over(sample(speaker, cfg, ids)):
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


def sample(speaker, cfg, ids, cache=None):
    return stream(speaker.model, ids, cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p, speaker.stop,
                  cfg.seed, vocab_size=speaker.tokenizer.vocab_size, cache=cache)


def chat(speaker, cfg, lines=sys.stdin):
    """Turn by turn until the input ends. A turn feeds only what is new: the cache has what was before."""
    room = min(cfg.context, speaker.model.config.max_seq_len)
    cache, left_over, first = speaker.model.new_cache(1, room), [], True
    print(f"room for {room} tokens; an empty line or the end of the input leaves", file=sys.stderr)
    prompt = "> " if sys.stdin.isatty() else ""
    while line := ask(prompt, lines):
        text, meter = Text(speaker.tokenizer, cfg.stop or ()), Meter(speaker.model)
        ids = left_over + speaker.turn(line, first)
        left_over, first = [], False
        for (i,) in meter.over(sample(speaker, cfg, [ids], cache)):
            left_over = [] if i is None else [i]        # the last id drawn is not in the cache yet
            print(text.feed(left_over), end="", flush=True)
            if text.done:
                break
        print(text.feed([], final=True))
        print(f"{meter.line()}; {cache.length} of {room} tokens", file=sys.stderr)


def ask(prompt, lines):
    print(prompt, end="", flush=True)
    return lines.readline().rstrip("\n")


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


def main(argv):
    cfg, = command_line.parse("sample.py", sampling, argv, SampleConfig)
    device = pick_device(cfg.device)
    kernels_hip.select(cfg.kernels)
    dtype = None if cfg.dtype == "auto" else getattr(torch, cfg.dtype)
    if cfg.weights:
        speaker = open_weights(cfg.weights, dtype, device)
    else:
        speaker = open_run(cfg.run or newest_run(), dtype, device)
    model = speaker.model
    path = "one-token decoder" if decode.supports(model.config) else "plain decoding (an ablation is on)"
    print(f"{speaker.name}: {model.num_parameters():,} parameters, {device}, "
          f"{model.embed_tokens.weight.dtype}; {path}; {kernels_hip.status()}", file=sys.stderr)
    if cfg.self_check:
        return self_check(speaker)
    if cfg.chat:
        return chat(speaker, cfg)
    prompts = list(cfg.prompt or ())
    if cfg.prompts:
        try:
            prompts += [line for line in Path(cfg.prompts).read_text().splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--prompts {cfg.prompts} cannot be read as text: {error}") from None
        require(prompts, f"--prompts {cfg.prompts} holds no line of text")
    write(speaker, cfg, prompts or [speaker.default])


def pick_device(name):
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError:
        raise ValueError(f"--device {name} is unknown: cpu, cuda, cuda:1, ... or auto") from None
    require(device.type in ("cpu", "cuda"),
            f"--device {name} is not supported: cpu, cuda, cuda:1, ... or auto")
    require(device.type == "cpu" or (device.index or 0) < torch.cuda.device_count(),
            f"--device {name}: torch sees {torch.cuda.device_count()} GPUs")
    return device


if __name__ == "__main__":
    command_line.run(main)
