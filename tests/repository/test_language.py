"""Docstrings begin as those of the field do: Return, Compute, Whether, Record, Report, Raise."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jdp"
FOREIGN = {"Give", "Gives", "Tell", "Tells", "Say", "Says", "Note", "Notes"}
NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize(
    "room", sorted({path.parent for path in PACKAGE.rglob("*.py")}), ids=lambda room: room.name
)
def test_no_docstring_begins_with_a_verb_of_another_language(room):
    found = {
        f"{path.name}:{getattr(node, 'lineno', 1)}"
        for path in room.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, NODES) and (ast.get_docstring(node) or "-").split()[0] in FOREIGN
    }
    assert not found
