"""`local_sgd` and `diloco`: each rank updates its own parameters between outer updates."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jdp import axis, collectives, pytrees
from jdp.analysis import scales
from jdp.analysis.marks import ALL_REDUCED, LOCAL_UPDATE, OUTER, mark
from jdp.axis import AxisName
from jdp.collectives import AllReduce, buckets
from jdp.distributed.mesh import mesh_of, num_ranks
from jdp.error_codes import with_code
from jdp.rank_state import PerRank
from jdp.reduction import gradients, nonfinite, step_context
from jdp.reduction.optimizer import (
    Replicated,
    applied,
    in_dtype,
    require_algorithm,
    require_shapes,
    with_extra_args,
)
from jdp.validation import int_at_least


class BetweenSteps(NamedTuple):
    """The optimizer state of `local_sgd` and `diloco` between steps, beside outer parameters.

    Attributes:
      num_local: `[]` int32, 1 to `every`: steps of this round; 0 before the first round.
      outer_state: with `streaming` of each fragment, `[every, ...]`.
      own_params: each rank's parameters, `[ranks, ...]`; not read at `num_local` 0.
      own_state: each rank's inner state, `[ranks, ...]`.
    """

    num_local: jax.Array
    outer_state: Any
    own_params: PerRank
    own_state: PerRank


class WithinStep(NamedTuple):
    """The same in a step, beside this rank's parameters; `outer_params` are the outer ones."""

    num_local: jax.Array
    outer_state: Any
    outer_params: Any
    own_state: Any


class LocalSteps(Replicated):
    """The result of `local_sgd` and `diloco`: an optax transformation with its axis."""

    @property
    def optimizers(self) -> tuple[optax.GradientTransformationExtraArgs, ...]:
        """The inner and the outer optimizer."""
        return self.update.optimizers  # type: ignore[attr-defined]


def local_sgd(
    tx: optax.GradientTransformation,
    *,
    every: int,
    axis_name: AxisName = "data",
    all_reduce: AllReduce = collectives.auto,
) -> LocalSteps:
    """Wrap an optimizer so that ranks train alone, and average their parameters every few steps.

    For slow links, in place of `jdp.replicated(tx)`: it sends parameters in one of `every` steps,
    and no gradients. It is `diloco` with an outer optimizer that takes the mean.

    Args:
      tx: each rank's complete optimizer; its state is never averaged.
      every: steps from one mean to the next, >= 1.
      axis_name: the data axis: a name, or a tuple of names.
      all_reduce: the algorithm of the mean, from `jdp.collectives`.

    Returns:
      An optax transformation for `jdp.TrainState.create`; see `diloco`.

    Raises:
      TypeError, ValueError: as `diloco`.

    Source: Stich 2018, Local SGD, https://arxiv.org/abs/1805.09767.

    >>> import jax, jax.numpy as jnp, optax, jdp
    >>> mesh = jdp.init(cpu_ranks=2)
    >>> @jdp.train_step
    ... def step(state, batch):  # each rank follows its own rows
    ...     grads = jax.grad(lambda w: jnp.mean((w - batch) ** 2) / 2)(state.params)
    ...     return state.apply_gradients(grads), {}
    >>> state = jdp.TrainState.create(jnp.zeros(1), jdp.local_sgd(optax.sgd(0.5), every=2))
    >>> for _ in range(2):
    ...     state, _ = step(state, jnp.array([2.0, 6.0]))
    >>> state.params  # the mean of 1.5 and 4.5
    Array([3.], dtype=float32)
    """
    outer = optax.sgd(1.0)
    return _local_steps("local_sgd", tx, outer, every, axis_name, all_reduce, streaming=False)


def diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation | None = None,
    *,
    every: int,
    streaming: bool = False,
    axis_name: AxisName = "data",
    all_reduce: AllReduce = collectives.auto,
) -> LocalSteps:
    """Wrap an optimizer so that ranks train alone, and an outer one joins them every few steps.

    For slow links, in place of `jdp.replicated(inner)`. Each rank updates its own parameters by its
    own gradients. Every `every` steps, the mean over ranks of the outer parameters minus a rank's
    own is the outer optimizer's gradient; all ranks continue from its result.

    In a `train_step`, `state.params` are this rank's parameters, and
    `state.opt_state.outer_params` the outer ones. Between steps and in an `eval_step`,
    `state.params` are the outer ones, equal on all ranks, and `state.opt_state` has the ranks'
    parameters and inner states, split over the ranks. A checkpoint continues from the mean of both
    on another number of ranks.

    Args:
      inner: each rank's complete optimizer; its state is never averaged.
      outer: the outer optimizer. Default: `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
      every: steps from one outer update to the next, >= 1.
      streaming: cut parameters into `every` fragments, and exchange one in each step, as it was
        before the step, so that XLA can hide the exchange behind the step.
      axis_name: the data axis: a name, or a tuple of names.
      all_reduce: the algorithm of the mean, from `jdp.collectives`.

    Returns:
      An optax transformation for `jdp.TrainState.create`.

    Raises:
      TypeError: an optimizer is no optax transformation, or already wrapped by jdp; `every` is no
        integer; from `update`, the state is no `jdp.TrainState` in a `jdp.train_step`.
      ValueError: `every` is below 1; from a step with reduced gradients (JDP219) or a `weight=`
        (JDP220).

    Source: Douillard et al. 2023, DiLoCo, https://arxiv.org/abs/2311.08105, and 2025, Streaming
    DiLoCo, https://arxiv.org/abs/2501.18512.

    >>> import jax, jax.numpy as jnp, optax, jdp
    >>> mesh = jdp.init(cpu_ranks=2)
    >>> @jdp.train_step
    ... def step(state, batch):  # each rank follows its own rows
    ...     grads = jax.grad(lambda w: jnp.mean((w - batch) ** 2) / 2)(state.params)
    ...     return state.apply_gradients(grads), {}
    >>> tx = jdp.diloco(optax.sgd(0.5), optax.sgd(0.5), every=2)
    >>> state = jdp.TrainState.create(jnp.zeros(1), tx)
    >>> for _ in range(2):
    ...     state, _ = step(state, jnp.array([2.0, 6.0]))
    >>> state.params  # half of the way to the mean of 1.5 and 4.5
    Array([1.5], dtype=float32)
    """
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    return _local_steps("diloco", inner, outer, every, axis_name, all_reduce, streaming=streaming)


