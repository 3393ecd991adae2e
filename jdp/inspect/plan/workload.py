"""What is trained: parameters by layers, and the time in which one rank computes a step."""

import math
from collections.abc import Sequence
from typing import NamedTuple

MiB = 2**20
STATE_BYTES = 4  # of a parameter, and of each number that the optimizer keeps of it: float32


class ModelLeaf(NamedTuple):
    """A leaf of the parameters, in the order of the forward pass.

    Attributes:
      params: number of parameters.
      work: its part of the time of a pass; all parts add up to 1.
    """

    params: float
    work: float


class Workload(NamedTuple):
    """A step of one rank that computes alone.

    Attributes:
      leaves: parameters, in the order of the forward pass.
      forward_s: seconds of the forward passes of all micro-batches.
      backward_s: seconds of their backward passes.
      update_s: seconds in which one rank updates all parameters.
      micro_batches: number of micro-batches, >= 1.
      gather_bytes: bytes of a parameter that is gathered where it is read.
      reduce_bytes: bytes of a gradient that is reduced.
      bucket_bytes: capacity of a bucket of gradients, and of a group of parameters.
    """

    leaves: tuple[ModelLeaf, ...]
    forward_s: float
    backward_s: float
    update_s: float = 0.0
    micro_batches: int = 1
    gather_bytes: float = 4
    reduce_bytes: float = 4
    bucket_bytes: float = 4 * MiB

    @property
    def params(self) -> float:
        """Number of parameters."""
        return sum(leaf.params for leaf in self.leaves)

    def alone_s(self) -> float:
        """Return the seconds of a step of one rank without any other."""
        return self.forward_s + self.backward_s + self.update_s


def uniform(params: float, layers: int, leaves_per_layer: int) -> tuple[ModelLeaf, ...]:
    """Return the leaves of a model of equal layers.

    >>> uniform(8, layers=2, leaves_per_layer=2)[0]
    ModelLeaf(params=2.0, work=0.25)
    """
    count = layers * leaves_per_layer
    return (ModelLeaf(params / count, 1 / count),) * count


def grouped(
    leaves: Sequence[ModelLeaf], bytes_per_param: float, capacity_bytes: float
) -> list[list[ModelLeaf]]:
    """Group leaves in their order into groups of at most `capacity_bytes`.

    A leaf is never split: a larger one is a group of its own, as in
    `jdp.collectives.buckets.plan`.

    >>> [len(group) for group in grouped(uniform(6, 6, 1), 4, capacity_bytes=8)]
    [2, 2, 2]
    """
    groups: list[list[ModelLeaf]] = []
    used = math.inf
    for leaf in leaves:
        num_bytes = leaf.params * bytes_per_param
        if used + num_bytes > capacity_bytes:
            groups.append([])
            used = 0.0
        groups[-1].append(leaf)
        used += num_bytes
    return groups


def work_of(group: Sequence[ModelLeaf]) -> float:
    """Return the part of a pass that the leaves of a group take."""
    return sum(leaf.work for leaf in group)


def params_of(group: Sequence[ModelLeaf]) -> float:
    """Return the number of parameters of a group."""
    return sum(leaf.params for leaf in group)
