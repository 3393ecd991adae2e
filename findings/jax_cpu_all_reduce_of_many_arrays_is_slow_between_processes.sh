#!/usr/bin/env bash
# XLA for CPUs combines the sums of a tree to one all-reduce, which takes some times as long between
# processes as an all-reduce of the same numbers in one array.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat > "$folder/sums.py" <<'END'
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[1]))
mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
own = [np.ones(size, np.float32) for size in [64] * 10 + [16384] * 5]
tree = [jax.make_array_from_process_local_data(NamedSharding(mesh, P("d")), x) for x in own]


def packed(tree):
    return jnp.split(lax.psum(jnp.concatenate(tree), "d"), np.cumsum([x.size for x in tree])[:-1])


def timed(total):
    total = jax.jit(
        jax.shard_map(total, mesh=mesh, in_specs=P("d"), out_specs=P(), check_vma=False)
    )
    assert total.lower(tree).compile().as_text().count(" all-reduce(") == 1
    times = []
    for _ in range(100):
        begin = time.perf_counter()
        sums = jax.block_until_ready(total(tree))
        times.append(time.perf_counter() - begin)
        assert all((np.asarray(x) == 2).all() for x in sums)
    return np.median(times)


ratio = timed(lambda tree: lax.psum(tree, "d")) / timed(packed)
if jax.process_index() == 0:
    print("jax", jax.__version__)
    print(f"the sum of 15 arrays takes {ratio:.1f} times as long as that of one array")
    assert ratio > 1.5
END
export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=1
port=$("$folder/venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
"$folder/venv/bin/python" "$folder/sums.py" 1 "$port" &
timeout 120 "$folder/venv/bin/python" "$folder/sums.py" 0 "$port"
wait
