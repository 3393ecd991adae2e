"""From the analysis of a traced step to what its author is told."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jdp import axis
from jdp.uniformity import Report, analyse, find_shard_maps


@dataclass(frozen=True)
class Output:
    """One leaf that leaves a step: its path as the author would write it, and what it is."""

    path: str
    kind: str  # "state", "metric" or "rows"
    type: str  # such as float32[3]


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


def check(jaxpr: Any, traced: Traced) -> None:
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
        *_deadlocks(report),
        *_reduced_twice(report),
        *_hidden_reductions(report, traced),
        *_varying_outputs(report, traced),
        *_unread_mask(report, traced),
        *_wrong_gather(step, traced),
    ]
    if problems:
        shown = "\n".join(f"- {problem}" for problem in problems[:8])
        more = f"\n- and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(f"`{traced.name}` is not the same training on every rank:\n{shown}{more}")
    _warn_of_unused(report)


def _deadlocks(report: Report) -> Iterator[str]:
    for found in report.deadlocks:
        yield (
            f"`{found.primitive}` at {found.source} runs under a `{found.control}` whose predicate "
            "may differ from rank to rank; ranks that skip it leave the others waiting for ever. "
            "Make the predicate the same first, for instance `jdp.mean_over_ranks(loss) < 2`."
        )


def _reduced_twice(report: Report) -> Iterator[str]:
    for found in report.marks:
        if found.kind == "local" and found.value.reduced & set(found.axes):
            yield (
                f"the gradient of `{found.path}` was reduced before it came to {found.source}: a "
                "sum would be averaged as if it were each rank's own, a mean sent twice. Hand over "
                "the local gradient, or write apply_gradients(grads, synced=True) if it is the "
                "mean."
            )


def _hidden_reductions(report: Report, traced: Traced) -> Iterator[str]:
    # Reductions that were traced and thrown away are no part of the program; those inside a
    # primitive whose body cannot be opened are, and could happen twice.
    hidden = sorted(traced.marked - {found.path for found in report.marks})
    if hidden and report.opaque:
        yield (
            f"{_listed(sorted(set(report.opaque)))} hides from the analysis how the gradients of "
            f"{_listed(hidden)} are reduced. Call apply_gradients outside of it."
        )


def _varying_outputs(report: Report, traced: Traced) -> Iterator[str]:
    for output, value, source in zip(
        traced.outputs, report.outputs, report.output_sources, strict=True
    ):
        if output.kind == "rows" or not value.axes:
            continue
        where = f" (computed at {source})" if source else ""
        if output.kind == "metric":
            yield (
                f"`{output.path}` {output.type}{where} differs from rank to rank, and only float "
                "scalars are averaged by themselves. Write jdp.sum_over_ranks(x) for counts, "
                "jdp.mean_over_ranks(x) for means, jdp.rows(x) for a value for each row."
            )
        elif value.axes & set(traced.axis_name):
            yield f"`{output.path}`{where} {_why_varying(output)}"
        else:
            yield (
                f"`{output.path}`{where} differs along the mesh axis {sorted(value.axes)}, on "
                "which the state is the same. Reduce it there too."
            )


def _why_varying(output: Output) -> str:
    if "model_state" in output.path or "batch_stats" in output.path:
        return (
            "comes from this rank's rows only: ranks would normalise differently. Give the layer "
            "axis_name=, or store jdp.mean_over_ranks(stats)."
        )
    return (
        "may differ from rank to rank: it depends on this rank's rows, key or number and was never "
        "averaged. Ranks would drift apart silently. Write `state.apply_gradients(grads)` with an "
        "optimizer in jdp.replicated(...), or jdp.sync_gradients(grads) or jdp.mean_over_ranks(x) "
        "first."
    )


def _unread_mask(report: Report, traced: Traced) -> Iterator[str]:
    if traced.mask is None:
        return
    num_constants = len(report.used_inputs) - len(traced.inputs)
    if not report.used_inputs[num_constants + traced.mask]:
        yield (
            f"`{traced.inputs[traced.mask]}` says which rows are padding, and the step never reads "
            "it: repeated rows would count. Weigh the loss with it, "
            '`(losses * batch["mask"]).sum() / batch["mask"].sum()`, and write '
            '`@jdp.train_step(weight=lambda batch: batch["mask"].sum())`; or leave the last batch '
            'out: jdp.batches(..., tail="drop").'
        )


def _wrong_gather(step: Any, traced: Traced) -> Iterator[str]:
    if axis.INVARYING_GATHER_HAS_WRONG_GRADIENT and traced.differentiates:
        if "all_gather_invariant" in _primitives(step.params["jaxpr"]):
            yield (
                f'all_gather(to="invarying") has a wrong gradient in JAX {jax.__version__}: '
                'write all_gather(to="varying"), which is the default, or use JAX >= 0.11.'
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
            f"the loss does not depend on {_listed(unused)}: their gradients are zero, as on one "
            "device (weight decay and momentum still move them). Leave them out with "
            "TrainState.create(trainable=...) if that is meant.",
            stacklevel=2,
        )


def _listed(paths: Sequence[str]) -> str:
    shown = ", ".join(f"`{path}`" for path in paths[:5])
    return shown + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
