#!/usr/bin/env bash
# If the first call of a jitted function raises, say because a value that it reads is not set yet, later calls of the same
# types are right and slow: JAX remembers not to use its fast path for these types, until the cache is cleared. A call of
# a small function then takes some ten times as long, with no message.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq jax==0.10.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'END'
import statistics
import time

import jax
import jax.numpy as jnp

scale = {}
x = jnp.ones(3)


def seconds(fn, calls=2000):
    rounds = []
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(calls):
            fn(x)
        rounds.append((time.perf_counter() - begun) / calls)
    return statistics.median(rounds)


@jax.jit
def scaled(x):
    return x * scale["factor"]


try:
    scaled(x)
except KeyError as error:
    print("the first call raises", repr(error))
scale["factor"] = 2.0
assert scaled(x).tolist() == [2.0] * 3
slow_s = seconds(scaled)
scaled.clear_cache()
scaled(x)
fast_s = seconds(scaled)
print("jax", jax.__version__)
print(f"later calls: {slow_s * 1e6:.1f} us; after clear_cache: {fast_s * 1e6:.1f} us")
assert slow_s > 3 * fast_s, "changed"
END
