"""Predicts a plan's row."""

import math
import random
from collections.abc import Mapping
from statistics import NormalDist, fmean
from typing import NamedTuple

from jdp.tools.plan.assumptions import STRAGGLER, Assumptions, values
from jdp.tools.plan.question import Model
from jdp.tools.plan.schedule import (
    HSDP,
    REPLICATED,
    STAGE_1,
    STAGE_2,
    STATE_BYTES,
    Deployment,
    Fabric,
    Workload,
    grouped,
    params_of,
    program_of,
)


# Effective training time (ETTR): docs/plan.md lists what it assumes.
class Failures(NamedTuple):
    """A run's failures, and their costs; `missing` is the share of missing hosts, 0 to 1."""

    per_s: float
    recovery_s: float
    commit_s: float = 0.0
    degraded_s: float = 0.0
    missing: float = 0.0

    def effective(self, commit_every_s: float) -> float:
        """Return the share of time in counting steps, with full hosts."""
        lost = self.per_s * (self.recovery_s + self.degraded_s * self.missing)
        return max(0.0, 1 - lost) * self.kept(commit_every_s)

    def highest(self, commit_every_s: float) -> float:
        """Return the same, if a failure during a recovery restarts it."""
        trains = math.exp(-self.per_s * self.recovery_s)
        degraded = self.per_s * trains * self.degraded_s * self.missing
        return max(0.0, trains - degraded) * self.kept(commit_every_s)

    def kept(self, commit_every_s: float) -> float:
        """Return the share of training time in kept steps.

        An interval and its commit last w seconds, and are repeated until they have no failure:
        (exp(rate * w) - 1) / rate seconds on average (Daly 2006,
        https://doi.org/10.1016/j.future.2004.11.016).
        """
        whole = commit_every_s + self.commit_s
        if self.per_s == 0:
            return commit_every_s / whole
        exponent = self.per_s * whole
        if exponent > 700:
            return 0.0
        return self.per_s * commit_every_s / math.expm1(exponent)

    def best_interval_s(self, step_s: float) -> float:
        """Return the seconds between commits that lose least, at least a step.

        Young's rule (1974, https://doi.org/10.1145/361147.361115): the root of 2 * commit_s / rate.
        """
        if self.per_s == 0:
            return math.inf
        return max(step_s, math.sqrt(2 * self.commit_s / self.per_s))


NONE, LOGNORMAL, EXPONENTIAL = "none", "lognormal", "exponential"
KINDS = (NONE, LOGNORMAL, EXPONENTIAL)
NUM_SAMPLES = 16


class Stragglers(NamedTuple):
    """Ranks' independent slowness in a step: a factor of computation, of mean 1.

    Attributes:
      kind: "none"; "lognormal"; or "exponential", 1 - scale + an exponential of mean scale.
      scale: standard deviation of the logarithm, or mean of the exponential; 0 to 1.
    """

    kind: str = NONE
    scale: float = 0.0
    seed: int = 0

    def slowest(self, num_ranks: int, num_samples: int = NUM_SAMPLES) -> list[float]:
        """Return samples of the slowest rank's factor.

        The largest of n has the n-th power of one rank's distribution. Each of `num_samples` equal
        parts of [0, 1] gives one sample, for a small error.
        """
        if self.kind == NONE or self.scale == 0:
            return [1.0]
        chosen = random.Random(self.seed)
        shares = [max((i + chosen.random()) / num_samples, 1e-9) for i in range(num_samples)]
        # One rank's known mean 1 corrects the samples of n.
        missed = fmean(self._of_slowest(share, 1) for share in shares)
        return [self._of_slowest(share, num_ranks) / missed for share in shares]

    def _of_slowest(self, share: float, num_ranks: int) -> float:
        above = -math.expm1(math.log(share) / num_ranks)  # of one rank; 1 - above would lose digits
        if self.kind == EXPONENTIAL:
            return 1 - self.scale - self.scale * math.log(above)
        return math.exp(-self.scale * (NormalDist().inv_cdf(above) + self.scale / 2))


