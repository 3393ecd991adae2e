#!/usr/bin/env bash
# An optimizer of Optax takes any misspelt keyword of update, and ignores it.
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

params = jnp.ones(2)
print("optax", version("optax"))
for name in ("sgd", "adam", "adamw", "lion"):
    tx = getattr(optax, name)(0.1)
    # No member of the chain reads a keyword, yet its type says that it does.
    assert isinstance(tx, optax.GradientTransformationExtraArgs), name
    plain, _ = tx.update(params, tx.init(params), params)
    misspelt, _ = tx.update(params, tx.init(params), params, lerning_rate=1e9)
    assert (plain == misspelt).all(), name
    print(f"{name}: update(..., lerning_rate=1e9) is accepted and changes nothing")
END
