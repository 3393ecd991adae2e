"""Trace the body of a high-level primitive."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from jdp.analysis import jaxprs
from jdp.jax_compat import opened


def expanded(eqn: Any, mesh: Any, manual: frozenset[str]) -> Any | None:
    """Return the body of a high-level primitive, traced on `mesh` with `manual` axes, or None."""
    primitive = eqn.params.get("_prim")
    try:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in primitive.in_avals_flat]

        def expand(*flat: Any) -> Any:
            args = jax.tree.unflatten(primitive.in_tree, flat)
            return jax.tree.leaves(primitive.expand(*args))

        # Trace inside a shard_map, so that the axes are bound that the body may name.
        spec = PartitionSpec()
        mapped = jax.shard_map(
            expand, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=manual, check_vma=False
        )
        (mapped_eqn,) = opened(jax.make_jaxpr(mapped)(*shapes)).eqns
    except Exception:  # A foreign primitive may raise anything.
        return None
    return jaxprs.mapped_body(mapped_eqn)
