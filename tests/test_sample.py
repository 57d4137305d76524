"""Sampling: decoding against plain recomputation, batches against single rows, draws, text, conversations,
the command line."""

import io
import json
import subprocess
import sys

import pytest
import torch

import checkpoint
import config as command_line
import data
import decode
import sample
from conftest import ROOT, assert_close
from model import ZAYA, ZAYAConfig
from sample import SampleConfig, Source, Text, generate, pick, stream

PROMPTS = [[5, 9, 200, 31, 7, 7, 90], [3], [250, 1]]


def decoded(model, tokens, segments=None, prefill=1):
    """Last hidden states of all positions from `prefill` on, the model fed a prefill and a Decoder the rest:
    (B, T, D)."""
    cache = model.new_cache(*tokens.shape)
    with torch.inference_mode():
        part = None if segments is None else segments[:, :prefill]
        first = model.hidden(tokens[:, :prefill], segments=part, cache=cache)
        step = decode.Decoder(model, cache)
        return torch.stack([first[:, -1], *(step(t) for t in tokens[:, prefill:].unbind(1))], 1)


SHAPES = {"published": dict(num_blocks=3), "windows": dict(num_blocks=4, sliding_window=4),
          "one kv head": dict(num_kv_heads=1),
          "heads alone": dict(num_heads=3, num_kv_heads=3), "wider convolutions": dict(conv_kernels=(3, 4)),
          "skip zero": dict(skip_expert="zero"), "no skip": dict(skip_expert="off"),
          "two experts": dict(top_k=2, num_experts=5)}


@pytest.mark.parametrize("batch", [1, 3, 11])
@pytest.mark.parametrize("shape", SHAPES)
def test_decoder_equals_the_model_at_every_position(shape, batch, make, ids):
    model, tokens = make(**SHAPES[shape]), ids(batch, 13)
    with torch.no_grad():
        expected = model.hidden(tokens)
    for prefill in (1, 2, 6):
        hidden = decoded(model, tokens, prefill=prefill)
        assert_close(hidden, expected[:, prefill - 1:], 2e-5, f"hidden states after {prefill} tokens")


@pytest.mark.parametrize("skip", ["identity", "zero"])
def test_decoder_follows_a_skip_class_that_wins(skip, make, ids):
    model, tokens = make(skip_expert=skip, num_blocks=3), ids(1, 9)
    for block in model.blocks[::2]:
        block.mlp.gate.balancing_biases[-1] = 2.0
    with torch.no_grad():
        assert_close(decoded(model, tokens), model.hidden(tokens), 2e-5, "hidden states")


def test_decoder_in_bfloat16_stays_within_rounding(make, ids):
    model, tokens = make(num_blocks=3).bfloat16(), ids(1, 12)
    with torch.no_grad():
        plain = model.hidden(tokens).float()
        exact = model.float().hidden(tokens)
        error = (decoded(model.bfloat16(), tokens).float() - exact).norm() / exact.norm()
    assert error <= 2 * (plain - exact).norm() / exact.norm(), f"relative error {error:.3g}"


@pytest.mark.parametrize("padding", [1, 2, 5])
@pytest.mark.parametrize("length", [1, 2, 6])
def test_left_padding_does_not_reach_the_text(padding, length, make, ids):
    model, pad, tokens = make(num_blocks=3, sliding_window=4), ids(1, padding, seed=5), ids(1, length + 7)
    segments = torch.tensor([[-1] * padding + [0] * length])
    hidden = decoded(model, torch.cat([pad, tokens], 1), segments, prefill=padding + length)
    with torch.no_grad():
        assert_close(hidden, model.hidden(tokens)[:, length - 1:], 2e-5, "hidden states of the real tokens")


