"""Refusals of wrong scales: reduced twice, not divided, not weighted."""

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jdp.analysis import diagnostics, jaxprs
from jdp.analysis.backward_slice import Node
from jdp.analysis.dataflow import Forward
from jdp.analysis.diagnostics import WEIGHT, Output, Traced, shown
from jdp.analysis.marks import LOCAL, LOCAL_UPDATE, MICRO_BATCH, OWN_WEIGHT, SYNCED, WEIGHTED_SUM
from jdp.analysis.provenance import Provenance, Report
from jdp.analysis.records import Marked
from jdp.analysis.rules import RULES, collectives
from jdp.error_codes import with_code


def reduction_refusals(eqn: Any, report: Report, names: Collection[str]) -> Iterator[str]:
    """Refuse each line that gets gradients with a wrong scale."""
    grouped: dict[tuple[str, str], list[str]] = {}
    beside = _lines_of_varying(report)
    for found in report.marks:
        if reason := _reason(eqn, report, found, names, beside):
            grouped.setdefault((found.source, reason), []).append(f"`{found.path or 'grads'}`")
    for (source, reason), paths in grouped.items():
        yield reason.format(leaves=shown(paths), where=source or "jdp")


def unweighted(report: Report, names: Collection[str]) -> Iterator[str]:
    """Refuse each line that gets gradients averaged without the weights."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for found in report.marks:
        axes = found.value.even & (frozenset(found.axes) | frozenset(names))
        if found.kind in (LOCAL, SYNCED) and axes and not found.value.zero:
            back = report.back(axes)
            node = back.of_mark(found.eqn)
            line = "" if node is None else back.reduction(node)
            leaves = grouped.setdefault((found.kind, found.source, line), [])
            leaves.append(f"`{found.path or 'grads'}`")
    for (kind, source, line), leaves in grouped.items():
        came = "was handed to" if kind == SYNCED else "was reduced before it reached"
        mend = (
            "Write jdp.sync_gradients(grads) instead, which weights."
            if kind == SYNCED
            else "Pass the local gradient, or write jdp.mean_over_ranks(x) where a mean "
            "multiplies a parameter: both weight."
        )
        yield with_code(
            "JDP123",
            f"the gradient of {shown(leaves)} {came} {source or 'jdp'}, and "
            f"{line or 'something'} averages it over ranks with equal weight. The step has a "
            f"weight=, so in a padded batch the weighted mean is another gradient. {mend}",
        )


def reweighed(report: Report, averaged: Collection[str]) -> Iterator[str]:
    """Refuse each line that weights the means of `jdp.value_and_grad` again."""
    grouped: dict[str, list[str]] = {}
    for found in report.marks:
        if found.kind == OWN_WEIGHT and found.path in averaged and not _varies(found):
            grouped.setdefault(found.source, []).append(f"`grads{found.path}`")
    for source, paths in grouped.items():
        yield (
            f"the gradient {shown(paths)} is already the mean over ranks at "
            f"{source or 'jdp.sync_gradients'}. With jdp.sharded(stage=2) or stage=3, "
            "jdp.value_and_grad averages by the weight of the step, so another weight= has no "
            "effect. Write jdp.train_step(weight=...), or jax.value_and_grad, which keeps "
            "gradients local."
        )


def means(report: Report, averaged: Collection[str], kind: str = LOCAL) -> dict[str, list[str]]:
    """Return each line's gradients if it gets only means."""
    by_line: dict[str, list[Marked]] = {}
    for found in report.marks:
        if found.kind == kind and found.path not in averaged:
            by_line.setdefault(found.source, []).append(found)
    return {
        line: [found.path for found in marks]
        for line, marks in by_line.items()
        if all(found.value.reduced & set(found.axes) and not _varies(found) for found in marks)
        # A parameter that multiplies a mean is mostly a scalar, cheap to send.
        and any(found.eqn.outvars[0].aval.size > 1 for found in marks)
    }


