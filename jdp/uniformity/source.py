"""The line of the author's program that an equation comes from."""

import functools
import sysconfig
from pathlib import Path
from typing import Any

_JDP = Path(__file__).parents[1]
_STANDARD = Path(sysconfig.get_paths()["stdlib"])
# Libraries whose lines say nothing to an author even if nothing else is left.
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "equinox")


def source(eqn: Any) -> str:
    """Name the innermost line that is the author's, such as "train.py:41".

    Files of installed packages, of Python's own library and of jdp are no author's; a program that
    is itself installed is named where no other line is found. Empty if there is none at all.
    """
    traceback = eqn.source_info.traceback
    return "" if traceback is None else _line(traceback)


# Reading the frames is slow, and all leaves of a tree come from one place: equal tracebacks.
@functools.lru_cache(maxsize=1024)
def _line(traceback: Any) -> str:
    second_best = ""
    for frame in traceback.frames:
        whose = _whose(frame.file_name)
        if whose == "author":
            return f"{Path(frame.file_name).name}:{frame.line_num}"
        if whose == "installed" and not second_best:
            second_best = f"{Path(frame.file_name).name}:{frame.line_num}"
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