def _local_steps(
    name: str,
    inner: Any,
    outer: Any,
    every: int,
    axis_name: AxisName,
    all_reduce: AllReduce,
    *,
    streaming: bool,
) -> LocalSteps:
    axes = axis.names(axis_name)
    every = int_at_least("every", every, least=1)
    require_algorithm(all_reduce)
    for each in (inner, outer):
        _require_plain(each, name)
    optimizers = with_extra_args(inner), with_extra_args(outer)
    mean_of = _packed_mean if streaming else _mean

    def init_outer(params: Any) -> Any:
        if not streaming:
            return optimizers[1].init(params)
        of_fragment = jax.vmap(lambda i: optimizers[1].init(_fragment(params, i, every)))
        return of_fragment(jnp.arange(every))

    def init(params: Any, num: int | None = None) -> Any:
        """Return the state of `num` ranks, by default of those of `jdp.init`."""
        num = num_ranks(mesh_of((), axes), axes) if num is None else num

        def on_ranks(tree: Any) -> PerRank:
            stacked = jax.tree.map(lambda x: jnp.broadcast_to(x, (num, *jnp.shape(x))), tree)
            return PerRank(stacked, _resized)

        own_state, outer_state = optimizers[0].init(params), init_outer(params)
        if nonfinite.fields((own_state, outer_state), "skips_left"):
            raise TypeError(
                f"jdp.{name} got an optimizer in jdp.skip_nonfinite or jdp.dynamic_loss_scale, "
                "whose skips all ranks count together, but each rank has its own gradients. Write "
                f"jdp.{name}(optax.apply_if_finite(tx, 10), every={every})."
            )
        return BetweenSteps(jnp.int32(0), outer_state, on_ranks(params), on_ranks(own_state))

    def outer_update(own: Any, *old: Any) -> Any:
        mean = mean_of(jax.tree.map(jnp.subtract, old[0], own), axes, all_reduce)
        return jax.tree.map(in_dtype, applied(optimizers[1], mean, old[1], old[0]), old)

    def streamed(own: Any, before: Any, state: WithinStep, i: jax.Array) -> tuple[Any, WithinStep]:
        """Exchange fragment `i` of the parameters before a step."""
        # Fused with the slices below, XLA would copy the inner state.
        own, own_state = lax.optimization_barrier((own, state.own_state))
        old = _fragment(before, i, every)
        outer, outer_state = outer_update(
            old,
            _fragment(state.outer_params, i, every),
            jax.tree.map(lambda x: x[i], state.outer_state),
        )
        moved = jax.tree.map(lambda x, y, z: x + (y - z), _fragment(own, i, every), outer, old)
        return _with_fragment(own, moved, i, every), state._replace(
            outer_params=_with_fragment(state.outer_params, outer, i, every),
            outer_state=jax.tree.map(
                lambda x, new: x.at[i].set(new), state.outer_state, outer_state
            ),
            own_state=own_state,
        )

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        synced: bool = False,
        applies: bool = False,
        **extra: Any,
    ) -> tuple[Any, WithinStep]:
        if not applies or not isinstance(state, WithinStep):
            raise TypeError(
                f"jdp.{name} updates the parameters of one rank, which only a jdp.TrainState in a "
                "jdp.train_step has. Write state = jdp.TrainState.create(params, "
                f"jdp.{name}(...)), and state.apply_gradients(grads) in a function decorated with "
                "jdp.train_step."
            )
        step = step_context.current(axes)
        if synced:
            raise ValueError(scales.reduced_before("synced=True means that they are reduced"))
        if step is not None and step.weight is not None:
            raise ValueError(with_code("JDP220", _WEIGHTED.format(name=name)))
        require_shapes(updates, params)
        grads = _marked(updates, LOCAL_UPDATE, axes)
        own, own_state = applied(optimizers[0], grads, state.own_state, params, **extra)
        done = state.num_local % every
        state = state._replace(num_local=done + 1, own_state=own_state)
        if streaming:
            return streamed(own, params, state, done)

        def joined(*given: Any) -> Any:
            outer_params, outer_state = outer_update(*given)
            return outer_params, outer_params, outer_state

        def alone(*given: Any) -> Any:
            return given

        given = own, state.outer_params, state.outer_state
        own, outer_params, outer_state = lax.cond(done + 1 == every, joined, alone, *given)
        return own, state._replace(outer_params=outer_params, outer_state=outer_state)

    options: dict[str, Any] = {"tx": inner, "axis_name": axis_name, "all_reduce": all_reduce}
    own = {"axis_name": axis_name, "reduce_dtype": None, "options": options}
    for key, value in {**own, "optimizers": optimizers}.items():
        setattr(update, key, value)
    return LocalSteps(init, update)


_WEIGHTED = (
    "jdp.{name} averages parameters, which many steps of each rank have changed, so the weight= "
    "of one step does not apply. Remove weight= from jdp.train_step, and give each rank as many "
    'rows that count: jdp.batches(..., tail="drop").'
)


def _require_plain(tx: Any, name: str) -> None:
    if isinstance(tx, Replicated):
        found = "an optimizer of jdp, which would average the gradients of each step"
    elif not (hasattr(tx, "init") and hasattr(tx, "update")):
        found = f"{pytrees.kind_of(tx)}, which is not an optax transformation (no init and update)"
    else:
        return
    raise TypeError(f"jdp.{name} got {found}. Write jdp.{name}(optax.adamw(1e-3), every=50).")


def _marked(tree: Any, kind: str, axes: tuple[str, ...]) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, x: mark(x, kind=kind, path=jax.tree_util.keystr(path), axes=axes), tree
    )


def _mean(tree: Any, axes: tuple[str, ...], all_reduce: AllReduce) -> Any:
    leaves, treedef = jax.tree.flatten(_marked(tree, OUTER, axes))
    return treedef.unflatten(_means(leaves, axes, all_reduce))


def _packed_mean(tree: Any, axes: tuple[str, ...], all_reduce: AllReduce) -> Any:
    """Send small outer gradients as one array of each dtype."""
    leaves, treedef = jax.tree.flatten(tree)
    dtypes: dict[Any, list[int]] = {leaf.dtype: [] for leaf in leaves}
    for i, leaf in enumerate(leaves):
        dtypes[leaf.dtype].append(i)
    packed = [buckets.pack([leaves[i] for i in group]) for group in dtypes.values()]
    sent = [mark(vector, kind=OUTER, path="", axes=axes) for vector in packed]
    for group, mean in zip(dtypes.values(), _means(sent, axes, all_reduce), strict=True):
        for i, part in zip(group, buckets.unpack(mean, [leaves[i] for i in group]), strict=True):
            leaves[i] = part
    return treedef.unflatten(leaves)


