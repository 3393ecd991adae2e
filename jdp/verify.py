"""From the analysis of a traced step to what its author is told."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jdp import axis, transposed
from jdp.mark import AVERAGED, OWN_WEIGHT, SHARED
from jdp.uniformity import Report, analyse, find_shard_maps
from jdp.weighted_sum import MICRO_BATCH

# A step's own output, the weight of the global batch.
WEIGHT = "weight"


@dataclass(frozen=True)
class Output:
    """One leaf that leaves a step, described only where it is complained about."""

    tree: str  # the tree that it is in, as the author would call it
    keys: tuple[Any, ...]  # its path in that tree
    kind: str  # "state", "metric" or "rows"
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
      weighed: what gives ranks different weights, such as jdp.train_step; empty: nothing does.
    """

    name: str
    axis_name: tuple[str, ...]
    inputs: Sequence[str]
    outputs: Sequence[Output]
    marked: frozenset[str]
    mask: int | None
    differentiates: bool
    weighed: frozenset[str] = frozenset()


def check(jaxpr: Any, traced: Traced) -> frozenset[str] | None:
    """Refuse a step after which the ranks could hold different states, or wait for each other.

    Args:
      jaxpr: the traced program, with the step's `shard_map` in it.
      traced: what its inputs and outputs are called.

    Returns:
      Paths of the gradients that are the same on every rank before they are reduced, if
      `scan_layers` has averaged any: traced again, the step need not send them. Else None.

    Raises:
      ValueError: saying which leaf or which line, why, and what to write.
    """
    step = find_shard_maps(jaxpr)[0]
    report = analyse(step)
    problems = [
        *_deadlocks(report),
        *_reduced_twice(report),
        *_hidden_reductions(report, traced),
        *_varying_layers(report),
        *_varying_outputs(report, traced),
        *_varying_refs(report, traced),
        *_unread_mask(report, traced),
        *_wrong_gather(step, traced),
        *_unweighted_transposes(step, report, traced),
    ]
    problems = list(dict.fromkeys(problems))  # A line that many leaves pass is told once.
    if problems:
        shown = "\n".join(f"- {problem}" for problem in problems[:8])
        more = f"\n- and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(f"`{traced.name}` is not the same training on every rank:\n{shown}{more}")
    _warn_of_unused(report)
    return _uniform_gradients(report)


def _uniform_gradients(report: Report) -> frozenset[str] | None:
    if not any(found.kind == AVERAGED for found in report.marks):
        return None
    local = [found for found in report.marks if found.kind == "local"]
    varying = {found.path for found in local if found.value.axes & set(found.axes)}
    return frozenset(found.path for found in local) - varying


def _deadlocks(report: Report) -> Iterator[str]:
    for found in report.deadlocks:
        where = f" at {found.source}" if found.source else ""
        yield (
            f"`{found.primitive}`{where} runs under a `{found.control}` whose predicate may differ "
            "from rank to rank; ranks that skip it leave the others waiting for ever. Make the "
            "predicate the same first, for instance `jdp.mean_over_ranks(loss) < 2`."
        )


