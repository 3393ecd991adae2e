"""Call a function that reads a state, and gather each sharded array where it is read."""

from collections.abc import Callable
from typing import Any

import jax

from jdp.reduction import flat_program, fsdp_schedule, gradients, shard_registry
from jdp.reduction.shard_registry import Shard


def call(function: Callable[[Any], Any], state: Any, batch: Any) -> Any:
    """Return `function(state)`, with two groups of gathered arrays at any time."""
    leaves, tree = jax.tree.flatten(state)
    found = {i: shard_registry.known(leaf) for i, leaf in enumerate(leaves)}
    shards = {i: part for i, part in found.items() if part is not None and not part.is_kept}
    if not shards:
        return function(state)
    wholes = {i: leaves[i] for i in shards}
    own = {i: part.value for i, part in shards.items()}
    others: list[Any] = []  # leaves of the result that are not arrays
    trees: list[Any] = []

    # JAX names this function and its argument where Python asks for a value: see `unknown_value`.
    def reading(wholes: dict[int, jax.Array], own: dict[int, jax.Array]) -> list[Any]:
        given = [*leaves]
        for i, part in shards.items():
            part = part._replace(value=own[i], owner=None)
            given[i] = shard_registry.remember(wholes[i], part)
        result, result_tree = jax.tree.flatten(function(tree.unflatten(given)))
        trees.append(result_tree)
        others.extend(None if isinstance(leaf, jax.Array) else (leaf,) for leaf in result)
        return [leaf for leaf in result if isinstance(leaf, jax.Array)]

    with shard_registry.forgotten_after():
        flat = flat_program.flatten(jax.make_jaxpr(reading)(wholes, own))
        evaluation = fsdp_schedule.ScheduledEvaluator(
            flat,
            [*wholes.values(), *own.values()],
            shards=dict(enumerate(shards.values())),
            whole=[],
            capacity=_capacity(list(shards.values())),
            after=fsdp_schedule.first_floats(batch),
            is_native=shard_registry.are_native(shards.values()),
        )
        arrays = iter(evaluation.run([], lambda chosen, values: values))
    return trees[0].unflatten([next(arrays) if it is None else it[0] for it in others])


def _capacity(found: list[Shard]) -> int:
    """Return the bytes of a group: bucket_bytes= of the optimizers, or its default."""
    sizes = [part.owner.sharding.bucket_bytes for part in found if part.owner is not None]
    return min(sizes, default=gradients.BUCKET_BYTES)
