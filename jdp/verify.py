"""From the analysis of a traced step to what its author is told."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jdp import axis, causes, reductions
from jdp.mark import AVERAGED, SHARED
from jdp.uniformity import Node, Origin, Provenance, Report, analyse, find_shard_maps, jaxprs

# A step's own output, the weight of the global batch.
WEIGHT = "weight"


@dataclass(frozen=True)
class Output:
    """One leaf that leaves a step, described only where it is complained about."""

    tree: str  # the tree that it is in, as the author would call it
    keys: tuple[Any, ...]  # its path in that tree
    kind: str  # "state", "metric", "rows", or "own": a metric before it is averaged
    aval: Any  # its `jax.typeof`

    @property
    def path(self) -> str:
        """The leaf's path as the author would write it."""
        return self.tree + jax.tree_util.keystr(self.keys)

    @property
    def type(self) -> str:
        """What it is, such as float32[3]."""
        return f"{self.aval.dtype}{list(self.aval.shape)}"


@dataclass(frozen=True)
class Traced:
    """A step as it was traced.

    Attributes:
      name: of the author's function.
      axis_name: the axes that split the batch.
      inputs: paths of the leaves of its arguments, in order.
      outputs: the leaves that leave it, in order.
      marked: paths of the gradients whose reduction was traced.
      mask: position among `inputs` of the padding mask of the batch, or None.
      differentiates: whether it is a train step.
    """

    name: str
    axis_name: tuple[str, ...]
    inputs: Sequence[str]
    outputs: Sequence[Output]
    marked: frozenset[str]
    mask: int | None
    differentiates: bool


class Proved(NamedTuple):
    """What is known of a step that was accepted.

    Attributes:
      gradients: paths of the gradients that are the same on every rank before they are reduced, if
        `scan_layers` has averaged any: traced again, the step need not send them. Else None.
      own_metrics: for each output of kind "own", whether it is the same on every rank.
    """

    gradients: frozenset[str] | None
    own_metrics: tuple[bool, ...]


def check(jaxpr: Any, traced: Traced) -> Proved:
    """Refuse a step after which the ranks could hold different states, or wait for each other.

    Args:
      jaxpr: the traced program, with the step's `shard_map` in it.
      traced: what its inputs and outputs are called.

    Raises:
      ValueError: saying which leaf or which line, why, and what to write.
    """
    step = find_shard_maps(jaxpr)[0]
    report = analyse(step)
    problems = [
        *_deadlocks(report, traced),
        *reductions.refusals(step, report, traced.axis_name),
        *_repeated_outputs(step, report, traced),
        *_hidden_reductions(report, traced),
        *_varying_layers(report, traced),
        *_varying_outputs(report, traced),
        *_varying_refs(report, traced),
        *_unread_mask(report, traced),
        *_wrong_gather(step, traced),
    ]
    problems = list(dict.fromkeys(problems))  # A line that many leaves pass is told once.
    if problems:
        shown = "\n".join(f"- {problem}" for problem in problems[:8])
        more = f"\n- and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(f"`{traced.name}` is not the same training on every rank:\n{shown}{more}")
    _warn_of_unused(report)
    _warn_of_means(report)
    own = [
        not value.axes
        for output, value in zip(traced.outputs, report.outputs, strict=True)
        if output.kind == "own"
    ]
    return Proved(_uniform_gradients(report), tuple(own))


def _uniform_gradients(report: Report) -> frozenset[str] | None:
    if not any(found.kind == AVERAGED for found in report.marks):
        return None
    local = [found for found in report.marks if found.kind == "local"]
    varying = {found.path for found in local if found.value.axes & set(found.axes)}
    return frozenset(found.path for found in local) - varying


def _deadlocks(report: Report, traced: Traced) -> Iterator[str]:
    for found in report.deadlocks:
        where = f" at {found.source}" if found.source else ""
        back = report.back(found.under)
        node = back.of_predicate(found.eqn)
        sources = "" if node is None else _sources(report, traced, back.origin(node))
        yield (
            f"`{found.primitive}`{where} runs under a `{found.control}` whose predicate may differ "
            f"from rank to rank{sources}; ranks that skip it leave the others waiting for ever. "
            "Make the predicate the same first, for instance `jdp.mean_over_ranks(loss) < 2`."
        )


