"""Conversations, and the command line of sample.py."""

import io
import json
import subprocess
import sys

import pytest
import torch

import chat
import checkpoint
import config as command_line
from chat import SampleConfig
from conftest import ROOT, Turns
from model import ZAYA, ZAYAConfig
from sample import generate
from speaker import Speaker, Text, open_run
from tokenizer import get_tokenizer


def talk(model, lines, capsys, **settings):
    speaker = Speaker(model, Turns(), "toy", (1, 106), (2,), "assistant")
    cfg = SampleConfig(chat=True, temperature=0, max_new_tokens=6, **settings)
    chat.chat(speaker, cfg, io.StringIO(lines))
    return capsys.readouterr()


def test_a_conversation_equals_the_same_text_without_a_cache(make, capsys):
    model = make(num_blocks=3)
    said = talk(model, "hello\nand now\nlast\n", capsys)
    speaker, ids, replies = Speaker(model, Turns(), "toy", (1, 106), (2,), "assistant"), [], []
    for n, line in enumerate(("hello", "and now", "last")):
        ids += speaker.turn(line, n == 0)
        new = generate(model, [ids], 6, temperature=0, stop=(1, 106), vocab_size=256, cached=False)[0]
        ids += new
        replies.append(Text(Turns()).feed(new, final=True))
    assert said.out == "".join(reply + "\n" for reply in replies)


def test_a_full_conversation_is_refused(make, capsys):
    with pytest.raises(ValueError, match="exceeds the context of 40"):
        talk(make(), "hello\nmore\n", capsys, context=40)


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
        spec = get_tokenizer("bytes").save(folder / "tokenizer.json")
        saved = {"model": vars(config), "data": "stdlib", "tokenizer_file": spec.partition(":")[0]}
        (folder / "config.json").write_text(json.dumps(saved))
    saver = checkpoint.Checkpointer(folder / "checkpoints")
    saver.save(5, {"model": ZAYA(config).state_dict()}, {})
    saver.wait()
    return base


def test_weights_that_do_not_fit_the_configuration_are_named(runs, monkeypatch):
    saved = json.loads((runs / "runs/007/config.json").read_text())
    saved["model"]["hidden_size"] = 40
    monkeypatch.setattr("speaker.read_run", lambda folder: saved)
    with pytest.raises(ValueError, match="config.json is not that of its weights: size mismatch for .*"):
        open_run(runs / "runs/007", None, "cpu")


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
    (["--device", "mps"], "--device mps is not supported"),
    (["--num-samples", "1000000000"], "at most 10000"),
    (["--prompt", "<|foo|>", "--special"], "unknown special token <|foo|>"),
    (["--prompts", "none.txt"], "none.txt"), (["--prompt", "x" * 300], "exceeds the context of 256")])
def test_mistakes_end_in_one_line_and_status_2(args, complaint, runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    monkeypatch.setattr(sys, "argv", ["sample.py", *args])
    with pytest.raises(SystemExit) as end:
        command_line.run(chat.main)
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if "parameters" not in line]
    assert end.value.code == 2 and len(lines) == 1 and complaint in lines[0], error
