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
    """Return the memory of a rank that trains with Adam.

    Args:
      workload: the model, whose parameters are float32.
      deployment: the method, hosts and ranks.
    """
    whole, n = workload.params * STATE_BYTES, deployment.sharded_over.size
    groups = grouped(workload.leaves[::-1], STATE_BYTES, workload.bucket_bytes)
    group = max(map(params_of, groups)) * STATE_BYTES
    if deployment.method == REPLICATED or n == 1:  # all stages compile to the same step then
        return RankMemory((1 + _MOMENTS) * whole, whole)
    if deployment.method in (STAGE_1, STAGE_2):
        gradients = whole if deployment.method == STAGE_1 else (whole + group) / n
        return RankMemory(whole + _MOMENTS * whole / n, gradients)
    return RankMemory((1 + _MOMENTS) * whole / n, whole / n + 2 * group / n + 2 * group)


def state_bytes_of_host(workload: Workload, deployment: Deployment) -> float:
    """Return the bytes of the state that one host commits and restores."""
    whole = (1 + _MOMENTS) * workload.params * STATE_BYTES
    if deployment.method == REPLICATED:
        return whole
    if deployment.method in (STAGE_1, STAGE_2):
        return workload.params * STATE_BYTES * (1 + _MOMENTS / deployment.hosts)
    return whole if deployment.method == HSDP else whole / deployment.hosts
