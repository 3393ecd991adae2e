#!/usr/bin/env bash
# optax.contrib.dpsgd warns that its own required argument is deprecated, and has no other.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq jax==0.10.2 jaxlib==0.10.2 optax==0.2.8
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import inspect
import warnings
from importlib.metadata import version

import optax.contrib

print("optax", version("optax"))
names = list(inspect.signature(optax.contrib.dpsgd).parameters)
print("arguments of dpsgd:", names)
assert "seed" in names and "key" not in names
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    optax.contrib.dpsgd(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, seed=0)
texts = [str(each.message) for each in caught if each.category is DeprecationWarning]
print("its warning:", texts)
assert any('use "key"' in text for text in texts)
END
