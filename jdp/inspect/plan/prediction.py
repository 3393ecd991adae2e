"""Predicts one row of a plan: step, memory, efficiency and effective training time."""

from collections.abc import Mapping
from statistics import fmean
from typing import NamedTuple

from jdp.inspect.plan.assumptions import STRAGGLER, Assumptions, values
from jdp.inspect.plan.fabric import Fabric
from jdp.inspect.plan.failures import Failures
from jdp.inspect.plan.memory import rank_memory, state_bytes_of_host
from jdp.inspect.plan.question import Model
from jdp.inspect.plan.schedule import Deployment, program_of
from jdp.inspect.plan.stragglers import Stragglers
from jdp.inspect.plan.workload import Workload


class PlanOptions(NamedTuple):
    """The options that all rows of a plan share.

    Attributes:
      model: the model that is trained.
      per_host: GPUs of a host.
      gather_bytes: bytes of a gathered parameter.
      reduce_bytes: bytes of a reduced gradient.
      bucket_bytes: capacity of a bucket.
      straggler: kind of distribution, see `Stragglers`.
      seed: of stragglers.
      activation_bytes: bytes of a rank beside its state.
      commit_every: steps between commits; 0: as many as lose least.
      degraded_s: seconds in which a host is missing after each failure.
      overlaps: whether links send while a GPU computes.
    """

    model: Model
    per_host: int = 8
    gather_bytes: float = 4
    reduce_bytes: float = 4
    bucket_bytes: float = 4 * 2**20
    straggler: str = "lognormal"
    seed: int = 0
    activation_bytes: float = 0.0
    commit_every: int = 0
    degraded_s: float = 0.0
    overlaps: bool = True


class Row(NamedTuple):
    """The prediction for one method on one number of hosts. Times are seconds.

    Attributes:
      method: such as "stage3".
      hosts: number of hosts.
      gpus: number of GPUs.
      step_s: mean time of a step: the sum of the next four.
      compute_s: forward and backward pass of a rank of mean speed.
      update_s: its update.
      exposed_s: communication that nothing hides, if all ranks are equally fast.
      straggler_s: the rest: waiting for the slowest rank.
      low_s: time of a step at the best of all assumed rates.
      high_s: at the worst.
      efficiency: time of a step on one GPU that holds everything, over `step_s`.
      efficiency_low: the lowest of this one, that with fast computation, slow links and many
        stragglers, and that with slow computation, fast links and few stragglers. Which of them it
        is depends on whether links cost more than a split update saves.
      efficiency_high: the highest of them.
      memory_bytes: of a rank: state, gradients, groups, and `activation_bytes`.
      fits: whether this is less than a GPU has.
      commit_every: steps between commits.
      ettr: share of the time in which steps are made that count.
      ettr_low: at the worst of all assumed rates.
      ettr_high: at the best.
    """

    method: str
    hosts: int
    gpus: int
    step_s: float
    compute_s: float
    update_s: float
    exposed_s: float
    straggler_s: float
    low_s: float
    high_s: float
    efficiency: float
    efficiency_low: float
    efficiency_high: float
    memory_bytes: float
    fits: bool
    commit_every: int
    ettr: float
    ettr_low: float
    ettr_high: float

    @property
    def effective(self) -> float:
        """What a GPU does in this run, over one alone that never fails."""
        return self.efficiency * self.ettr


