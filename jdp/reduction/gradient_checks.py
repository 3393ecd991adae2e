"""Refuse values that are not gradients, or are reduced already."""

from collections.abc import Sequence
from typing import Any

import jax

from jdp import axis
from jdp.axis import AxisName
from jdp.reduction import shard_registry


def require_local(paths: Sequence[str], leaves: Sequence[jax.Array], axis_name: AxisName) -> None:
    """Refuse gradients that JAX has summed over the ranks already."""
    if not axis.is_typed(axis_name):
        return
    for path, leaf in zip(paths, leaves, strict=True):
        if not set(axis.names(axis_name)) <= axis.varying_axes(leaf):
            raise ValueError(
                f"the gradient `grads{path}` {leaf.dtype}{list(leaf.shape)} was already summed "
                f"over {axis_name!r} by JAX, as shard_map(check_vma=True) does for parameters that "
                f"do not vary. Averaged now it would be {axis.size(axis_name)} times too large. "
                "Write jdp.value_and_grad(loss_fn)(params, batch), which keeps it local."
            )


def require_unreduced(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Refuse gradients that jdp knows to be means over the ranks."""
    means = shard_registry.means()
    for path, leaf in zip(paths, leaves, strict=True):
        if id(leaf) in means:
            raise ValueError(
                f"the gradient `grads{path}` is the mean over the ranks already: with "
                "jdp.sharded(stage=2) or stage=3, jdp.value_and_grad averages where it "
                "differentiates, by the weight of the step. Another weight=, or mean=False, would "
                "not apply to it. Write jdp.train_step(weight=...), or jax.value_and_grad, which "
                "keeps gradients local."
            )
