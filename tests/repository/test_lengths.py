"""Files of the library have at most 800 lines, functions at most 40 without their docstring."""

import ast
from pathlib import Path

import jdp

LIBRARY = Path(jdp.__file__).parent
MAX_LINES, MAX_LINES_OF_FUNCTION = 800, 40
SOURCES = {".py", ".h", ".cc", ".cu", ".cuh"}


def test_no_file_is_too_long():
    sources = (path for path in LIBRARY.rglob("*") if path.suffix in SOURCES)
    lengths = {str(path): len(path.read_text().splitlines()) for path in sources}
    assert len(lengths) > 300
    assert {path: n for path, n in lengths.items() if n > MAX_LINES} == {}


def test_no_function_is_too_long():
    found = {}
    for path in LIBRARY.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[f"{path}:{node.lineno} {node.name}"] = _length(node)
    assert len(found) > 2000
    assert {name: n for name, n in found.items() if n > MAX_LINES_OF_FUNCTION} == {}


def _length(function):
    assert function.end_lineno is not None
    length = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        length -= docstring.end_lineno - docstring.lineno + 1
    return length