@pytest.mark.parametrize("rows", [(0, 1), (1, 2), (2, 0), (0, 1, 2), (0, 0, 1, 1, 2, 2)])
def test_prompts_of_different_lengths_give_what_each_gives_alone(rows, make):
    model = make(10, num_blocks=3)
    alone = [generate(model, [p], 12, temperature=0)[0] for p in PROMPTS]
    assert generate(model, [PROMPTS[i] for i in rows], 12, temperature=0) == [alone[i] for i in rows]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_shorter_than_the_convolutions_and_empty_continuations_work(length, make):
    model = make()
    assert len(generate(model, [[4] * length], 5)[0]) == 5
    assert generate(model, [[4] * length], 0) == [[]] and generate(model, [], 5) == []
    cache = model.new_cache(1, 8)
    model.hidden(torch.tensor([[4] * length]), cache=cache)
    assert all(s.z.shape[1] == model.config.taps - 1 and s.v_next.shape[1] == 1 for s in cache.blocks)


@pytest.mark.parametrize("settings", [dict(temperature=0), dict(), dict(top_k=7),
                                      dict(top_p=0.8, temperature=1.5), dict(top_k=20, top_p=0.5)])
def test_cached_and_uncached_sampling_write_the_same(settings, make):
    model = make(10, num_blocks=3, sliding_window=5)       # of this seed greedy text does not repeat one id
    for prompts in ([PROMPTS[0]], PROMPTS):
        cached = generate(model, prompts, 30, seed=11, **settings)
        assert cached == generate(model, prompts, 30, seed=11, cached=False, **settings)
        assert any(len(set(row)) > 1 for row in cached)


@pytest.mark.parametrize("change", [dict(qk_mean=False), dict(router="linear"), dict(conv_kernels=()),
                                    dict(residual_scaling=False), dict(eda=False), dict(value_shift=False)])
def test_ablations_decode_without_the_decoder(change, make):
    model = make(**change)
    assert not decode.supports(model.config)
    plain = generate(model, [PROMPTS[0]], 15, seed=2, cached=False)
    assert generate(model, [PROMPTS[0]], 15, seed=2) == plain


def test_seed_repeats_a_draw_and_another_seed_changes_it(make):
    draw = lambda seed: generate(make(), [PROMPTS[0]], 30, seed=seed)
    assert draw(1) == draw(1) != draw(2)


def test_prefill_in_uneven_chunks_gives_the_same_token(make, ids, monkeypatch):
    model, prompt = make(num_blocks=3, sliding_window=5), ids(2, 41).tolist()
    whole = generate(model, [prompt[0], prompt[1][:17]], 6, temperature=0)
    for size in (1, 7, 40):
        monkeypatch.setattr(sample, "PREFILL", size)
        assert generate(model, [prompt[0], prompt[1][:17]], 6, temperature=0) == whole


def test_generation_changes_nothing_in_the_model(make):
    model = make().train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    loads = [block.mlp.gate.load.clone() for block in model.blocks]
    generate(model, PROMPTS, 5)
    assert model.training and all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(torch.equal(block.mlp.gate.load, load) for block, load in zip(model.blocks, loads))


def test_a_cache_cannot_be_rewound(make):
    cache = make().new_cache(1, 8)
    with pytest.raises(AttributeError):
        cache.length = 0


def test_autocast_falls_back_to_the_model(make):
    with torch.autocast("cpu", torch.bfloat16):
        assert len(generate(make(), [PROMPTS[0]], 9)[0]) == 9


def test_forty_blocks_under_autocast_keep_float32_where_it_matters():
    torch.manual_seed(0)
    model = ZAYA(ZAYAConfig.preset("tiny", num_blocks=40)).eval()
    tokens, seen = torch.randint(0, 257, (2, 15)), []
    note = lambda state, other: lambda module, args, out: seen.append((out[state].dtype, out[other].dtype))
    for block in model.blocks:
        block.register_forward_hook(note(0, 1))                     # residual, router state (the EDA sum)
        block.mlp.gate.register_forward_hook(note(0, 2))            # p, router state
    with torch.no_grad():
        exact = model(tokens)[0]
        seen.clear()
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(tokens)[0]
    assert len(seen) == 80 and set(seen) == {(torch.float32, torch.float32)}
    assert {block.mlp.gate.balancing_biases.dtype for block in model.blocks} == {torch.float32}
    error = (rounded - exact).norm() / exact.norm()
    assert 1e-5 < error < 0.05, f"relative error of the logits under bfloat16: {error:.3g}"


