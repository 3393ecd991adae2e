"""Refusals of gradients with a wrong scale: already reduced, not divided, or not weighted."""

import math
from collections.abc import Collection, Iterator
from typing import Any

from jdp.analysis import eqn_axes
from jdp.analysis.backward_slice import Node
from jdp.analysis.findings import Marked
from jdp.analysis.marks import LOCAL, OWN_WEIGHT, SYNCED
from jdp.analysis.provenance import Provenance
from jdp.analysis.report import Report
from jdp.analysis.wording import shown
from jdp.error_codes import with_code


def refusals(eqn: Any, report: Report, names: Collection[str]) -> Iterator[str]:
    """Yield a text for each line that gets gradients with a wrong scale along `names`."""
    grouped: dict[tuple[str, str], list[str]] = {}
    beside = _lines_of_varying(report)
    for found in report.marks:
        if reason := _reason(eqn, report, found, names, beside):
            grouped.setdefault((found.source, reason), []).append(f"`{found.path or 'grads'}`")
    for (source, reason), paths in grouped.items():
        yield reason.format(leaves=shown(paths), where=source or "jdp")


def unweighted(report: Report, names: Collection[str]) -> Iterator[str]:
    """Yield a text for each line that gets gradients which were averaged without the weights."""
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
        came = "was handed to" if kind == SYNCED else "was reduced before it came to"
        mend = (
            "Write jdp.sync_gradients(grads) in its place, which weighs."
            if kind == SYNCED
            else "Hand over the local gradient, or write jdp.mean_over_ranks(x) where a mean "
            "multiplies a parameter: both weigh."
        )
        yield with_code(
            "JDP123",
            f"the gradient of {shown(leaves)} {came} {source or 'jdp'}, and {line or 'something'} "
            "averages it over the ranks as if all of them counted the same. The step has a "
            "weight=, and where ranks weigh differently, as in a padded batch, the mean by weight "
            f"is another gradient. {mend}",
        )


def reweighed(report: Report, averaged: Collection[str]) -> Iterator[str]:
    """Yield a text for each line that weighs the means of `jdp.value_and_grad` once more."""
    grouped: dict[str, list[str]] = {}
    for found in report.marks:
        if found.kind == OWN_WEIGHT and found.path in averaged and not _varies(found):
            grouped.setdefault(found.source, []).append(f"`grads{found.path}`")
    for source, paths in grouped.items():
        yield (
            f"the gradient {shown(paths)} is the mean over the ranks already where it comes to "
            f"{source or 'jdp.sync_gradients'}: with jdp.sharded(stage=2) or stage=3, "
            "jdp.value_and_grad averages by the weight of the step, and another weight= does "
            "nothing. Write jdp.train_step(weight=...), or jax.value_and_grad, which keeps "
            "gradients local."
        )


def means(report: Report, averaged: Collection[str]) -> dict[str, list[str]]:
    """Return, by line, the paths of gradients where all gradients of the line are already means."""
    by_line: dict[str, list[Marked]] = {}
    for found in report.marks:
        if found.kind == LOCAL and found.path not in averaged:
            by_line.setdefault(found.source, []).append(found)
    return {
        line: [found.path for found in marks]
        for line, marks in by_line.items()
        if all(_is_reduced(found) for found in marks)
        # A parameter that multiplies a mean is mostly a scalar, which costs little to send.
        and any(found.eqn.outvars[0].aval.size > 1 for found in marks)
    }


def times(eqn: Any, axes: Collection[str], collective: Any = None) -> str:
    """Return how many times too large a sum over some axes is, as a text."""
    groups = None if collective is None else eqn_axes.groups(collective)
    num_ranks = math.prod(eqn.params["mesh"].shape[name] for name in axes)
    num_ranks = num_ranks if groups is None else len(groups[0])
    return f"{num_ranks} times" if num_ranks > 1 else "n times (on n ranks)"


def repetition(eqn: Any, back: Provenance, node: Node | None, axes: Collection[str]) -> str:
    """Return a clause that says how many times too large a repeated sum is, and on which line."""
    found = None if node is None else back.repetition(node)
    collective, line = (None, "") if found is None else found
    return (
        f"is made from a sum that is {times(eqn, axes, collective)} too large: "
        f"{line or 'something'} sums over the ranks what every rank has the same. Leave the sum "
        "out, or write jdp.mean_over_ranks(x)."
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
        return with_code("JDP122", "the gradient of {leaves} that comes to {where} " + text)
    total, line = value.total & axes, ""
    if not total:
        if not (value.unclear | value.undivided) & axes:
            return ""
        # A user who reduces by hand reduces a whole tree. If a single gradient is reduced and
        # others are not, its parameter multiplies a sum over ranks, such as losses divided by
        # their number.
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
        "the gradient of {leaves} was handed to {where} as the mean, with synced=True, but "
        f"{line} sums it over the ranks, and jdp sees no division by their number. If the loss "
        "of each rank was divided by the rows of all ranks, the sum is right: write "
        "jdp.sync_gradients(grads, mean=False) in place of the sum, which says so. If it is "
        f"the mean over a rank's own rows, the sum is {too_large} the mean: write "
        "jdp.sync_gradients(grads) in place of the sum, which divides.",
    )


def _local_sum(line: str, too_large: str) -> str:
    """Return the text for a sum that comes as a local gradient; too_large: "" if unclear."""
    if too_large:
        return with_code(
            "JDP121",
            f"the gradient of {{leaves}} was reduced before it came to {{where}}: {line} sums it "
            f"over the ranks, which makes it {too_large} the mean if each rank's loss is the mean "
            "over its own rows, and to average it again does not change that. Hand over the local "
            "gradient, or write jdp.sync_gradients(grads) in place of the sum and then "
            "apply_gradients(grads, synced=True). If the loss of each rank was divided by the rows "
            "of all ranks, write jdp.sync_gradients(grads, mean=False) there.",
        )
    return with_code(
        "JDP121",
        f"the gradient of {{leaves}} was reduced before it came to {{where}}: {line} sums it over "
        "the ranks, and jdp cannot tell whether later divisions make it the mean. Hand "
        "over the local gradient, or write apply_gradients(grads, synced=True) if it is the mean.",
    )


def _undivided(report: Report, found: Marked, axes: Collection[str]) -> str:
    """Return the line of the nearest sum of gradients that may make a gradient too large.

    Sums of other values, such as counts and statistics, may have any scale.
    """
    if not axes:
        return ""
    back, local = report.back(axes, "undivided"), report.back(axes)
    node = back.of_mark(found.eqn)
    for _, line, operand in () if node is None else back.sums(node):
        if local.is_of_cotangent(operand):
            return line or "something"
    return ""


def _is_reduced(found: Marked) -> bool:
    return bool(found.value.reduced & set(found.axes)) and not _varies(found)


def _varies(found: Marked) -> bool:
    return bool(found.value.axes & set(found.axes))


def _lines_of_varying(report: Report) -> set[str]:
    """Return the lines to which gradients come that nobody has reduced yet."""
    local = (each for each in report.marks if each.kind == LOCAL)
    return {each.source for each in local if not each.value.axes.isdisjoint(each.axes)}
