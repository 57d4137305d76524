"""Dataclasses as command lines."""

import dataclasses
import subprocess
import sys
from dataclasses import dataclass

import pytest

import config
from conftest import ROOT
from config import option
from model import ZAYAConfig
from recipe import TrainConfig


@dataclass
class Example:
    rate: float = option(0.5, "a number")
    count: int | None = option(None, "a whole number or none")
    kinds: tuple = option((2, 2), "numbers")
    kind: str = option("a", "a choice", ("a", "b"))
    on: bool = option(True, "a switch")
    hidden: object = option(None, None)

    def __post_init__(self):
        if self.rate > 1:
            raise ValueError(f"rate is {self.rate}, it must be at most 1")


def test_flags_set_fields():
    argv = ["--rate=0.25", "--count", "3", "--kinds=1,2,3", "--kind=b", "--no-on"]
    parsed, = config.parse("x", "", argv, Example)
    assert parsed == Example(0.25, 3, (1, 2, 3), "b", False)
    assert config.parse("x", "", ["--count=none", "--kinds="], Example)[0] == Example(kinds=())


def test_defaults_may_be_replaced_and_flags_still_win():
    assert config.parse("x", "", [], Example, rate=0.1)[0].rate == 0.1
    assert config.parse("x", "", ["--rate=0.2"], Example, rate=0.1)[0].rate == 0.2


@pytest.mark.parametrize("argv, words", [
    (["--rat=1"], "did you mean --rate"), (["--rate=x"], "number"), (["--rate"], "expected one argument"),
    (["--kind=c"], "'a', 'b'"), (["--count=1.5"], "whole number"), (["--kinds=a"], "2,2"),
    (["--rate=3"], "at most 1"), (["stray"], "'stray' belongs to no flag"), ([""], "'' belongs to no flag"),
    (["--hidden=1"], "unknown flag --hidden")])
def test_mistakes_end_in_one_line_and_status_2(argv, words, capsys):
    with pytest.raises(SystemExit) as caught:
        config.parse("x", "", argv, Example)
    said = capsys.readouterr().err
    assert caught.value.code == 2 and len(said.strip().splitlines()) == 1 and words in said, said


def test_every_flag_is_in_the_help_with_its_default(capsys):
    with pytest.raises(SystemExit):
        config.parse("train.py", "", ["--help"], TrainConfig, ZAYAConfig)
    shown = " ".join(capsys.readouterr().out.split())
    for field in (*dataclasses.fields(TrainConfig), *dataclasses.fields(ZAYAConfig)):
        if field.metadata["help"]:
            flag, default = f"--{field.name.replace('_', '-')}", f"(default: {field.default})"
            assert flag in shown and default in shown, field.name


@pytest.mark.parametrize("lines", [3, 100_000])     # written at the end, and in the midst
def test_a_reader_who_has_seen_enough_is_no_error(lines):
    code = f"import config; config.run(lambda argv: print('line\\n' * {lines}))"
    line = f'{sys.executable} -c "{code}" | true; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.strip() in ("141", "0"), done
