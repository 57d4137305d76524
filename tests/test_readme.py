"""What the README says of files, flags and commands is true. `python tests/test_readme.py` rewrites its line
counts."""

import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
ROW = re.compile(r"^\| (\w+\.py) \| (\d+) \|", re.M)


def tables():
    """{marker: the Markdown between <!-- marker --> and <!-- /marker -->}, from the benchmarks' own
    results."""
    sys.path.insert(0, str(ROOT))
    from benchmarks import ablations, faults, kernels, kills, quality, scaling, speed
    return {"ablations": ablations.table(), "bytes": kernels.table(), "faults": faults.table(),
            "kills": kills.table(), "quality": quality.table(), "scaling": scaling.table(),
            "speed": speed.table()}


def block(marker):
    return re.compile(rf"(<!-- {marker} -->\n).*?\n?(<!-- /{marker} -->)", re.S)


def lines(name):
    return len((ROOT / name).read_text().splitlines())


def test_map_lists_every_file_with_its_length():
    rows = {name: int(n) for name, n in ROW.findall(README.read_text())}
    assert set(rows) == {f.name for f in ROOT.glob("*.py")}
    wrong = {name: (n, lines(name)) for name, n in rows.items() if n != lines(name)}
    assert not wrong, f"README against file: {wrong}; python tests/test_readme.py mends it"


def test_functions_named_in_the_walk_exist():
    walk = README.read_text().split("one token's way")[1].split("## I want to")[0]
    sources = "\n".join(f.read_text() for f in ROOT.glob("*.py"))
    for name in re.findall(r"`(?:\w+\.)?(\w+)`", walk):
        assert re.search(rf"(def|class) {name}\b", sources), f"{name} is in the README and nowhere else"


def commands():
    text = README.read_text().replace("\\\n", " ")
    return sorted(set(re.findall(r"python (\w+\.py(?: [^`#\n|]*)?)", text)))


@pytest.mark.parametrize("command", commands())
def test_flags_of_every_command_exist(command, capsys):
    program, *args = shlex.split(command)
    if program not in ("train.py", "sample.py"):
        assert (ROOT / program).exists()
        return
    import chat
    import config
    import recipe
    from model import ZAYAConfig
    classes = (recipe.TrainConfig, ZAYAConfig) if program == "train.py" else (chat.SampleConfig,)
    if "--help" not in args:
        config.parse(program, "", [a for a in args if a != "..."], *classes)


def test_tables_are_those_of_the_committed_results():
    pytest.importorskip("transformers")
    text = README.read_text()
    for marker, table in tables().items():
        assert block(marker).search(text)[0] == f"<!-- {marker} -->\n{table}\n<!-- /{marker} -->", marker


if __name__ == "__main__":
    text = ROW.sub(lambda m: f"| {m[1]} | {lines(m[1])} |", README.read_text())
    for marker, table in tables().items():
        text = block(marker).sub(lambda m: f"{m[1]}{table}\n{m[2]}", text)
    README.write_text(text)
