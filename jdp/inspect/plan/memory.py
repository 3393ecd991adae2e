"""The memory of a rank: the table of `docs/sharding.md`, in bytes."""

from typing import NamedTuple

from jdp.inspect.plan.schedule import HSDP, REPLICATED, STAGE_1, STAGE_2, Deployment
from jdp.inspect.plan.workload import STATE_BYTES, Workload, grouped, params_of

_MOMENTS = 2  # numbers that Adam keeps of a parameter


class RankMemory(NamedTuple):
    """Bytes of one rank, without activations and rows.

    Attributes:
      between_steps: parameters and state of the optimizer.
      in_step: more within a step: gradients, and parameters and gradients of groups.
    """

    between_steps: float
    in_step: float

    @property
    def total(self) -> float:
        """The most bytes of a step."""
        return self.between_steps + self.in_step


def rank_memory(workload: Workload, deployment: Deployment) -> RankMemory:
    """Return the memory of a rank that trains with Adam."""
    whole, n = workload.params * STATE_BYTES, deployment.sharded_over.size
    groups = grouped(workload.leaves[::-1], STATE_BYTES, workload.bucket_bytes)
    group = max(map(params_of, groups)) * STATE_BYTES
    adds_up = workload.micro_batches > 1  # beside the sums is a gradient of the next micro-batch
    if deployment.method == REPLICATED or n == 1:  # all stages compile to the same step then
        return RankMemory((1 + _MOMENTS) * whole, whole + adds_up * group)
    if deployment.method == STAGE_1:
        return RankMemory(whole + _MOMENTS * whole / n, whole + group / n + adds_up * group)
    parts = adds_up * (whole / n + group)  # a loop holds its sums of parts before and after
    if deployment.method == STAGE_2:
        return RankMemory(whole + _MOMENTS * whole / n, (whole + group) / n + group + parts)
    pair = min(2 * group, whole)  # a model of one group has no second
    return RankMemory((1 + _MOMENTS) * whole / n, (whole + pair) / n + pair + parts)


def state_bytes_of_host(workload: Workload, deployment: Deployment) -> float:
    """Return the bytes of the state that one host commits and restores."""
    whole = (1 + _MOMENTS) * workload.params * STATE_BYTES
    if deployment.method == REPLICATED:
        return whole
    if deployment.method in (STAGE_1, STAGE_2):
        return workload.params * STATE_BYTES * (1 + _MOMENTS / deployment.hosts)
    return whole if deployment.method == HSDP else whole / deployment.hosts
