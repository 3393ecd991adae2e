"""Counts the lines of a program that training on one device does not have, in the source files."""

import ast
import difflib
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path

from benchmarks.compare.contestants import CONTESTANTS, ONE_DEVICE

_PROGRAMS = Path(__file__).parent / "programs"


def of_program(name: str) -> int:
    """Count the lines of a contestant's program that are new or changed."""
    one = CONTESTANTS[name]
    plain = _PROGRAMS / f"{ONE_DEVICE[one.framework]}.py"
    return difference(plain.read_text(), (_PROGRAMS / f"{one.program}.py").read_text())


def of_functions(pairs: list[tuple[Callable | None, Callable]]) -> int:
    """Count the same in functions: for each pair the plain one, or None, and its replacement."""

    def source(function: Callable | None) -> str:
        return textwrap.dedent(inspect.getsource(function)) if function else ""

    return sum(difference(source(plain), source(own)) for plain, own in pairs)


def difference(plain: str, own: str) -> int:
    """Count the lines of `own` that `plain` does not have, without comments, docstrings and layout.

    >>> difference("x = 1\\ny = 2\\n", "# a comment\\nx = 1\\ny = 3\\nz = 4\\n")
    2
    """
    a, b = _lines(plain), _lines(own)
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    blocks = matcher.get_matching_blocks()
    return len(b) - sum(block.size for block in blocks)


def _lines(source: str) -> list[str]:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:]
    return ast.unparse(tree).splitlines()
