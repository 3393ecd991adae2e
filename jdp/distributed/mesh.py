"""The mesh: over which devices the data axis runs, and placing values on it."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdp import axis, rank_state
from jdp.axis import AxisName
from jdp.distributed import initialize, kv_store, this_process
from jdp.distributed.checks import startup
from jdp.distributed.checks import state as state_check
from jdp.pytrees import is_array, is_key
from jdp.worker import progress


def init(
    mesh: Mesh | None = None,
    *,
    axis_name: AxisName = "data",
    cpu_ranks: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    timeout_s: float | None = 600.0,
) -> Mesh:
    """Make the mesh that jdp trains on, and remember it.

    Of several processes, `init` finds the others, and the mesh spans the devices of all: under
    `jdp run`, mpiexec, Slurm's srun or Kubernetes, by torchrun's variables, or after a
    `jax.distributed.initialize()` of your own. It must then come before anything that makes an
    array. Under `jdp run`, what stands before `init` is also run by standby processes, which
    wait in it. Calling `init` again replaces the mesh; states that already lie on another mesh
    stay there.

    Args:
      mesh: a mesh of your own, with any further axes; jdp touches only `axis_name`.
      axis_name: name of the data axis, or a tuple of names of axes of `mesh` that form it.
      cpu_ranks: train on this many virtual CPU devices, >= 1. Must come before anything
        asks JAX for a device.
      devices: the devices of the mesh, in rank order. Default: all of all processes.
      timeout_s: seconds, > 0, after which a run that makes no step is ended with exit code 124;
        after 30 s it says where each process is. Compiling, evaluating, saving and all that comes
        before the first step may take six times as long; see `jdp.phase`. `jdp run --timeout-s`
        comes first. None: no limit. A program that makes no step and takes no batch of
        `jdp.batches`, such as plain inference, has no limit either. One process alone is ended only
        in a step, or while it waits for `jdp.batches`, and at a prompt not at all.

    Returns:
      The mesh. Rank r is its r-th device along `axis_name`.

    Raises:
      ValueError: if `mesh` has no such axis, `cpu_ranks` comes too late, or `timeout_s` is not
        positive; on every process, if one has other versions, devices, XLA_FLAGS or another mesh.
      RuntimeError: if the other processes can't be found, or JAX runs already.

    >>> import jdp
    >>> mesh = jdp.init(cpu_ranks=4)
    >>> mesh.shape["data"]
    4
    """
    wanted = axis.names(axis_name)
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(
            f"init got {mesh!r} for a mesh. Write jdp.init(cpu_ranks=4) for ranks of this CPU, "
            "jdp.init(devices=...) for some devices, jdp.init() for all."
        )
    if devices is not None and not len(devices):
        raise ValueError("init got no devices, and a mesh needs at least one: leave devices= out.")
    if sum(choice is not None for choice in (mesh, cpu_ranks, devices)) > 1:
        raise ValueError("init takes one of mesh, cpu_ranks and devices: each says which devices.")
    initialize.join()
    if mesh is None:
        if len(wanted) > 1:
            raise ValueError(
                f"axis_name={wanted} names {len(wanted)} axes, and init cannot know how many "
                "devices lie along each. Write init(jax.make_mesh((2, 4), ...), axis_name=...)."
            )
        chosen = _cpu_devices(cpu_ranks) if cpu_ranks is not None else devices
        chosen = jax.devices() if chosen is None else list(chosen)
        mesh = Mesh(np.array(chosen), wanted, axis_types=(AxisType.Auto,))
    require_axes(mesh, wanted)
    startup.require_start(mesh, timeout_s)
    if mesh.is_multi_process and mesh.devices.flat[0].platform == "cpu":
        kv_store.keep_programs_of_all()
    progress.begin(timeout_s, jax.process_index(), jax.process_count())
    this_process.current.mesh = mesh
    return mesh


def current_mesh() -> Mesh:
    """Return the mesh that `init` made.

    Raises:
      RuntimeError: if `init` was not called.
    """
    mesh = this_process.current.mesh
    if mesh is None:
        raise RuntimeError(
            "jdp has no mesh yet, so it cannot know how many ranks share the batch. "
            "Call jdp.init() once, before the first step or batch."
        )
    return mesh


def mesh_of(leaves: Sequence[Any], axis_name: AxisName) -> Mesh:
    """Find the mesh that a state lives on: that of its leaves, else the one of `init`.

    Args:
      leaves: leaves of the state.
      axis_name: the data axis, which the mesh must have.

    Raises:
      ValueError: if the mesh of `init` has no such axis.
      RuntimeError: if no leaf lies on a mesh with that axis and `init` was not called.
    """
    wanted = axis.names(axis_name)
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            if set(wanted) <= set(sharding.mesh.axis_names):
                return sharding.mesh
    mesh = current_mesh()
    require_axes(mesh, wanted)
    return mesh


def num_ranks(mesh: Mesh, axis_name: AxisName) -> int:
    """Count the ranks of `mesh` along `axis_name`."""
    return math.prod(mesh.shape[name] for name in axis.names(axis_name))


def placed(tree: Any, axis_name: AxisName, mesh: Mesh | None = None, *, copy: bool = False) -> Any:
    """Copy a state onto the mesh, the same on every rank; `per_rank` is split over the ranks.

    Leaves that lie there already, perhaps split over further axes, are left where they are.
    What is copied shares no buffer with what was given, so that donating it deletes nothing
    of the caller's.

    Args:
      tree: tree of arrays and numbers; of other leaves nothing happens.
      axis_name: the data axis.
      mesh: where to. Default: the mesh of the leaves, else that of `init`; without either the
        tree is left as it is.
      copy: copy also what lies there already.

    Raises:
      ValueError: if a leaf is split over `axis_name`, or lies on another mesh; if one of `per_rank`
        does not divide by the number of ranks.
    """
    named, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [leaf for _, leaf in named]
    if mesh is None:
        try:
            mesh = mesh_of(leaves, axis_name)
        except RuntimeError:
            return tree
    is_own = rank_state.flags(tree)
    away, unsplit = [], []
    for i, (path, leaf) in enumerate(named):
        if is_own[i]:
            if _is_unsplit(path, leaf, mesh, axis_name):
                unsplit.append(i)
        elif _is_away(path, leaf, mesh, axis_name):
            away.append(i)
    if (away or unsplit) and not NamedSharding(mesh, PartitionSpec()).is_fully_addressable:
        # Only over a mesh of several processes: one that trains alone must not wait for others.
        kept = {*away, *unsplit}
        state_check.agreed(
            treedef.unflatten([x if i in kept else None for i, x in enumerate(leaves)])
        )
    for i, leaf in zip(away, replicate([leaves[i] for i in away], mesh), strict=True):
        leaves[i] = leaf
    for i in unsplit:
        leaves[i] = _split(leaves[i], mesh, axis_name)
    if copy:
        placed = {*away, *unsplit}
        stayed = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and i not in placed]
        for i in stayed:
            leaves[i] = jnp.copy(leaves[i])
    return jax.tree.unflatten(treedef, leaves)


def replicate(leaves: list[Any], mesh: Mesh) -> list[jax.Array]:
    """Copy arrays to every device of `mesh`; each process gives the same values."""
    sharding = NamedSharding(mesh, PartitionSpec())
    if not sharding.is_fully_addressable:
        # device_put would compare the values over all processes, leaf by leaf.
        return [_replicate_here(leaf, sharding) for leaf in leaves]
    # Numbers become arrays of a strong type: a weak one would change at the first step, and
    # the step would compile twice.
    # A copy first, since device_put may go on using the caller's own memory, also a NumPy
    # array's, whatever may_alias says.
    strong = [jnp.copy(x) if isinstance(x, jax.Array) else np.array(x) for x in leaves]
    return jax.device_put(strong, sharding)


def _replicate_here(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if is_key(leaf):
        data = _replicate_here(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    # A copy, since JAX may go on using the caller's own memory as a device's.
    value = np.asarray(leaf) if isinstance(leaf, jax.Array) else np.array(leaf)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _is_unsplit(path: tuple, leaf: Any, mesh: Mesh, axis_name: AxisName) -> bool:
    if isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)) or not is_array(leaf):
        return False
    rank_state.require_dim(jax.tree_util.keystr(path), leaf, num_ranks(mesh, axis_name))
    spec = _spec_on(leaf, mesh)
    return not spec or spec[0] is None or axis.names(spec[0]) != axis.names(axis_name)


def _spec_on(leaf: Any, mesh: Mesh) -> PartitionSpec | None:
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return sharding.spec
    return None


def _split(leaf: Any, mesh: Mesh, axis_name: AxisName) -> jax.Array:
    # Over further axes it stays split as it was.
    others = (_spec_on(leaf, mesh) or (None,))[1:]
    sharding = NamedSharding(mesh, PartitionSpec(axis.names(axis_name), *others))
    if is_key(leaf):
        data = _split(jax.random.key_data(leaf), mesh, axis_name)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.jit(jnp.copy, out_shardings=sharding)(leaf)
    value = np.asarray(leaf)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: np.array(value[index]))


def _is_away(path: tuple, leaf: Any, mesh: Mesh, axis_name: AxisName) -> bool:
    if isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)) or not is_array(leaf):
        return False
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return True
    split = {name for part in sharding.spec if part is not None for name in axis.names(part)}
    if split & set(axis.names(axis_name)):
        raise ValueError(
            f"`{jax.tree_util.keystr(path)}` {leaf.dtype}{list(leaf.shape)} is split over "
            f"{axis_name!r}, but every rank needs the whole state. "
            "Place it with jax.sharding.PartitionSpec() on that axis."
        )
    if sharding.mesh != mesh and sharding.mesh.size > 1:
        raise ValueError(
            f"`{jax.tree_util.keystr(path)}` lies on a mesh of {sharding.mesh.size} devices "
            f"{dict(sharding.mesh.shape)}, the rest of the state on one of {mesh.size} "
            f"{dict(mesh.shape)}. Move it with jax.device_put first, or create the state after "
            "jdp.init()."
        )
    return sharding.mesh != mesh


def _cpu_devices(num: int) -> list[jax.Device]:
    if num < 1:
        raise ValueError(f"cpu_ranks must be at least 1, got {num}.")
    try:
        jax.config.update("jax_num_cpu_devices", num)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:
        pass  # A backend runs already; it will do if it has the devices.
    found = [device for device in jax.devices("cpu") if device.process_index == jax.process_index()]
    if len(found) < num:
        raise ValueError(
            f"cpu_ranks={num}, but JAX already runs with {len(found)} CPU device(s) and cannot "
            "change that. Call jdp.init(cpu_ranks=...) before anything that uses a device (jnp "
            "arrays, jax.devices()), or start again."
        )
    return jax.devices("cpu") if jax.process_count() > 1 else found[:num]


def require_axes(mesh: Mesh, wanted: tuple[str, ...]) -> None:
    """Refuse a mesh without the axes `wanted`.

    Raises:
      ValueError: naming the axes that it has.
    """
    missing = [name for name in wanted if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"the mesh has the axes {mesh.axis_names}, none called {missing[0]!r}. "
            f"Say which one splits the batch: axis_name={mesh.axis_names[0]!r}."
        )
