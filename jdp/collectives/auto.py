"""The all-reduce that fits the ranks' devices."""

import logging
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

from jdp import axis
from jdp.axis import AxisName
from jdp.collectives import call_order
from jdp.collectives.native import native, why_not
from jdp.collectives.xla import Scale, xla
from jdp.distributed.this_process import log_once


def auto(
    buckets: Sequence[Sequence[jax.Array]],
    axis_name: AxisName,
    *,
    scale: Scale = 1.0,
    mesh: Mesh | None = None,
) -> list[list[jax.Array]]:
    """Sum every leaf over `axis_name`: `native` in steps on CPUs of one host, else `xla`.

    The choice depends only on the program, the devices and the hosts. It is logged once, to the
    logger "jdp" at level INFO.

    Args:
      buckets: lists of leaves, one dtype each; any shapes.
      axis_name: a name, or a tuple of names, bound by `shard_map` or `pmap`.
      scale: multiplies the sum; a number, or `[]` float, equal on all ranks.
      mesh: the ranks' mesh; None if unknown, as inside a `shard_map` of your own.

    Returns:
      The same lists, summed and scaled, in each leaf's dtype.
    """
    chosen, reason = choice(axis_name, mesh)
    message = (
        "gradients are summed by XLA (collectives.xla), because collectives.native cannot: "
        f"{reason}"
        if reason
        else "gradients are summed by jdp (collectives.native)."
    )
    log_once(logging.INFO, message)
    return chosen(buckets, axis_name, scale=scale, mesh=mesh)


def choice(axis_name: AxisName, mesh: Mesh | None) -> tuple[Callable[..., list], str | None]:
    """Return the algorithm of `auto` in the traced code, and why it is not `native`."""
    reason = call_order.why_not() or why_not(axis.in_mesh_order(axis_name), mesh)
    return (xla if reason else native), reason
