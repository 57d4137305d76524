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
Nothing slides: the state of the convolutions for a token that fell out would be gone.

Here is generation, ids to ids; speaker.py has models with their tokenizers, chat.py the command line.
Glossary: row one text of a batch. Letters: B rows, T time, V vocabulary.
"""

import torch

import decode
from model import require

PREFILL = 2048                      # prompt tokens that are in flight at once


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
    """Yields, token by token, one id per prompt, or None for a row that has ended. Arguments as `generate`.

    vocab_size: ids from there on are never drawn (an embedding is padded). cache: one that earlier turns have
    filled, the prompts go on behind them. cached=False: every step computes the whole text again, the plain
    twin of decoding.
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


def check(model, prompts, temperature, top_k, top_p):
    require(all(len(p) for p in prompts), "a prompt is empty: give at least one token")
    ids = [i for p in prompts for i in p]
    V = model.config.vocab_size
    require(all(0 <= i < V for i in ids), f"a prompt holds an id outside the vocabulary of {V}")
    require(temperature >= 0, f"temperature is {temperature}, it must be 0 (greedy) or more")
    require(top_k is None or top_k >= 0, f"top_k is {top_k}, it must be 0 (all) or more")
    require(top_p is None or 0 <= top_p <= 1, f"top_p is {top_p}, it must be between 0 and 1")


def pad_left(prompts, width, device):
    """tokens (B, T), all rows end together; segments (B, T), -1 on padding, or None: nothing is padded."""
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


def pick(logits, temperature, top_k, top_p, generator):
    """One id per row from logits (B, V). The likeliest id always stays in; top_k 0 means all."""
    require(logits.isfinite().all(),
            "the model's logits are not finite: its weights are damaged or its training diverged")
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


if __name__ == "__main__":
    import chat
    from config import run
    run(chat.main)
