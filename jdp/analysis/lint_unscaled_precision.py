"""Find gradients of losses that did not see parameters in the dtype that they are gathered in."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jdp.analysis import find_shard_maps, jaxprs, source_lines
from jdp.analysis.forward import Forward
from jdp.analysis.marks import NARROW_LOSS, OF_MASTERS
from jdp.analysis.traced import Traced
from jdp.analysis.wording import shown


class _Gradient(NamedTuple):
    """The facts about a value of a step: whether it is such a gradient.

    Attributes:
      of_rows: whether it depends on the rows of the batch, other than by the gradient of a loss
        that saw narrow parameters.
      is_wide: whether it depends on a derivative of these that JAX computed in full precision.
      line: the author's line of that derivative, empty if that is not known.
    """

    of_rows: bool = False
    is_wide: bool = False
    line: str = ""


class _Context(NamedTuple):
    """The context of an equation.

    Attributes:
      is_transposed: whether it computes a cotangent.
      is_narrow: whether it belongs to a loss that saw narrow parameters.
    """

    is_transposed: bool = False
    is_narrow: bool = False

    def within(self, eqn: Any) -> "_Context":
        names = str(eqn.source_info.name_stack)
        return _Context(
            self.is_transposed or jaxprs.is_transposed(eqn), self.is_narrow or NARROW_LOSS in names
        )


def require_narrow(jaxpr: Any, traced: Traced) -> None:
    """Refuse an update by the gradient of a loss that saw parameters in full precision.

    Such a gradient comes from the batch, by a derivative outside of `jdp.value_and_grad` that does
    not end in a cast to more bits: that would be the derivative of a cast in the loss.
    """
    dtype = traced.found.gather_dtype
    if not dtype:
        return
    found = _wide_gradients(jaxprs.mapped_body(find_shard_maps(jaxpr)[0]), traced)
    if not found:
        return
    line = next(filter(None, found.values()), "")
    raise ValueError(
        f"gather_dtype={dtype} has no effect in a loss of this step{f', at {line}' if line else ''}"
        f": it saw parameters in full precision, and the gradients of "
        f"{shown([f'`{path}`' for path in found])} come from it. jdp.value_and_grad alone hands a "
        f"loss {dtype} parameters. Write loss, grads = jdp.value_and_grad(loss_fn)(state.params, "
        "batch) for each loss, with state.params as they are, in the step itself and not in a "
        "jax.jit, lax.scan or lax.cond of it. To keep jax.value_and_grad cast in the loss: "
        f"jax.tree.map(lambda p: p.astype(jnp.{dtype}), params)."
    )


def _wide_gradients(body: Any, traced: Traced) -> dict[str, str]:
    """Return the paths of the gradients of wide losses, each with the line of the loss."""
    found: dict[str, str] = {}

    def visit(eqn: Any, operands: list[_Gradient], around: _Context) -> list[_Gradient] | None:
        here = around.within(eqn)
        value = _join(operands)
        if here.is_narrow or (here.is_transposed and _widens(eqn)):
            return [_Gradient()] * len(eqn.outvars)
        if eqn.primitive.name == "jdp_mark" and eqn.params["kind"] == OF_MASTERS and value.is_wide:
            found[f"grads{eqn.params['path']}"] = value.line
        if here.is_transposed and value.of_rows and not jaxprs.bodies(eqn):
            line = value.line or source_lines.source(eqn)
            return [_Gradient(True, True, line)] * len(eqn.outvars)
        return None

    names = [name.split("[")[0].split(".")[0] for name in traced.inputs]
    batch = traced.spec.argument(1)
    ins = [_Gradient()] * (len(body.invars) - len(names))
    ins += [_Gradient(of_rows=name == batch) for name in names]
    Forward(_join, visit, _Context.within).outputs(body, ins, _Context())
    return found


def _widens(eqn: Any) -> bool:
    """Whether an equation casts a float to one of more bits."""
    if eqn.primitive.name != "convert_element_type":
        return False
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in (before, after)):
        return False
    return jnp.finfo(before).bits < jnp.finfo(after).bits


def _join(values: Sequence[_Gradient]) -> _Gradient:
    return _Gradient(
        any(value.of_rows for value in values),
        any(value.is_wide for value in values),
        next((value.line for value in values if value.line), ""),
    )
