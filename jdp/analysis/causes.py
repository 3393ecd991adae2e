"""Refusals of differing values."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jdp import pytrees
from jdp.analysis import Node, Origin, Provenance, shown
from jdp.analysis.diagnostics import Output, Traced, spelled
from jdp.analysis.marks import PART, SHARED
from jdp.analysis.provenance import Report, decision, since, why, without_skipped
from jdp.analysis.records import Marked
from jdp.error_codes import with_code


def unmatched_refusals(report: Report, inputs: Sequence[str], uniform: str) -> Iterator[str]:
    """Refuse each collective skipped by some ranks."""
    for found in report.deadlocks:
        at = f" at {found.source}" if found.source else ""
        under = f"runs under a `{found.control}` whose predicate may differ from rank to rank"
        if found.is_compilers:
            yield with_code(
                "JDP104",
                f"`{found.primitive}`{at} {under}, and the mesh axis {spelled(found.axes)} is left "
                "to the compiler. If that splits the operand, XLA communicates between all devices "
                "there, and ranks that skip it leave the others waiting forever. Make the "
                f"predicate the same first, `{uniform}`, or compute both cases and write "
                "jnp.where(predicate, a, b).",
            )
            continue
        back = report.back(found.under)
        node = back.of_predicate(found.eqn)
        reason = "" if node is None else since(back.origin(node), inputs)
        yield with_code(
            "JDP103",
            f"`{found.primitive}`{at} over {spelled(found.axes)} {under}{reason}; ranks that skip "
            "it leave the others waiting forever. Make the predicate the same first, for instance "
            f"`{uniform}`.",
        )


# Computed for the new parameters, not from them.
_ON_THE_WAY = re.compile(r"opt|moment|trace|velocity")


def refusals(report: Report, traced: Traced) -> Iterator[str]:
    """Refuse each group of wrongly differing values."""
    yield from _layers(report, traced)
    outputs = [*_outputs(report, traced)]
    yield from outputs or _parts(report, traced)
    yield from _refs(report, traced)


def input_names(report: Report, traced: Traced) -> list[str]:
    """Return input names, captured arrays first."""
    return ["a captured array"] * (report.num_inputs - len(traced.inputs)) + list(traced.inputs)


def _layers(report: Report, traced: Traced) -> Iterator[str]:
    for found, sources in _differing(report, traced, SHARED):
        yield with_code(
            "JDP105",
            f"`params{found.path}` of jdp.scan_layers at {found.source} may differ from rank to "
            f"rank{sources}, but its gradient would be the mean of all ranks. Pass as params "
            "only values that every rank shares, and the rest as xs=; with jdp.local_sgd or "
            "jdp.diloco write late=False.",
        )


def _parts(report: Report, traced: Traced) -> Iterator[str]:
    for found, sources in _differing(report, traced, PART):
        yield with_code(
            "JDP114",
            f"the update of an optimizer in jdp.sharded, at {found.source or 'jdp'}, gathers "
            f"parts from all ranks, and a part may differ from rank to rank{sources}. Each rank "
            f"would then mix its own rows into its shard of the state. {_STATE}",
        )


def _differing(report: Report, traced: Traced, kind: str) -> Iterator[tuple[Marked, str]]:
    for found in report.marks:
        axes = found.value.axes & set(found.axes)
        if found.kind == kind and axes:
            back = report.back(axes)
            node = back.of_mark(found.eqn)
            known = input_names(report, traced)
            yield found, "" if node is None else since(back.origin(node), known)


def _outputs(report: Report, traced: Traced) -> Iterator[str]:
    grouped: dict[Any, list[tuple[str, Origin]]] = {}
    inputs = input_names(report, traced)
    for i, (back, node) in _torn(report, traced).items():
        output, axes = traced.outputs[i], report.outputs[i].axes
        leaf, along, line = f"`{output.path}`", "from rank to rank", report.output_sources[i]
        origin = back.origin(node)
        if output.kind == "metric":
            leaf, advice = f"{leaf} {output.type}", _METRIC
        elif not axes & set(traced.spec.axis_name):
            along, advice = f"along the mesh axis {', '.join(map(repr, sorted(axes)))}", _OTHER_AXIS
        elif origin.sources == (_OWN_KEY,) and not _is_key(output):
            advice = _DRAWN
        elif decided := decision(back, node):
            line, origin, advice = back.nearest_line(decided), back.origin(decided), _DECISION
        else:
            advice = _advice(output)
        if output.kind == "state" and _reads(origin, inputs, ".opt_state.own_params."):
            advice = f"{advice} {_OF_RANK}"
        key = line, origin.line, frozenset(origin.sources), along, advice
        grouped.setdefault(key, []).append((leaf, origin))
    for (source, *_, along, advice), found in grouped.items():
        leaves, origins = zip(*found, strict=True)
        made = "decided" if advice == _DECISION else "computed"
        where = f" ({made} at {source})" if source else ""
        text = f"{shown(leaves)}{where} may differ {along}: {why(origins, inputs)}. {advice}"
        yield with_code("JDP102" if advice is _METRIC else "JDP101", text)


def _reads(origin: Origin, inputs: Sequence[str], path: str) -> bool:
    return any(isinstance(each, int) and path in inputs[each] for each in origin.sources)


def _torn(report: Report, traced: Traced) -> dict[int, tuple[Provenance, Node]]:
    by_axes: dict[frozenset[str], dict[int, str]] = {}
    for i, (output, value) in enumerate(zip(traced.outputs, report.outputs, strict=True)):
        if output.kind in ("state", "metric") and value.axes:
            by_axes.setdefault(value.axes, {})[i] = output.path
    found = {}
    for axes, leaves in by_axes.items():
        back = report.back(axes)
        left = _without_consequences(back, leaves)
        left = without_skipped(back, left, report.deadlocks)
        found |= {i: (back, node) for i, node in left.items()}
    return dict(sorted(found.items()))


def _is_key(output: Output) -> bool:
    return jax.dtypes.issubdtype(output.aval.dtype, jax.dtypes.prng_key)


def _advice(output: Output) -> str:
    if _is_key(output):
        return _KEY
    if pytrees.OVERWRITTEN in output.path:
        return _OVERWRITTEN
    if _METRICS.search(output.path):
        return _KEPT_METRIC
    return _STATISTICS if _MODEL_STATE.search(output.path) else _STATE


# nnx metrics: a key such as train_metrics, or their variables.
_METRICS = re.compile(r"(\['|\.)\w*metrics?('\]|\.|\[|$)|\['(total|count|m2)'\]\.value$")

# Flax linen, nnx, Haiku; Equinox has numbers as paths.
_MODEL_STATE = re.compile(
    r"model_state|batch_stats|running_|moving_|(\['|\.)(mean|var)('\]|\.|$)|(mean|var)_ema'\]|/ema_"
    r"|<flat index"
)


_STATE = (
    "Ranks would drift apart silently. Write `state.apply_gradients(grads)` with an optimizer in "
    "jdp.replicated(...), or jdp.sync_gradients(grads) first. For a loss write "
    "jdp.mean_over_ranks(loss), for a value_fn= jdp.global_mean(value_fn). Wrap state of one "
    "rank or its rows (hidden states, error feedback) in jdp.per_rank(x)."
)
_OF_RANK = (
    "In a step of jdp.local_sgd or jdp.diloco, state.params are this rank's. All ranks share "
    "new_state.opt_state.outer_params."
)
_OVERWRITTEN = (
    "Ranks would drift apart silently. Its gradient is a maximum over this rank's rows. Write "
    "jdp.value_and_grad(loss_fn) instead of jax.value_and_grad: it computes the maximum over all "
    "ranks."
)
_KEPT_METRIC = (
    "Ranks would keep different metrics. Return the value as a metric of the step, which "
    "averages it, or update the metric with jdp.mean_over_ranks(x), or jdp.sum_over_ranks(x) for "
    "counts."
)
_STATISTICS = (
    "Ranks would drift apart silently, and normalise differently if these are batch statistics. "
    "Store jdp.mean_over_ranks(stats), or pass axis_name= to the layer (weighted micro-batches "
    "need both). Wrap state of one rank or its rows (hidden states, error feedback) in "
    "jdp.per_rank(x)."
)
_KEY = (
    "Ranks would drift apart silently. Do not store this key: state.key differs per rank and per "
    "step."
)
_OWN_KEY = "`state.key` (this rank's)"
_DRAWN = (
    "Ranks would drift apart silently. Draw from state.shared_key, which is the same on every rank."
)
_DECISION = (
    "Ranks would decide differently and drift apart silently. Decide by a value that all ranks "
    "share: jdp.mean_over_ranks(loss) instead of a loss, grads = jdp.sync_gradients(grads) "
    "instead of this rank's gradients (then apply_gradients(grads, synced=True))."
)
_METRIC = (
    "jdp averages only float scalars. Write jdp.sum_over_ranks(x) for counts, "
    "jdp.mean_over_ranks(x) for means, jdp.max_over_ranks(x) for maxima, jdp.rows(x) for one "
    "value per row."
)
_OTHER_AXIS = "The state is the same along that axis: reduce it there too."


def _refs(report: Report, traced: Traced) -> Iterator[str]:
    for position, value in report.refs:
        if value.axes:
            inputs = input_names(report, traced)
            back = report.back(value.axes)
            node = Node(back.top, back.body.invars[position])
            line, reason = back.nearest_line(node), why([back.origin(node)], inputs)
            yield with_code(
                "JDP106",
                f"the Ref `{inputs[position]}` is the same on every rank before the step and may "
                f"differ after {line or 'it'}: {reason}. Store jdp.mean_over_ranks(x), or return "
                "values of single rows as jdp.rows(x).",
            )


def _without_consequences(back: Provenance, leaves: Mapping[int, str]) -> dict[int, Node]:
    nodes = {i: back.of_output(i) for i in leaves}
    causes = [nodes[i] for i, path in leaves.items() if not _ON_THE_WAY.search(path)]
    left = {i: node for i, node in nodes.items() if not back.is_consequence(node, causes)}
    return left or nodes
