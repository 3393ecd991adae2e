"""Whether the averages of an optimizer keep their digits in the dtype that they have.

optax makes most of its state in the dtype of the parameters. In 16 bits that is enough for a mean
of gradients, and too little for a slow mean of their squares.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp.error_codes import with_code
from jdp.training import moment_updates
from jdp.training.moment_updates import Change

# Attributes of optax's states that hold squares of gradients, and sums of them over all steps. That
# a leaf is such a sum also shows in the update, if it can be traced.
_SQUARES = frozenset("nu nu_max e_g e_x v_row v_col exp_avg_sq".split())
_SUMS = frozenset("sum_of_squares grad_sum_of_squares grad_sum_sq".split())
_ADVICE = (
    "optax keeps it in the dtype of the parameters. Keep these in float32, and compute in "
    "bfloat16: jdp.sharded(tx, stage=3, gather_dtype=jnp.bfloat16), or p.astype(jnp.bfloat16) in "
    "the loss."
)

_INJECTED = (
    "an average with a decay below 1 that optax.inject_hyperparams has cast to {dtype}, where it "
    "is 1: a bias correction divides by 0, and the update is NaN. Write "
    "optax.inject_hyperparams(..., hyperparam_dtype=jnp.float32), and keep more bits."
)


def require_digits(tx: Any, opt_state: Any, params: Any) -> None:
    """Refuse an optimizer state whose leaves have too few digits to be updated."""
    named = jax.tree_util.tree_leaves_with_path(opt_state)
    short = [i for i, (_, leaf) in enumerate(named) if moment_updates.is_short(leaf)]
    changes = moment_updates.changes(tx, opt_state, params) if short else {}
    for i in short:
        path, leaf = named[i]
        names = {key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)}
        why = _why_not(jnp.result_type(leaf), names, changes.get(i, Change()))
        if why:
            where = f"opt_state{jax.tree_util.keystr(path)}"
            shown = f"`{where}` is {jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
            raise ValueError(with_code("JDP130", f"{shown}, {why} {_ADVICE}"))


def _why_not(dtype: np.dtype, names: set[str], change: Change) -> str:
    """Return why a leaf loses the values that are added to it, empty if it does not."""
    if change.is_nothing:
        return ""
    below_1 = float(jnp.finfo(dtype).epsneg)
    # optax.inject_hyperparams has rounded the decay itself.
    lost = [x for x in change.decays if x.value < 1 or x.is_rounded]
    lost = [x for x in lost if np.asarray(x.value, dtype) == 1]
    if lost:
        decay = min(lost)
        if decay.is_rounded:
            return _INJECTED.format(dtype=dtype)
        least = 10.0 ** np.ceil(np.log10(2 * below_1))
        mend = (
            f"Write a decay of at most {1 - least:g}, such as optax.adamw(..., b2={1 - least:g}), "
            "or keep more bits."
        )
        when = ""
        if decay.is_of_count:
            when = f" after {moment_updates.MANY_STEPS:,} steps"
            mend = "It depends on the number of steps, and comes closer to 1: keep more bits."
        return (
            f"an average with the decay {decay.value:.6g}{when}. {dtype} has no number between "
            f"{1 - below_1:.6g} and 1, so that this rounds to 1: the average never falls, and "
            f"after one large gradient all steps stay small. {mend}"
        )
    if names & _SUMS or change.adds_squares:
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
