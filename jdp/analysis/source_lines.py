"""Find the line of the user's program that an equation comes from."""

import functools
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_JDP = Path(__file__).parents[1]
_STANDARD = Path(sysconfig.get_paths()["stdlib"])
# Libraries whose lines are never named, because they do not help a user.
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "equinox")


def source(eqn: Any) -> str:
    """Return the innermost line of the author's, such as "train.py:41", empty if there is none.

    Files of installed packages, of Python's standard library and of jdp are not the author's. A
    line of an installed program is returned only if there is no other.
    """
    found = eqn.source_info.traceback
    return "" if found is None else _line(found)


def is_of_author(eqn: Any) -> bool:
    """Whether the author's code, or a library that it calls, made an equation, and not jdp."""
    found = eqn.source_info.traceback
    return found is not None and not is_of_jdp(frame.file_name for frame in found.frames)


def is_of_jdp(files: Iterable[str]) -> bool:
    """Whether the innermost of some files, JAX's own left out, is one of jdp."""
    for name in files:
        path = Path(name)
        if path.is_relative_to(_JDP):
            return True
        if not name.startswith("<frozen") and not {"jax", "jaxlib"} & {*path.parts}:
            return False
    return False


def line_of(error: BaseException) -> str:
    """Return the innermost line of the author's that raised an error, as `source` does."""
    frames = traceback.extract_tb(error.__traceback__)
    return innermost((frame.filename, frame.lineno or 0) for frame in reversed(frames))


# Reading frames is slow, and all leaves of a tree have equal tracebacks.
@functools.lru_cache(maxsize=1024)
def _line(found: Any) -> str:
    return innermost((frame.file_name, frame.line_num) for frame in found.frames)


def innermost(frames: Iterable[tuple[str, int]]) -> str:
    """Return the innermost line of the author's among frames, as `source` does."""
    second_best = ""
    for file_name, number in frames:
        whose = _whose(file_name)
        if whose == "author":
            return f"{Path(file_name).name}:{number}"
        if whose == "installed" and not second_best:
            second_best = f"{Path(file_name).name}:{number}"
    return second_best


@functools.cache
def _whose(file_name: str) -> str:
    path = Path(file_name)
    if path.is_relative_to(_JDP) or file_name.startswith("<frozen"):
        return "library"
    for folder in ("site-packages", "dist-packages"):
        if folder in path.parts:
            package = path.parts[path.parts.index(folder) + 1]
            return "library" if package in _LIBRARIES else "installed"
    return "library" if path.is_relative_to(_STANDARD) else "author"