# --------------------------------------------------------------------------------------------------- drawing

def test_temperature_zero_is_greedy_and_near_zero_is_finite():
    logits = torch.tensor([[0.0, 3.0, 2.999, -1.0]])
    for temperature in (0, 1e-6, 1e-4):
        assert pick(logits, temperature, None, None, None).item() == 1
    assert pick(logits * 1e30, 1e-3, 0, 1.0, None).item() == 1


@pytest.mark.parametrize("top_k", [0, 1, 4, 14, None])
@pytest.mark.parametrize("top_p", [0, 0.5, 1, None])
def test_extreme_cuts_always_leave_an_id(top_k, top_p):
    logits = torch.tensor([[1e5, -1e5, 5.0, 4.0], [0.0, 0.0, 0.0, 0.0]])
    for seed in range(20):
        drawn = pick(logits, 1.0, top_k, top_p, torch.Generator().manual_seed(seed))
        assert drawn[0] == 0 and 0 <= drawn[1] <= 3


def test_cuts_keep_exactly_the_likeliest_ids():
    p = torch.tensor([[0.05, 0.4, 0.1, 0.3, 0.15]])
    g = torch.Generator().manual_seed(0)
    drawn = lambda top_k, top_p: {pick(p.log(), 1.0, top_k, top_p, g).item() for _ in range(400)}
    assert drawn(2, None) == {1, 3} and drawn(None, 0.69) == {1, 3} and drawn(None, 0.71) == {1, 3, 4}
    assert drawn(3, 0.9) == {1, 3, 4} and drawn(0, 1.0) == {0, 1, 2, 3, 4}


def test_draws_follow_the_probabilities():
    p, g = torch.tensor([[0.1, 0.6, 0.3]]), torch.Generator().manual_seed(0)
    drawn = pick(p.log().expand(6000, 3), 1.0, None, None, g).bincount(minlength=3) / 6000
    assert (drawn - p[0]).abs().max() < 0.03
    hot = pick(p.log().expand(6000, 3), 2.0, None, None, g).bincount(minlength=3) / 6000
    assert (hot - p[0].sqrt() / p[0].sqrt().sum()).abs().max() < 0.03


def test_padding_of_the_vocabulary_is_never_drawn(make):
    model = make()
    rows = generate(model, [[1]] * 8, 40, temperature=5.0, seed=0)
    assert max(map(max, rows)) > 200
    rows = generate(model, [[1]] * 8, 40, temperature=5.0, seed=0, vocab_size=200)
    assert max(map(max, rows)) < 200


def test_stop_ids_end_a_row_and_are_not_returned(make):
    model = make()
    free = generate(model, PROMPTS, 20, temperature=0)
    stop = free[0][7]
    cut = [row[:row.index(stop)] if stop in row else row for row in free]
    assert generate(model, PROMPTS, 20, temperature=0, stop=(stop,)) == cut and len(cut[0]) <= 7


def test_text_ends_where_the_context_does_and_longer_prompts_are_refused(make):
    model = make(max_seq_len=12)
    assert len(generate(model, [[1] * 9], 20)[0]) == 3 and generate(model, [[1] * 12], 20) == [[]]
    with pytest.raises(ValueError, match="13 tokens exceeds the context of 12"):
        generate(model, [[1] * 13], 1)


@pytest.mark.parametrize("prompts, settings, complaint", [
    ([[]], {}, "empty"), ([[300]], {}, "outside the vocabulary"), ([[-1]], {}, "outside the vocabulary"),
    ([[1]], dict(temperature=-1), "temperature"), ([[1]], dict(top_k=-1), "top_k"),
    ([[1]], dict(top_p=1.1), "top_p")])
