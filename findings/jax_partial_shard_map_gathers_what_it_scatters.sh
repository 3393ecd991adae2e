#!/usr/bin/env bash
# In a shard_map over one of two axes, reduce-scatters and all-gathers first gather over the other.
# An array split over "model" by the compiler is whole in them, and an all-reduce leaves it split.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

print("jax", jax.__version__)
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def scatter(x):
    return jax.lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True)


def scatter_shard(x):  # the same in a second shard_map, over the other axis
    specs = P(None, "model")
    return jax.shard_map(scatter, axis_names={"model"}, in_specs=specs, out_specs=specs)(x)


def collectives(on_rank, in_spec, out_spec):
    mapped = jax.shard_map(
        on_rank, mesh=mesh, axis_names={"data"}, in_specs=in_spec, out_specs=out_spec,
        check_vma=False,
    )
    split = NamedSharding(mesh, P(*in_spec, *[None] * (1 - len(in_spec)), "model"))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=split)
    text = jax.jit(mapped).lower(x).compile().as_text()
    return re.findall(r"= (f32\[[\d,]+\])\S* (all-gather|all-reduce|reduce-scatter)\(", text)


found = {
    "psum": collectives(lambda x: jax.lax.psum(x, "data"), P(), P()),
    "psum_scatter": collectives(scatter, P(), P("data")),
    "psum_scatter of shards": collectives(scatter_shard, P(), P("data")),
    "all_gather": collectives(
        lambda x: jax.lax.all_gather(x, "data", tiled=True), P("data"), P()
    ),
}
for name, each in found.items():
    print(f"{name}: {each}")
assert found["psum"] == [("f32[64,8]", "all-reduce")], "changed"
assert ("f32[64,32]", "all-gather") in found["psum_scatter"], "changed"
assert found["psum_scatter of shards"] == [("f32[32,8]", "reduce-scatter")], "changed"
assert ("f32[32,32]", "all-gather") in found["all_gather"], "changed"
END
