#!/usr/bin/env bash
# Two quotients by one number, in a shard_map without collectives, have other bits on 1 device than on 2 (JAX 0.12.0.1, too).
#
# With several devices XLA:CPU leaves x / n and y / n alone. In a program for one device it finds the common divisor and
# multiplies by 1 / n. One quotient alone is equal. So "the same program on fewer devices" is another program.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cd "$folder"
cat > quotients.py <<'END'
import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec

jax.config.update("jax_num_cpu_devices", 2)
x = np.random.default_rng(0).normal(size=(13, 37)).astype(np.float32)


def on(num_devices, function):
    devices = jax.devices()[:num_devices]
    mesh = jax.make_mesh((num_devices,), ("data",), devices=devices, axis_types=(AxisType.Auto,))
    specs = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec(), "check_vma": False}
    return jax.tree.map(np.asarray, jax.jit(jax.shard_map(function, mesh=mesh, **specs))(x))


def two(x):
    return x[0] / (x[0, 0] + 2), x[1] / (x[0, 0] + 2)


def one(x):
    return (x[0] / (x[0, 0] + 2),)


print("jax", jax.__version__)
differ = {f.__name__: sum(int((a != b).sum()) for a, b in zip(on(1, f), on(2, f))) for f in (one, two)}
print("elements that differ between 1 and 2 devices:", differ)
assert differ["one"] == 0 and differ["two"] > 0, "changed"
END
JAX_PLATFORMS=cpu "$folder/venv/bin/python" quotients.py
