"""Sharded gradients, sent when ready, and parameters gathered where used."""

from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdp import axis
from jdp.analysis.marks import LOCAL, mark
from jdp.axis import AxisName
from jdp.reduction import (
    flat_program,
    gradients,
    mixed_precision,
    scattered_gradients,
    shard_registry,
    step_context,
    step_metrics,
)
from jdp.reduction.flat_program import FlatProgram
from jdp.reduction.fsdp_schedule import ScheduledEvaluator, first_floats
from jdp.reduction.local_gradients import LeafGradients, WholeMeans
from jdp.reduction.shard_registry import Shard


def shard_gradients(
    params: Any, axis_name: AxisName, wholes: WholeMeans, besides: Container[int] = ()
) -> "ShardGradients | None":
    """Return the derivative, None if `jax.value_and_grad` suffices."""
    if step_context.current(axis_name) is None:
        return None
    shards: dict[int, Shard] = {}
    for i, leaf in enumerate(jax.tree.leaves(params)):
        shard = shard_registry.known(leaf)
        if shard is not None and shard.owner is not None and i not in besides:
            shards[i] = shard
    trained = [i for i, it in shards.items() if it.trains and it.owner.sharding.mean]
    sent = trained if wholes.are_sent else []
    found = ShardGradients(params, shards, sent, wholes) if shards else None
    return found if found is not None and found.does_anything else None


