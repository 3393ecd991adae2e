#!/usr/bin/env bash
# jnp.max and jnp.min of 8,192 float32 on a CPU ignore a NaN; of 1,024 they return it (JAX 0.12.0.1, too).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'END'
import jax
import jax.numpy as jnp
import numpy as np

print("jax", jax.__version__)


def with_nan(size):
    values = np.ones(size, np.float32)
    values[3] = np.nan
    return values


for size in (1024, 8192, 2**20):
    values = with_nan(size)
    x = jnp.asarray(values)
    found = {"max": x.max(), "min": x.min(), "sum": x.sum(), "numpy max": values.max()}
    found |= {"isfinite": jnp.isfinite(x).all(), "argmax": x.argmax()}
    print(size, {name: np.asarray(value).tolist() for name, value in found.items()})

small, large = jnp.asarray(with_nan(1024)), jnp.asarray(with_nan(8192))
assert np.isnan(small.max()) and np.isnan(small.min()), "changed"
assert large.max() == 1 and large.min() == 1, "changed"
assert jax.jit(lambda x: jnp.abs(x).max())(large) == 1, "changed"
assert np.isnan(large.sum()) and large.argmax() == 3 and np.isnan(np.max(with_nan(8192))), "changed"
END
