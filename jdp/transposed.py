"""Collectives of a traced program that JAX made by transposing those of a loss."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jdp.uniformity import collectives, jaxprs, source, walk
from jdp.weighted_sum import NAME

# No cotangent goes through a maximum, and these do not communicate.
_HARMLESS = frozenset("axis_index jdp_mark pmax pmin unreduced_pmax unreduced_pmin".split())
_COLLECTIVES = frozenset(collectives.RULES) - _HARMLESS
_TRANSPOSE_OF = {
    "all_gather": "psum_scatter",
    "jdp_all_reduce": "collectives.native",
    "psum_invariant": "psum",
    "reduce_scatter": "all_gather",
}


class Found(NamedTuple):
    """A collective that adds up cotangents.

    Attributes:
      name: of the author's collective, of which it is the transpose.
      source: the author's line; empty if no line is the author's.
    """

    name: str
    source: str


def find(jaxpr: Any, axes: frozenset[str]) -> list[Found]:
    """Find the transposed collectives over one of `axes` that do not weigh the ranks.

    The name stack of an equation says that it was transposed, and also which part of that is the
    forward pass that `jax.checkpoint` computes again.

    Args:
      jaxpr: of a rank.
      axes: names of the axes along which ranks weigh differently.
    """
    return list(dict.fromkeys(_find(jaxprs.opened(jaxpr), axes, is_transposed=False, around="")))


def _find(jaxpr: Any, axes: frozenset[str], *, is_transposed: bool, around: str) -> Iterator[Found]:
    for eqn in jaxpr.eqns:
        stack = eqn.source_info.name_stack.stack
        names = {part.name for part in stack if type(part).__name__ == "Scope"}
        transforms = {part.name for part in stack if type(part).__name__ == "Transform"}
        if NAME in names:
            continue
        here = is_transposed and "rematted_computation" not in names or "transpose" in transforms
        line = source.source(eqn) or around
        if here and _communicates(eqn, axes):
            yield Found(_TRANSPOSE_OF.get(eqn.primitive.name, eqn.primitive.name), line)
        for body in jaxprs.bodies(eqn):
            yield from _find(body, axes, is_transposed=here, around=line)


def _communicates(eqn: Any, axes: frozenset[str]) -> bool:
    name = eqn.primitive.name
    if name in _COLLECTIVES:
        return not axes.isdisjoint(jaxprs.collective_axes(eqn))
    return name not in walk.RULES and not axes.isdisjoint(jaxprs.named_axes(eqn))
