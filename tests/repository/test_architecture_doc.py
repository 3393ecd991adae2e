"""Every path and function that ARCHITECTURE.md names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
# `jdp/axis.py`, `tests/`, `requirements/*.txt`, `jdp/reduction/buckets.py:plan`
PATH = re.compile(r"`([\w.]+/[\w./*-]*|[\w-]+\.(?:py|md|toml|h|cc))(?::(\w[\w.]*))?`")
ROW = re.compile(r"^\| `(jdp/[\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)


def files(pattern):
    return [path for folder in (ROOT, ROOT / "jdp") for path in folder.glob(pattern)]


def is_defined(path, name):
    last = re.escape(name.rpartition(".")[2])
    defined = re.compile(rf"^\s*(?:def|class) {last}\b|^{last}\b", re.MULTILINE)
    return any(each.is_file() and defined.search(each.read_text()) for each in files(path))


def test_every_path_and_function_in_it_exists():
    named = [*PATH.findall(TEXT), *ROW.findall(TEXT)]
    assert len(named) > 100
    assert not [path for path, _ in named if not files(path)]
    assert not [(path, name) for path, name in named if name and not is_defined(path, name)]
