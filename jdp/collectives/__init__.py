"""All-reduce algorithms: one signature, bitwise equal results on every rank.

`all_reduce(buckets, axis_name, *, scale, mesh) -> buckets` sums every leaf over the ranks of
`axis_name` and multiplies it by `scale`. A bucket is a list of leaves of one dtype; buckets are in
the order of backpropagation.
"""

from collections.abc import Callable

from jdp.collectives.auto import auto
from jdp.collectives.cpu.runtime import reset, set_timeout_s
from jdp.collectives.gpu.start_done import split
from jdp.collectives.native import native, starts_when_ready
from jdp.collectives.quantized import quantized
from jdp.collectives.ring import ring
from jdp.collectives.xla import xla

AllReduce = Callable[..., list]

# jdp's own: float32 sums keep all digits, and one rank gets its own leaves back.
ALGORITHMS: tuple[AllReduce, ...] = (auto, native, ring, split, xla)

__all__ = [
    "AllReduce",
    "auto",
    "native",
    "quantized",
    "reset",
    "ring",
    "set_timeout_s",
    "split",
    "starts_when_ready",
    "xla",
]