def _reduced_twice(report: Report) -> Iterator[str]:
    paths: dict[str, list[str]] = {}
    for found in report.marks:
        if found.kind == "local" and found.value.reduced & set(found.axes):
            paths.setdefault(found.source, []).append(found.path)
    for source, reduced in paths.items():
        yield (
            f"the gradient of {_listed(_quoted(reduced))} was reduced before it came to "
            f"{source or 'jdp.sync_gradients'}: a sum would be averaged as if it were each rank's "
            "own, a mean sent twice. Hand over the local gradient, or write "
            "apply_gradients(grads, synced=True) if it is the mean."
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


def _varying_layers(report: Report) -> Iterator[str]:
    for found in report.marks:
        if found.kind == SHARED and found.value.axes & set(found.axes):
            yield (
                f"`params{found.path}` of jdp.scan_layers at {found.source} may differ from rank "
                "to rank, and the gradient that comes back would be the mean of all. Hand over as "
                "params what every rank has the same, and the rest as xs=."
            )


def _varying_outputs(report: Report, traced: Traced) -> Iterator[str]:
    leaves: dict[tuple[str, str], list[str]] = {}
    for output, value, source in zip(
        traced.outputs, report.outputs, report.output_sources, strict=True
    ):
        if output.kind == "rows" or not value.axes:
            continue
        leaf = f"`{output.path}`"
        if output.kind == "metric":
            leaf, why = f"{leaf} {output.type}", _WHY_METRIC
        elif value.axes & set(traced.axis_name):
            why = _why_state(output)
        else:
            others = ", ".join(map(repr, sorted(value.axes)))
            why = _WHY_OTHER_AXIS.format(others)
        leaves.setdefault((source, why), []).append(leaf)
    for (source, why), told in leaves.items():
        where = f" (computed at {source})" if source else ""
        yield f"{_listed(told)}{where} {why}"


def _why_state(output: Output) -> str:
    if jax.dtypes.issubdtype(output.aval.dtype, jax.dtypes.prng_key):
        return _WHY_KEY
    is_model_state = "model_state" in output.path or "batch_stats" in output.path
    return _WHY_STATISTICS if is_model_state else _WHY_STATE


_WHY_STATE = (
    "may differ from rank to rank: it depends on this rank's rows, key or number and was never "
    "averaged. Ranks would drift apart silently. Write `state.apply_gradients(grads)` with an "
    "optimizer in jdp.replicated(...), or jdp.sync_gradients(grads) or jdp.mean_over_ranks(x) "
    "first."
)
_WHY_STATISTICS = (
    "may differ from rank to rank: it comes from this rank's rows only. Ranks would drift apart "
    "silently, and normalise differently if these are batch statistics. Store "
    "jdp.mean_over_ranks(stats), or give the layer axis_name= (micro-batches that are weighed want "
    "both)."
)
_WHY_KEY = (
    "may differ from rank to rank: it is a random key that was made from this rank's. Ranks would "
    "drift apart silently. Leave it out of the state: state.key is this rank's, and a new one in "
    "every step."
)
_WHY_METRIC = (
    "may differ from rank to rank, and only float scalars are averaged by themselves. Write "
    "jdp.sum_over_ranks(x) for counts, jdp.mean_over_ranks(x) for means, jdp.rows(x) for a value "
    "for each row."
)
_WHY_OTHER_AXIS = (
    "may differ along the mesh axis {}, on which the state is the same. Reduce it there too."
)


def _varying_refs(report: Report, traced: Traced) -> Iterator[str]:
    for position, value in report.refs:
        if value.axes:
            yield (
                f"the Ref `{traced.inputs[position - _num_constants(report, traced)]}` is the same "
                "on every rank where it goes in, and may hold another value on each afterwards. "
                "Store jdp.mean_over_ranks(x), or return what differs by row as jdp.rows(x)."
            )


def _num_constants(report: Report, traced: Traced) -> int:
    # Captured arrays stand in front of the arguments.
    return len(report.used_inputs) - len(traced.inputs)


def _unread_mask(report: Report, traced: Traced) -> Iterator[str]:
    averages = any(out.kind != "rows" and out.tree != WEIGHT for out in traced.outputs)
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
        if "all_gather_invariant" in _primitives(step.params["jaxpr"]):
            yield (
                f'all_gather(to="invarying") has a wrong gradient in JAX {jax.__version__}: '
                'write all_gather(to="varying"), which is the default, or use JAX >= 0.11.'
            )


def _unweighted_transposes(step: Any, report: Report, traced: Traced) -> Iterator[str]:
    axes = frozenset(traced.axis_name)
    if any(found.kind == OWN_WEIGHT for found in report.marks):
        for found in transposed.find_before(step.params["jaxpr"], axes, OWN_WEIGHT):
            where = f" at {found.source}" if found.source else ""
            yield (
                f"`{found.name}`{where} is differentiated, and jdp.sync_gradients(weight=) weighs "
                "that gradient by something else than the step: the cotangents of the ranks were "
                "added up by other weights, and the gradient would be wrong. Write "
                "jdp.train_step(weight=...), and leave it out of jdp.sync_gradients."
            )
    if not traced.weighed:
        return
    by = _listed([f"{name}(weight=)" for name in sorted(traced.weighed)])
    for found in transposed.find(step.params["jaxpr"], axes):
        where = f" at {found.source}" if found.source else ""
        if found.name == MICRO_BATCH:
            yield (
                f"a sum or mean over ranks{where} stands in the micro-batches of a gradient "
                "and is differentiated from outside of them, too, where ranks weigh differently: "
                "that gradient would be wrong. Leave accumulate= and micro_batch_rows= out of the "
                "inner gradient."
            )
            continue
        yield (
            f"`{found.name}`{where} is differentiated, and {by} weighs the ranks: JAX adds up the "
            "cotangents of all ranks without their weights, and the gradient would be wrong where "
            "these differ. Write jdp.mean_over_ranks(x) or jdp.sum_over_ranks(x) in its place, or "
            "leave out weight= and return the loss "
            '`(losses * batch["mask"]).sum() / jdp.mean_over_ranks(batch["mask"].sum())`, '
            "whose mean over ranks is that of all rows."
        )


def _primitives(jaxpr: Any) -> set[str]:
    found = set()
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found.add(equation.primitive.name)
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    found |= _primitives(inner)
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


def _quoted(paths: Sequence[str]) -> list[str]:
    return [f"`{path}`" for path in dict.fromkeys(paths)]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