def predict(options: PlanOptions, known: Assumptions, method: str, hosts: int) -> Row:
    """Return the row of a method on a number of hosts.

    Args:
      hosts: number of hosts, >= 1.
    """
    likely = values(known)
    workload, deployment = _workload(options, likely), _deployment(options, likely, method, hosts)
    step = mean_step_s(workload, deployment, _stragglers(options, likely))
    update_s = workload.update_s / deployment.sharded_over.size
    compute_s = workload.forward_s + workload.backward_s
    exposed = program_of(workload, deployment).exposed_s()
    memory = rank_memory(workload, deployment).total + options.activation_bytes
    low_s, _ = _bound(options, values(known, "fast"), method, hosts)
    high_s, _ = _bound(options, values(known, "slow"), method, hosts)
    efficiency = workload.alone_s() / step
    # Communication costs most where computation is fast.
    mixed = values(known, "slow", "fast"), values(known, "fast", "slow")
    ends = [efficiency, *(_bound(options, rates, method, hosts)[1] for rates in mixed)]
    every = options.commit_every or _best_interval(options, likely, workload, deployment, step)
    usual, slow, fast = (
        _failures(options, values(known, which), workload, deployment)
        for which in ("value", "slow", "fast")
    )
    return Row(
        method=method,
        hosts=hosts,
        gpus=deployment.all_ranks.size,
        step_s=step,
        compute_s=compute_s,
        update_s=update_s,
        exposed_s=exposed,
        straggler_s=step - compute_s - update_s - exposed,
        low_s=low_s,
        high_s=high_s,
        efficiency=efficiency,
        efficiency_low=min(ends),
        efficiency_high=max(ends),
        memory_bytes=memory,
        fits=memory <= likely["memory_bytes"],
        commit_every=every,
        ettr=usual.effective(every * step),
        ettr_low=slow.effective(every * high_s),
        ettr_high=fast.highest(every * low_s),
    )


def mean_step_s(workload: Workload, deployment: Deployment, stragglers: Stragglers) -> float:
    """Return the mean seconds of a step, over samples of the slowest rank."""
    program = program_of(workload, deployment)
    return fmean(map(program.step_s, stragglers.slowest(deployment.all_ranks.size)))


def _bound(
    options: PlanOptions, rates: Mapping[str, float], method: str, hosts: int
) -> tuple[float, float]:
    """Return seconds of a step, and the efficiency."""
    workload = _workload(options, rates)
    deployment = _deployment(options, rates, method, hosts)
    step = mean_step_s(workload, deployment, _stragglers(options, rates))
    return step, workload.alone_s() / step


def _workload(options: PlanOptions, rates: Mapping[str, float]) -> Workload:
    sizes = options.gather_bytes, options.reduce_bytes, options.bucket_bytes
    return options.model.workload(rates, *sizes)


def _deployment(
    options: PlanOptions, rates: Mapping[str, float], method: str, hosts: int
) -> Deployment:
    fabric = Fabric(
        link_bytes_per_s=rates["link_bytes_per_s"],
        link_hop_s=rates["link_hop_s"],
        network_bytes_per_s=rates["network_bytes_per_s"],
        network_hop_s=rates["network_hop_s"],
        start_s=rates["collective_start_s"],
    )
    return Deployment(method, hosts, options.per_host, fabric, options.overlaps)


def _stragglers(options: PlanOptions, rates: Mapping[str, float]) -> Stragglers:
    return Stragglers(options.straggler, rates[STRAGGLER], options.seed)


def _failures(
    options: PlanOptions, rates: Mapping[str, float], workload: Workload, deployment: Deployment
) -> Failures:
    num_bytes = state_bytes_of_host(workload, deployment)
    names = ("detection_s", "re_forming_s", "compiling_s", "restoring_s", "first_step_s")
    return Failures(
        per_s=deployment.all_ranks.size / rates["mtbf_gpu_s"],
        recovery_s=sum(rates[name] for name in names) + num_bytes / rates["restore_bytes_per_s"],
        commit_s=num_bytes / rates["commit_bytes_per_s"],
        degraded_s=options.degraded_s,
        missing=1 / deployment.hosts,
    )


def _best_interval(
    options: PlanOptions,
    rates: Mapping[str, float],
    workload: Workload,
    deployment: Deployment,
    step: float,
) -> int:
    interval_s = _failures(options, rates, workload, deployment).best_interval_s(step)
    return max(1, round(interval_s / step))
