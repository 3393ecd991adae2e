"""The rule for products of matrices."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jdp.reduction.partition.ranks import Dim, Ranks
from jdp.reduction.partition.rules.plans import Plan, same


def _dot_general(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    """Slice the other operand in the same way if it has the dim, too; else take it whole."""
    contracted, batch = eqn.params["dimension_numbers"]
    ins: list[Dim] = [None, None]
    ins[position] = dim
    if dim in contracted[position]:
        ins[1 - position] = contracted[1 - position][contracted[position].index(dim)]
        is_narrow = eqn.outvars[0].aval.dtype in (jnp.bfloat16, jnp.float16)
        # The shares of ranks are rounded once, after they are added up.
        wide = {"preferred_element_type": jnp.dtype(jnp.float32)} if is_narrow else {}
        return same(eqn, ins, [None], **wide)._replace(partial="sum")
    if dim in batch[position]:
        out = batch[position].index(dim)
        ins[1 - position] = batch[1 - position][out]
        return same(eqn, ins, [out])
    free = [_free(eqn, i) for i in (0, 1)]
    out = len(batch[0]) + position * len(free[0]) + free[position].index(dim)
    return same(eqn, ins, [out])


def _free(eqn: Any, position: int) -> list[int]:
    contracted, batch = (dims[position] for dims in eqn.params["dimension_numbers"])
    num_dims = len(eqn.invars[position].aval.shape)
    return [i for i in range(num_dims) if i not in contracted and i not in batch]


RULES = {"dot_general": _dot_general}
