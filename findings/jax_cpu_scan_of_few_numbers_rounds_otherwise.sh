#!/usr/bin/env bash
# The first iteration of a lax.scan on a CPU has other bits than the same function under jit (JAX 0.12.0.1, too).
#
# XLA:CPU compiles a loop on few bytes as one kernel, and LLVM then adds up in another order. JAX 0.12 does so with loops
# of any size that call no library, so not with large matrix products. An option, which is in no list of XLA's flags, turns
# it off. It matters to who compares a loop in Python with a scan bit by bit, or 1 device with 2: a loop with a collective
# is never one kernel.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cd "$folder"
cat > norm.py <<'EOF'
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def norm(arrays):
    return jnp.sqrt(sum(jnp.sum(jnp.square(0.5 * x)) for x in arrays))


def scanned(arrays):
    halve = lambda arrays, _: (jax.tree.map(lambda x: 0.5 * x, arrays), norm(arrays))
    return lax.scan(halve, arrays, length=3)[1][0]


plain, loop = jax.jit(norm), jax.jit(scanned)
num_differ = 0
for seed in range(300):
    draw = np.random.default_rng(seed).normal
    arrays = [draw(size=shape).astype(np.float32) for shape in ((4,), (3, 4), (4, 2))]
    num_differ += bool(plain(arrays) != loop(arrays))
print(f"jax {jax.__version__}, {sys.argv[1]}: {num_differ} of 300 norms differ")
assert (num_differ > 0) == (sys.argv[1] == "default"), "changed"
EOF
export JAX_PLATFORMS=cpu
"$folder/venv/bin/python" norm.py default
XLA_FLAGS=--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=0 "$folder/venv/bin/python" norm.py off
