"""The size of the repository may only fall: lower a limit with the commit that makes room."""

import ast
import functools
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMITS = {
    "files of jdp": 253,
    "lines of jdp": 57_459,
    "words of docstrings and comments in jdp": 64_865,
    "lines of tests": 77_058,
    "lines of README.md": 120,
    "lines of CHANGELOG.md": 95,
}
FILES = "README.md", "CHANGELOG.md"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def counted() -> dict[str, int]:
    library = [path.read_text() for path in (ROOT / "jdp").rglob("*.py")]
    tests = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    return {
        "files of jdp": len(library),
        "lines of jdp": sum(map(num_lines, library)),
        "words of docstrings and comments in jdp": sum(map(num_words, library)),
        "lines of tests": sum(map(num_lines, tests)),
        **{f"lines of {name}": num_lines((ROOT / name).read_text()) for name in FILES},
    }


def num_lines(text: str) -> int:
    return len(text.splitlines())


def num_words(source: str) -> int:
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [each.string.lstrip("# ") for each in tokens if each.type == tokenize.COMMENT]
    return sum(len((text or "").split()) for text in [*map(ast.get_docstring, nodes), *comments])


@pytest.mark.parametrize("what", LIMITS)
def test_the_size_of_the_repository_does_not_grow(what):
    assert counted()[what] <= LIMITS[what]
