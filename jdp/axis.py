"""Bound mesh axes, and JAX's types over them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

AxisName = str | Sequence[str]

# For each dim the further mesh axes that split an array, by the compiler; () if none.
FurtherSpec = tuple[tuple[str, ...], ...]

_mesh: ContextVar[AbstractMesh | None] = ContextVar("jdp_mesh", default=None)
_NO_MESH = AbstractMesh((), ())


def names(axis_name: AxisName) -> tuple[str, ...]:
    """Return the axis as a tuple of names."""
    found = (axis_name,) if isinstance(axis_name, str) else axis_name
    if (
        not isinstance(found, Sequence)
        or not found
        or not all(isinstance(name, str) for name in found)
        or len(set(found)) < len(found)  # XLA aborts the process on a repeated axis.
    ):
        raise TypeError(
            f"axis_name must be a name or a tuple of different names, got {axis_name!r}. "
            'Write axis_name="data", or axis_name=("replica", "fsdp").'
        )
    return tuple(found)


def in_mesh_order(axis_name: AxisName) -> tuple[str, ...]:
    """Return the names in mesh order, in which `lax.ppermute` counts ranks.

    `lax.axis_index` counts in the order of its argument. Names are returned as given unless all are
    axes of a mesh (`vmap`, `pmap`).
    """
    found = names(axis_name)
    order = enclosing_mesh().axis_names
    return tuple(sorted(found, key=order.index)) if set(found) <= set(order) else found


def is_bound(axis_name: AxisName) -> bool:
    """Whether the traced code runs on every rank of `axis_name`; unbound axes mean one rank."""
    wanted = names(axis_name)
    unbound = [name for name in wanted if not _has_size(name)]
    if not unbound:
        return True
    # JAX has no public list of the axes of `vmap`.
    bound = [name for name in wanted if name not in unbound]
    bound = bound or [*enclosing_mesh().manual_axes]
    if bound:
        raise ValueError(
            f"axis {unbound[0]!r} is not bound here, but {', '.join(map(repr, bound))} is, so "
            "gradients would stay local and ranks would drift apart silently. If that axis "
            "splits the batch, write "
            f"axis_name={bound[0] if len(bound) == 1 else tuple(bound)!r}."
        )
    return False


def size(axis_name: AxisName) -> int:
    """Count the ranks of `axis_name`; 1 if unbound."""
    return lax.axis_size(names(axis_name)) if is_bound(axis_name) else 1


def rank(axis_name: AxisName) -> jax.Array:
    """Return this rank's index on `axis_name`, int32 `[]`; 0 if unbound."""
    return lax.axis_index(names(axis_name)) if is_bound(axis_name) else jnp.int32(0)


def enclosing_mesh() -> AbstractMesh:
    """Return the traced code's mesh, perhaps empty."""
    around = jax.sharding.get_abstract_mesh()
    return around if around.axis_names else _mesh.get() or around


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Trace the body without its mesh, unless the compiler has axes; `enclosing_mesh` keeps it."""
    around = jax.sharding.get_abstract_mesh()
    if not around.axis_names or set(around.axis_names) != set(around.manual_axes):
        yield
        return
    token = _mesh.set(around)
    try:
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            yield
    finally:
        _mesh.reset(token)


def is_without_mesh() -> bool:
    """Whether the traced code runs in `without_mesh`."""
    return _mesh.get() is not None and not jax.sharding.get_abstract_mesh().axis_names


def platform(mesh: Mesh | None) -> str:
    """Return a mesh's platform; of JAX's default backend for None."""
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def is_between_processes(mesh: Mesh | None) -> bool:
    """Whether gloo sends arrays between CPU processes."""
    if platform(mesh) != "cpu":
        return False
    if mesh is None:
        return jax.process_count() > 1
    return len({device.process_index for device in mesh.devices.flat}) > 1


def further_spec(array: Any, axis_name: AxisName) -> FurtherSpec:
    """Return over which axes beside `axis_name` an array or its description is split."""
    sharding = None if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return ()
    without = {*names(axis_name), *(x for x, size in sharding.mesh.shape.items() if size == 1)}
    parts = [
        names(part) if part and isinstance(part, str | tuple) else () for part in sharding.spec
    ]
    spec = tuple(tuple(name for name in part if name not in without) for part in parts)
    return spec if any(spec) else ()


def on_local_shards(fn: Callable[[jax.Array], jax.Array], x: jax.Array, spec: FurtherSpec) -> Any:
    """Call `fn` on this device's shard over further axes.

    XLA would gather `x` over them first: it partitions no reduce-scatter, all-gather or all-to-all
    over manual axes (JAX 0.12).
    """
    if not spec:
        return fn(x)
    around = enclosing_mesh()
    left = {name for name in around.axis_names if name not in around.manual_axes}
    partition = PartitionSpec(*(part or None for part in spec))
    return jax.shard_map(
        fn, axis_names=left, in_specs=partition, out_specs=partition, check_vma=False
    )(x)


def psum(tree: Any, axis_name: AxisName, platform: str) -> Any:
    """Sum every leaf, in float32 where XLA would abort on bfloat16."""
    axes = names(axis_name)
    if not aborts_in_bfloat16(platform):
        return lax.psum(tree, axes)
    leaves, treedef = jax.tree.flatten(tree)
    dtypes = [jnp.result_type(leaf) for leaf in leaves]
    wide = [
        lax.convert_element_type(leaf, jnp.float32) if dtype == jnp.bfloat16 else leaf
        for leaf, dtype in zip(leaves, dtypes, strict=True)
    ]
    sums = [
        lax.convert_element_type(leaf, dtype) if dtype == jnp.bfloat16 else leaf
        for leaf, dtype in zip(lax.psum(wide, axes), dtypes, strict=True)
    ]
    return jax.tree.unflatten(treedef, sums)


def aborts_in_bfloat16(platform: str) -> bool:
    """Whether XLA:CPU aborts on a bfloat16 reduction here, with an axis left to the compiler."""
    around = enclosing_mesh()
    return platform == "cpu" and set(around.axis_names) != set(around.manual_axes)


def varying_axes(x: Any) -> frozenset[str]:
    """Return the varying axes of `x`; empty outside a typed `shard_map`."""
    return jax.typeof(x).manual_axis_type.varying


def is_typed(axis_name: AxisName) -> bool:
    """Whether the enclosing `shard_map` has check_vma=True."""
    return is_bound(axis_name) and bool(varying_axes(lax.axis_index(names(axis_name))))


def as_varying(tree: Any, axis_name: AxisName) -> Any:
    """Type every leaf as varying over `axis_name`, so JAX does not sum its gradient."""
    if not is_typed(axis_name):
        return tree
    return jax.tree.map(lambda x: _cast(x, names(axis_name)), tree)


def as_typed_like(tree: Any, like: Any) -> Any:
    """Type every leaf as varying like the same leaf of `like`, for a typed `shard_map`."""
    return jax.tree.map(lambda x, of: _cast(x, sorted(varying_axes(of))), tree, like)


def reshaped(aval: Any, shape: tuple[int, ...], dtype: Any = None) -> Any:
    """Return a type of another shape that varies over the same axes."""
    sharding = aval.sharding.update(spec=PartitionSpec(*[None] * len(shape)))
    dtype = aval.dtype if dtype is None else dtype
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def _cast(x: Any, wanted: Sequence[str]) -> Any:
    # `pcast` refuses a cast to an axis that already varies.
    missing = tuple(name for name in wanted if name not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def _has_size(name: str) -> bool:
    try:
        lax.axis_size(name)
    except NameError:
        return False
    return True