def test_impossible_arguments_are_named(prompts, settings, complaint, make):
    with pytest.raises(ValueError, match=complaint):
        generate(make(), prompts, 3, **settings)


# ------------------------------------------------------------------------------------------------------ text

def test_text_holds_back_incomplete_characters():
    tokenizer, text, said = data.get_tokenizer("bytes"), "aé漢🙂!", []
    writer = Text(tokenizer)
    said = [writer.feed([i]) for i in tokenizer.encode(text)]
    assert "".join(said) == text and "\ufffd" not in "".join(said) and said[1] == "" and said[2] == "é"
    writer = Text(tokenizer)
    assert writer.feed(list("🙂".encode())[:3]) == "" and writer.feed([], final=True) == "\ufffd"


def test_text_stops_before_a_stop_text_even_across_tokens():
    tokenizer = data.get_tokenizer("bytes")
    writer, said = Text(tokenizer, ["END", "\n\n"]), []
    for i in tokenizer.encode("the EN, then\n one ENDless"):
        said.append(writer.feed([i]))
    assert "".join(said) == "the EN, then\n one " and writer.done and writer.feed([65]) == ""
    writer = Text(tokenizer, ["END"])
    assert writer.feed(tokenizer.encode("x EN")) == "x " and writer.feed([], final=True) == "EN"


def test_ids_past_the_tokenizer_are_shown_not_fatal():
    assert Text(data.get_tokenizer("bytes")).feed([65, 999, 66]) == "A\ufffdB"


class Turns:
    """A stand-in for Gemma's tokenizer: bytes shifted behind the ids of its control tokens."""
    vocab_size, bos, eot, specials = 256, 2, 1, {"<|im_start|>": 105, "<|im_end|>": 106}

    def encode(self, text, allow_special=False):
        return [110 + b % 140 for b in text.encode()]

    def decode_bytes(self, ids):
        return bytes(i % 128 for i in ids)


def talk(model, lines, capsys, **settings):
    source = Source(model, Turns(), "toy", (1, 106), (2,), "assistant")
    cfg = SampleConfig(chat=True, temperature=0, max_new_tokens=6, **settings)
    sample.chat(source, cfg, io.StringIO(lines))
    return capsys.readouterr()


def test_a_conversation_equals_the_same_text_without_a_cache(make, capsys):
    model = make(num_blocks=3)
    said = talk(model, "hello\nand now\nlast\n", capsys)
    source, ids, replies = Source(model, Turns(), "toy", (1, 106), (2,), "assistant"), [], []
    for n, line in enumerate(("hello", "and now", "last")):
        ids += source.turn(line, n == 0)
        new = generate(model, [ids], 6, temperature=0, stop=(1, 106), vocab_size=256, cached=False)[0]
        ids += new
        replies.append(Text(Turns()).feed(new, final=True))
    assert said.out == "".join(reply + "\n" for reply in replies)


def test_a_turn_follows_the_template_and_text_never_becomes_control_tokens():
    source = Source(None, Turns(), "toy", (1, 106), (2,), "assistant")
    e = Turns().encode
    turn = [105, *e("user\nhi"), 106, *e("\n"), 105, *e("assistant\n")]
    assert source.turn("hi", True) == [2, *turn] and source.turn("hi", False) == [106, *e("\n"), *turn]
    assert not {105, 106} & set(source.turn("<|im_end|>", True)[2:-15])


def test_a_full_conversation_is_refused(make, capsys):
    with pytest.raises(ValueError, match="exceeds the context of 40"):
        talk(make(), "hello\nmore\n", capsys, context=40)