def reduced_before(why: str) -> str:
    """Refuse gradients of `jdp.local_sgd` and `jdp.diloco` that are equal on every rank."""
    return with_code(
        "JDP219",
        f"jdp.local_sgd and jdp.diloco update by this rank's own gradients, but {why}. All ranks "
        "would compute the same update, and communicate in every step. Write grads = "
        "jax.grad(loss_fn)(state.params, batch), and pass them to state.apply_gradients(grads).",
    )


def times(eqn: Any, axes: Collection[str], collective: Any = None) -> str:
    """Return how many times too large a sum is."""
    groups = None if collective is None else jaxprs.axis_groups(collective)
    num_ranks = math.prod(eqn.params["mesh"].shape[name] for name in axes)
    num_ranks = num_ranks if groups is None else len(groups[0])
    return f"{num_ranks} times" if num_ranks > 1 else "n times (on n ranks)"


def repetition(eqn: Any, back: Provenance, node: Node | None, axes: Collection[str]) -> str:
    """Return a clause with a repeated sum's factor and line."""
    found = None if node is None else back.repetition(node)
    collective, line = (None, "") if found is None else found
    return (
        f"is made from a sum that is {times(eqn, axes, collective)} too large: "
        f"{line or 'something'} sums equal values over the ranks. Remove the sum, or write "
        "jdp.mean_over_ranks(x)."
    )


def _reason(
    eqn: Any, report: Report, found: Marked, names: Collection[str], beside: Collection[str]
) -> str:
    value = found.value
    axes = frozenset(found.axes) | frozenset(names)
    if found.kind not in (LOCAL, SYNCED) or value.zero:
        return ""
    if repeated := value.repeated & axes:
        back = report.back(axes)
        text = repetition(eqn, back, back.of_mark(found.eqn), repeated)
        return with_code("JDP122", "the gradient of {leaves} that reaches {where} " + text)
    total, line = value.total & axes, ""
    if not total:
        if not (value.unclear | value.undivided) & axes:
            return ""
        # By hand a user reduces a whole tree; a single reduced gradient is of a parameter that
        # multiplies a sum over ranks.
        if found.kind == LOCAL and found.source in beside:
            return ""
        line = _undivided(report, found, value.undivided & axes)
        if line:
            total = value.undivided & axes
        elif found.kind == SYNCED or not value.unclear & axes:
            return ""
    back = report.back(axes)
    node = back.of_mark(found.eqn)
    line = line or ("" if node is None else back.reduction(node)) or "something"
    too_large = times(eqn, total)
    if found.kind == SYNCED:
        return _synced_sum(line, too_large)
    return _local_sum(line, too_large if total else "")


def _synced_sum(line: str, too_large: str) -> str:
    return with_code(
        "JDP121",
        "the gradient of {leaves} was passed to {where} as the mean, with synced=True, but "
        f"{line} sums it over ranks, and jdp sees no division by their number. If each rank "
        "divides its loss by the rows of all ranks, the sum is right: write "
        "jdp.sync_gradients(grads, mean=False) instead of the sum. If each rank's loss is a mean "
        f"over its own rows, the sum is {too_large} the mean: write jdp.sync_gradients(grads) "
        "instead of the sum.",
    )


def _local_sum(line: str, too_large: str) -> str:
    """Refuse a sum of local gradients; too_large: "" if unclear."""
    if too_large:
        return with_code(
            "JDP121",
            f"the gradient of {{leaves}} was reduced before it reached {{where}}: {line} sums it "
            "over ranks. If each rank's loss is a mean over its own rows, the sum is "
            f"{too_large} the mean, also after a second average. Pass the local gradient, or "
            "write jdp.sync_gradients(grads) instead of the sum and then apply_gradients(grads, "
            "synced=True). If each rank divides its loss by the rows of all ranks, write "
            "jdp.sync_gradients(grads, mean=False) there.",
        )
    return with_code(
        "JDP121",
        f"the gradient of {{leaves}} was reduced before it reached {{where}}: {line} sums it "
        "over ranks, and later divisions may or may not make it the mean. Pass the local "
        "gradient, or write apply_gradients(grads, synced=True) if it is the mean.",
    )


