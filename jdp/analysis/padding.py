"""Checks that steps weight rows by the padding mask."""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

from jdp.analysis import jaxprs
from jdp.analysis.dataflow import Forward, used_inputs
from jdp.analysis.diagnostics import WEIGHT, Traced, shown, source_of
from jdp.analysis.provenance import Report
from jdp.analysis.rules import collectives
from jdp.error_codes import with_code


class _Kind(IntEnum):
    CONSTANT = 0
    MASK = 1  # the mask and constants
    COUNT = 2  # sums of such values
    OTHER = 3


_SUMS = frozenset(("reduce_sum", "dot_general"))


def refusals(step: Any, report: Report, traced: Traced) -> Iterator[str]:
    """Refuse a step that averages over rows without the mask."""
    averages = any(
        out.kind in ("state", "metric") and out.tree.name != WEIGHT for out in traced.outputs
    )
    if traced.mask is None or not averages:  # jdp.evaluate takes the padding out of rows
        return
    if not used_inputs(jaxprs.mapped_body(step))[_place(report, traced)]:
        yield with_code(
            "JDP109",
            f"`{traced.inputs[traced.mask]}` marks padding, but the step does not read it, or "
            "only for its weight=, so repeated rows would count. Weight the loss with it, "
            '`(losses * batch["mask"]).sum() / batch["mask"].sum()`, and write `weight=lambda '
            'batch: batch["mask"].sum()` in the decorator; or drop the last batch: '
            'jdp.batches(..., tail="drop").',
        )


def warnings(step: Any, report: Report, traced: Traced) -> Iterator[str]:
    """Warn of means of ranks not weighted by the mask."""
    if traced.mask is None:
        return
    body, place = jaxprs.mapped_body(step), _place(report, traced)
    weighs = traced.spec.weight_fn is not None
    if weighs and _weight_reads(body, place, traced):
        return
    if lines := local_means(body, place):
        mask = traced.inputs[traced.mask]
        how = "with equal weight: in a padded batch"
        if weighs:
            how = "by a weight= that does not depend on that mask: with padding"
        yield with_code(
            "JDP129",
            f"the mean at {shown([line or 'a line of a library' for line in lines])} is over the "
            f"unpadded rows of one rank (`{mask}`), and ranks are then averaged {how} the result "
            "depends on the number of ranks, and is NaN where a rank has only padding. Write "
            f"`weight=lambda {traced.spec.argument(1)}: {mask}.sum()` in the decorator.",
        )


def _place(report: Report, traced: Traced) -> int:
    assert traced.mask is not None
    return report.num_inputs - len(traced.inputs) + traced.mask


def _weight_reads(body: Any, place: int, traced: Traced) -> bool:
    pass_over = Forward(any, lambda eqn, operands, _: None)
    depends = pass_over.outputs(body, [i == place for i in range(len(body.invars))])
    return any(
        found for out, found in zip(traced.outputs, depends, strict=True) if out.tree.name == WEIGHT
    )


def local_means(body: Any, mask: int) -> list[str]:
    """Return the lines that divide by a rank's number of unpadded rows, unless weighted by hand."""
    walk, inputs = _Walk(), [_Kind.OTHER] * len(body.invars)
    inputs[mask] = _Kind.MASK
    walk.follow(body, inputs)
    return [] if walk.is_weighed else list(walk.lines)


class _Walk:
    def __init__(self) -> None:
        self.lines: dict[str, None] = {}
        self.is_weighed = False

    def follow(self, jaxpr: Any, inputs: Sequence[_Kind]) -> list[_Kind]:
        kinds = dict(zip(jaxpr.invars, inputs, strict=True))

        def kind_of(atom: Any) -> _Kind:
            return _Kind.CONSTANT if jaxprs.is_literal(atom) else kinds.get(atom, _Kind.OTHER)

        for eqn in jaxpr.eqns:
            results = self._results(eqn, [kind_of(atom) for atom in eqn.invars])
            kinds.update(zip(eqn.outvars, results, strict=True))
        return [kind_of(atom) for atom in jaxpr.outvars]

    def _results(self, eqn: Any, operands: list[_Kind]) -> list[_Kind]:
        name, unknown = eqn.primitive.name, [_Kind.OTHER] * len(eqn.outvars)
        if name in jaxprs.CALLS:
            body = jaxprs.called_body(eqn)
            return unknown if body is None else self.follow(body, operands)
        if name == "scan":
            body, num_constants, num_carry = jaxprs.scan_parts(eqn)
            carry = [_Kind.OTHER] * num_carry
            rest = operands[num_constants + num_carry :]
            self.follow(body, [*operands[:num_constants], *carry, *rest])
            return unknown
        if name == "cond":
            for branch in jaxprs.branches(eqn):
                self.follow(branch, operands[1:])
            return unknown
        if name in collectives.RULES and name != "jdp_mark":
            self.is_weighed |= any(kind in (_Kind.MASK, _Kind.COUNT) for kind in operands)
            return unknown
        if jaxprs.bodies(eqn):
            return unknown
        if name == "div" and operands[1] == _Kind.COUNT:
            self.lines[source_of(eqn)] = None
        kind = max(operands, default=_Kind.CONSTANT)
        if name in _SUMS and kind == _Kind.MASK:
            kind = _Kind.COUNT
        return [kind] * len(eqn.outvars)
