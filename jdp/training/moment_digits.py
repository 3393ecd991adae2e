"""Whether the averages of an optimizer keep their digits in the dtype that they have.

optax makes most of its state in the dtype of the parameters. In 16 bits that is enough for a mean
of gradients, and too little for a slow mean of their squares.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdp import jax_compat, pytrees
from jdp.analysis import jaxprs
from jdp.error_codes import with_code

# Attributes of optax's states that hold squares of gradients, and sums of them over all steps.
_SQUARES = frozenset("nu nu_max e_g e_x v_row v_col exp_avg_sq".split())
_SUMS = frozenset("sum_of_squares grad_sum_of_squares grad_sum_sq".split())
# A schedule of decays has come to its end by then.
_MANY_STEPS = 10_000

_ADVICE = (
    "optax keeps it in the dtype of the parameters. Keep these in float32, and compute in "
    "bfloat16: jdp.sharded(tx, stage=3, gather_dtype=jnp.bfloat16), or p.astype(jnp.bfloat16) in "
    "the loss."
)


def require_digits(tx: Any, opt_state: Any, params: Any) -> None:
    """Refuse an optimizer state whose leaves have too few digits to be updated.

    Args:
      tx: the optimizer.
      opt_state: its first state.
      params: the parameters that train.

    Raises:
      ValueError: naming the first leaf.
    """
    named = jax.tree_util.tree_leaves_with_path(opt_state)
    short = [i for i, (_, leaf) in enumerate(named) if _is_short(leaf)]
    decays = _decays(tx, opt_state, params) if short else {}
    for i in short:
        path, leaf = named[i]
        names = {key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)}
        why = _why_not(jnp.result_type(leaf), names, decays.get(i, set()))
        if why:
            where = f"opt_state{jax.tree_util.keystr(path)}"
            shown = f"`{where}` is {jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
            raise ValueError(with_code("JDP130", f"{shown}, {why} {_ADVICE}"))


def _why_not(dtype: np.dtype, names: set[str], decays: set[float]) -> str:
    """Return why a leaf loses what is added to it, empty if it does not."""
    below_1 = float(jnp.finfo(dtype).epsneg)
    # optax.inject_hyperparams has rounded the decay itself.
    lost = [x for x in decays if x < 1 or (x == 1 and names & _SQUARES)]
    lost = [x for x in lost if np.asarray(x, dtype) == 1]
    if lost:
        least = 10.0 ** np.ceil(np.log10(2 * below_1))
        return (
            f"an average with the decay {min(lost):.6g}. {dtype} has no number between "
            f"{1 - below_1:.6g} and 1, so that this rounds to 1: the average never falls, and "
            f"after one large gradient all steps stay small. Write a decay of at most "
            f"{1 - least:g}, such as optax.adamw(..., b2={1 - least:g}), or keep more bits."
        )
    if names & _SUMS:
        most = round(1 / below_1)
        return (
            f"a sum of squares over all steps. {dtype} has {jnp.finfo(dtype).nmant + 1} binary "
            f"digits, so that the sum stops growing when it is {most} times what a step adds, such "
            f"as after {most} steps of equal gradients."
        )
    if names & _SQUARES and dtype == jnp.float16:
        least = (float(jnp.finfo(dtype).smallest_subnormal) / 2) ** 0.5
        return (
            f"an average of squares of gradients. The square of a gradient below {least:.2g} is 0 "
            "in float16, and the update divides by its root."
        )
    return ""


def _is_short(leaf: Any) -> bool:
    if not pytrees.is_array(leaf):
        return False
    dtype = jnp.result_type(leaf)
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits == 16


class _KnownValue(NamedTuple):
    """What is known of a value of the update.

    Attributes:
      leaf: position of the leaf of the state that it is, None for other values.
      number: the one number that all of it is, None if that is not known.
    """

    leaf: int | None = None
    number: Any = None


def _decays(tx: Any, opt_state: Any, params: Any) -> dict[int, set[float]]:
    """Return for each leaf of an optimizer's state the numbers that an update multiplies it by.

    In float32, where no decay is rounded to 1.
    """
    leaves, tree = jax.tree.flatten(opt_state)
    known = [_KnownValue(i, _number(leaf)) for i, leaf in enumerate(leaves)]

    def update(grads: Any, leaves: Any, params: Any) -> Any:
        # The further arguments that optax's transformations know; others ignore them.
        extra = {"value": jnp.float32(1), "grad": grads, "value_fn": lambda _: jnp.float32(1)}
        return tx.update(grads, tree.unflatten(leaves), params, synced=True, **extra)

    wide = jax.tree.map(_wide, params)
    try:
        program = jax.make_jaxpr(update)(wide, list(map(_wide, leaves)), wide)
    except Exception:  # It needs other arguments, or ranks: its decays are not judged.
        return {}
    others = [_KnownValue()] * len(jax.tree.leaves(params))
    found: dict[int, set[float]] = {}
    _walk(program, [*others, *known, *others], found)
    return found


def _wide(leaf: Any) -> jax.ShapeDtypeStruct:
    dtype = jnp.float32 if _is_short(leaf) else jnp.result_type(leaf)
    return jax.ShapeDtypeStruct(jnp.shape(leaf), dtype)


def _number(leaf: Any) -> Any:
    """Return the value of a scalar of the state; of a count that of a later step."""
    if isinstance(leaf, jax.core.Tracer) or jnp.ndim(leaf):
        return None
    if jnp.issubdtype(jnp.result_type(leaf), jnp.integer):
        return np.asarray(_MANY_STEPS, leaf.dtype)
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
        return None
    return np.asarray(leaf, np.float32 if _is_short(leaf) else leaf.dtype)


# Operations whose result is what their one operand is.
_SAME = frozenset("broadcast_in_dim convert_element_type copy jdp_mark reshape squeeze".split())


def _walk(
    program: Any, values: Sequence[_KnownValue], found: dict[int, set[float]]
) -> list[_KnownValue]:
    """Record what multiplies leaves in a program, and return what is known of its results."""
    body = jaxprs.opened(program)
    env = dict(zip(body.invars, values, strict=True))
    for variable, constant in jaxprs.constants(program):
        env[variable] = _KnownValue(number=constant if np.ndim(constant) == 0 else None)

    def read(atom: Any) -> _KnownValue:
        return _KnownValue(number=atom.val) if jaxprs.is_literal(atom) else env[atom]

    for eqn in body.eqns:
        env.update(zip(eqn.outvars, _results(eqn, [*map(read, eqn.invars)], found), strict=True))
    return [read(atom) for atom in body.outvars]


def _results(eqn: Any, ins: list[_KnownValue], found: dict[int, set[float]]) -> list[_KnownValue]:
    unknown = [_KnownValue()] * len(eqn.outvars)
    name = eqn.primitive.name
    if name == "mul":
        for one, other in (ins, ins[::-1]):
            if one.leaf is not None and other.number is not None:
                found.setdefault(one.leaf, set()).add(float(other.number))
    if name == "cond":
        for branch in eqn.params["branches"]:
            _walk(branch, ins[1:], found)
        return unknown
    if (called := jaxprs.called(eqn)) is not None:
        return _walk(called, ins, found)
    same = ins if name in _SAME and len(ins) == 1 else unknown
    are_numbers = all(value.number is not None for value in ins) and not jaxprs.acts(eqn)
    if ins and are_numbers and all(v.aval.shape == () for v in eqn.outvars):
        with jax.ensure_compile_time_eval():
            results = jax_compat.bind(eqn, [value.number for value in ins])
        return [value._replace(number=x) for value, x in zip(same, results, strict=True)]
    return same
