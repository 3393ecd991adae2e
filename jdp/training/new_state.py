"""The arrays of a new `TrainState`, placed on the mesh of the ranks."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jdp import axis
from jdp.axis import AxisName
from jdp.distributed import placement
from jdp.distributed.checks import state as state_check
from jdp.distributed.mesh import mesh_of, num_ranks
from jdp.reduction.optimizer import Replicated
from jdp.reduction.sharding import sharding_of
from jdp.training import shard_layout

_log = logging.getLogger("jdp")
_logged: set[str] = set()


def of_the_first_process(tree: Any, axis_name: AxisName) -> Any:
    """Return a tree with the values of the first process, on all processes of the mesh."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    shared = [leaf for leaf in arrays if not leaf.is_fully_addressable]
    try:
        mesh = mesh_of(shared, axis_name)
    except RuntimeError:
        mesh = None
    return state_check.agreed(tree, mesh, broadcast=True)


def placed(state: Any, *, copy: bool) -> Any:
    """Copy a `TrainState` onto the mesh of `jdp.init()`, whole or split as its optimizer says.

    Args:
      copy: whether leaves that lie there already are copied, too.
    """
    axis_name = state.tx.axis_name
    try:
        mesh = mesh_of(jax.tree.leaves(state), axis_name)
    except RuntimeError:
        return state
    partition = shard_layout.partition(state, mesh)
    return placement.placed(state, axis_name, mesh, copy=copy, partition=partition)


def optimizer_state(tx: Replicated, params: Any) -> Any:
    """Return the first state of an optimizer, split over the ranks as it will be."""
    data_axes = set(axis.names(tx.axis_name))
    meshes = {_mesh(x, data_axes) for x in jax.tree.leaves(params)}
    mesh = meshes.pop() if len(meshes) == 1 else None
    if mesh is None:
        return tx.init(params)
    _log_undivided(tx, params, mesh)
    try:
        like = jax.eval_shape(tx.init, params)
    except Exception as error:  # of any kind: it reads values or returns what is not an array
        state = tx.init(params)  # A mistake of the author's is raised here, too, without a trace.
        _log_whole(tx, error)
        return state
    # One program for all leaves: optax alone would run one for each shape, and replaced processes
    # would start later. No split leaf ever exists as a whole.
    return jax.jit(tx.init, out_shardings=_shardings(tx, like, mesh))(params)


def _log_whole(tx: Replicated, error: Exception) -> None:
    """Log the cost of a first optimizer state that is not made by one program."""
    is_split = sharding_of(tx) is not None
    cost = "each of its operations is a program of its own, which makes the start slower"
    if is_split:
        cost = "its whole state is on each device until it is split"
    text = (
        f"jdp: the init of the optimizer cannot be traced ({type(error).__name__}: "
        f"{(str(error).splitlines() or [''])[0]}), so {cost}. Write it with jax.numpy, without "
        "reading values of the parameters."
    )
    if text not in _logged:
        _logged.add(text)
        _log.log(logging.WARNING if is_split else logging.INFO, text)


def _log_undivided(tx: Replicated, params: Any, mesh: Mesh) -> None:
    """Log which parameters stay whole though they are large: no dim of theirs divides."""
    sharding = sharding_of(tx)
    if sharding is None:
        return
    num_shards = num_ranks(mesh, axis.names(sharding.axes or tx.axis_name))
    named = [
        (path, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size >= sharding.min_size
    ]
    whole = [(path, leaf) for path, leaf in named if sharding.dim(leaf, num_shards) is None]
    if num_shards == 1 or not whole:
        return
    path, largest = max(whole, key=lambda each: each[1].nbytes)
    text = (
        f"jdp.sharded(stage={sharding.stage}) splits {len(named) - len(whole)} of {len(named)} "
        f"parameters that have min_size={sharding.min_size} numbers or more. The others stay whole "
        f"on each of {num_shards} ranks, {sum(leaf.nbytes for _, leaf in whole):,} bytes: "
        f"{num_shards} divides no dim of `params{jax.tree_util.keystr(path)}` "
        f"{largest.dtype}{list(largest.shape)}. Pad a dim in the model, or use another number of "
        "ranks."
    )
    if text not in _logged:
        _logged.add(text)
        _log.warning(text)


def _shardings(tx: Replicated, like: Any, mesh: Mesh) -> Any:
    specs = shard_layout.partition_of_optimizer(like, tx, mesh)
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    return jax.tree.unflatten(jax.tree.structure(like), shardings)


def _mesh(x: Any, data_axes: set[str]) -> Mesh | None:
    """Return the mesh of a parameter that is split along no further axis."""
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    split = {name for part in sharding.spec if part is not None for name in axis.names(part)}
    return sharding.mesh if split <= data_axes else None
