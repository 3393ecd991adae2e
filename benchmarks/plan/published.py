"""Published runs that `jdp plan` has to reproduce, with every number that it needs and its source.

One constant is fitted, the scale of stragglers, to one row (FITTED_TO). It holds for all others.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from jdp.tools.plan.prediction import LOGNORMAL, Failures, Stragglers, rank_memory
from jdp.tools.plan.schedule import (
    REPLICATED,
    STAGE_3,
    Deployment,
    Fabric,
    MiB,
    ModelLeaf,
    Workload,
    program_of,
    uniform,
)
from jdp.tools.rate import NCCL_BYTES_PER_S

FITTED_TO = "Horovod, Inception V3, 512 GPUs"
GOAL = 0.05  # percentage points
SOURCES = {
    "Horovod": "arXiv 1802.05799 and docs/benchmarks: hosts of 4 Pascal GPUs, one RoCE card of "
    "25 Gbit/s, 64 images a GPU; 128 GPUs: the README of 2017",
    "images/s of one P100": "TensorFlow's benchmarks of May 2017 (docs_src/performance): "
    "Inception V3 142, VGG-16 154; ResNet-101, between ResNet-50 (219) and -152 (91.8) by its "
    "operations: 129",
    "parameters of layers": "of the papers, 4 bytes each; operations of a layer are parameters x "
    "positions of its output",
    "fusion buffer": "64 MiB, Horovod's default, taken as a static bucket",
    "hops": "NCCL's tuning model: ring, simple protocol; PCI 5.7 us, NVLink 3.4 us, network 14 us, "
    "start 8.4 us; Horovod's NCCL had no trees",
    "network": "90 % of the line rate, assumed, as in jdp plan",
    "PCI": "10 GB/s within a host of Horovod's, assumed; the network is slower",
    "torchtitan": "benchmarks/llama3_h100_202412_torchtitan.md: Llama 3.1 8B, 2 x 8192 tokens a "
    "GPU, hosts of 8 H100, 400 Gbit/s a GPU, gathers in bfloat16, reductions in float32",
    "NVLink": "NCCL on 8 GPUs, vLLM's pull request 42324",
    "FT-HSDP": "arXiv 2602.00277: a failure every 18 minutes, recoveries of 10 minutes; with "
    "replicas that fail alone, 3 minutes for all and 7 more for one of 12 (read in summaries of "
    "the paper)",
}
_LINE_SHARE = 0.9
_P100_MEMORY_BYTES_PER_S = 0.85 * 732e9


class Published(NamedTuple):
    """A published figure and its prediction, both from 0 to 1."""

    name: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted - self.published


class _Block(NamedTuple):
    params: float
    positions: int  # of its output
    leaves: int


def _net(blocks: Sequence[_Block], dense: Sequence[float]) -> tuple[ModelLeaf, ...]:
    """Make leaves of convolutions, whose work is parameters x positions, and of dense layers."""
    leaves = [(it.params / it.leaves, it.params * it.positions / it.leaves)
              for it in blocks for _ in range(it.leaves)]  # fmt: skip
    leaves += [(params, params) for params in dense]
    total = sum(work for _, work in leaves)
    return tuple(ModelLeaf(params, work / total) for params, work in leaves)


_VGG_16 = _net(
    [
        _Block(1_792, 224**2, 1), _Block(36_928, 224**2, 1), _Block(73_856, 112**2, 1),
        _Block(147_584, 112**2, 1), _Block(295_168, 56**2, 1), _Block(1_180_160, 56**2, 2),
        _Block(1_180_160, 28**2, 1), _Block(4_719_616, 28**2, 2), _Block(7_079_424, 14**2, 3),
    ],
    [102_764_544, 16_781_312, 4_097_000],
)  # fmt: skip
_INCEPTION_V3 = _net(
    [
        _Block(0.03e6, 147**2, 3), _Block(0.143e6, 71**2, 2), _Block(0.83e6, 35**2, 9),
        _Block(1.15e6, 17**2, 3), _Block(6.82e6, 17**2, 16), _Block(1.7e6, 8**2, 4),
        _Block(11.12e6, 8**2, 8),
    ],
    [2.05e6],
)  # fmt: skip
_RESNET_101 = _net(
    [
        _Block(9_408, 112**2, 1), _Block(0.216e6, 56**2, 9), _Block(1.22e6, 28**2, 12),
        _Block(26.1e6, 14**2, 69), _Block(14.96e6, 7**2, 9),
    ],
    [2.05e6],
)  # fmt: skip
# Leaves, images in a second of one GPU, and efficiency by number of GPUs.
_NETS = {
    "Inception V3": (_INCEPTION_V3, 142.0, {512: 0.90, 128: 0.90}),
    "ResNet-101": (_RESNET_101, 129.0, {512: 0.90, 128: 0.90}),
    "VGG-16": (_VGG_16, 154.0, {512: 0.68, 128: 0.79}),
}


def horovod(leaves: Sequence[ModelLeaf], images_per_s: float, gpus: int, scale: float) -> float:
    """Return the predicted efficiency of Horovod in relation to one GPU."""
    # SGD with momentum reads a parameter, its gradient and momentum, and writes two of them.
    update_s = 20 * sum(leaf.params for leaf in leaves) / _P100_MEMORY_BYTES_PER_S
    compute_s = 64 / images_per_s - update_s
    workload = Workload(
        tuple(leaves), compute_s / 3, 2 / 3 * compute_s, update_s, bucket_bytes=64 * MiB
    )
    fabric = Fabric(10e9, 5.7e-6, _LINE_SHARE * 25e9 / 8, 14e-6, 8.4e-6, "ring")
    return workload.alone_s() / _mean_s(
        workload, Deployment(REPLICATED, gpus // 4, 4, fabric), scale
    )


# Tokens in a second of one of 8 and of one of 128 GPUs, and bytes of a gathered parameter.
_TORCHTITAN = {
    "bfloat16": (5762, 5605, 2),
    "compiled": (6667, 6514, 2),
    "compiled, float8": (8532, 8380, 2),
}


def torchtitan(tokens_per_s: float, gather_bytes: float, scale: float) -> float:
    """Return the predicted throughput of a GPU of 128 in relation to one of 8."""
    workload = _llama(2 * 8192 / tokens_per_s, gather_bytes)
    fabric = Fabric(NCCL_BYTES_PER_S, 3.4e-6, _LINE_SHARE * 8 * 400e9 / 8, 14e-6, 8.4e-6)
    few, many = (Deployment(STAGE_3, hosts, 8, fabric) for hosts in (1, 16))
    return _mean_s(workload, few, scale) / _mean_s(workload, many, scale)


def _llama(compute_s: float, gather_bytes: float) -> Workload:
    params = 8.03e9
    # A group is a layer, as FSDP2 wraps it.
    return Workload(
        uniform(params, 32, 1), compute_s / 3, 2 / 3 * compute_s,
        update_s=28 * params / (0.85 * 2.4e12), gather_bytes=gather_bytes, reduce_bytes=4,
        bucket_bytes=1,
    )  # fmt: skip


def _mean_s(workload: Workload, deployment: Deployment, scale: float) -> float:
    program = program_of(workload, deployment)
    slowest = Stragglers(LOGNORMAL, scale).slowest(deployment.all_ranks.size)
    return fmean(map(program.step_s, slowest))


def llama_gigabytes_less() -> float:
    """Return by how much memory falls from 8 to 128 GPUs, in GiB; torchtitan says 15.4 to 15.0."""
    fabric = Fabric(1.0, 0.0, 1.0, 0.0)
    few, many = (
        rank_memory(_llama(1.0, 2), Deployment(STAGE_3, hosts, 8, fabric)).total
        for hosts in (1, 16)
    )
    return (few - many) / 2**30


def fitted_scale() -> float:
    """Return the scale of stragglers with which FITTED_TO is exact, by bisection."""
    leaves, images_per_s, published = _NETS["Inception V3"]
    low, high = 0.0, 0.1
    for _ in range(40):
        middle = (low + high) / 2
        if horovod(leaves, images_per_s, 512, middle) > published[512]:
            low = middle
        else:
            high = middle
    return round((low + high) / 2, 4)


def rows(scale: float) -> list[Published]:
    """Return all published figures beside their predictions.

    Args:
      scale: of the stragglers.
    """
    found = []
    for gpus in (512, 128):
        for name, (leaves, images_per_s, published) in _NETS.items():
            predicted = horovod(leaves, images_per_s, gpus, scale)
            found.append(Published(f"Horovod, {name}, {gpus} GPUs", published[gpus], predicted))
    for name, (few, many, gather_bytes) in _TORCHTITAN.items():
        predicted = torchtitan(few, gather_bytes, scale)
        found.append(Published(f"torchtitan, {name}, 8 to 128 GPUs", many / few, predicted))
    whole = Failures(per_s=1 / (18 * 60), recovery_s=600)
    parts = Failures(per_s=1 / (18 * 60), recovery_s=180, degraded_s=420, missing=1 / 12)
    found.append(Published("100,000 GPUs, all recover", 0.44, whole.effective(1e-3)))
    found.append(Published("100,000 GPUs, FT-HSDP", 0.80, parts.effective(1e-3)))
    return found
