"""Marks: identity operations that the uniformity analysis finds again in a traced program."""

from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

# The kind of mark that a collective puts on its result, see `mark`.
ALL_REDUCED = "all_reduced"
# The kind of mark on what a step's weight is made from, which is no use of it by the step itself.
WEIGHED = "weighed"


def mark(x: jax.Array, *, kind: str, path: str, axes: tuple[str, ...]) -> jax.Array:
    """Return `x` unchanged, and leave a note in the traced program.

    The note survives grad, vmap, jvp, scan, jit and rematerialization: it is an operation of its
    own, which no policy of `jax.checkpoint` saves by name and no lowering emits. Forward-mode
    tangents and cotangents pass it by unmarked. Under a `vmap` that binds one of `axes`, that
    axis leaves the note: what stands there happens among the rows of an array, not among ranks.

    Args:
      x: array of any shape and dtype.
      kind: what is noted. `"local"`: a gradient on its way to being reduced. The analysis reports
        such a mark and gives `x` the class that it has anyway. `"all_reduced"` is for
        collectives that are not one primitive of JAX, and the only kind that is believed: what
        stands here is the sum over `axes`, equal bits on every rank of them.
      path: the leaf's name as its author would write it.
      axes: names of the mesh axes that the note is about.

    Returns:
      `x`.

    >>> import jax
    >>> noted = lambda x: mark(x, kind="local", path="['w']", axes=("data",)) ** 2
    >>> "path=['w']" in str(jax.make_jaxpr(jax.grad(noted))(3.0)), jax.grad(noted)(3.0)
    (True, Array(6., dtype=float32, weak_type=True))
    """
    return _mark_p.bind(jnp.asarray(x), kind=kind, path=path, axes=tuple(axes))


_mark_p = jax.extend.core.Primitive("jdp_mark")


def _jvp(primals: tuple, tangents: tuple, **note: Any) -> tuple[Any, Any]:
    return _mark_p.bind(*primals, **note), tangents[0]


def _batch(
    axis_data: Any, values: tuple, dims: tuple, *, axes: tuple[str, ...], **note: Any
) -> tuple:
    remaining = tuple(name for name in axes if name != axis_data.name)
    return _mark_p.bind(*values, axes=remaining, **note), dims[0]


_mark_p.def_impl(lambda x, **note: x)
_mark_p.def_abstract_eval(lambda x, **note: x)
ad.primitive_jvps[_mark_p] = _jvp
batching.fancy_primitive_batchers[_mark_p] = _batch
# Every note is another one: JAX's cache of lowerings would emit a function for each.
mlir.register_lowering(_mark_p, lambda context, x, **note: [x], cacheable=False)