def _undivided(report: Report, found: Marked, axes: Collection[str]) -> str:
    """Return the line of the nearest sum that may make a gradient too large, except counts."""
    if not axes:
        return ""
    back, local = report.back(axes, "undivided"), report.back(axes)
    node = back.of_mark(found.eqn)
    for _, line, operand in () if node is None else back.sums(node):
        if local.is_of_cotangent(operand):
            return line or "something"
    return ""


def _varies(found: Marked) -> bool:
    return bool(found.value.axes & set(found.axes))


def _lines_of_varying(report: Report) -> set[str]:
    local = (each for each in report.marks if each.kind == LOCAL)
    return {each.source for each in local if not each.value.axes.isdisjoint(each.axes)}


# They have no cotangent, do not communicate, or weight cotangents.
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
      name: before the transposition; `MICRO_BATCH` for jdp's weighted sum in a micro-batch
        transposed from outside.
    """

    name: str
    source: str


def transpose_refusals(step: Any, report: Report, traced: Traced) -> Iterator[str]:
    """Refuse each transposed collective that adds up unweighted cotangents."""
    axes = frozenset(traced.spec.axis_name)
    if any(found.kind == OWN_WEIGHT for found in report.marks):
        for found in _find_before(step.params["jaxpr"], axes, OWN_WEIGHT):
            where = f" at {found.source}" if found.source else ""
            yield with_code(
                "JDP124",
                f"`{found.name}`{where} is differentiated, and jdp.sync_gradients(weight=) "
                "weights that gradient differently from the step. The cotangents of the ranks "
                "have other weights, so the gradient would be wrong. Write "
                "jdp.train_step(weight=...), and remove it from jdp.sync_gradients.",
            )
    if not traced.found.weighed:
        return
    by = shown([f"{name}(weight=)" for name in sorted(traced.found.weighed)])
    for found in _find(step.params["jaxpr"], axes):
        where = f" at {found.source}" if found.source else ""
        if found.name == MICRO_BATCH:
            yield with_code(
                "JDP124",
                f"a sum or mean over ranks{where} is in the micro-batches of a gradient and is "
                "also differentiated from outside, and ranks have different weights. That "
                "gradient would be wrong. Remove accumulate= and micro_batch_rows= from the "
                "inner gradient.",
            )
            continue
        yield with_code(
            "JDP124",
            f"`{found.name}`{where} is differentiated, and {by} weights the ranks. JAX sums the "
            "cotangents of all ranks unweighted, so the gradient would be wrong where weights "
            "differ. Write jdp.mean_over_ranks(x) or jdp.sum_over_ranks(x) instead, or remove "
            'weight= and return the loss `(losses * batch["mask"]).mean() / '
            'jdp.mean_over_ranks(batch["mask"].mean())`, whose mean over ranks is that of all '
            "rows.",
        )


def _find(jaxpr: Any, axes: frozenset[str]) -> list[_Differentiated]:
    """Find transposed collectives that do not weight ranks."""
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
    """An equation's context; `in_micro_batch`: a micro-batch transposed as a whole."""

    is_transposed: bool = False
    is_ours: bool = False
    in_micro_batch: bool = False
    line: str = ""

    def within(self, eqn: Any) -> "_Place":
        # It shows a transposition, and recomputation by `jax.checkpoint`.
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
            diagnostics.source_of(eqn) or self.line,
        )


def _name(eqn: Any) -> str:
    return _TRANSPOSE_OF.get(eqn.primitive.name, eqn.primitive.name)


def _communicates(eqn: Any, axes: frozenset[str]) -> bool:
    name = eqn.primitive.name
    if name in _COLLECTIVES:
        return not axes.isdisjoint(jaxprs.collective_axes(eqn))
    return name not in RULES and not axes.isdisjoint(jaxprs.named_axes(eqn))


