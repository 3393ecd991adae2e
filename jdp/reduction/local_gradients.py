"""The gradients of a loss over this rank's rows, in parameters that are whole on every rank."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from jdp import axis
from jdp.axis import AxisName
from jdp.reduction import mixed_precision, step_context
from jdp.reduction.unsharded_gradients import WholeMeans


class LeafGradients(NamedTuple):
    """The gradients of a tree of parameters.

    Attributes:
      local: this rank's own gradients, a list of leaves; None for those in `means`.
      means: position of a leaf -> this rank's shard of the mean over all ranks, or all of it.
    """

    local: list[Any]
    means: Mapping[int, jax.Array] = MappingProxyType({})


def local_value_and_grad(
    loss_fn: Callable[..., Any], has_aux: bool, axis_name: AxisName
) -> Callable[..., tuple[Any, Any]]:
    """Return `jax.value_and_grad(loss_fn)` of this rank's rows, typed or not."""
    # A step of jdp's is never typed, and to ask takes a while.
    if step_context.current(axis_name) is not None or not axis.is_typed(axis_name):
        return jax.value_and_grad(loss_fn, has_aux=has_aux)

    # Types decide which gradients JAX sums. It would sum those of parameters that do not vary over
    # the ranks. The gradient of a loss that does not vary, such as pmean(loss), would be n times
    # smaller than without types.
    def varying_loss(params: Any, *rest: Any) -> Any:
        value = loss_fn(params, *rest)
        if not has_aux:
            return axis.as_varying(value, axis_name)
        loss, aux = value
        return axis.as_varying(loss, axis_name), aux

    def fn(params: Any, *rest: Any) -> tuple[Any, Any]:
        params = axis.as_varying(params, axis_name)
        return jax.value_and_grad(varying_loss, has_aux=has_aux)(params, *rest)

    return fn


class WholeGradients:
    """The derivative of losses with respect to whole parameters, as `ShardGradients` has it.

    Args:
      params: tree of parameters.
      value_and_grad: of the loss.
      wholes: the gradients that are averaged over the ranks.
    """

    sends = False

    def __init__(
        self,
        params: Any,
        value_and_grad: Callable[..., tuple[Any, Any]],
        wholes: WholeMeans,
    ):
        self._params = params
        self._seen = mixed_precision.for_loss(params)
        self._value_and_grad, self._wholes = value_and_grad, wholes

    def differentiate(
        self, loss_fn: Callable[..., Any], has_aux: bool, args: tuple
    ) -> tuple[Any, LeafGradients]:
        """Return the value of a loss and its gradients."""
        value, grads = self._value_and_grad(self._seen, *args)
        if self._seen is not self._params:
            grads = mixed_precision.like_masters(grads, self._params)
        return value, LeafGradients(jax.tree.leaves(grads))

    def whole(self, grads: LeafGradients) -> Any:
        """Return the tree of gradients, like the parameters."""
        means = self._wholes.means(grads.local, {}) if self._wholes.owners else {}
        leaves = [means.get(i, leaf) for i, leaf in enumerate(grads.local)]
        return jax.tree.structure(self._params).unflatten(leaves)
