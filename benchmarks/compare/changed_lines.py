"""Counts the lines that a program differs in from training on one device, in the source files."""

import ast
import difflib
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path

from benchmarks.compare.contestants import CONTESTANTS, ONE_DEVICE

_PROGRAMS = Path(__file__).parent / "programs"


def of_program(name: str) -> int:
    """Count the lines of a contestant's program that are new, changed or gone."""
    one = CONTESTANTS[name]
    plain = _PROGRAMS / f"{ONE_DEVICE[one.framework]}.py"
    return difference(plain.read_text(), (_PROGRAMS / f"{one.program}.py").read_text())


def of_functions(pairs: list[tuple[Callable | None, Callable]]) -> int:
    """Count the same in functions: for each pair the plain one, or None, and its replacement."""

    def source(function: Callable | None) -> str:
        return textwrap.dedent(inspect.getsource(function)) if function else ""

    return sum(difference(source(plain), source(own)) for plain, own in pairs)


def difference(plain: str, own: str) -> int:
    """Count the lines of code that differ, without comments, docstrings and layout.

    >>> difference("x = 1\\ny = 2\\n", "# a comment\\nx = 1\\ny = 3\\nz = 4\\n")
    2
    """
    a, b = _lines(plain), _lines(own)
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    return sum(
        max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal"
    )


def _lines(source: str) -> list[str]:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:]
    return ast.unparse(tree).splitlines()
