#!/usr/bin/env bash
# lax.all_to_all(x, axis, 0, 1) without tiled=True runs, and its gradient is an error of types.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

print("jax", jax.__version__)
jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
x = jnp.arange(16.0 * 2 * 8).reshape(16, 2, 8)


def sent(x, split, joined, tiled):
    exchange = functools.partial(
        jax.lax.all_to_all, axis_name="x", split_axis=split, concat_axis=joined, tiled=tiled
    )
    return jax.shard_map(exchange, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)


def gradient(*options):
    try:
        return jax.grad(lambda x: sent(x, *options).sum())(x).shape
    except ValueError as error:
        return str(error).splitlines()[0]


for options in ((0, 0, False), (0, 1, False), (0, 1, True)):
    print("split, joined, tiled:", options, sent(x, *options).shape, "gradient:", gradient(*options))
assert gradient(0, 0, False) == x.shape, "changed"
assert "Expected cotangent type" in gradient(0, 1, False), "changed"
assert gradient(0, 1, True) == x.shape, "changed"
END
