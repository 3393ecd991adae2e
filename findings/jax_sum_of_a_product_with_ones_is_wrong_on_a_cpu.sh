#!/usr/bin/env bash
# Under jit on a CPU, the sum of a matrix product with a constant matrix of ones is wrong or NaN (JAX 0.12.0.1, too).
#
# XLA:CPU fuses dot and reduce for YNNPACK. With the broadcast constant in the same fusion the result is wrong, and
# another one in each run. Without these fusions, or with the ones as an argument, it is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cd "$folder"
cat > product.py <<'END'
import sys

import jax
import jax.numpy as jnp
import numpy as np

print("jax", jax.__version__, sys.argv[1])
are_right = []
for shape in ((64, 64), (2048, 256)):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    ones = np.ones((shape[1], shape[1]), np.float32)
    found = {
        "jit": jax.jit(lambda x, n=shape[1]: (x @ jnp.ones((n, n))).sum())(x),
        "without a sum": jax.jit(lambda x, n=shape[1]: x @ jnp.ones((n, n)))(x).sum(),
        "argument": jax.jit(lambda x, ones: (x @ ones).sum())(x, ones),
    }
    wanted = (x.astype(float) @ ones).sum()
    print(shape, {name: float(value) for name, value in found.items()}, "numpy", float(wanted))
    right = {name: np.isclose(value, wanted, rtol=1e-3) for name, value in found.items()}
    assert right["without a sum"] and right["argument"], "changed"
    are_right.append(right["jit"])
assert all(are_right) == (sys.argv[1] == "without") and any(are_right) == all(are_right), "changed"
END
export JAX_PLATFORMS=cpu
"$folder/venv/bin/python" product.py with
XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= "$folder/venv/bin/python" product.py without
