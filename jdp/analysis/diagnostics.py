"""Names in refusals: lines, leaves, axes, problems."""

import functools
import sysconfig
import traceback
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jdp.step_spec import StepSpec


def shown(names: Iterable[str]) -> str:
    """Return at most five different names, and count the others.

    >>> shown(["`a`", "`b`", "`a`"]), shown(["`w`"] + [f"`v{i}`" for i in range(6)])
    ('`a`, `b`', '`w`, `v0`, `v1`, `v2`, `v3` and 2 more')
    """
    each = list(dict.fromkeys(names))
    more = f" and {len(each) - 5} more" if len(each) > 5 else ""
    return ", ".join(each[:5]) + more


def bulleted(problems: Sequence[str]) -> str:
    """Return at most eight problems, and count the others."""
    lines = [f"- {problem}" for problem in problems[:8]]
    if len(problems) > 8:
        lines.append(f"- and {len(problems) - 8} more")
    return "\n".join(lines)


def spelled(names: Collection[str]) -> str:
    """Return axes as a name or a tuple."""
    ordered: Iterable[str] = names if isinstance(names, tuple) else sorted(names)
    return repr(next(iter(ordered)) if len(names) == 1 else tuple(ordered))


_JDP = Path(__file__).parents[1]
_STANDARD = Path(sysconfig.get_paths()["stdlib"])
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "equinox")


def source_of(eqn: Any) -> str:
    """Return the author's innermost line, such as "train.py:41", else one outside `_LIBRARIES`."""
    found = eqn.source_info.traceback
    return "" if found is None else _line(found)


def is_of_author(eqn: Any) -> bool:
    """Whether an equation comes from outside jdp."""
    found = eqn.source_info.traceback
    return found is not None and not is_of_jdp(frame.file_name for frame in found.frames)


def is_of_jdp(files: Iterable[str]) -> bool:
    """Whether the innermost file outside JAX belongs to jdp."""
    for name in files:
        path = Path(name)
        if path.is_relative_to(_JDP):
            return True
        if not name.startswith("<frozen") and not {"jax", "jaxlib"} & {*path.parts}:
            return False
    return False


def line_of(error: BaseException) -> str:
    """Return the author's line of an error, see `source_of`."""
    frames = traceback.extract_tb(error.__traceback__)
    return innermost_line((frame.filename, frame.lineno or 0) for frame in reversed(frames))


# Frames are slow to read, and leaves share tracebacks.
@functools.lru_cache(maxsize=1024)
def _line(found: Any) -> str:
    return innermost_line((frame.file_name, frame.line_num) for frame in found.frames)


def innermost_line(frames: Iterable[tuple[str, int]]) -> str:
    """Return the author's line among frames, see `source_of`."""
    second_best = ""
    for file_name, number in frames:
        whose = whose_file(file_name)
        if whose == "author":
            return f"{Path(file_name).name}:{number}"
        if whose == "installed" and not second_best:
            second_best = f"{Path(file_name).name}:{number}"
    return second_best


@functools.cache
def whose_file(file_name: str) -> str:
    """Return "author", "installed", or "library" (never named) for a file."""
    path = Path(file_name)
    if path.is_relative_to(_JDP) or file_name.startswith("<frozen"):
        return "library"
    for folder in ("site-packages", "dist-packages"):
        if folder in path.parts:
            package = path.parts[path.parts.index(folder) + 1]
            return "library" if package in _LIBRARIES else "installed"
    return "library" if path.is_relative_to(_STANDARD) else "author"


# The global batch's weight, an output added by jdp.
WEIGHT = "weight"


class NamedTree:
    """A tree with leaf names, built lazily for errors.

    >>> NamedTree("metrics", {"loss": 1.0, "norms": (2.0, 3.0)}).paths
    ["metrics['loss']", "metrics['norms'][0]", "metrics['norms'][1]"]
    """

    def __init__(self, name: str, tree: Any):
        self.name = name
        self._tree = tree

    @functools.cached_property
    def paths(self) -> list[str]:
        """The leaves' paths, as authors write them."""
        named = jax.tree_util.tree_leaves_with_path(self._tree)
        return [self.name + jax.tree_util.keystr(path) for path, _ in named]


class Output(NamedTuple):
    """A step's output leaf; kind "own" is a metric before its mean."""

    tree: NamedTree
    position: int
    kind: str
    aval: Any

    @property
    def path(self) -> str:
        """The leaf's path, as authors write it."""
        return self.tree.paths[self.position]

    @property
    def type(self) -> str:
        """Dtype and shape, such as float32[3]."""
        return f"{self.aval.dtype}{list(self.aval.shape)}"


@jax.tree_util.register_static
@dataclass(frozen=True)
class TraceFindings:
    """A step trace's findings, a pytree without leaves.

    Attributes:
      marked: paths of gradients with a traced reduction.
      split: paths of gradients sent when ready.
      averaged: paths of gradients given to the author as means over ranks.
      weighed: the function that weights ranks, such as jdp.train_step, or empty.
      gathers: texts of arrays gathered by a sharded update.
      owned: texts of matrices that such an update computes on one rank.
      skips: gradient paths of each skippable update.
      gather_dtype: of narrow parameters in losses, or empty.
    """

    marked: frozenset[str]
    split: frozenset[str]
    weighed: frozenset[str]
    gradient_bytes: int
    gathers: tuple[str, ...] = ()
    owned: tuple[str, ...] = ()
    gather_dtype: str = ""
    group_bytes: int = 0
    integer_sums: tuple[str, ...] = ()
    skips: tuple[tuple[str, ...], ...] = ()
    averaged: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Traced:
    """A traced step; `mask` is the padding mask's position among `inputs`, or None."""

    spec: StepSpec
    platform: str
    inputs: Sequence[str]
    mask: int | None
    outputs: Sequence[Output]
    found: TraceFindings
