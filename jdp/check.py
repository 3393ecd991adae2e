"""`check_step`: the same step on one rank and on all, leaf by leaf."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp import mesh, statics
from jdp.step import Step


@dataclass(frozen=True)
class LeafDifference:
    """How far one leaf is apart after a step on one rank and on n.

    Attributes:
      path: where it is, as in `state.params['w']`.
      difference: largest absolute difference between both.
      allowed: largest difference that rounding explains.
      change_one: largest absolute change that the step on one rank made.
      change_all: the same on n ranks.
    """

    path: str
    difference: float
    allowed: float
    change_one: float
    change_all: float


@dataclass(frozen=True)
class StepDifference:
    """What `check_step` found: every leaf, the worst first, and the likely cause if any."""

    leaves: list[LeafDifference]
    cause: str | None
    num_ranks: int

    def __str__(self) -> str:
        width = max((len(leaf.path) for leaf in self.leaves[:5]), default=4)
        lines = [
            f"{'leaf':{width}}  difference    allowed  change on 1 rank  on {self.num_ranks} ranks"
        ]
        for leaf in self.leaves[:5]:
            lines.append(
                f"{leaf.path:{width}}  {leaf.difference:10.2e} {leaf.allowed:10.2e}"
                f"  {leaf.change_one:16.6g}  {leaf.change_all:.6g}"
            )
        if len(self.leaves) > 5:
            lines.append(f"... and {len(self.leaves) - 5} leaves that are closer")
        return "\n".join(lines)


def check_step(
    step: Step, state: Any, batch: Any, *rest: Any, tolerance: float = 1e-5
) -> StepDifference:
    """Run one step on one rank with the whole batch, and on all ranks, and compare every leaf.

    What the uniformity analysis cannot see is a matter of scale: a loss that is summed instead
    of averaged, batch statistics of a rank's own rows, a local masked mean. It shows here. Use
    plain SGD: Adam hides a wrong scale. Neither `state` nor `batch` is changed.

    Args:
      step: a function decorated with `jdp.train_step`.
      state: the state to start from; its mesh gives the ranks.
      batch: a global batch.
      *rest: further arguments of the step.
      tolerance: largest difference, relative to 1 + the largest value of the leaf, > 0.

    Returns:
      The differences, which are also printed.

    Raises:
      ValueError: if a leaf is further apart than `tolerance`; names the worst and the likely
        cause. Also if several processes share the mesh, or it has one rank.

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
    if not isinstance(step, Step) or not step.returns_state:
        raise TypeError(
            f"check_step got {getattr(step, '__name__', step)!r}, which is not decorated with "
            "jdp.train_step: it compares the states that train steps return."
        )
    leaves = jax.tree.leaves(state)
    ranks = mesh.mesh_of(leaves, step.axis_name)
    if jax.process_count() > 1:
        raise ValueError(
            f"check_step needs all ranks in one process, and {jax.process_count()} share this "
            "mesh. Run it in one process with virtual devices: jdp.init(cpu_ranks=4)."
        )
    num_ranks = mesh.num_ranks(ranks, step.axis_name)
    if num_ranks == 1:
        raise ValueError(
            "check_step compares all ranks with one, and this mesh has 1 rank: any step would "
            "pass. Make ranks of virtual devices: jdp.init(cpu_ranks=4)."
        )
    step = step.without_donation()
    start, batch = jax.device_get((statics.hold(state), batch))
    after_all = _run(step, start, batch, rest, ranks)
    after_one = _run(step, start, batch, rest, _first_rank(ranks, step.axis_name))
    leaves = _compare(start, after_one, after_all, tolerance)
    wrong = [leaf for leaf in leaves if not leaf.difference <= leaf.allowed]
    cause = None
    if wrong:
        program = str(step.lower(_on(start, ranks), batch, *rest).as_text())
        cause = _likely_cause(wrong, num_ranks, program)
    found = StepDifference(leaves, cause, num_ranks)
    print(found)
    if wrong:
        raise ValueError(
            f"`{step.__name__}` does another thing on {num_ranks} ranks than on one: "
            f"`{wrong[0].path}` is {wrong[0].difference:.2e} apart, and rounding explains "
            f"{wrong[0].allowed:.2e}. {cause}"
        )
    return found


def _run(step: Step, start: Any, batch: Any, rest: tuple, where: Mesh) -> Any:
    state, _ = step(_on(start, where), batch, *rest)
    return jax.device_get(statics.hold(state))


def _on(start: Any, where: Mesh) -> Any:
    sharding = NamedSharding(where, PartitionSpec())
    return statics.restore(jax.device_put(start, sharding, may_alias=False))


def _numbers(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf, np.float64)


def _first_rank(ranks: Mesh, axis_name: tuple[str, ...]) -> Mesh:
    corner = tuple(slice(0, 1) if name in axis_name else slice(None) for name in ranks.axis_names)
    return Mesh(ranks.devices[corner], ranks.axis_names, axis_types=ranks.axis_types)


def _compare(start: Any, one: Any, many: Any, tolerance: float) -> list[LeafDifference]:
    found = []
    for (path, old), a, b in zip(
        jax.tree_util.tree_leaves_with_path(start),
        jax.tree.leaves(one),
        jax.tree.leaves(many),
        strict=True,
    ):
        old, a, b = (_numbers(x) for x in (old, a, b))
        found.append(
            LeafDifference(
                path=f"state{jax.tree_util.keystr(path)}",
                difference=float(np.abs(a - b).max(initial=0)),
                allowed=tolerance * (1 + float(np.abs(a).max(initial=0))),
                change_one=_largest(a - old),
                change_all=_largest(b - old),
            )
        )
    return sorted(found, key=lambda leaf: leaf.allowed / max(leaf.difference, 1e-300))


def _largest(change: np.ndarray) -> float:
    return float(change.flat[np.abs(change).argmax()]) if change.size else 0.0


def _likely_cause(wrong: list[LeafDifference], num_ranks: int, program: str) -> str:
    statistics = [x.path for x in wrong if "model_state" in x.path or "batch_stats" in x.path]
    ratios = [x.change_all / x.change_one for x in wrong if x.change_one]
    if ratios and np.allclose(ratios, 1 / num_ranks, rtol=1e-2):
        return (
            f"Every change is {num_ranks} times smaller. The loss is summed over rows instead of "
            "averaged: the mean over ranks of sums divides by the ranks. Write .mean(), not .sum()."
        )
    if ratios and np.allclose(ratios, num_ranks, rtol=1e-2):
        return (
            f"Every change is {num_ranks} times larger. A gradient is summed over ranks instead of "
            "averaged: look for lax.psum in the step, or replicated(mean=False)."
        )
    if statistics:
        return (
            f"Batch statistics differ (`{statistics[0]}`): each rank normalises with its own rows. "
            "Give the layer axis_name=, or accept the difference, as torch does without "
            "SyncBatchNorm."
        )
    if "threefry" in program or "rng_bit_generator" in program:
        return (
            "The step draws random numbers: with state.key every rank draws its own (dropout, "
            "noise), which one rank cannot repeat. Compare with them off, or with state.shared_key."
        )
    return (
        "Something in the loss is not a mean over rows: a masked mean without weight=, a norm of "
        "the whole batch, statistics of a rank's own rows."
    )
