#!/usr/bin/env bash
# On a CPU a convolution's gradient takes 6 to 40 times as long in a loop, scan or cond (JAX 0.12.0.1, too).
#
# The convolution itself does not. Its gradients have other dimension numbers, which XLA:CPU brings to channels-last
# outside of loops alone; inside they miss the fast kernel. Gradient accumulation by lax.scan pays this. If one writes
# the same transposes by hand, the loop is as fast as the rest.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cd "$folder"
cat > gradient.py <<'END'
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

x = np.random.default_rng(0).normal(size=(32, 16, 16, 16)).astype(np.float32)
kernel = np.random.default_rng(1).normal(size=(3, 3, 16, 16)).astype(np.float32)
DIMS = ("NHWC", "HWIO", "NHWC")


def forward(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=DIMS)


def loss(x, kernel):
    return (forward(x, kernel) ** 2).sum()


def ms(function):
    run = jax.jit(function)
    jax.block_until_ready(run(x, kernel, 1))
    times = []
    for _ in range(15):
        start = time.perf_counter()
        jax.block_until_ready(run(x, kernel, 1))
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def by_hand(x, kernel):
    """The kernel's gradient, [3, 3, in, out]: channels are the rows of a channels-last convolution."""
    doubled = 2 * forward(x, kernel)
    rows, filters = x.transpose(3, 1, 2, 0), doubled.transpose(1, 2, 0, 3)
    found = lax.conv_general_dilated(rows, filters, (1, 1), [(1, 1)] * 2, dimension_numbers=DIMS)
    return found.transpose(1, 2, 0, 3)


np.testing.assert_allclose(by_hand(x, kernel), jax.grad(loss, 1)(x, kernel), rtol=1e-3, atol=1e-2)
print("jax", jax.__version__)
slower = {}
for name, function in {
    "forward": forward,
    "gradient of the input": jax.grad(loss, 0),
    "gradient of the kernel": jax.grad(loss, 1),
    "the same by hand": by_hand,
}.items():
    zeros = jnp.zeros(jax.eval_shape(function, x, kernel).shape)
    plain = ms(lambda x, kernel, n, f=function: f(x, kernel))
    looped = ms(
        lambda x, kernel, n, f=function, z=zeros: lax.fori_loop(0, n, lambda i, y: f(x, kernel), z)
    )
    slower[name] = looped / plain
    print(f"{name}: {plain:.2f} ms, in a loop of one turn {looped:.2f} ms")
assert slower["forward"] < 2.5 and slower["the same by hand"] < 2.5, "changed"
assert slower["gradient of the input"] > 3 and slower["gradient of the kernel"] > 10, "changed"
END
JAX_PLATFORMS=cpu "$folder/venv/bin/python" gradient.py
