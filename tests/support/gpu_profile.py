"""A profile of two GPUs in the format of JAX's profiler, written by hand: none was there.

After the format of XSpace, XLA's names of planes and lines of CUDA devices, and NCCL's names of
kernels. Two runs of a step: a matmul while the bucket of the run is reduced on another stream, then
an update. Times are in microseconds.
"""

from jax.profiler import ProfileData

START_NS = 1_795_000_000_000_000_000
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
# Kernel, operation, stream, begin, duration; the second run begins 1,000 us later.
KERNELS = (
    ("sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n", "gemm_fusion_dot.1", 14, 100, 200),
    (NCCL, "all-reduce-start.1", 17, 200, 300),
    ("loop_multiply_fusion", "loop_multiply_fusion", 14, 500, 50),
)
COPY = ("MemcpyH2D", 13, 20, 10)


def _string(text):
    return '"' + text.replace('"', '\\"') + '"'


def _plane(number, slower_us):
    names, stats = {}, {"hlo_op": 1, "hlo_module": 2, "correlation_id": 3}
    lines = {}

    def add(stream, name, begin, duration, details):
        key = names.setdefault(name, len(names) + 1)
        values = " ".join(
            f"stats {{ metadata_id: {stats[k]} str_value: {_string(v)} }}"
            for k, v in details.items()
        )
        lines.setdefault(stream, []).append(
            f"events {{ metadata_id: {key} offset_ps: {begin * 10**6} "
            f"duration_ps: {duration * 10**6} {values} "
            f"stats {{ metadata_id: 3 uint64_value: {len(names) * 7} }} }}"
        )

    for run in range(2):
        at = 1000 * run
        copy, stream, begin, duration = COPY
        add(stream, copy, at + begin, duration, {})
        for kernel, name, stream, begin, duration in KERNELS:
            if stream == 17:  # the others wait in it for the slower one
                begin, duration = begin + slower_us, duration - slower_us
            elif begin == 100:
                duration += slower_us
            details = {"hlo_op": name, "hlo_module": "jit_step"}
            add(stream, kernel, at + begin, duration, details)
    titles = {13: "MemcpyH2D", 14: "Compute", 17: "Compute"}
    text = " ".join(
        f"lines {{ id: {stream} name: {_string(f'Stream #{stream}({titles[stream]})')} "
        f"timestamp_ns: 0 {' '.join(events)} }}"
        for stream, events in lines.items()
    )
    text += "".join(
        f" event_metadata {{ key: {key} value {{ id: {key} name: {_string(name)} }} }}"
        for name, key in names.items()
    )
    text += "".join(
        f" stat_metadata {{ key: {key} value {{ id: {key} name: {_string(name)} }} }}"
        for name, key in stats.items()
    )
    return f"planes {{ id: {number} name: {_string(f'/device:GPU:{number}')} {text} }}"


def write(path):
    """GPU 1 computes 100 us longer, and GPU 0 waits for it in the collective."""
    text = _plane(0, 0) + _plane(1, 100)
    text += (
        ' planes { id: 9 name: "Task Environment" '
        f"stats {{ metadata_id: 1 uint64_value: {START_NS} }} "
        'stat_metadata { key: 1 value { id: 1 name: "profile_start_time" } } }'
    )
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