_MOMENTS = 2  # numbers that Adam keeps of a parameter


class _RankMemory(NamedTuple):
    """Bytes of one rank, without activations and rows; `in_step`: in addition."""

    between_steps: float
    in_step: float

    @property
    def total(self) -> float:
        return self.between_steps + self.in_step


def rank_memory(workload: Workload, deployment: Deployment) -> _RankMemory:
    """Return a rank's memory with Adam."""
    whole, n = workload.params * STATE_BYTES, deployment.sharded_over.size
    groups = grouped(workload.leaves[::-1], STATE_BYTES, workload.bucket_bytes)
    group = max(map(params_of, groups)) * STATE_BYTES
    adds_up = workload.micro_batches > 1  # beside the sums is the next micro-batch's gradient
    if deployment.method == REPLICATED or n == 1:  # all stages compile to the same step then
        return _RankMemory((1 + _MOMENTS) * whole, whole + adds_up * group)
    if deployment.method == STAGE_1:
        return _RankMemory(whole + _MOMENTS * whole / n, whole + group / n + adds_up * group)
    parts = adds_up * (whole / n + group)  # a loop holds its sums of parts before and after
    if deployment.method == STAGE_2:
        return _RankMemory(whole + _MOMENTS * whole / n, (whole + group) / n + group + parts)
    pair = min(2 * group, whole)  # a model of one group has no second
    return _RankMemory((1 + _MOMENTS) * whole / n, (whole + pair) / n + pair + parts)


def state_bytes_of_host(workload: Workload, deployment: Deployment) -> float:
    """Return the committed and restored bytes of one host."""
    whole = (1 + _MOMENTS) * workload.params * STATE_BYTES
    if deployment.method == REPLICATED:
        return whole
    if deployment.method in (STAGE_1, STAGE_2):
        return workload.params * STATE_BYTES * (1 + _MOMENTS / deployment.hosts)
    return whole if deployment.method == HSDP else whole / deployment.hosts


class PlanOptions(NamedTuple):
    """The options common to a plan's rows.

    Attributes:
      per_host: GPUs of a host.
      gather_bytes: of a gathered parameter.
      reduce_bytes: of a reduced gradient.
      activation_bytes: of a rank beside its state.
      commit_every: steps between commits; 0: as many as lose least.
      degraded_s: seconds with a missing host after each failure.
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
      step_s: mean time of a step: the sum of the next four.
      compute_s: forward and backward pass of a rank of mean speed.
      exposed_s: exposed communication, if all ranks are equally fast.
      straggler_s: the rest: waiting for the slowest rank.
      low_s, high_s: a step at the best, and at the worst, of all assumed rates.
      efficiency: time of a step on one GPU that holds everything, over `step_s`.
      efficiency_low, efficiency_high: the extremes of this one, of fast computation with slow links
        and many stragglers, and of the reverse.
      memory_bytes: of a rank: state, gradients, groups, and `activation_bytes`.
      ettr: share of time in steps that count.
      ettr_low, ettr_high: at the worst, and at the best, of all assumed rates.
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
        """A GPU's work in this run, relative to one alone without failures."""
        return self.efficiency * self.ettr


def predict(options: PlanOptions, known: Assumptions, method: str, hosts: int) -> Row:
    """Return a method's row on `hosts` hosts."""
    likely = values(known)
    workload, deployment = _workload(options, likely), _deployment(options, likely, method, hosts)
    step = _mean_step_s(workload, deployment, _stragglers(options, likely))
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


def _mean_step_s(workload: Workload, deployment: Deployment, stragglers: Stragglers) -> float:
    program = program_of(workload, deployment)
    return fmean(map(program.step_s, stragglers.slowest(deployment.all_ranks.size)))


def _bound(
    options: PlanOptions, rates: Mapping[str, float], method: str, hosts: int
) -> tuple[float, float]:
    workload = _workload(options, rates)
    deployment = _deployment(options, rates, method, hosts)
    step = _mean_step_s(workload, deployment, _stragglers(options, rates))
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
