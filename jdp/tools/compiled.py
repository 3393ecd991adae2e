"""A step, compiled but never run."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp import axis, pytrees, rank_state
from jdp.distributed import mesh as meshes
from jdp.step_spec import StepSpec
from jdp.tools.hlo import HloProgram
from jdp.tools.targets import TargetDevices, target
from jdp.training import communication_plan, shard_layout
from jdp.training.communication_plan import TracedStep
from jdp.training.step import Step, require_step


def _shapes_on(mesh: Mesh, spec: StepSpec, args: tuple) -> tuple:
    state, batch, *rest = args
    num_ranks = meshes.num_ranks(mesh, spec.axis_name)
    rows = PartitionSpec(spec.axis_name)
    require_equal_rows(batch, spec, num_ranks)
    place = _Placing(mesh)
    return (
        _state(state, mesh, spec, num_ranks),
        jax.tree.map(lambda leaf: place(leaf, rows), batch),
        *(jax.tree.map(lambda leaf: place(leaf, PartitionSpec()), arg) for arg in rest),
    )


def require_equal_rows(batch: Any, spec: StepSpec, num_ranks: int) -> None:
    """Raise a ValueError if the rows cannot be split."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not jnp.ndim(leaf) or jnp.shape(leaf)[0] % num_ranks:
            name = spec.argument(1) + jax.tree_util.keystr(path)
            raise ValueError(
                f"`{name}` has the shape {list(jnp.shape(leaf))}, but its rows do not divide by "
                f"{num_ranks} ranks. Pass a batch whose number of rows is a multiple of "
                f"{num_ranks}."
            )


def with_rows(spec: StepSpec, state: Any, batch: Any, rows: int) -> tuple[Any, Any]:
    """Return a state and a batch as shapes with other rows, also in `per_rank` arrays."""
    before = {jnp.shape(leaf)[0] for leaf in jax.tree.leaves(batch)}
    held = pytrees.hold(state)
    leaves, tree = jax.tree.flatten(held)
    before.discard(_ranks_of(leaves, spec))  # one row per rank
    own = rank_state.flags(held)
    changed = [
        _with_rows(leaf, rows) if is_own and jnp.shape(leaf)[0] in before else leaf
        for leaf, is_own in zip(leaves, own, strict=True)
    ]
    return tree.unflatten(changed), jax.tree.map(lambda leaf: _with_rows(leaf, rows), batch)


def _with_rows(leaf: Any, rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, *jnp.shape(leaf)[1:]), dtype_of(leaf))


def dtype_of(leaf: Any) -> Any:
    """Return an array's dtype on a device, mostly of 32 bits instead of 64."""
    dtype = getattr(leaf, "dtype", None) or jnp.result_type(leaf)
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


class _Placing:
    def __init__(self, mesh: Mesh):
        self._mesh = mesh

    def __call__(self, leaf: Any, spec: PartitionSpec, num_rows: int | None = None) -> Any:
        shape = jnp.shape(leaf)
        if num_rows is not None:
            shape = (num_rows, *shape[1:])
        where = getattr(leaf, "sharding", None)
        if isinstance(where, NamedSharding) and where.mesh == self._mesh:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
        return jax.ShapeDtypeStruct(shape, dtype_of(leaf), sharding=NamedSharding(self._mesh, spec))


def _state(state: Any, mesh: Mesh, spec: StepSpec, num_ranks: int) -> Any:
    held = pytrees.hold(state)
    leaves, tree = jax.tree.flatten(held)
    place = _Placing(mesh)
    own = rank_state.flags(held)
    before = _ranks_of(leaves, spec)
    partition = shard_layout.partition(held, mesh)
    placed = []
    for leaf, split, is_own in zip(leaves, partition, own, strict=True):
        if not is_own:
            placed.append(place(leaf, _with_further(leaf, split or PartitionSpec(), mesh, spec)))
            continue
        rows = _rows_of_ranks(jnp.shape(leaf)[0], before, num_ranks)
        placed.append(place(leaf, PartitionSpec(spec.axis_name), rows))
    return tree.unflatten(placed)


def _with_further(leaf: Any, partition: PartitionSpec, mesh: Mesh, spec: StepSpec) -> PartitionSpec:
    """Return a leaf's partition with its own over further axes."""
    further = axis.further_spec(leaf, spec.axis_name)
    parts = [*partition, *[None] * (len(further) - len(partition))]
    for i, names in enumerate(further):
        if names and {*names} <= {*mesh.axis_names}:
            parts[i] = names
    return PartitionSpec(*parts)


def _rows_of_ranks(num_rows: int, before: int, num_ranks: int) -> int:
    if num_rows != before and num_rows % num_ranks == 0:
        return num_rows  # rows of the batch, which stays unchanged
    return num_rows // before * num_ranks


def _ranks_of(leaves: list[Any], spec: StepSpec) -> int:
    try:
        return meshes.num_ranks(meshes.mesh_of(leaves, spec.axis_name), spec.axis_name)
    except RuntimeError:
        return 1  # the state was never placed


class StepForDevices(NamedTuple):
    """A step compiled for some devices; `args` are shapes on them."""

    spec: StepSpec
    where: TargetDevices
    num_ranks: int
    args: tuple
    traced: TracedStep
    compiled: Any
    program: HloProgram


class TooLargeError(ValueError):
    """A device has too little memory for the step."""


def devices_of(
    step: Step, args: tuple, keywords: dict[str, Any], on: str | Mesh | None
) -> tuple[TargetDevices, int]:
    """Return a step's devices, and the number of ranks."""
    require_step("this tool", step)
    spec, args = step.bound(args, keywords)
    here = None
    with contextlib.suppress(RuntimeError):  # the state was never placed
        here = meshes.mesh_of(jax.tree.leaves(args[0]), spec.axis_name)
    if on is None:
        on = meshes.current_mesh() if here is None else here
    sizes = {} if here is None else dict(here.shape)
    further = {name: size for name, size in sizes.items() if name not in spec.axis_name}
    where = target(on, spec.axis_name, further)
    return where, meshes.num_ranks(where.mesh, spec.axis_name)


def compile_step(
    step: Step, args: tuple, keywords: dict[str, Any], on: str | Mesh | None
) -> StepForDevices:
    """Compile a step for devices, perhaps absent."""
    where, num_ranks = devices_of(step, args, keywords, on)
    spec, args = step.bound(args, keywords)
    shapes = _shapes_on(where.mesh, spec, args)
    traced = step.trace_on(where.mesh, *spec.by_keyword(shapes))
    names = [path for i, arg in enumerate(shapes) for path in spec.paths(i, arg)]
    try:
        with _own_names():
            compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise TooLargeError(
            f"`{spec.name}` needs more memory than a device of {where.name} has: "
            f"{str(error).splitlines()[0]} Use fewer rows or micro-batches "
            "(jdp.find_batch_size), or shard the state (jdp.sharded)."
        ) from error
    return StepForDevices(
        spec=spec,
        where=where,
        num_ranks=num_ranks,
        args=shapes,
        traced=communication_plan.planned(traced.jaxpr, names),
        compiled=compiled,
        program=HloProgram(compiled.as_text()),
    )


@contextlib.contextmanager
def _own_names() -> Iterator[None]:
    """Key JAX's compilation cache by names and source lines."""
    option = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        yield
    finally:
        jax.config.update(option, before)
