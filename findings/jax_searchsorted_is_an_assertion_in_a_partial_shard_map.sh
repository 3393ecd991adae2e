#!/usr/bin/env bash
# jnp.searchsorted in a shard_map over one of two axes is an AssertionError; over both, or with method="sort", it runs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'END'
import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

print("jax", jax.__version__)  # and 0.12.0.1
jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
rows = PartitionSpec("data")


def found(method, manual):
    places = functools.partial(jnp.searchsorted, v=jnp.arange(3.0), method=method)
    over_axes = jax.shard_map(places, mesh=mesh, in_specs=rows, out_specs=rows, axis_names=manual)
    try:
        return jax.jit(over_axes)(jnp.arange(8.0)).tolist()
    except AssertionError as error:
        return f"AssertionError: {str(error)[:40]}"


for method in ("scan", "compare_all", "sort"):
    for manual in ({"data"}, {"data", "model"}):
        print(method, sorted(manual), found(method, manual))
expected = [0, 1, 2, 0, 0, 0]
for method in ("scan", "compare_all"):
    assert str(found(method, {"data"})).startswith("AssertionError: ManualAxisType"), "changed"
    assert found(method, {"data", "model"}) == expected, "changed"
assert found("sort", {"data"}) == expected, "changed"
END
