"""The rule for elementwise primitives, which are recognized by how JAX batches them."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jdp.analysis import jaxprs
from jdp.reduction.partition.ranks import Dim, Ranks
from jdp.reduction.partition.rules.plans import Plan, same


def plan(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    """Slice all operands along `dim`, except those that have one element there."""
    shape = eqn.outvars[0].aval.shape if eqn.outvars else ()
    shapes = [atom.aval.shape for atom in eqn.invars]
    if not _fit(shapes, shape) or any(atom.aval.shape != shape for atom in eqn.outvars):
        return None
    if ranks.communicate(eqn):
        return None
    if shapes[position][dim] != shape[dim] or not is_elementwise(eqn, len(shape)):
        return None
    ins: list[Dim] = [dim if each and each[dim] == shape[dim] else None for each in shapes]
    return same(eqn, ins, [dim] * len(eqn.outvars))


def _fit(shapes: list[tuple[int, ...]], out: tuple[int, ...]) -> bool:
    return all(
        not shape
        or len(shape) == len(out)
        and all(size in (1, full) for size, full in zip(shape, out, strict=True))
        for shape in shapes
    )


def is_elementwise(eqn: Any, num_dims: int) -> bool:
    """Whether each element of the results depends on the same element of the operands alone.

    A collective is elementwise for one rank alone: the slices of others are of other elements.
    """
    if eqn.primitive.name == "jdp_mark":
        return True
    try:
        params = tuple(sorted(eqn.params.items()))
        dtypes = tuple(atom.aval.dtype for atom in eqn.invars)
        return _batches_anywhere(eqn.primitive, params, dtypes, num_dims)
    except TypeError:  # A parameter that is not hashable.
        return False


# By primitive and not by equation: the answer does not depend on the sizes.
@functools.lru_cache(maxsize=4096)
def _batches_anywhere(primitive: Any, params: Any, dtypes: Any, num_dims: int) -> bool:
    """Whether `vmap` over a new first dim, and over a new last one, leaves the primitive as it is.

    With the new dim in front, the rows of a matrix do not depend on each other; with the new dim at
    the end, its columns do not. The primitive is the same both times, so no element depends on
    another one.
    """
    settings = dict(params)

    def bind(*operands: Any) -> Any:
        return primitive.bind(*operands, **primitive.get_bind_params(settings))

    shape = (2,) * (num_dims + 1)
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes]
    for new in (0, num_dims):
        batched = jax.vmap(bind, in_axes=new, out_axes=new)
        try:
            jaxpr = jaxprs.opened(jax.make_jaxpr(batched)(*shapes))
        except Exception:  # A primitive of another library may raise: take it as not elementwise.
            return False
        if not jaxpr.eqns and jaxpr.outvars == jaxpr.invars:
            continue  # A conversion to the same dtype is left out.
        if len(jaxpr.eqns) != 1 or any(out.aval.shape != shape for out in jaxpr.outvars):
            return False
        (eqn,) = jaxpr.eqns
        if eqn.primitive is not primitive or eqn.params != settings:
            return False
    return True
