"""JAX's transformations of a function of one vector, as parameters of a test."""

import jax
import jax.numpy as jnp
import pytest

_OF = {
    "grad": lambda f: jax.grad(lambda x: (f(x) ** 3).sum()),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x * x,))[1],
    "hessian": lambda f: jax.hessian(lambda x: (f(x) ** 3).sum()),
    "vmap": lambda f: lambda x: jax.vmap(f, in_axes=1)(jnp.stack([x, x * x], 1)),
    "grad of vmap": lambda f: jax.grad(lambda x: (jax.vmap(f)(jnp.stack([x, x * x])) ** 2).sum()),
}


def each_transform(**more):
    """Return a mark that gives each transformation, and `more` by name, to the argument `of`."""
    found = {**_OF, **more}
    return pytest.mark.parametrize("of", found.values(), ids=found.keys())
