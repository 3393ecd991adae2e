"""The result of an analysis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from jdp.analysis.abstract_value import AbstractValue
from jdp.analysis.findings import Deadlock, Marked
from jdp.analysis.provenance import Provenance


@dataclass(frozen=True)
class Report:
    """The result of the analysis of one `shard_map`.

    Attributes:
      outputs: class of each output of its body, before `out_specs` combines the ranks' parts.
      output_sources: the author's line that computed an output, for outputs that vary along an axis
        which `out_specs` does not name; empty for the others.
      deadlocks: collectives under control flow on which ranks may differ.
      marks: the marks in its body.
      opaque: primitives whose body jdp could not open.
      unknown: primitives without a rule, each with the author's line on which it stands.
      num_inputs: number of inputs of its body; the captured arrays come first.
      refs: position and final class of each input that is a `jax.Ref`.
      back: returns the way back for some axes: from the values that vary along them, or that are
        "undivided" or "duplicated", see `AbstractValue`.
    """

    outputs: tuple[AbstractValue, ...]
    output_sources: tuple[str, ...]
    deadlocks: tuple[Deadlock, ...]
    marks: tuple[Marked, ...]
    opaque: tuple[str, ...]
    unknown: tuple[tuple[str, str], ...]
    num_inputs: int
    refs: tuple[tuple[int, AbstractValue], ...]
    back: Callable[..., Provenance] = field(compare=False, repr=False)
