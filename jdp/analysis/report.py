"""What an analysis found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from jdp.analysis.classes import Class
from jdp.analysis.findings import Deadlock, Marked
from jdp.analysis.provenance import Provenance


@dataclass(frozen=True)
class Report:
    """The result of the analysis of one `shard_map`.

    Attributes:
      outputs: class of each output of its body, before `out_specs` put the ranks' parts together.
      output_sources: the author's line that computed an output which varies along an axis that
        its `out_specs` does not name; empty for others.
      deadlocks: collectives under control flow on which ranks may differ.
      marks: the marks in it.
      opaque: primitives whose body could not be opened.
      unknown: primitives that are on no list, and for each the author's line where it stands.
      num_inputs: number of inputs of its body; the captured arrays come first.
      refs: position and final class of each input that is a `jax.Ref`.
      back: for some axes, the way back from what differs along them; or from what is "undivided"
        or "duplicated", see `Class`.
    """

    outputs: tuple[Class, ...]
    output_sources: tuple[str, ...]
    deadlocks: tuple[Deadlock, ...]
    marks: tuple[Marked, ...]
    opaque: tuple[str, ...]
    unknown: tuple[tuple[str, str], ...]
    num_inputs: int
    refs: tuple[tuple[int, Class], ...]
    back: Callable[..., Provenance] = field(compare=False, repr=False)
