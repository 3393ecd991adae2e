"""Trace a rank's program without the mesh in types.

Equinox, Lineax, Optimistix and Diffrax refuse a `shard_map`'s types, which have a mesh. So a
mark removes it from values' types. A program with a bare `PartitionSpec` keeps it.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax

from jdp import axis
from jdp.analysis import marks

# Errors of JAX without a mesh in the context, and of JAX 0.10 where an all_gather's result does not
# vary.
_NEEDS_MESH = re.compile(
    r"requires a non-empty mesh|not under a mesh context|context mesh cannot be empty"
    r"|ManualAxisType\(varying="
)
_ERRORS = AssertionError, RuntimeError, ValueError


class MeshNeededError(Exception):
    """Trace a `meshless` program again, with the mesh in types."""


def meshless(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` with arguments without mesh."""
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


def _without_mesh(x: Any) -> Any:
    aval = jax.typeof(x)
    is_array = isinstance(aval, jax.core.ShapedArray)  # no `jax.Ref`
    return marks.without_mesh(x) if is_array and aval.sharding.mesh.axis_names else x
