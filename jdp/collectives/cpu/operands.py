"""The operands of a native call before its leaves: rank, group, scale and token."""

from collections.abc import Sequence
from typing import Any

from jax import lax

from jdp.collectives import call_order


def of_one_row(args: Sequence[Any], places: Sequence[int | None]) -> list[Any]:
    """Return the operands before the leaves, as they are in each row of a `vmap`.

    They are the same in all rows. `vmap` maps them where it makes a select of a `cond`, of which it
    maps everything that a branch reads.
    """
    before = zip(args[: call_order.TOKEN + 1], places, strict=False)
    return [
        x if place is None else lax.index_in_dim(x, 0, place, keepdims=False) for x, place in before
    ]
