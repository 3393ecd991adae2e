#!/usr/bin/env bash
# On a mesh of jax.make_mesh, shard_map refuses an array that it splits on a mesh of jax.sharding.Mesh.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq jax==0.10.2 jaxlib==0.10.2
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 2)


def doubled(mesh):
    mapped = jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    return mapped(jnp.arange(2.0)).tolist()


print("jax", jax.__version__)
given, made = Mesh(jax.devices(), ("data",)), jax.make_mesh((2,), ("data",))
print("axis types:", given.axis_types, made.axis_types)
print("Mesh:", doubled(given))
try:
    print("make_mesh:", doubled(made))
except ValueError as error:
    print("make_mesh: ValueError:", str(error)[:110])
else:
    raise SystemExit("changed: both split the array")
END
