"""From flat dataclasses to a command line: every field is a flag, with its default, type, choices and help.

    @dataclass
    class Config:
        lr: float = option(1e-3, "learning rate")
    config, = parse("train.py", "Trains.", argv, Config)

A mistake of the user's (unknown flag, wrong type, impossible combination, missing file) ends with one line
and exit status 2.
"""

import argparse
import dataclasses
import difflib
import os
import sys
import typing


def option(default, help, choices=None):
    """A dataclass field with its help text and, where the values are few, its choices."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


class Parser(argparse.ArgumentParser):
    """argparse in one line: names the wrong flag, the value, and the nearest flag that exists."""

    def error(self, message):
        left = message.removeprefix("unrecognized arguments: ")
        if left != message:
            words = left.split(" ")          # an empty word too
            flag = next((word.split("=")[0] for word in words if word.startswith("-")), None)
            near = difflib.get_close_matches(flag or "", self._option_string_actions, n=1, cutoff=0.6)
            meant = f", did you mean {near[0]}?" if near else ""
            message = (f"unknown flag {flag}{meant}" if flag else
                       f"{words[0]!r} belongs to no flag") + " (--help lists all)"
        self.exit(2, f"{self.prog}: {message}\n")


def parse(prog, description, argv, *classes, without=(), **defaults):
    """One instance of each dataclass from a command line. defaults: values in place of the fields' own.

    without: fields that get no flag, as those without help text. Field names must differ between the classes.
    Raises SystemExit(2) with one line for anything that does not fit.
    """
    parser = Parser(prog, usage="%(prog)s [flags]", description=description, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    for cls in classes:
        group = parser.add_argument_group(cls.__name__)
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.metadata["help"] and field.name not in without:
                add_flag(group, field, hints[field.name], defaults.get(field.name, field.default))
    values = defaults | vars(parser.parse_args(argv))
    try:
        return [cls(**{f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values})
                for cls in classes]
    except ValueError as error:
        parser.error(str(error))


def add_flag(group, field, hint, default):
    """--field-name for one field. A bool gets --no-field-name too, X | None takes the word none, a list
    collects the texts of a flag that is given several times."""
    flag, help = "--" + field.name.replace("_", "-"), field.metadata["help"] + f" (default: {default})"
    if hint is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=help)
        return
    optional = type(None) in typing.get_args(hint)
    kind = next((t for t in typing.get_args(hint) if t is not type(None)), hint) if optional else hint
    if kind is list:
        group.add_argument(flag, action="append", default=default, metavar="TEXT", help=help)
        return
    choices = field.metadata["choices"]
    group.add_argument(flag, type=converter(kind, optional), default=default, choices=choices, help=help,
                       metavar=None if choices else kind.__name__.upper())


def converter(kind, optional):
    def convert(text):
        if optional and text.lower() == "none":
            return None
        if kind is tuple:
            return tuple(int(part) for part in text.split(",") if part)
        return kind(text)
    words = {tuple: "list of whole numbers (as 2,2)", int: "whole number", float: "number"}
    convert.__name__ = words.get(kind, kind.__name__)       # argparse names it when a text does not fit
    return convert


def run(main):
    """Call a command's main(argv). The user's mistakes end in one line and status 2, not in a traceback."""
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
        sys.exit(status)
    except BrokenPipeError:     # `| head` has seen enough; nothing more may be written, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)           # 128 + SIGPIPE, as other programs
    except (ValueError, OSError) as error:
        print(f"{sys.argv[0].rsplit('/', 1)[-1]}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"\n{sys.argv[0].rsplit('/', 1)[-1]}: interrupted", file=sys.stderr)
        sys.exit(130)
