"""Refusals of mistakes in a training loop that the user wrote with shard_map."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jdp.analysis import eqn_axes, reductions, unmatched_collectives
from jdp.analysis.divergent_branches import decision, without_skipped
from jdp.analysis.explanation import why
from jdp.analysis.report import Report
from jdp.analysis.wording import shown, spelled
from jdp.error_codes import with_code


def refusals(
    eqn: Any,
    report: Report,
    names: tuple[str, ...],
    paths: dict[int, str],
    inputs: Sequence[str],
) -> Iterator[str]:
    """Yield a text for each mistake in a shard_map over the axes `names`.

    Args:
      inputs: names of its inputs in the enclosing function, in order.
    """
    yield from unmatched_collectives.refusals(
        report, inputs, f"jax.lax.pmean(loss, {spelled(names)}) < 2"
    )
    yield from reductions.refusals(eqn, report, names)
    yield from _torn_outputs(eqn, report, names, paths, inputs)
    yield from _torn_refs(eqn, report, names)


def _torn_outputs(
    eqn: Any,
    report: Report,
    names: tuple[str, ...],
    paths: dict[int, str],
    inputs: Sequence[str],
) -> Iterator[str]:
    grouped: dict[tuple[str, ...], list[str]] = {}
    for i, spec in enumerate(eqn.params["out_specs"]):
        torn = report.outputs[i].axes.intersection(names) - eqn_axes.spec_axes(spec)
        if not torn:
            continue
        back = report.back(torn)
        node = back.of_output(i)
        if not without_skipped(back, {i: node}, report.deadlocks):
            continue
        made, line, mend = "computed", report.output_sources[i], "average"
        if decided := decision(back, node):
            made, line, mend, node = "decided", back.nearest_line(decided), "decide", decided
        leaf = f"`output{paths[i]}`" if i in paths else f"output {i} of the shard_map"
        aval, reason = eqn.outvars[i].aval, why([back.origin(node)], inputs)
        if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
            mend = "key"
        at = f" ({made} at {line})" if line else ""
        cause = at, spelled(torn), reason, mend
        grouped.setdefault(cause, []).append(f"{leaf} {aval.dtype}{list(aval.shape)}")
    for (at, along, reason, mend), leaves in grouped.items():
        yield with_code(
            "JDP101",
            f"{shown(leaves)}{at} may differ from rank to rank along {along}: {reason}. The "
            "out_specs say that all ranks have the same, so that one rank's value would be taken "
            "for that of all, and ranks would drift apart silently. "
            f"{_MENDS[mend].format(spelled(names))}",
        )


_MENDS = {
    "average": "Average it first, jax.lax.pmean(x, {0}), or let out_specs put the parts together, "
    "P({0}).",
    "key": "Return the key that is the same on every rank, and draw from "
    "jax.random.fold_in(key, jax.lax.axis_index({0})).",
    "decide": "Decide by what all ranks have the same, jax.lax.pmean(x, {0}) of the loss or the "
    "gradients.",
}


def _torn_refs(eqn: Any, report: Report, names: tuple[str, ...]) -> Iterator[str]:
    for i, value in report.refs:
        torn = value.axes.intersection(names) - eqn_axes.spec_axes(eqn.params["in_specs"][i])
        if torn:
            yield with_code(
                "JDP106",
                f"the Ref that is input {i} of the shard_map may hold different values along "
                f"{spelled(torn)} in the end, but its in_specs say that all ranks share it. "
                f"Average what is written, jax.lax.pmean(x, {spelled(names)}), or split it, "
                f"P({spelled(names)}).",
            )


def unknown_primitives(report: Report) -> Iterator[str]:
    """Yield a text for every primitive without a rule, whose results are assumed to differ."""
    for name, line in report.unknown:
        at = f" at {line}" if line else ""
        yield with_code(
            "JDP107",
            f"jdp does not know the primitive `{name}`{at} and assumes that its results differ "
            "from rank to rank. If equal operands give equal results on every rank, write "
            "jdp.declare_pure(primitive) before the first step. If not, average what it gives.",
        )
