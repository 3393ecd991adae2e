#!/usr/bin/env bash
# XLA for CPUs sends bfloat16 as float32 and float8 as float16, also where nothing is added.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2 "$folder/venv/bin/python" - <<'END'
import re

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

OPERATIONS = {
    "all-reduce": lambda x: lax.psum(x, "d"),
    "all-gather": lambda x: lax.all_gather(x, "d"),
    "all-to-all": lambda x: lax.all_to_all(x, "d", 0, 0, tiled=True),
    "collective-permute": lambda x: lax.ppermute(x, "d", [(0, 1), (1, 0)]),
}
SENT = {"bfloat16": "f32", "float16": "f16", "float8_e4m3fn": "f16", "int8": "s8"}
mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
print("jax", jax.__version__)
for dtype, sent in SENT.items():
    for name, operation in OPERATIONS.items():
        mapped = jax.shard_map(
            operation, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False
        )
        shape = jax.ShapeDtypeStruct((4096,), jnp.dtype(dtype))
        text = jax.jit(mapped).lower(shape).compile().as_text()
        (found,) = re.findall(rf"= \(?([a-z0-9]+)\[[^=]*? {name}\(", text)
        print(f"{dtype} is sent as {found} by {name}")
        assert found == sent
END
