#!/usr/bin/env bash
# `jax.Array.is_deleted()` looks at the first shard. On CPUs a call does not donate a shard that a NumPy array views, and
# donates the others. `np.asarray(x)` of a replicated array views its first shard. So after a donating call the array says
# that it is alive, reads of it work, and a computation with it on all devices fails.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq jax==0.10.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'END'
import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.device_put(np.arange(4096.0, dtype="float32"), jax.NamedSharding(mesh, jax.P()))
view = np.asarray(x)
y = jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(x))
shards = [shard.data.is_deleted() for shard in x.addressable_shards]
print("jax", jax.__version__)
print("after a donating call: x.is_deleted() is", x.is_deleted(), "and that of its shards", shards)
assert x.is_deleted() is False and shards == [False, True], "changed"
END
