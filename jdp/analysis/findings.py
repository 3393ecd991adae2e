"""Findings of an analysis: collectives that ranks may skip, and marks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jdp.analysis.abstract_value import AbstractValue


@dataclass(frozen=True)
class Deadlock:
    """A collective that some ranks may skip while other ranks wait for them.

    Attributes:
      primitive: name of the primitive.
      axes: names of the mesh axes along which it communicates.
      control: the control flow around it, "cond" or "while".
      source: the author's line, such as "train.py:41"; empty if no line is the author's.
      under: mesh axes along which ranks may skip it.
      eqn: the equation.
      is_compilers: whether XLA would add the collective, to split `primitive` over `axes`.
    """

    primitive: str
    axes: tuple[str, ...]
    control: str
    source: str
    under: frozenset[str] = frozenset()
    eqn: Any = field(default=None, compare=False, repr=False)
    is_compilers: bool = False


@dataclass(frozen=True, slots=True)
class Marked:
    """A mark (`marks.mark`), once for each equation.

    Attributes:
      kind, path, axes: as given to `mark`.
      value: class of the marked value. If a function is called in several places, or a loop has
        several rounds, `reduced` holds the axes that were reduced in any of them.
      under: mesh axes along which ranks may skip the mark.
      source: the author's line, as in `Deadlock`.
      eqn: the equation.
    """

    kind: str
    path: str
    axes: tuple[str, ...]
    value: AbstractValue
    under: frozenset[str]
    source: str
    eqn: Any = field(default=None, compare=False, repr=False)
