"""`TrainState`: the state of a step, the same on every rank."""

import dataclasses
import difflib
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp import axis, pytrees, rank_state
from jdp.analysis.marks import SOURCE, mark
from jdp.axis import AxisName
from jdp.distributed import placement
from jdp.distributed.checks import state as state_check
from jdp.distributed.mesh import mesh_of, num_ranks
from jdp.distributed.this_process import log_once
from jdp.reduction import (
    declared_reductions,
    local_steps,
    mixed_precision,
    nonfinite,
    optimizer,
    shard_registry,
    sharded_update,
)
from jdp.reduction.local_steps import BetweenSteps, LocalSteps
from jdp.reduction.optimizer import Replicated, Sharded, sharding_of
from jdp.training import moment_digits, parameters, shard_layout
from jdp.validation import int_at_least

_NOT_REPLACED = frozenset(("step", "params", "opt_state", "tx", "trainable"))


def split_keywords(
    tx: Replicated, fields: Iterable[str], keywords: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keywords that the optimizer reads, and the new values of fields."""
    replaced = sorted(set(fields) - _NOT_REPLACED)
    values = {name: x for name, x in keywords.items() if name in replaced}
    others = {name: x for name, x in keywords.items() if name not in replaced}
    read = _read_by(tx)
    for name in others:
        if name in _NOT_REPLACED:
            raise TypeError(
                f"apply_gradients got {name}=, which the update computes or keeps. To change it "
                f"afterwards, write state.apply_gradients(grads).replace({name}=...)."
            )
        if read is not None and name not in read:
            raise TypeError(_without_effect(name, [*replaced, *read]))
    return others, values


def _read_by(tx: Replicated) -> set[str] | None:
    """Return the keywords that functions of the optimizer name; None if one may read any."""
    names: set[str] = set()
    seen: set[int] = set()
    pending: list[Any] = [tx.options["tx"].update]
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if inspect.isfunction(each):
            code = each.__code__
            takes_any = code.co_flags & inspect.CO_VARKEYWORDS
            if takes_any and each.__module__.split(".")[0] not in ("jdp", "optax"):
                return None
            names.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
            names.update(x for x in code.co_consts if isinstance(x, str))
        pending.extend(_held_by(each))
    return names


def _held_by(each: Any) -> list[Any]:
    """Return what may be or hold functions in a function or container."""
    if inspect.isfunction(each):
        return [x for cell in each.__closure__ or () for x in _contents(cell)]
    if inspect.ismethod(each):
        return [each.__func__, *getattr(each.__self__, "__dict__", {}).values()]
    if isinstance(each, functools.partial):
        return [each.func, *each.args, *each.keywords.values()]
    if isinstance(each, (tuple, list)):
        return [*each]
    if isinstance(each, dict):
        return [*each.values()]
    wrapped, update = (getattr(each, name, None) for name in ("__wrapped__", "update"))
    return [x for x in (wrapped, update) if x is not None]


def _contents(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _without_effect(name: str, fields: list[str]) -> str:
    close = difflib.get_close_matches(name, fields, n=1)
    remedy = f"Write {close[0]}=" if close else "Leave it out"
    return (
        f"apply_gradients got {name}=, which would have no effect: it is not a field of the "
        f"state ({', '.join(fields)}), and the optimizer does not read it. {remedy}."
    )


def _of_the_first_process(tree: Any, axis_name: AxisName) -> Any:
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    shared = [leaf for leaf in arrays if not leaf.is_fully_addressable]
    try:
        mesh = mesh_of(shared, axis_name)
    except RuntimeError:
        mesh = None
    return state_check.agreed(tree, mesh, broadcast=True)


def placed(state: Any, *, copy: bool) -> Any:
    """Place a `TrainState`; `copy` leaves that are already there."""
    axis_name = state.tx.axis_name
    if placement.is_shapes_only():
        return state
    try:
        mesh = mesh_of(jax.tree.leaves(state), axis_name)
    except RuntimeError:
        return state
    partition = shard_layout.partition(state, mesh)
    return placement.placed(state, axis_name, mesh, copy=copy, partition=partition)


def optimizer_state(tx: Replicated, params: Any) -> Any:
    """Return an optimizer's first state, sharded as it will be."""
    meshes = {*map(_mesh, jax.tree.leaves(params))}
    mesh = meshes.pop() if len(meshes) == 1 else None
    if mesh is None:
        return tx.init(params)
    _log_undivided(tx, params, mesh)
    init: Any = tx.init
    if isinstance(tx, LocalSteps):
        init = functools.partial(init, num=num_ranks(mesh, axis.names(tx.axis_name)))
    try:
        like = jax.eval_shape(init, params)
    except Exception as error:  # it reads values or returns what is not an array
        state = init(params)  # raises a mistake of the author's, too, without a trace
        _log_whole(tx, error)
        return state
    # One program for all leaves: optax would run one for each shape, which delays replaced
    # processes. No sharded leaf ever exists as a whole.
    return jax.jit(init, out_shardings=_shardings(tx, like, params, mesh))(params)


def _log_whole(tx: Replicated, error: Exception) -> None:
    """Log the cost of a first state that is not made by one program."""
    is_split = sharding_of(tx) is not None
    cost = "each of its operations compiles separately, which slows the start"
    if is_split:
        cost = "its whole state is on each device until it is sharded"
    text = (
        f"jdp: the init of the optimizer cannot be traced ({type(error).__name__}: "
        f"{(str(error).splitlines() or [''])[0]}), so {cost}. Write it with jax.numpy, without "
        "reading values of the parameters."
    )
    log_once(logging.WARNING if is_split else logging.INFO, text)


def _log_undivided(tx: Replicated, params: Any, mesh: Mesh) -> None:
    """Log large parameters whose dims the ranks do not divide."""
    sharding = sharding_of(tx)
    if sharding is None:
        return
    num_shards = num_ranks(mesh, axis.names(sharding.axes or tx.axis_name))
    named = [
        (path, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size >= sharding.min_size
    ]
    whole = [
        (path, leaf) for path, leaf in named if shard_registry.dim_of(tx, leaf, num_shards) is None
    ]
    if num_shards == 1 or not whole:
        return
    path, largest = max(whole, key=lambda each: each[1].nbytes)
    text = (
        f"jdp.sharded(stage={sharding.stage}) shards {len(named) - len(whole)} of {len(named)} "
        f"parameters with at least min_size={sharding.min_size} numbers. The others stay whole "
        f"on each of {num_shards} ranks, {sum(leaf.nbytes for _, leaf in whole):,} bytes, "
        f"because {num_shards} divides no dim of `params{jax.tree_util.keystr(path)}` "
        f"{largest.dtype}{list(largest.shape)}. Pad a dim in the model, or use another number of "
        "ranks."
    )
    log_once(logging.WARNING, text)


def _shardings(tx: Replicated, like: Any, params: Any, mesh: Mesh) -> Any:
    """Return the shardings of an optimizer's state, over further axes those of its parameters."""
    named, treedef = jax.tree_util.tree_flatten_with_path(like)
    split = {
        path: (x.shape, axis.further_spec(x, tx.axis_name))
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }
    leaves, further = [], []
    for is_own, (path, leaf) in zip(rank_state.flags(like), named, strict=True):
        ends = (path[i:] for i in range(len(path) + 1))  # a moment's path ends with its parameter's
        shape, parts = next((split[end] for end in ends if end in split), ((), ()))
        parts = [part or None for part in parts if shape == leaf.shape[is_own:]]
        spec = PartitionSpec(*[None] * is_own, *parts)
        sharding = NamedSharding(mesh, spec)
        leaves.append(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding))
        further.append(spec)
    own = shard_layout.partition_of_optimizer(treedef.unflatten(leaves), tx, mesh)
    merged = [NamedSharding(mesh, _merged(*pair)) for pair in zip(own, further, strict=True)]
    return treedef.unflatten(merged)


def _merged(own: PartitionSpec, further: PartitionSpec) -> PartitionSpec:
    pairs = itertools.zip_longest(own, further)
    return PartitionSpec(*(part or other for part, other in pairs))


def _mesh(x: Any) -> Mesh | None:
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    return sharding.mesh


_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def _without_apply_fn(create: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Refuse `apply_fn=`, which Flax takes, before Python reads the arguments."""

    @functools.wraps(create)
    def checked(*args: _Args.args, **options: _Args.kwargs) -> _Result:
        if "apply_fn" in options:
            raise TypeError(
                "jdp.TrainState holds no apply_fn; the loss calls the model itself.\n"
                "Write jdp.TrainState.create(params, jdp.replicated(tx)), and in the loss "
                'model.apply({"params": params}, ...). '
                "Flax's TrainState with tx=jdp.replicated(tx) works, too."
            )
        return create(*args, **options)

    return checked


@jax.tree_util.register_dataclass
@dataclass(frozen=True, init=False)
class TrainState:
    """Parameters, optimizer state and step number: a pytree, the same on every rank.

    Attributes:
      step: `[]` int32, optimizer steps done.
      params: the parameters, an ordinary tree of arrays, inside a step and outside. With
        `jdp.local_sgd` and `jdp.diloco`, in a `train_step` this rank's, elsewhere the outer ones.
      opt_state: state of `tx`, for the parameters that train.
      model_state: state of the model beside parameters, such as batch statistics.
      seed: `[]` uint32, from which `key` and `shared_key` are made.
      tx: the optimizer: `jdp.replicated(...)`, `jdp.sharded(...)`, `jdp.local_sgd(...)` or
        `jdp.diloco(...)`. Not a leaf.
      trainable: for each leaf of `params` whether it trains. Not a leaf.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    model_state: Any
    seed: jax.Array
    tx: Replicated = dataclasses.field(metadata={"static": True})
    trainable: tuple[bool, ...] = dataclasses.field(metadata={"static": True})

    # JAX makes one in each call, and a frozen dataclass takes twice as long.
    def __init__(
        self,
        step: jax.Array,
        params: Any,
        opt_state: Any,
        model_state: Any,
        seed: jax.Array,
        tx: Replicated,
        trainable: tuple[bool, ...],
    ) -> None:
        own = self.__dict__
        own["step"], own["params"], own["opt_state"] = step, params, opt_state
        own["model_state"], own["seed"] = model_state, seed
        own["tx"], own["trainable"] = tx, trainable

    @classmethod
    @_without_apply_fn
    def create(
        cls,
        params: Any,
        tx: Replicated,
        *,
        model_state: Any = None,
        trainable: Any = None,
        seed: int = 0,
        broadcast: bool = False,
    ) -> "TrainState":
        """Make the state of step 0, on the mesh of `jdp.init()` if there is one.

        Args:
          params: tree of arrays. Leaves that are not inexact (integers) never train; with any of
            them, differentiate with `jdp.value_and_grad(loss_fn, allow_int=True)`.
          tx: the optimizer, with `jdp.replicated(...)` or another one of jdp outermost.
          model_state: tree of arrays that the step carries along, or None. Values that differ from
            rank to rank are in a `jdp.per_rank(...)`.
          trainable: which parameters train: a tree of bools like `params` or a prefix of it, or
            `(path, leaf) -> bool` with path as in `"['encoder']['kernel']"`. Default: all. The
            gradients of the others are never reduced, and the optimizer never sees them.
          seed: where `key` and `shared_key` start, 0 <= seed < 2**32.
          broadcast: take the values of the first process of the mesh, usually process 0. Otherwise
            all its processes must give equal values.

        Returns:
          The state. The given arrays are copied, never donated.

        Raises:
          TypeError: `tx` is not wrapped.
          ValueError: processes give different values (the error names the leaf); no parameter
            trains; `params` and `model_state` are on different meshes; a leaf was donated, or has
            fewer bits than `gather_dtype`; an average of the optimizer has too few bits to change;
            or a variable of nnx is at two places.

        >>> import jax.numpy as jnp, optax, jdp
        >>> state = jdp.TrainState.create({"w": jnp.ones(2)}, jdp.replicated(optax.sgd(0.5)))
        >>> state.apply_gradients({"w": jnp.array([1.0, 2.0])}).params["w"]
        Array([0.5, 0. ], dtype=float32)
        """
        optimizer.require_outermost(tx)
        if int_at_least("seed", seed, least=0) >= 2**32:
            raise ValueError(f"seed must be 0 <= seed < 2**32, got {seed}.")
        for name, tree in (("params", params), ("model_state", model_state)):
            pytrees.require_alive(
                name, tree, "Pass a copy made before: jax.tree.map(jnp.copy, ...)."
            )
            parameters.require_unshared(name, tree)
            parameters.require_numbers(name, tree)
        parameters.require_no_numbers_of_modules(params, all_train=trainable is None)
        if (sharding := sharding_of(tx)) is not None:
            mixed_precision.require_masters(params, sharding.gather_dtype)
        numbers = {"step": np.int32(0), "seed": np.uint32(seed)}
        given = {"params": params, "model_state": model_state, **numbers}
        if broadcast and not placement.is_shapes_only():
            given = _of_the_first_process(given, tx.axis_name)
        fields: dict[str, Any] = {**given, "opt_state": None, "tx": tx, "trainable": ()}
        state = placed(cls(**fields), copy=True)
        flags = parameters.trainable_flags(state.params, trainable)
        trained = _select(state.params, flags)
        opt_state = optimizer_state(tx, trained)
        moment_digits.require_digits(tx, opt_state, trained)
        state = state.replace(
            step=jnp.asarray(state.step),
            opt_state=opt_state,
            seed=jnp.asarray(state.seed),
            trainable=flags,
        )
        return placed(state, copy=False)

    def as_placed(self) -> "TrainState | None":
        """Return this state, made for its shapes alone, with the shardings that `create` gives.

        None without a mesh, or if it has further axes, over which the author's arrays decide.
        """
        names = axis.names(self.tx.axis_name)
        try:
            mesh = mesh_of((), names)
        except RuntimeError:
            return None
        if set(mesh.axis_names) != set(names):
            return None
        return placement.described(self, names, mesh, shard_layout.partition(self, mesh))

    def apply_gradients(self, grads: Any, *, synced: bool = False, **extra: Any) -> "TrainState":
        """Reduce the gradients over ranks, update the parameters, and count the step.

        Args:
          grads: tree like `params`: this rank's own gradient of its mean loss.
          synced: `grads` are means over ranks already, from `jdp.sync_gradients` or the gradient of
            a `jdp.global_mean` loss.
          **extra: new values of other fields of the state, such as `model_state=`; and keywords of
            the optimizer: `value=`, `value_fn=`, ...

        Returns:
          The next state.

        Raises:
          TypeError: a keyword is no such field, and the optimizer does not read it.
          ValueError: `grads` is another tree than `params`, and the optimizer cannot use it.
        """
        names = {field.name for field in dataclasses.fields(self)}
        extra, fields = split_keywords(self.tx, names, extra)
        params = _select(self.params, self.trainable)
        all_grads, axis_name = grads, self.tx.axis_name
        if jax.tree.structure(grads) != jax.tree.structure(params):
            grads = _select(grads, self.trainable)
        try:
            update = sharded_update.updated if isinstance(self.tx, Sharded) else _updated
            params, opt_state = update(
                self.tx, grads, self.opt_state, params, synced=synced, **extra
            )
        except (TypeError, ValueError) as error:
            if jax.tree.structure(grads) == jax.tree.structure(params):
                raise
            raise ValueError(_other_tree(grads, params)) from error
        params = _merge(params, self.params, self.trainable)
        overwritten = declared_reductions.overwrite(params, all_grads, axis_name, synced=synced)
        if (skipped := nonfinite.was_skipped(self.opt_state, opt_state)) is not None:
            overwritten = nonfinite.kept(skipped, params, overwritten)
            old = {name: getattr(self, name) for name in fields}
            fields = {name: nonfinite.kept(skipped, old[name], x) for name, x in fields.items()}
        new = self.replace(step=self.step + 1, params=overwritten, opt_state=opt_state, **fields)
        shard_layout.claim_update(new)
        return new

    def __repr__(self) -> str:
        step = "donated" if pytrees.is_deleted(self.step) else self.step
        trees = [f"{name}={_sizes(getattr(self, name))}" for name in _TREES]
        return f"TrainState(step={step}, {', '.join(trees)})"

    def replace(self, **changes: Any) -> "TrainState":
        """Return a state with some fields changed: EMA, clipped weights, new batch statistics."""
        if isinstance(self.opt_state, BetweenSteps) and "params" in changes:
            begun = self.opt_state._replace(num_local=self.opt_state.num_local * 0)
            changes = {"opt_state": begun, **changes}
        return dataclasses.replace(self, **changes)

    @property
    def key(self) -> jax.Array:
        """This rank's random key of this step (dropout, augmentation): a typed key, `[]`."""
        rank = axis.rank(self.tx.axis_name)
        if axis.is_bound(self.tx.axis_name):
            names = axis.names(self.tx.axis_name)
            rank = mark(rank, kind=SOURCE, path="state.key", axes=names)
        return jax.random.fold_in(self._step_key(), 1 + rank)

    @property
    def shared_key(self) -> jax.Array:
        """The random key of this step that is equal on every rank: a typed key, `[]`."""
        return jax.random.fold_in(self._step_key(), 0)

    def _step_key(self) -> jax.Array:
        return jax.random.fold_in(jax.random.key(self.seed), self.step)


# Fields with many arrays.
_TREES = ("params", "opt_state", "model_state")


def _updated(
    tx: Replicated, grads: Any, opt_state: Any, params: Any, **options: Any
) -> tuple[Any, Any]:
    return tx.update(grads, opt_state, params, applies=True, **options)


def _sizes(tree: Any) -> str:
    leaves = jax.tree.leaves(tree)
    return f"<{len(leaves)} leaves, {sum(map(np.size, leaves)):,} numbers>"


def _select(tree: Any, flags: tuple[bool, ...]) -> Any:
    # A frozen leaf becomes None, so optax never sees it.
    if all(flags):
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    if len(leaves) != len(flags):
        raise ValueError(
            f"the gradients have {len(leaves)} leaves and params have {len(flags)}. "
            "Differentiate with respect to state.params as a whole; jdp leaves out frozen "
            "parameters afterwards."
        )
    chosen = [x if flag else None for x, flag in zip(leaves, flags, strict=True)]
    return jax.tree.unflatten(treedef, chosen)


def _other_tree(grads: Any, params: Any) -> str:
    def named(tree: Any) -> str:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        paths = [f"`{jax.tree_util.keystr(path)}`" for path, _ in leaves[:3]]
        return f"{len(leaves)} ({', '.join(paths)}{', ...' if len(leaves) > 3 else ''})"

    if isinstance(grads, jax.Array):
        found = "a single array. jax.value_and_grad returns (loss, grads), in this order"
    else:
        found = f"{pytrees.kind_of(grads)} with the leaves {named(grads)}"
    return (
        f"the gradients are {found}; params is {pytrees.kind_of(params)} with the leaves "
        f"{named(params)}, and each parameter needs its own gradient. Differentiate with respect "
        "to state.params as a whole, and pass only the gradients: loss, grads = "
        f"jax.value_and_grad(loss_fn)(state.params, batch).{_of_nnx(grads)}"
    )


def _of_nnx(grads: Any) -> str:
    if not type(grads).__module__.startswith("flax.nnx"):
        return ""
    return (
        " nnx.grad returns a State. Make params a State too: graph, params = nnx.split(model, "
        "nnx.Param), and model = nnx.merge(graph, params) in the loss."
    )


def _merge(new: Any, old: Any, flags: tuple[bool, ...]) -> Any:
    if all(flags):
        return new
    updated = iter(jax.tree.leaves(new))
    leaves, treedef = jax.tree.flatten(old)
    return jax.tree.unflatten(
        treedef, [next(updated) if flag else x for x, flag in zip(leaves, flags, strict=True)]
    )


def within_step(state: Any) -> Any:
    """Return a state in which `local_sgd` and `diloco` have parameters of this rank."""
    return _exchanged(state, local_steps.entered)


def between_steps(state: Any) -> Any:
    """Invert `within_step`."""
    return _exchanged(state, local_steps.left)


def _exchanged(state: Any, exchange: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
    def exchanged(node: Any) -> Any:
        if not _has_local_steps(node):
            return node
        params, opt_state = exchange(node.opt_state, _select(node.params, node.trainable))
        params = _merge(params, node.params, node.trainable)
        return dataclasses.replace(node, params=params, opt_state=opt_state)

    return jax.tree.map(exchanged, state, is_leaf=_has_local_steps)


def _has_local_steps(node: Any) -> bool:
    return isinstance(node, TrainState) and isinstance(node.tx, LocalSteps)
