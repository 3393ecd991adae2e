"""Rooms import exactly what the table of ARCHITECTURE.md says, and only what stands below them.

One name is for one thing.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "jdp"
# jdp/__init__.py: the public names, which may come from every room and which no room may import.
PUBLIC = "__init__"

ROW = re.compile(r"^\| `jdp/(\w+)(?:/|\.py)` \|[^|]*\| ([\w, ]*) \|$", re.MULTILINE)


# From top to bottom: a room, and the rooms that it imports.
def rooms():
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("## Rooms\n")[2]
    return {room: set(filter(None, names.split(", "))) for room, names in ROW.findall(table)}


def room_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


# The modules of jdp that a file imports, anywhere in it, each with the line.
def imported(path, source):
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
            if name.split(".")[0] == "jdp":
                yield node.lineno, name


def violations(path, source, table):
    room = room_of(path)
    if room == PUBLIC:
        return
    if room not in table:
        yield f"{path.relative_to(ROOT)}: ARCHITECTURE.md has no row for the room '{room}'"
        return
    for line, name in imported(path, source):
        other = (*name.split("."), PUBLIC)[1]
        if other != room and other not in table[room]:
            yield f"{path.relative_to(ROOT)}:{line} imports {name}: not in the row of '{room}'"


# The files of jdp: module name -> path.
def modules():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = ("jdp", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def test_rooms_import_what_the_table_says():
    table = rooms()
    assert not [
        line for path in PACKAGE.rglob("*.py") for line in violations(path, path.read_text(), table)
    ]


def test_the_table_names_no_import_that_is_not_there():
    found = {room: set() for room in rooms()}
    for path in PACKAGE.rglob("*.py"):
        for _, name in imported(path, path.read_text()):
            found.setdefault(room_of(path), set()).add((*name.split("."), PUBLIC)[1])
    assert rooms() == {room: found[room] - {room} for room in rooms()}


def test_every_room_has_a_row_and_every_row_a_room():
    assert {*rooms()} == {room_of(path) for path in PACKAGE.rglob("*.py")} - {PUBLIC}


def test_rooms_stand_above_what_they_import():
    order = list(rooms())
    for room, others in rooms().items():
        assert all(order.index(other) > order.index(room) for other in others), room


def test_at_most_eight_files_lie_beside_the_rooms():
    assert len([*PACKAGE.glob("*.py")]) <= 8


# What only some JAX versions have, and names that JAX does not promise.
@pytest.mark.parametrize("sign", ["__version_info__", "jax._src", "hasattr(jax", "hasattr(lax"])
def test_only_jax_compat_knows_that_jax_versions_differ(sign):
    found = {path.name for path in PACKAGE.rglob("*.py") if sign in path.read_text()}
    assert found <= {"jax_compat.py"}


def test_no_two_classes_share_a_name():
    found = [
        node.name.lstrip("_")
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert sorted(found) == sorted({*found})


def test_no_function_rebinds_a_global():
    assert not [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Global)
    ]


# A package imports its files to hand on their names: what its files import of it is left out.
def test_no_file_imports_itself_through_others():
    known = modules()
    arrows = {
        module: {
            target
            for _, name in imported(path, path.read_text())
            for target in [name if name in known else name.rpartition(".")[0]]
            if known.get(target, path).name != "__init__.py" and target != module
        }
        for module, path in known.items()
        if path.name != "__init__.py"
    }
    while leaves := [module for module, others in arrows.items() if not others & {*arrows}]:
        for module in leaves:
            del arrows[module]
    assert not arrows


SMALL_TABLE = {"training": {"reduction", "collectives"}, "reduction": {"collectives"}}


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("reduction/gradients.py", "from jdp.training import step"),
        ("reduction/gradients.py", "from jdp import training"),
        ("reduction/gradients.py", "import jdp.training.step as s"),
        ("reduction/gradients.py", "from .. import training"),
        ("reduction/gradients.py", "from ..training.step import train_step"),
        ("reduction/gradients.py", "def f():\n    from jdp.data import batches"),
        ("reduction/gradients.py", "import jdp"),
        ("reduction/gradients.py", "from jdp import train_step"),
        ("reduction/partition/rules.py", "from ...training import step"),
        ("new.py", ""),
    ],
)
def test_an_import_that_is_not_in_the_row_is_found(file, source):
    assert len([*violations(PACKAGE / file, source, SMALL_TABLE)]) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("__init__.py", "from jdp.training.step import train_step"),
        ("training/step.py", "from jdp import collectives\nfrom jdp.reduction import metrics"),
        ("training/step.py", "import jdp.reduction.metrics\nfrom ..collectives import ring"),
        ("training/step.py", "from jdp.training.state import TrainState\nfrom . import state"),
        ("reduction/gradients.py", "import jax\nfrom jaxlib import training"),
    ],
)
def test_an_import_that_is_in_the_row_is_accepted(file, source):
    assert not [*violations(PACKAGE / file, source, SMALL_TABLE)]