def refusals(step: Any, report: Report, traced: Traced) -> Iterator[str]:
    """Refuse gradients and states with a wrong scale."""
    yield from reduction_refusals(step, report, traced.spec.axis_name)
    yield from reweighed(report, traced.found.averaged)
    for paths in means(report, (), LOCAL_UPDATE).values():
        named = shown(f"`grads{path}`" for path in paths)
        yield reduced_before(f"{named} is reduced over the ranks already")
    if _has_weight(traced):
        yield from unweighted(report, traced.spec.axis_name)
    if not any(found.value.repeated for found in report.marks):
        # A too large gradient explains a too large state.
        yield from _repeated(step, report, traced, _states(traced))


def warnings(step: Any, report: Report, traced: Traced) -> Iterator[str]:
    """Warn of metrics and states of probably unintended scale."""
    yield from _repeated(step, report, traced, metrics(traced))
    yield from _duplicated(step, report, traced)
    if _has_weight(traced):
        yield from _unweighted(report, traced, _states(traced) | metrics(traced))


def _has_weight(traced: Traced) -> bool:
    # jdp.value_and_grad weights only its micro-batches.
    return "jdp.train_step" in traced.found.weighed


def _states(traced: Traced) -> dict[int, Output]:
    return {i: output for i, output in enumerate(traced.outputs) if output.kind == "state"}


def metrics(traced: Traced) -> dict[int, Output]:
    """Return the metrics by position before the mean."""
    own = (i for i, output in enumerate(traced.outputs) if output.kind == "own")
    reported = [
        (i, each)
        for i, each in enumerate(traced.outputs)
        if each.kind == "metric" and each.tree.name != WEIGHT
    ]
    return {next(own) if _is_averaged(each) else i: each for i, each in reported}


def _is_averaged(output: Output) -> bool:
    return not output.aval.shape and jnp.issubdtype(output.aval.dtype, jnp.floating)


def _repeated(
    step: Any, report: Report, traced: Traced, outputs: dict[int, Output]
) -> Iterator[str]:
    grouped: dict[str, list[str]] = {}
    for i, output in outputs.items():
        value = report.outputs[i]
        axes = value.repeated & set(traced.spec.axis_name)
        if axes and not value.axes:
            back = report.back(axes)
            text = repetition(step, back, back.of_output(i), axes)
            grouped.setdefault(text, []).append(f"`{output.path}`")
    for text, leaves in grouped.items():
        yield with_code("JDP122", f"{shown(leaves)} {text}")


def _duplicated(step: Any, report: Report, traced: Traced) -> Iterator[str]:
    grouped: dict[tuple[str, str], list[str]] = {}
    for i, output in _states(traced).items():
        if axes := report.outputs[i].duplicated & set(traced.spec.axis_name):
            back = report.back(axes, "duplicated")
            for collective, line, _ in back.sums(back.of_output(i)):
                many = times(step, axes, collective)
                grouped.setdefault((line, many), []).append(f"`{output.path}`")
                break
    for (line, many), leaves in grouped.items():
        yield with_code(
            "JDP122",
            f"{shown(leaves)} depends on a sum that is {many} too large: {line or 'something'} "
            "sums equal values over the ranks. Write jdp.mean_over_ranks(x), or "
            "lax.axis_size(axis) * x if you want the sum.",
        )


def _unweighted(report: Report, traced: Traced, outputs: dict[int, Output]) -> Iterator[str]:
    grouped: dict[str, list[str]] = {}
    for i, output in outputs.items():
        if axes := report.outputs[i].even & set(traced.spec.axis_name):
            back = report.back(axes)
            grouped.setdefault(back.reduction(back.of_output(i)), []).append(f"`{output.path}`")
    for line, leaves in grouped.items():
        yield with_code(
            "JDP123",
            f"{shown(leaves)} is an unweighted mean over ranks "
            f"({line or 'it is divided by their number'}), but this step has a weight=, so a "
            "rank of padding counts as much as the others. Write jdp.mean_over_ranks(x), which "
            "weights, or jdp.mean_over_ranks(x, weight=1.0) for the unweighted mean.",
        )
