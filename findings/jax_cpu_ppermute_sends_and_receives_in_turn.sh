#!/usr/bin/env bash
# Between two hosts, a ppermute of megabytes on CPUs takes as long as its bytes of both directions one
# after the other, though links are duplex. An all-reduce, which sends as many bytes, takes half.
# Needs root: the hosts are two network namespaces with a link of 1 Gbit/s.
set -euo pipefail
folder=$(mktemp -d)
names=("duplex-$$-0" "duplex-$$-1")
clean() {
    for name in "${names[@]}"; do
        ip netns del "$name" 2> /dev/null || true
        rm -rf "/etc/netns/$name"
    done
    rm -rf "$folder"
}
trap clean EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
for i in 0 1; do
    ip netns add "${names[$i]}"
    ip -n "${names[$i]}" link set lo up
    mkdir -p "/etc/netns/${names[$i]}"
    echo "10.84.0.$((i + 1)) $(hostname)" > "/etc/netns/${names[$i]}/hosts"
done
ip -n "${names[0]}" link add wire0 type veth peer name wire1
ip -n "${names[0]}" link set wire1 netns "${names[1]}"
for i in 0 1; do
    ip -n "${names[$i]}" addr add "10.84.0.$((i + 1))/24" dev "wire$i"
    ip -n "${names[$i]}" link set "wire$i" up
    ip netns exec "${names[$i]}" tc qdisc add dev "wire$i" root tbf rate 1gbit burst 256kb latency 50ms
done
cat > "$folder/sends.py" <<'END'
import sys
import time

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

jax.distributed.initialize("10.84.0.1:8431", 2, int(sys.argv[1]))
mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
own = np.full(2**21, jax.process_index(), np.float32)  # 8 MiB: 67 ms at 1 Gbit/s
x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("d")), own)


def milliseconds(call, want):
    call = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        found = jax.block_until_ready(call(x))
        times.append((time.perf_counter() - begin) * 1e3)
        assert (np.asarray(found.addressable_data(0)) == want).all()
    return np.median(times[1:])


other = 1 - jax.process_index()
permuted = milliseconds(lambda x: lax.ppermute(x, "d", [(0, 1), (1, 0)]), other)
summed = milliseconds(lambda x: lax.pcast(lax.psum(x, "d"), "d", to="varying"), 1)
if jax.process_index() == 0:
    print("jax", jax.__version__)
    print(f"8 MiB each way: ppermute {permuted:.0f} ms, psum {summed:.0f} ms")
    assert permuted > 1.4 * summed
END
export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=1
ip netns exec "${names[1]}" "$folder/venv/bin/python" "$folder/sends.py" 1 &
timeout 120 ip netns exec "${names[0]}" "$folder/venv/bin/python" "$folder/sends.py" 0
wait