def _sources(report: Report, traced: Traced, origin: Origin) -> str:
    return f", since {causes.why([origin], _inputs(report, traced))}"


def _inputs(report: Report, traced: Traced) -> list[str]:
    # Captured arrays stand in front of the arguments.
    return ["a captured array"] * _num_constants(report, traced) + list(traced.inputs)


def _repeated_outputs(step: Any, report: Report, traced: Traced) -> Iterator[str]:
    told: dict[tuple[int, str], list[str]] = {}
    if any(found.value.repeated for found in report.marks):
        return  # a gradient that is too large makes a state that is
    for i, (output, value) in enumerate(zip(traced.outputs, report.outputs, strict=True)):
        axes = value.repeated & set(traced.axis_name)
        if output.kind == "state" and axes and not value.axes:
            back = report.back(axes)
            key = reductions.num_ranks(step, axes), back.repetition(back.of_output(i))
            told.setdefault(key, []).append(f"`{output.path}`")
    for (times, line), leaves in told.items():
        yield (
            f"{_listed(leaves)} is {times} times too large: {line or 'something'} sums over the "
            "ranks what every rank has the same. Leave the sum out, or write "
            "jdp.mean_over_ranks(x)."
        )


def _hidden_reductions(report: Report, traced: Traced) -> Iterator[str]:
    # Reductions that were traced and thrown away are no part of the program; those inside a
    # primitive whose body cannot be opened are, and could happen twice.
    hidden = sorted(traced.marked - {found.path for found in report.marks})
    if hidden and report.opaque:
        yield (
            f"{_listed(_quoted(sorted(report.opaque)))} hides from the analysis how the gradients "
            f"of {_listed(_quoted(hidden))} are reduced. Call apply_gradients outside of it."
        )


def _varying_layers(report: Report, traced: Traced) -> Iterator[str]:
    for found in report.marks:
        axes = found.value.axes & set(found.axes)
        if found.kind == SHARED and axes:
            back = report.back(axes)
            node = back.of_mark(found.eqn)
            sources = "" if node is None else _sources(report, traced, back.origin(node))
            yield (
                f"`params{found.path}` of jdp.scan_layers at {found.source} may differ from rank "
                f"to rank{sources}; the gradient that comes back would be the mean of all. Hand "
                "over as params what every rank has the same, and the rest as xs=."
            )


def _varying_outputs(report: Report, traced: Traced) -> Iterator[str]:
    told: dict[Any, list[tuple[str, Origin]]] = {}
    for i, (back, node) in _torn(report, traced).items():
        output, axes = traced.outputs[i], report.outputs[i].axes
        leaf, along = f"`{output.path}`", "from rank to rank"
        if output.kind == "metric":
            leaf, advice = f"{leaf} {output.type}", _METRIC
        elif axes & set(traced.axis_name):
            advice = _advice(output)
        else:
            along, advice = f"along the mesh axis {', '.join(map(repr, sorted(axes)))}", _OTHER_AXIS
        origin = back.origin(node)
        key = report.output_sources[i], origin.line, frozenset(origin.sources), along, advice
        told.setdefault(key, []).append((leaf, origin))
    for (source, *_, along, advice), found in told.items():
        leaves, origins = zip(*found, strict=True)
        where = f" (computed at {source})" if source else ""
        reason = causes.why(origins, _inputs(report, traced))
        yield f"{_listed(leaves)}{where} may differ {along}: {reason}. {advice}"


def _torn(report: Report, traced: Traced) -> dict[int, tuple[Provenance, Node]]:
    by_axes: dict[frozenset[str], dict[int, str]] = {}
    for i, (output, value) in enumerate(zip(traced.outputs, report.outputs, strict=True)):
        if output.kind in ("state", "metric") and value.axes:
            by_axes.setdefault(value.axes, {})[i] = output.path
    found = {}
    for axes, leaves in by_axes.items():
        back = report.back(axes)
        left = causes.without_consequences(back, leaves)
        found |= {i: (back, node) for i, node in left.items()}
    return dict(sorted(found.items()))


def _advice(output: Output) -> str:
    if jax.dtypes.issubdtype(output.aval.dtype, jax.dtypes.prng_key):
        return _KEY
    is_model_state = "model_state" in output.path or "batch_stats" in output.path
    return _STATISTICS if is_model_state else _STATE


