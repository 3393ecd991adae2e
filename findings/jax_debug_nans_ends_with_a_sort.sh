#!/usr/bin/env bash
# With jax_debug_nans=True JAX looks at the results of each call of a compiled function. Once a thread has left
# `with jax.debug_nans(...)`, it looks at none of the later calls that take the fast path, whatever the flag says. JAX enters
# that context itself while it traces jnp.sort, jnp.nanmean, jnp.var with a mask, and programs that it has traced before. So
# a training loop may hear of a NaN in its first step, and of none later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq jax==0.10.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'END'
import logging

import jax
import jax.numpy as jnp

logging.disable()
jax.config.update("jax_debug_nans", True)


def is_found():
    """Whether the third call of a new function is found to return a NaN."""
    loss = jax.jit(lambda x: jnp.log(x).mean())
    try:
        for number in (1.0, 1.0, -1.0):
            loss(jnp.full(8, number))
    except FloatingPointError:
        return True
    return False


before = is_found()
jnp.sort(jnp.ones(3))
after = is_found()
print("jax", jax.__version__, "jax_debug_nans:", jax.config.jax_debug_nans)
print("a NaN is found before the sort:", before, "- and after it:", after)
assert before and not after, "changed"
END
