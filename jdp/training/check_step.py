"""`check_step`: the same step on one rank and on all, leaf by leaf."""

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp import pytrees
from jdp.analysis.lint_shared_rng import equal_draws
from jdp.axis import AxisName
from jdp.distributed import mesh
from jdp.reduction.accumulation import num_rows
from jdp.training import host_constants
from jdp.training.likely_causes import likely_cause
from jdp.training.step import Step
from jdp.training.step_differences import (
    StepDifference,
    beyond,
    compare,
    digits_of,
    digits_of_wire,
)
from jdp.validation import int_at_least

_CHANGING = (
    "A constant changes from trace to trace, such as np.random or the time: {lines}. The compiled "
    "step repeats the constant of its trace. Use jax.random with state.key, or pass the value as "
    "an argument of the step."
)


def check_step(
    step: Step,
    /,
    *args: Any,
    tolerance: float = 1e-5,
    num_steps: int = 2,
    **keywords: Any,
) -> StepDifference:
    """Run steps on one rank with the whole batch, and on all ranks, and compare what comes out.

    The uniformity analysis cannot see a wrong scale: a loss that is summed instead of averaged,
    batch statistics of a rank's own rows, a local masked mean, a norm of local gradients among the
    metrics. It shows here, where every leaf of the state on every rank, and every metric, is
    compared with that of one rank. Use plain SGD: Adam hides a wrong scale. None of the arguments
    is changed.

    Args:
      step: a function decorated with `jdp.train_step`.
      *args: what a call of the step takes: the state to start from, whose mesh gives the ranks, a
        global batch, and further arguments.
      tolerance: largest difference after one step, relative to 1 + the largest value of the leaf,
        > 0; k times as much after k steps, and what the digits of a leaf of 16 bits explain, or
        those of `gather_dtype` and `reduce_dtype`.
      num_steps: how many steps, all with this batch, at least 1.
      **keywords: arguments of that call by keyword. One of the name `tolerance` or `num_steps` goes
        by position, or into a `functools.partial`.

    Returns:
      The differences after the last step, which are also printed.

    Raises:
      ValueError: if a leaf or a metric is further apart than `tolerance`; names the worst and the
        likely cause. Also if several processes share the mesh, it has one rank, or an argument was
        donated.
      TypeError: if `num_steps` is not an integer.

    >>> import jax, jax.numpy as jnp, optax, jdp
    >>> mesh = jdp.init(cpu_ranks=2)
    >>> state = jdp.TrainState.create({"w": jnp.ones(())}, jdp.replicated(optax.sgd(0.5)))
    >>> @jdp.train_step
    ... def step(state, batch):
    ...     grads = jax.grad(lambda params: jnp.sum(params["w"] * batch))(state.params)
    ...     return state.apply_gradients(grads), {}
    >>> jdp.check_step(step, state, jnp.arange(4.0))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: ... The loss is summed over rows instead of averaged...
    """
    _require_train_step(step)
    spec, given = step.bound(args, keywords)
    (state, *others), keywords = spec.by_keyword(given)
    _require_alive({"state": state, "batch": others[0], "rest": others[1:], **keywords})
    ranks = mesh.mesh_of(jax.tree.leaves(state), step.spec.axis_name)
    num_ranks = _several_ranks(ranks, step.spec.axis_name)
    num_steps = int_at_least("num_steps", num_steps, least=1)
    step = step.without_donation()
    start, others, keywords = _on_host((pytrees.hold(state), others, keywords))
    states = [_on(start, _first_rank(ranks, step.spec.axis_name)), _on(start, ranks)]
    findings = step.findings(_on(start, ranks), *others, **keywords)
    found, wire = StepDifference([], None, num_ranks), digits_of_wire(state)
    for number in range(1, num_steps + 1):
        results = [step(each, *others, **keywords) for each in states]
        states, reported = zip(*results, strict=True)
        one, many = map(pytrees.hold, states)
        limits: dict[str, Any] = {"tolerance": tolerance, "num_steps": number}
        found = StepDifference(
            leaves=compare("state", start, one, many, digits_of_change=wire, **limits),
            cause=None,
            num_ranks=num_ranks,
            metrics=compare("metrics", None, *reported, digits=max(digits_of(one), wire), **limits),
            num_steps=number,
            gathers=findings.gathers,
            owned=findings.owned,
        )
        if beyond(found.leaves) or beyond(found.metrics):
            found = _explained(found, step, (_on(start, ranks), *others), keywords)
            break
    print(found)
    _require_equal(step, found)
    return found


def _require_train_step(step: Any) -> None:
    if not isinstance(step, Step) or not step.spec.returns_state:
        raise TypeError(
            f"check_step got {getattr(step, '__name__', step)!r}, which is not decorated with "
            "jdp.train_step: it compares the states that train steps return."
        )


def _require_alive(given: dict[str, Any]) -> None:
    for name, tree in given.items():
        pytrees.require_alive(name, tree, "Give what no step has donated, or a copy made before.")


def _several_ranks(ranks: Mesh, axis_name: AxisName) -> int:
    """Return how many ranks a mesh has; a ValueError if they cannot be compared with one."""
    if jax.process_count() > 1:
        raise ValueError(
            f"check_step needs all ranks in one process, and {jax.process_count()} share this "
            "mesh. Run it in one process with virtual devices: jdp.init(cpu_ranks=4)."
        )
    num_ranks = mesh.num_ranks(ranks, axis_name)
    if num_ranks == 1:
        raise ValueError(
            "check_step compares all ranks with one, and this mesh has 1 rank: any step would "
            "pass. Make ranks of virtual devices: jdp.init(cpu_ranks=4)."
        )
    return num_ranks


def _explained(
    found: StepDifference, step: Step, args: tuple, keywords: dict[str, Any]
) -> StepDifference:
    """Return a difference with its likely cause, found in the traced step."""
    if lines := host_constants.changing(step, args, keywords):
        return replace(found, cause=_CHANGING.format(lines=", ".join(lines)))
    traced = step.trace(*args, **keywords)
    lowered = traced.lower()
    draws = equal_draws(traced.jaxpr, num_rows(args[1]) // found.num_ranks)
    named = str(lowered.as_text(debug_info=True))
    cause = likely_cause(found, str(lowered.as_text()), named, draws, step.spec.warned)
    return replace(found, cause=cause)


def _require_equal(step: Step, found: StepDifference) -> None:
    """Raise a ValueError with the worst difference if a cause for one was found."""
    if found.cause is None:
        return
    worst = (beyond(found.leaves) or beyond(found.metrics))[0]
    after = "" if found.num_steps == 1 else f" after {found.num_steps} steps"
    raise ValueError(
        f"`{step.__name__}` computes something else on {found.num_ranks} ranks than on one: "
        f"`{worst.path}` differs by {worst.difference:.2e}{after}, and rounding explains at "
        f"most {worst.allowed:.2e}. {found.cause}"
    )


def _on_host(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_get(x) if isinstance(x, jax.Array) else x, tree)


def _on(start: Any, where: Mesh) -> Any:
    sharding = NamedSharding(where, PartitionSpec())
    return pytrees.restore(jax.device_put(start, sharding, may_alias=False))


def _first_rank(ranks: Mesh, axis_name: tuple[str, ...]) -> Mesh:
    corner = tuple(slice(0, 1) if name in axis_name else slice(None) for name in ranks.axis_names)
    return Mesh(ranks.devices[corner], ranks.axis_names, axis_types=ranks.axis_types)