_STATE = (
    "Ranks would drift apart silently. Write `state.apply_gradients(grads)` with an optimizer in "
    "jdp.replicated(...), or jdp.sync_gradients(grads) or jdp.mean_over_ranks(x) first."
)
_STATISTICS = (
    "Ranks would drift apart silently, and normalise differently if these are batch statistics. "
    "Store jdp.mean_over_ranks(stats), or give the layer axis_name= (micro-batches that are "
    "weighed want both)."
)
_KEY = (
    "Ranks would drift apart silently. Leave such a random key out of the state: state.key is this "
    "rank's, and a new one in every step."
)
_METRIC = (
    "Only float scalars are averaged by themselves. Write jdp.sum_over_ranks(x) for counts, "
    "jdp.mean_over_ranks(x) for means, jdp.rows(x) for a value for each row."
)
_OTHER_AXIS = "The state is the same along that axis: reduce it there too."


def _varying_refs(report: Report, traced: Traced) -> Iterator[str]:
    for position, value in report.refs:
        if value.axes:
            inputs = _inputs(report, traced)
            back = report.back(value.axes)
            reason = causes.why([back.origin(back.of_input(position))], inputs)
            yield (
                f"the Ref `{inputs[position]}` is the same on every rank where it goes in, and may "
                f"hold another value on each afterwards: {reason}. Store jdp.mean_over_ranks(x), "
                "or return what differs by row as jdp.rows(x)."
            )


def _num_constants(report: Report, traced: Traced) -> int:
    return len(report.used_inputs) - len(traced.inputs)


def _unread_mask(report: Report, traced: Traced) -> Iterator[str]:
    averages = any(out.kind in ("state", "metric") and out.tree != WEIGHT for out in traced.outputs)
    if traced.mask is None or not averages:  # jdp.evaluate takes the padding out of rows
        return
    if not report.used_inputs[_num_constants(report, traced) + traced.mask]:
        yield (
            f"`{traced.inputs[traced.mask]}` says which rows are padding, and the step does not "
            "read it, or only for its weight=: repeated rows would count. Weigh the loss with it, "
            '`(losses * batch["mask"]).sum() / batch["mask"].sum()`, and write '
            '`weight=lambda batch: batch["mask"].sum()` in the decorator; or leave the last batch '
            'out: jdp.batches(..., tail="drop").'
        )


def _wrong_gather(step: Any, traced: Traced) -> Iterator[str]:
    if axis.INVARYING_GATHER_HAS_WRONG_GRADIENT and traced.differentiates:
        if "all_gather_invariant" in _primitives(step.params["jaxpr"], set()):
            yield (
                f'all_gather(to="invarying") has a wrong gradient in JAX {jax.__version__}: '
                'write all_gather(to="varying"), which is the default, or use JAX >= 0.11.'
            )


def _primitives(jaxpr: Any, seen: set[int]) -> set[str]:
    found = set()
    jaxpr = jaxprs.opened(jaxpr)
    if id(jaxpr) not in seen:
        seen.add(id(jaxpr))
        for equation in jaxpr.eqns:
            found.add(equation.primitive.name)
            for inner in jaxprs.bodies(equation):
                found |= _primitives(inner, seen)
    return found


def _warn_of_unused(report: Report) -> None:
    unused = [m.path for m in report.marks if m.kind == "local" and m.value.zero]
    if unused:
        warnings.warn(
            f"the loss does not depend on {_listed(_quoted(unused))}: their gradients are zero, as "
            "on one device (weight decay and momentum still move them). Leave them out with "
            "TrainState.create(trainable=...) if that is meant.",
            stacklevel=2,
        )


def _warn_of_means(report: Report) -> None:
    if any(found.kind == AVERAGED for found in report.marks):
        return
    for source, paths in reductions.means(report).items():
        warnings.warn(
            f"the gradient of {_listed(_quoted(paths))} is the mean over ranks already where it "
            f"comes to {source or 'jdp.sync_gradients'}, and is sent once more. Write "
            "apply_gradients(grads, synced=True), or hand over the local gradient.",
            stacklevel=2,
        )


def _quoted(paths: Sequence[str]) -> list[str]:
    return [f"`{path}`" for path in dict.fromkeys(paths)]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
