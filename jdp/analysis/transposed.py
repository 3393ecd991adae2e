"""Find collectives that JAX made by transposing those of a loss."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jdp.analysis import eqn_axes, jaxprs, source_lines
from jdp.analysis.forward import Forward
from jdp.analysis.marks import MICRO_BATCH, OWN_WEIGHT, WEIGHTED_SUM
from jdp.analysis.report import Report
from jdp.analysis.rules import RULES, collectives
from jdp.analysis.traced import Traced
from jdp.analysis.wording import shown
from jdp.error_codes import with_code

# A maximum has no cotangent, a mark does not communicate, and `jdp.sharded_embedding` weights the
# cotangents that it adds up.
_HARMLESS = frozenset(
    "axis_index jdp_add_rows jdp_add_rows_native jdp_mark jdp_take_rows jdp_take_rows_native pmax "
    "pmin unreduced_pmax unreduced_pmin".split()
)
_COLLECTIVES = frozenset(collectives.RULES) - _HARMLESS
_TRANSPOSE_OF = {
    "all_gather": "psum_scatter",
    "jdp_all_gather": "psum_scatter",
    "jdp_all_reduce": "collectives.native",
    "jdp_all_to_all": "all_to_all",
    "jdp_reduce_scatter": "all_gather",
    "psum_invariant": "psum",
    "reduce_scatter": "all_gather",
}


class _Differentiated(NamedTuple):
    """A collective that adds up cotangents.

    Attributes:
      name: name of the author's collective, before the transposition; `MICRO_BATCH` if it is jdp's
        sum in a micro-batch, which weights the ranks, and was transposed from outside the
        micro-batch.
      source: the author's line; empty if no line is the author's.
    """

    name: str
    source: str


def refusals(step: Any, report: Report, traced: Traced) -> Iterator[str]:
    """Yield a text for every transposed collective that adds up unweighted cotangents."""
    axes = frozenset(traced.spec.axis_name)
    if any(found.kind == OWN_WEIGHT for found in report.marks):
        for found in _find_before(step.params["jaxpr"], axes, OWN_WEIGHT):
            where = f" at {found.source}" if found.source else ""
            yield with_code(
                "JDP124",
                f"`{found.name}`{where} is differentiated, and jdp.sync_gradients(weight=) weighs "
                "that gradient by something else than the step: the cotangents of the ranks were "
                "added up by other weights, and the gradient would be wrong. Write "
                "jdp.train_step(weight=...), and leave it out of jdp.sync_gradients.",
            )
    if not traced.found.weighed:
        return
    by = shown([f"{name}(weight=)" for name in sorted(traced.found.weighed)])
    for found in _find(step.params["jaxpr"], axes):
        where = f" at {found.source}" if found.source else ""
        if found.name == MICRO_BATCH:
            yield with_code(
                "JDP124",
                f"a sum or mean over ranks{where} stands in the micro-batches of a gradient "
                "and is differentiated from outside of them, too, where ranks weigh differently: "
                "that gradient would be wrong. Leave accumulate= and micro_batch_rows= out of the "
                "inner gradient.",
            )
            continue
        yield with_code(
            "JDP124",
            f"`{found.name}`{where} is differentiated, and {by} weighs the ranks: JAX adds up the "
            "cotangents of all ranks without their weights, and the gradient would be wrong where "
            "these differ. Write jdp.mean_over_ranks(x) or jdp.sum_over_ranks(x) in its place, or "
            "leave out weight= and return the loss "
            '`(losses * batch["mask"]).mean() / jdp.mean_over_ranks(batch["mask"].mean())`, '
            "whose mean over ranks is that of all rows.",
        )


def _find(jaxpr: Any, axes: frozenset[str]) -> list[_Differentiated]:
    """Return the transposed collectives over one of `axes` that do not weight the ranks."""
    found: dict[_Differentiated, None] = {}
    for eqn, around in jaxprs.placed_equations(jaxpr, _Place(), _Place.within):
        here = around.within(eqn)
        if here.is_transposed and _communicates(eqn, axes):
            if not here.is_ours:
                found[_Differentiated(_name(eqn), here.line)] = None
            elif here.in_micro_batch:
                found[_Differentiated(MICRO_BATCH, here.line)] = None
    return list(found)


def _find_before(jaxpr: Any, axes: frozenset[str], kind: str) -> list[_Differentiated]:
    """Return the transposed collectives over one of `axes` on which a mark of `kind` depends."""
    found: dict[_Differentiated, None] = {}

    def visit(eqn: Any, operands: list[Any], around: _Place) -> list[Any] | None:
        here = around.within(eqn)
        if here.is_transposed and _communicates(eqn, axes):
            causes = _join([*operands, (_Differentiated(_name(eqn), here.line),)])
            return [causes] * len(eqn.outvars)
        if eqn.primitive.name == "jdp_mark" and eqn.params["kind"] == kind:
            found.update(dict.fromkeys(operands[0]))
        return None

    body = jaxprs.opened(jaxpr)
    Forward(_join, visit, _Place.within).outputs(body, [()] * len(body.invars), _Place())
    return list(found)


def _join(causes: Sequence[tuple[_Differentiated, ...]]) -> tuple[_Differentiated, ...]:
    return tuple(dict.fromkeys(itertools.chain(*causes)))


class _Place(NamedTuple):
    """The context of an equation.

    Attributes:
      is_transposed: whether JAX made it by transposing another equation.
      is_ours: whether it belongs to jdp's sum that weights the ranks.
      in_micro_batch: whether it is in a micro-batch that was transposed as a whole.
      line: the author's line.
    """

    is_transposed: bool = False
    is_ours: bool = False
    in_micro_batch: bool = False
    line: str = ""

    def within(self, eqn: Any) -> "_Place":
        # The name stack of an equation shows whether it was transposed, and whether it belongs to
        # the part of the forward pass that `jax.checkpoint` computes again.
        stack = eqn.source_info.name_stack.stack
        names = {part.name for part in stack if type(part).__name__ == "Scope"}
        transforms = {part.name for part in stack if type(part).__name__ == "Transform"}
        goes_on = self.is_transposed and "rematted_computation" not in names
        is_transposed = goes_on or "transpose" in transforms
        is_micro_batch = is_transposed and eqn.params.get("name") == MICRO_BATCH
        return _Place(
            is_transposed,
            self.is_ours or WEIGHTED_SUM in names,
            self.in_micro_batch or is_micro_batch,
            source_lines.source(eqn) or self.line,
        )


def _name(eqn: Any) -> str:
    return _TRANSPOSE_OF.get(eqn.primitive.name, eqn.primitive.name)


def _communicates(eqn: Any, axes: frozenset[str]) -> bool:
    name = eqn.primitive.name
    if name in _COLLECTIVES:
        return not axes.isdisjoint(eqn_axes.collective_axes(eqn))
    return name not in RULES and not axes.isdisjoint(eqn_axes.named_axes(eqn))
