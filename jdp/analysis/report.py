"""What an analysis found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jdp.analysis.lattice import Class

if TYPE_CHECKING:
    from jdp.analysis.provenance import Provenance


@dataclass(frozen=True)
class Deadlock:
    """A collective that some ranks may skip while the others wait for them.

    Attributes:
      primitive: its name.
      axes: names of the mesh axes along which it communicates.
      control: what it stands under, "cond" or "while".
      source: the author's line, such as "train.py:41"; empty if no line is the author's.
      under: mesh axes along which ranks may not come to it.
      eqn: the equation.
      is_compilers: whether XLA would put the collective in, to split `primitive` over `axes`.
    """

    primitive: str
    axes: tuple[str, ...]
    control: str
    source: str
    under: frozenset[str] = frozenset()
    eqn: Any = field(default=None, compare=False, repr=False)
    is_compilers: bool = False


@dataclass(frozen=True)
class Marked:
    """A mark (`jdp.mark`), once for each equation.

    Attributes:
      kind, path, axes: as given to `mark`.
      value: class of the marked value. Where a function is called in several places, `reduced`
        holds the axes that were reduced in any of them.
      under: mesh axes along which ranks may not all come here.
      source: the author's line, as for `Deadlock`.
      eqn: the equation.
    """

    kind: str
    path: str
    axes: tuple[str, ...]
    value: Class
    under: frozenset[str]
    source: str
    eqn: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Report:
    """What is known of one `shard_map`.

    Attributes:
      outputs: class of each output of its body, before `out_specs` put the ranks' parts together.
      output_sources: the author's line that computed an output which varies along an axis that
        its `out_specs` does not name; empty for others.
      deadlocks: collectives under control flow on which ranks may differ.
      marks: the marks in it.
      opaque: primitives with a body that could not be opened.
      unknown: primitives that are on no list, and for each the author's line where it stands.
      used_inputs: for each input of its body, captured arrays first, whether an output or a side
        effect depends on it.
      refs: position and final class of each input that is a `jax.Ref`.
      back: for some axes, the way back from what differs along them.
    """

    outputs: tuple[Class, ...]
    output_sources: tuple[str, ...]
    deadlocks: tuple[Deadlock, ...]
    marks: tuple[Marked, ...]
    opaque: tuple[str, ...]
    unknown: tuple[tuple[str, str], ...]
    used_inputs: tuple[bool, ...]
    refs: tuple[tuple[int, Class], ...]
    back: Callable[[Iterable[str]], Provenance] = field(compare=False, repr=False)