def _means(
    leaves: list[jax.Array], axes: tuple[str, ...], all_reduce: AllReduce
) -> list[jax.Array]:
    order = axis.in_mesh_order(axes)
    if gradients.is_alone(order, all_reduce):
        return [mark(leaf, kind=ALL_REDUCED, path="", axes=order) for leaf in leaves]
    mesh = gradients.mesh_of_step(order)
    reduce = functools.partial(all_reduce, scale=1.0 / axis.size(order), mesh=mesh)
    return buckets.summed(leaves, gradients.BUCKET_BYTES, reduce, order)


def _fragment(params: Any, i: jax.Array, num: int) -> Any:
    """Return fragment `i` of `num`, `[size]` of each parameter, with zeros for others' numbers."""

    def piece(x: jax.Array) -> jax.Array:
        begin, is_of = _place(x, i, num)
        return jnp.where(is_of, lax.dynamic_slice_in_dim(jnp.ravel(x), begin, is_of.size), 0)

    return jax.tree.map(piece, params)


def _with_fragment(params: Any, fragment: Any, i: jax.Array, num: int) -> Any:
    """Invert `_fragment`."""

    def put(x: jax.Array, piece: jax.Array) -> jax.Array:
        begin, is_of = _place(x, i, num)
        old = lax.dynamic_slice_in_dim(jnp.ravel(x), begin, is_of.size)
        new = jnp.where(is_of, piece, old)
        return lax.dynamic_update_slice_in_dim(jnp.ravel(x), new, begin, 0).reshape(x.shape)

    return jax.tree.map(put, params, fragment)


def _place(x: jax.Array, i: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """Return the begin of a slice, and which of its numbers are the fragment's."""
    size = -(-x.size // num)
    begin = jnp.minimum(i * size, x.size - size)
    return begin, begin + jnp.arange(size) >= i * size


def entered(opt_state: BetweenSteps, outer_params: Any) -> tuple[Any, WithinStep]:
    """Return this rank's parameters and the optimizer state, at the start of a step."""
    num_local, outer_state, own_params, own_state = opt_state
    own, state = jax.tree.map(_of_this_rank, (own_params.value, own_state.value))
    begins = num_local == 0  # also after `replace(params=)`, or without saved ones
    own = jax.tree.map(lambda outer, x: jnp.where(begins, outer, x), outer_params, own)
    return own, WithinStep(num_local, outer_state, outer_params, state)


def left(opt_state: WithinStep, own_params: Any) -> tuple[Any, BetweenSteps]:
    """Return the outer parameters and the optimizer state, at the end of a step."""
    num_local, outer_state, outer_params, own_state = opt_state
    own, state = jax.tree.map(lambda x: jnp.asarray(x)[None], (own_params, own_state))
    parts = PerRank(own, _resized), PerRank(state, _resized)
    return outer_params, BetweenSteps(num_local, outer_state, *parts)


def _of_this_rank(x: jax.Array) -> jax.Array:
    if x.shape[0] != 1:
        raise ValueError(
            f"the state has parameters for {x.shape[0]} times as many ranks as this mesh. Create "
            "it on this mesh: jdp.TrainState.create(params, tx). jdp.check_step compares with one "
            "rank: use jdp.replicated(tx) there."
        )
    return x.reshape(x.shape[1:])


def _resized(saved: Any, like: jax.ShapeDtypeStruct) -> Any:
    """Return equal values for another number of ranks: the mean of floats, else the first."""
    if jnp.issubdtype(like.dtype, jnp.inexact):
        is_complex = jnp.issubdtype(like.dtype, jnp.complexfloating)
        wide = np.asarray(saved, np.complex128 if is_complex else np.float64)
        return np.broadcast_to(wide.mean(0).astype(like.dtype), like.shape)
    return (jnp if pytrees.is_key(like) else np).broadcast_to(saved[0], like.shape)
