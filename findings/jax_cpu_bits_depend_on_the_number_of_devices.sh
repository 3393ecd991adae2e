#!/usr/bin/env bash
# A matrix product on one CPU device has other bits if the process has more devices (JAX 0.12.0.1, too).
#
# XLA:CPU splits a long contraction by the size of its thread pool, which is max(CPUs, devices). So a run with
# jax_num_cpu_devices=8 and one with 1 differ, and so do machines of other core counts. The variable NPROC, which
# JAX does not document, sets the number of CPUs that XLA sees, and makes the bits equal.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cd "$folder"
cat > product.py <<'END'
import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
x = np.random.default_rng(0).normal(size=(1024, 64)).astype(np.float32)
product = jax.jit(lambda x: x.T @ jnp.tanh(x))(x)
assert product.devices() == {jax.devices()[0]}
print(hashlib.sha256(np.asarray(product).tobytes()).hexdigest()[:12])
END
export JAX_PLATFORMS=cpu
run() { taskset -c 0 "$folder/venv/bin/python" product.py "$1"; }
unset NPROC
one=$(run 1) eight=$(run 8)
fixed_one=$(NPROC=8 run 1) fixed_eight=$(NPROC=8 run 8)
echo "jax 0.10.2, one CPU: 1 device $one, 8 devices $eight; with NPROC=8: $fixed_one, $fixed_eight"
[[ $one != "$eight" && $fixed_one == "$fixed_eight" ]] || { echo changed; exit 1; }