def test_self_check_compares_ids_and_tokens(make, capsys):
    class Published(Turns):
        def encode(self, text, allow_special=False):
            return sample.CHECK_IDS[1:-1]
    class Model(torch.nn.Module):
        embed_tokens, next_ids = torch.nn.Embedding(1, 1), sample.CHECK_NEXT
        def forward(self, tokens):
            assert tokens.tolist() == [sample.CHECK_IDS]
            return torch.nn.functional.one_hot(torch.tensor([self.next_ids]), 237_000), None
    model = Model()
    sample.self_check(Source(model, Published(), "toy", (), (2,)))
    assert "passed" in capsys.readouterr().out
    model.next_ids = [104, *sample.CHECK_NEXT[1:]]
    with pytest.raises(ValueError, match="likeliest next ids are .104"):
        sample.self_check(Source(model, Published(), "toy", (), (2,)))
    with pytest.raises(ValueError, match="tokenizer.json is not that of ZAYA1-8B"):
        sample.self_check(Source(model, Turns(), "toy", (), (2,)))


# ----------------------------------------------------------------------------------------------- the command

@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with runs/007 (a tiny model, bytes) and an older, empty runs/002."""
    base = tmp_path_factory.mktemp("work")
    for number in ("002", "007"):
        folder = base / "runs" / number
        folder.mkdir(parents=True)
        torch.manual_seed(0)
        config = ZAYAConfig.preset("tiny", vocab_size=320)
        spec = data.get_tokenizer("bytes").save(folder / "tokenizer.json")
        saved = {"model": vars(config), "data": "stdlib", "tokenizer_file": spec.partition(":")[0]}
        (folder / "config.json").write_text(json.dumps(saved))
    saver = checkpoint.Checkpointer(folder / "checkpoints")
    saver.save(5, {"model": ZAYA(config).state_dict()}, {})
    saver.wait()
    return base


def command(runs, *args):
    line = [sys.executable, ROOT / "sample.py", *args]
    return subprocess.run(line, cwd=runs, capture_output=True, text=True, timeout=100)


def test_the_command_takes_the_newest_run_streams_and_measures(runs):
    done = command(runs, "--max-new-tokens", "20", "--seed", "3")
    assert done.returncode == 0 and done.stdout.startswith("def "), done.stderr
    for fact in ("runs/007, step 5", "kernels: plain", "first token after", "tokens/s", "peak memory"):
        assert fact in done.stderr, f"{fact!r} is not in {done.stderr!r}"


def test_the_command_takes_prompts_from_flags_and_a_file(runs):
    (runs / "prompts.txt").write_text("two <|endoftext|>\n\nthree\n")
    line = "--prompt one --prompts prompts.txt --num-samples 2 --max-new-tokens 3 --seed 1"
    done = command(runs, *line.split())
    parts = done.stdout.split("-" * 40 + "\n")
    expected = ["one", "one", "two <|endoftext|>", "two <|endoftext|>", "three", "three"]
    assert len(parts) == 6 and all(part.startswith(text) for part, text in zip(parts, expected)), parts


@pytest.mark.parametrize("args, complaint", [
    (["--run", "nowhere"], "nowhere is not the folder of a run"),
    (["--run", "runs/002"], "no undamaged checkpoint"), (["--weights", "runs"], "runs has no config.json"),
    (["--tempertaure", "1"], "did you mean --temperature"), (["--top-k", "x"], "--top-k"),
    (["--top-p", "3"], "--top-p is 3.0"), (["--kernels", "hip"], "--kernels hip cannot run"),
    (["--device", "abacus"], "--device abacus is unknown"),
    (["--prompt", "<|foo|>", "--special"], "unknown special token <|foo|>"),
    (["--prompts", "none.txt"], "none.txt"), (["--prompt", "x" * 300], "exceeds the context of 256")])
def test_mistakes_end_in_one_line_and_status_2(args, complaint, runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    monkeypatch.setattr(sys, "argv", ["sample.py", *args])
    with pytest.raises(SystemExit) as end:
        command_line.run(sample.main)
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if "parameters" not in line]
    assert end.value.code == 2 and len(lines) == 1 and complaint in lines[0], error
