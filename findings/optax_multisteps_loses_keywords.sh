#!/usr/bin/env bash
# optax.with_extra_args_support drops the keywords of an optax.MultiSteps, which by itself hands them on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq jax==0.10.2 jaxlib==0.10.2 optax==0.2.8
cd "$folder"
"$folder/venv/bin/python" - <<'END'
from importlib.metadata import version

import jax.numpy as jnp
import optax

# Reads value= in each update; MultiSteps takes **extra_args and hands them to it.
inner = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
tx = optax.MultiSteps(inner, every_k_schedule=1)
params = jnp.ones(2)

by_itself, _ = tx.update(params, tx.init(params), params, value=jnp.float32(1.0))
print("optax", version("optax"))
print("MultiSteps.update(..., value=) by itself:", by_itself)

wrapped = optax.with_extra_args_support(tx)
try:
    wrapped.update(params, wrapped.init(params), params, value=jnp.float32(1.0))
except TypeError as error:
    print("through with_extra_args_support, which is for optimizers that take no keywords:", error)
else:
    raise SystemExit("changed: the keyword arrives")
print("MultiSteps is no GradientTransformationExtraArgs:",
      not isinstance(tx, optax.GradientTransformationExtraArgs))
END
