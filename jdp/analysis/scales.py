"""Refusals of values that are n times too large or averaged without the weight of the step."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from jdp.analysis import Report, reductions, shown
from jdp.analysis.traced import WEIGHT, Output, Traced
from jdp.error_codes import with_code


def refusals(step: Any, report: Report, traced: Traced) -> Iterator[str]:
    """Yield a text for gradients and states that have a wrong scale."""
    yield from reductions.refusals(step, report, traced.spec.axis_name)
    yield from reductions.reweighed(report, traced.found.averaged)
    if _has_weight(traced):
        yield from reductions.unweighted(report, traced.spec.axis_name)
    if not any(found.value.repeated for found in report.marks):
        # If a gradient is too large, the state is too, and one text suffices.
        yield from _repeated(step, report, traced, _states(traced))


def warnings(step: Any, report: Report, traced: Traced) -> Iterator[str]:
    """Yield a text for metrics and states whose scale is probably not intended."""
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
    """Return the metrics by the positions of their own values, before they are averaged."""
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
            text = reductions.repetition(step, back, back.of_output(i), axes)
            grouped.setdefault(text, []).append(f"`{output.path}`")
    for text, leaves in grouped.items():
        yield with_code("JDP122", f"{shown(leaves)} {text}")


def _duplicated(step: Any, report: Report, traced: Traced) -> Iterator[str]:
    grouped: dict[tuple[str, str], list[str]] = {}
    for i, output in _states(traced).items():
        if axes := report.outputs[i].duplicated & set(traced.spec.axis_name):
            back = report.back(axes, "duplicated")
            for collective, line, _ in back.sums(back.of_output(i)):
                many = reductions.times(step, axes, collective)
                grouped.setdefault((line, many), []).append(f"`{output.path}`")
                break
    for (line, many), leaves in grouped.items():
        yield with_code(
            "JDP122",
            f"{shown(leaves)} depends on a sum that is {many} too large: {line or 'something'} "
            "sums over the ranks what every rank has the same. Write jdp.mean_over_ranks(x), or "
            "lax.axis_size(axis) * x if that is meant.",
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
            f"{shown(leaves)} is a mean over the ranks in which all of them count the same "
            f"({line or 'it is divided by their number'}), and this step has a weight=: a rank of "
            "padding counts as much as the others. Write jdp.mean_over_ranks(x), which weighs, or "
            "jdp.mean_over_ranks(x, weight=1.0) if that is meant.",
        )
