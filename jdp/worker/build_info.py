"""jdp's version and digests of its sources."""

import ast
import functools
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path


@functools.cache  # each commit holds the version
def version() -> str:
    """Return jdp's version; "0+unknown" if not installed."""
    from importlib import metadata  # slower than all of `import jdp`

    try:
        package = metadata.distribution("jdp")
    except metadata.PackageNotFoundError:
        return "0+unknown"
    # PKG-INFO of built sources.
    found = package.read_text("METADATA") or package.read_text("PKG-INFO") or ""
    # `metadata.version` parses the whole description.
    match = re.search(r"^Version: (\S+)$", found.partition("\n\n")[0], re.M)
    return match[1] if match else "0+unknown"


PACKAGE = Path(__file__).parents[1]
# Packages that launchers and processes must share.
PROTOCOL = ("worker", "launch")


@functools.cache
def source_digest(rooms: Sequence[str] = (".",), package: Path = PACKAGE) -> str:
    """Return 8 hexadecimal digits of all files in some packages."""
    return _digest(name.encode() + content for name, content in _files(rooms, package))


@functools.cache
def code_digest(rooms: Sequence[str] = (".",), package: Path = PACKAGE) -> str:
    """Return 8 hexadecimal digits of the code alone."""
    return _digest(
        f"{name} {ast.dump(_without_docstrings(ast.parse(content)))}".encode()
        for name, content in _files(rooms, package)
    )


def is_build_of(digest: str | None, package: str | None) -> bool:
    """Whether another of this host's processes runs this build."""
    if digest == source_digest(PROTOCOL):
        return True
    try:
        return package is not None and code_digest(PROTOCOL, Path(package)) == code_digest(PROTOCOL)
    except (OSError, SyntaxError):
        return False


# At every process's start: `pathlib` is slower.
def _files(rooms: Sequence[str], package: Path) -> list[tuple[str, bytes]]:
    paths = sorted(
        os.path.join(folder, name)
        for room in rooms
        for folder, _, names in os.walk(os.path.normpath(package / room))
        for name in names
        if name.endswith(".py")
    )
    return [(os.path.relpath(path, package), _content(path)) for path in paths]


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:8]


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            # Also strings below an attribute.
            body[:] = [each for each in body if not _is_text(each)]
    return tree


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
