"""Constants without a finite reciprocal, and others at the ends of their types, in every rule."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from support.analysed import VARYING, pmean, psum, report

CONSTANTS = [
    0.0, -0.0, 1.0, -1.0, 4.0, 0.25, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 1e-40,
    1.2e-38, -3e38, 3.4e38, 2.0**31, 5e-324, 1.7e308,
]  # fmt: skip

# Operations whose rules read the value of an operand, alone or together with another.
READ = {
    "product": lambda x, c: x * c,
    "product from the left": lambda x, c: c * x,
    "quotient": lambda x, c: lax.div(x, jnp.full_like(x, c)),
    "quotient of scalars": lambda x, c: lax.div(x.sum(), c),
    "over": lambda x, c: c / x,
    "sum": lambda x, c: x + c,
    "difference": lambda x, c: c - x,
    "maximum": lambda x, c: jnp.maximum(x, c),
    "minimum": lambda x, c: jnp.minimum(c, x),
    "clip": lambda x, c: jnp.clip(x, -c, c),
    "power": lambda x, c: x**c,
    "power of": lambda x, c: lax.pow(c, x.sum()),
    "mask": lambda x, c: jnp.where(x > 0, x, c),
    "mask by a sum": lambda x, c: x + jnp.where(x > 0, 0.0, c),
    "spread": lambda x, c: jnp.full_like(x, c) * x.mean(),
    "mean": lambda x, c: (x * c).mean() / c,
    "sum over ranks": lambda x, c: psum(c * x) / c,
    "mean over ranks": lambda x, c: pmean(x / c) * c,
    "count of ranks": lambda x, c: x * psum(c) / psum(x * c),
    "dot": lambda x, c: jnp.dot(jnp.full_like(x, c), x),
    "remainder": lambda x, c: lax.rem(x.sum(), c),
    "angle": lambda x, c: jnp.arctan2(x, c),
    "choice": lambda x, c: lax.cond(x[0] > c, lambda: x * c, lambda: x / c),
    "loop": lambda x, c: lax.fori_loop(0, 3, lambda _, y: y * c + x, x / c),
}


# In these each rank has the same.
OVER_RANKS = {"sum over ranks", "mean over ranks"}


def test_no_constant_breaks_a_rule_or_changes_what_differs():
    dtypes = [np.float32, jnp.bfloat16, np.float64]
    for (name, program), dtype, constant in itertools.product(READ.items(), dtypes, CONSTANTS):
        with np.errstate(all="ignore"), jax.enable_x64(dtype is np.float64):
            c = dtype(constant)
            same, own = report(
                lambda w, x, c=c, f=program: (f(w.astype(c.dtype), c), f(x.astype(c.dtype), c))
            ).outputs
        about = f"{name} with {c}"
        assert not same.axes, about
        assert own.axes == (frozenset() if name in OVER_RANKS else VARYING), about
        assert not own.zero or c == 0, about


def test_a_sum_times_a_constant_without_a_reciprocal_is_not_a_mean():
    for c in (math.inf, -math.inf, math.nan, 1e-45):
        scaled = report(lambda w, x, c=c: psum(x) * np.float32(c)).outputs[0]
        assert not scaled.axes and scaled.reduced == VARYING, c
        assert scaled.total | scaled.unclear == VARYING, c
