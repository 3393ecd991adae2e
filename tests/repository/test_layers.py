"""Imports point down the table of rooms, never up and never sideways."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jdp"

# From top to bottom: a room may import the rooms of the rows below its own. A room is a file
# or a folder of jdp/. ARCHITECTURE.md says what each is for.
ROOMS = (
    ("__main__",),
    ("cli",),
    ("check", "checkpoint", "evaluate"),
    ("replicas",),
    ("step",),
    ("program", "state"),
    ("optimizer", "grad", "data", "scan_layers"),
    (
        "sync",
        "metrics",
        "in_flight",
        "agreement",
        "lockstep",
        "verify",
        "readiness",
        "late_reduction",
        "batch",
        "waits",
        "unknown_value",
    ),
    ("causes", "scales", "transposed"),
    ("weighted_sum",),
    ("placement", "scope", "collectives", "uniformity", "newest"),
    ("mesh", "buckets"),
    ("same",),
    ("same_program", "processes", "arguments"),
    ("argument_differences",),
    ("exchange", "checksums"),
    ("joining", "snapshot", "store", "hashes"),
    ("leaving", "progress", "rank_state"),
    (
        "axis",
        "failure",
        "mark",
        "together",
        "statics",
        "sampler",
        "prefetch",
        "dataset",
        "launch",
        "schedulers",
        "traced",
        "row_weight",
    ),
    (
        "background",
        "commit",
        "disk",
        "preemption",
        "differences",
        "overdue",
        "places",
        "known_leaves",
    ),
)
# jdp/__init__.py: the public names, which may come from every room and which no room may import.
PUBLIC = "__init__"


def room_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


# The rooms that a file imports, anywhere in it, each with the line.
def imported_rooms(path, source):
    package = ("jdp", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, *rest = name.split(".")
            if top == "jdp":
                yield node.lineno, rest[0] if rest else PUBLIC


def violations(path, source, table):
    row_of = {room: row for row, rooms in enumerate(table) for room in rooms}
    room = room_of(path)
    if room == PUBLIC:
        return []
    if room not in row_of:
        return [f"{path.name}: '{room}' is not in ROOMS; put it in the row that it belongs to"]
    return [
        f"{path.relative_to(PACKAGE)}:{line} imports '{other}', which is no room below '{room}'"
        for line, other in imported_rooms(path, source)
        if other != room and row_of.get(other, -1) <= row_of[room]
    ]


def test_imports_point_down_the_table_of_rooms():
    paths = sorted(PACKAGE.rglob("*.py"))
    assert paths
    assert not [v for path in paths for v in violations(path, path.read_text(), ROOMS)]


def test_every_room_of_the_table_exists():
    assert {room for row in ROOMS for room in row} == {
        room_of(path) for path in PACKAGE.rglob("*.py")
    } - {PUBLIC}


SMALL_TABLE = (("step",), ("sync", "metrics"), ("collectives",))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("sync.py", "from jdp.training.step import train_step"),
        ("sync.py", "from jdp import step"),
        ("sync.py", "import jdp.step as s"),
        ("sync.py", "from . import step"),
        ("sync.py", "from .step import train_step"),
        ("sync.py", "def f():\n    from jdp.reduction.metrics import mean"),
        ("sync.py", "import jdp"),
        ("sync.py", "from jdp import train_step"),
        ("collectives/ring.py", "from ..sync import plan"),
        ("collectives/ring.py", "from .. import sync"),
        ("new.py", ""),
    ],
)
def test_an_import_that_does_not_point_down_is_found(file, source):
    assert len(violations(PACKAGE / file, source, SMALL_TABLE)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("__init__.py", "from jdp.training.step import train_step"),
        ("step.py", "from jdp import collectives, sync\nfrom jdp.collectives.ring import ring"),
        ("step.py", "import jdp.sync\nfrom . import sync\nfrom .collectives import ring"),
        ("collectives/__init__.py", "from jdp.collectives.ring import ring\nfrom . import ring"),
        ("collectives/ring.py", "import jax\nfrom jaxlib import step\nfrom .xla import xla"),
    ],
)
def test_an_import_that_points_down_is_accepted(file, source):
    assert not violations(PACKAGE / file, source, SMALL_TABLE)