class ShardGradients:
    """The derivative of losses in parameters, if some have an owner.

    Args:
      shards: position of an owned leaf -> its shard.
      sent: positions of those with gradients averaged where they are computed.
    """

    sends = True

    def __init__(
        self, params: Any, shards: dict[int, Shard], sent: Sequence[int], wholes: WholeMeans
    ):
        self._sent, self._wholes = sent, wholes
        named, self._tree = jax.tree_util.tree_flatten_with_path(params)
        self._paths = [jax.tree_util.keystr(path) for path, _ in named]
        leaves = [leaf for _, leaf in named]
        self._dtypes = [jnp.result_type(leaf) for leaf in leaves]
        dtypes = mixed_precision.loss_dtypes(leaves)
        self._leaves = list(map(mixed_precision.cast, leaves, dtypes))
        self._shards = {
            i: shard._replace(
                gather_dtype=dtypes[i],
                reduce_dtype=shard.owner.reduce_dtype,
                all_reduce=shard.owner.sharding.all_reduce,
            )
            for i, shard in shards.items()
        }
        self._in_time = {i: shard for i, shard in self._shards.items() if not shard.is_kept}
        self._bucket_bytes = min(s.owner.sharding.bucket_bytes for s in shards.values())
        self._keep_gathered()

    def _keep_gathered(self) -> None:
        """Gather arrays that stay gathered, with another dtype in the loss."""
        kept = {
            i: shard._replace(owner=None)
            for i, shard in self._shards.items()
            if i not in self._in_time and shard.gather_dtype is not None
        }
        wholes = shard_registry.gathered([*kept.values()], self._bucket_bytes)
        for i, whole in zip(kept, wholes, strict=True):
            self._leaves[i] = whole

    @property
    def does_anything(self) -> bool:
        """Whether it differs from `jax.value_and_grad`."""
        return bool(self._in_time or self._sent)

    def differentiate(
        self, loss_fn: Callable[..., Any], has_aux: bool, args: tuple
    ) -> tuple[Any, LeafGradients]:
        """Return `loss_fn(params, *args)` and the gradients."""
        own_shards = [self._shards[i].value for i in self._sent]
        with shard_registry.forgotten_after():
            program, first, restored = self._traced(loss_fn, has_aux, args)
            # An author's rule may define an unread parameter's gradient.
            zeros = flat_program.zeros_of(program)
            has_gradient = [value not in zeros for value in program.outs[first:]]
            evaluation = ScheduledEvaluator(
                program,
                [*self._leaves, *own_shards],
                shards=self._in_time,
                whole=[i for i in range(len(self._leaves)) if i not in self._shards],
                capacity=self._bucket_bytes,
                after=first_floats(args[:1]),
                is_native=shard_registry.are_native(self._shards.values()),
            )
            along = self._wholes.along() if self._sent else []
            to_send = [first + i for i in sorted([*self._sent, *along]) if has_gradient[i]]
            outs = evaluation.run(to_send, self._sender(evaluation, to_send, first))
        means = {
            i: outs[first + i] if has_gradient[i] else self._nothing(i)
            for i in self._wholes.owners
            if i in along or (self._wholes.is_at_once and not has_gradient[i])
        }
        for place, i in enumerate(self._sent, len(self._leaves)):
            parts = [outs[first + input_] for input_ in (i, place) if has_gradient[input_]]
            means[i] = sum(parts[1:], parts[0]) if parts else self._nothing(i)
        local = [
            None if i in means else mixed_precision.cast(outs[first + i], dtype)
            for i, dtype in enumerate(self._dtypes)
        ]
        return restored(outs[:first]), LeafGradients(local, means)

    def _sender(self, evaluation: ScheduledEvaluator, to_send: Sequence[int], first: int) -> Any:
        left = {*to_send}

        def send(chosen: list[int], grads: list[Any]) -> list[Any]:
            left.difference_update(chosen)
            if not left and self._wholes.is_at_once:
                value = [evaluation.result(i) for i in range(first)]
                step_metrics.offer_mean(step_context.innermost(), value)
            return self._scattered([i - first for i in chosen], grads)

        return send

    def _traced(
        self, loss_fn: Callable[..., Any], has_aux: bool, args: tuple
    ) -> tuple[FlatProgram, int, Callable[[Sequence[Any]], Any]]:
        """Return a loss with its gradients as one program.

        Inputs: the parameters, and the sent shards. Outputs: the value's arrays, whose number is
        returned, then the gradients of all inputs. The function restores the value.
        """
        others: list[Any] = []
        trees: list[Any] = []

        def loss(leaves: list[Any], shards: list[Any]) -> Any:
            leaves = list(leaves)
            for i, value in zip(self._sent, shards, strict=True):
                # Without an owner: a gradient inside of the loss is this rank's.
                own = self._shards[i]._replace(value=value, owner=None)
                leaves[i] = shard_registry.remember(leaves[i], own)
            return loss_fn(self._tree.unflatten(leaves), *args)

        def program(leaves: list[Any], shards: list[Any]) -> Any:
            differentiate = jax.value_and_grad(loss, argnums=(0, 1), has_aux=has_aux)
            value, grads = differentiate(leaves, shards)
            found, tree = jax.tree.flatten(value)
            trees.append(tree)
            others.extend(None if isinstance(leaf, jax.Array) else (leaf,) for leaf in found)
            return [leaf for leaf in found if isinstance(leaf, jax.Array)], grads

        own_shards = [self._shards[i].value for i in self._sent]
        flat = flat_program.flatten(jax.make_jaxpr(program)(self._leaves, own_shards))

        def restored(arrays: Sequence[Any]) -> Any:
            left = iter(arrays)
            leaves = [next(left) if other is None else other[0] for other in others]
            return trees[0].unflatten(leaves)

        return flat, others.count(None), restored

    def _nothing(self, i: int) -> jax.Array:
        shard = self._shards.get(i)
        owner = self._owner(i)
        # Another loss may have a whole gradient of that path.
        zeros = jnp.zeros(self._leaves[i].shape, self._dtypes[i])
        axes = axis.in_mesh_order(owner.axis_name)
        zeros = mark(zeros, kind=LOCAL, path=self._paths[i], axes=axes)
        if shard is None:
            return zeros
        return lax.slice_in_dim(zeros, 0, shard.value.shape[shard.dim], axis=shard.dim)

    def _owner(self, i: int) -> Any:
        return self._shards[i].owner if i in self._shards else self._wholes.owners[i]

    def _scattered(self, chosen: Sequence[int], grads: Sequence[Any]) -> list[jax.Array]:
        found: dict[int, jax.Array] = {}
        of = {i: self._owner(i) for i in chosen}
        for owner in {id(owner): owner for owner in of.values()}.values():
            places = [k for k, i in enumerate(chosen) if of[i] is owner]
            paths = [self._paths[chosen[k]] for k in places]
            leaves = [
                mixed_precision.cast(
                    gradients.require_float(path, grads[k]), self._dtypes[chosen[k]]
                )
                for path, k in zip(paths, places, strict=True)
            ]
            shards = [self._shards.get(chosen[k]) for k in places]
            dims = [None if shard is None else shard.dim for shard in shards]
            further = [() if shard is None else shard.further for shard in shards]
            parts = scattered_gradients.scattered(paths, leaves, dims, owner, further)
            found |= dict(zip(places, parts, strict=True))
        return [found[k] for k in range(len(chosen))]

    def whole(self, grads: LeafGradients) -> Any:
        """Return the gradients; means are whole arrays with known shards."""
        parts = []
        split = [i for i in grads.means if i in self._shards]
        for i in split:
            value = grads.means[i]
            axes = axis.in_mesh_order(self._shards[i].owner.axis_name)
            value = scattered_gradients.proved(value, axes, mean=True)
            parts.append(self._shards[i]._replace(value=value, owner=None, gather_dtype=None))
        wholes = shard_registry.gathered(parts, self._bucket_bytes)
        found = self._wholes.means(grads.local, grads.means) | {
            i: shard_registry.remember_mean(whole, self._paths[i])
            for i, whole in zip(split, wholes, strict=True)
        }
        return self._tree.unflatten([found.get(i, leaf) for i, leaf in enumerate(grads.local)])
