#!/usr/bin/env bash
# lax.pbroadcast takes the letters of an axis name for names: one of several letters is a NameError.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq jax==0.10.2 jaxlib==0.10.2
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 2)


def traced(name):
    mesh = jax.sharding.Mesh(jax.devices(), (name,))
    function = lambda x: lax.pbroadcast(x, name, 0)  # noqa: E731
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P(name), out_specs=P(name))
    return "pbroadcast" in str(jax.make_jaxpr(mapped)(jnp.ones(2)))


print("jax", jax.__version__)
print("axis 'd' is traced:", traced("d"))
assert traced("d"), "changed"
try:
    traced("data")
except NameError as error:
    print("axis 'data': NameError:", str(error).splitlines()[0])
else:
    raise SystemExit("changed: an axis name of several letters works")
END
