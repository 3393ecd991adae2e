"""Trace a rank's program without the mesh in types.

Equinox, Lineax, Optimistix and Diffrax refuse a `shard_map`'s types, which have a mesh. So the
trace has no mesh, and a mark removes it from values' types. A program with a bare `PartitionSpec`
is traced with it.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core

from jdp import axis
from jdp.analysis import marks

# Errors of JAX without a mesh in the context, and of JAX 0.10 where an all_gather's result does not
# vary.
_NEEDS_MESH = re.compile(
    r"requires a non-empty mesh|not under a mesh context|context mesh cannot be empty"
    r"|ManualAxisType\(varying="
)
_ERRORS = AssertionError, RuntimeError, ValueError


def traced(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """Return the jaxpr of `fn(*args)`, and its result as shapes."""
    loses_mesh = False
    try:
        with axis.without_mesh():
            loses_mesh = axis.is_without_mesh()
            types = jax.tree.map(_of_rank, args) if loses_mesh else args
            return jax.make_jaxpr(fn, return_shape=True)(*types)
    except _ERRORS as error:
        if not loses_mesh or not _NEEDS_MESH.search(str(error)):
            raise
    return jax.make_jaxpr(fn, return_shape=True)(*args)


def leaves(args: Sequence[Any], closed: Any) -> list[Any]:
    """Return the operands of the jaxpr of `traced(fn, args)`."""
    given = zip(jax.tree.leaves(args), closed.in_avals, strict=True)
    with axis.without_mesh():
        return [x if _has_mesh(aval) else _without_mesh(x) for x, aval in given]


class MeshNeededError(Exception):
    """A program must be traced again, with the mesh in types."""


def meshless(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` for the `shard_map` of a program that `trace` traces."""
    needs_mesh = False

    def on_rank(*args: Any) -> Any:
        nonlocal needs_mesh
        if needs_mesh:
            return fn(*args)
        with axis.without_mesh():
            if not axis.is_without_mesh():
                return fn(*args)
            try:
                return fn(*jax.tree.map(_without_mesh, args))
            except _ERRORS as error:
                needs_mesh = _NEEDS_MESH.search(str(error)) is not None
                if not needs_mesh:
                    raise
                # Not here: a trace keeps the operations of the first attempt.
                raise MeshNeededError from error

    on_rank.__signature__ = inspect.signature(fn)  # type: ignore[attr-defined]  # for JAX's errors
    return on_rank


def trace(program: Any, args: Sequence[Any]) -> Any:
    """Return `program.trace(*args)` of a jitted program, with the mesh in types if it needs it."""
    try:
        return program.trace(*args)
    except MeshNeededError:
        return program.trace(*args)


def _of_rank(x: Any) -> Any:
    if not _is_array(x):
        return x
    found = jax.typeof(x)
    return jax.ShapeDtypeStruct(found.shape, found.dtype, weak_type=found.weak_type)


def _without_mesh(x: Any) -> Any:
    return marks.without_mesh(x) if _has_mesh(jax.typeof(x)) else x


def _has_mesh(aval: Any) -> bool:
    return isinstance(aval, jax.core.ShapedArray) and bool(aval.sharding.mesh.axis_names)


def _is_array(x: Any) -> bool:  # in contrast to a `jax.Ref`
    return isinstance(jax.typeof(x), jax.core.ShapedArray)
