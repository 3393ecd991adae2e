"""Trace the program of a rank without the mesh in the types of its values.

Inside a `shard_map` JAX writes the mesh into the type of each value. Equinox, Lineax, Optimistix
and Diffrax compare such types with types that they made elsewhere, and refuse them. So the program
is traced without a mesh, and its equations run inside the `shard_map` on values whose types have
lost the mesh by a mark.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core

from jdp import axis
from jdp.analysis import marks


def traced(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """Return the jaxpr of `fn(*args)`, and its result with shapes in place of arrays."""
    with axis.without_mesh():
        types = jax.tree.map(_of_rank, args) if axis.is_without_mesh() else args
        return jax.make_jaxpr(fn, return_shape=True)(*types)


def leaves(args: Sequence[Any]) -> list[Any]:
    """Return the arrays with which the jaxpr of `traced(fn, args)` runs."""
    with axis.without_mesh():
        loses_mesh = axis.is_without_mesh()
        return [_without_mesh(x) if loses_mesh else x for x in jax.tree.leaves(args)]


def evaluated(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for a `shard_map` that traces `fn` with `traced`, and runs the jaxpr."""

    def run(*args: Any) -> Any:
        closed, shapes = traced(fn, args)
        results = jax.extend.core.jaxpr_as_fun(closed)(*leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _of_rank(x: Any) -> Any:
    if not _is_array(x):
        return x
    found = jax.typeof(x)
    return jax.ShapeDtypeStruct(found.shape, found.dtype, weak_type=found.weak_type)


def _without_mesh(x: Any) -> Any:
    has_mesh = _is_array(x) and jax.typeof(x).sharding.mesh.axis_names
    return marks.without_mesh(x) if has_mesh else x


def _is_array(x: Any) -> bool:  # in contrast to a `jax.Ref`
    return isinstance(jax.typeof(x), jax.core.ShapedArray)
