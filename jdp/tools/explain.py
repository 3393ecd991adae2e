"""`explain`: a compiled step's memory, collectives and time."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jdp.tools import hlo_matching, timeline
from jdp.tools.calibration import CollectiveLaw
from jdp.tools.compiled import compile_step
from jdp.tools.costs import Kernel, kernel_of
from jdp.tools.findings import Facts, findings_of
from jdp.tools.hlo import HloProgram
from jdp.tools.hlo_matching import Match
from jdp.tools.memory import memory_of, state_parts
from jdp.tools.rate import LEAST_GIVEN, MOST_GIVEN, UNUSED, Rate, time_interval
from jdp.tools.rates import given_rates, measured, rates_of
from jdp.tools.report import Bucket, StepReport, StepTime
from jdp.tools.timeline import Groups, Timeline, Work
from jdp.tools.transfers import SentArrays
from jdp.training.communication_plan import SentLeaf, update_of
from jdp.training.step import Step

# With one of these, collectives have no measured times.
_OF_LINKS = {"link_bytes_per_s", "reduction_start_s", "kernel_reduction_start_s"}


def explain(
    step: Step,
    /,
    *args: Any,
    on: str | Mesh | None = None,
    rates: Mapping[str, float] | None = None,
    **keywords: Any,
) -> StepReport:
    """Compile a step, and return its memory, collectives, predicted time and what to change.

    Nothing runs, is donated or put onto a device. The devices may be absent: GPUs need the extra
    `jdp[explain-gpu]`, TPUs `jdp[explain-tpu]`, and no hardware.

    Args:
      step: a function decorated with `jdp.train_step` or `jdp.eval_step`.
      *args: arguments of the step, as arrays or `jax.ShapeDtypeStruct`s: its state, such as from
        `jax.eval_shape(make_state)`; a global batch, with rows divisible by the number of ranks;
        and others.
      on: the devices: `"8xH200"`, `"16xH100"` (two hosts of 8), `"v5e:2x4"`, `"cpu:4"`, or a mesh.
        Default: the state's mesh.
      rates: rates for the predicted time, such as `{"matmul_flops": 600e12}`. The report names all,
        with units, and the defaults.
      **keywords: keyword arguments of the step. Pass those named `on` or `rates` by position, or in
        a `functools.partial`.

    Returns:
      A report: print it, read its attributes, or call `report.to_json()`. Its memory is what XLA
      allocates; its times are predicted.

    Raises:
      ValueError: there is no such target or rate, the rows cannot be split, or the step is
        refused, as in a run.
      MissingPluginError: this environment cannot compile for the target.
      TypeError: `step` is not decorated, `on` is neither a text nor a mesh, or a rate is not a
        number.

    >>> import jax, jax.numpy as jnp, optax, jdp
    >>> mesh = jdp.init(cpu_ranks=2)
    >>> state = jdp.TrainState.create({"w": jnp.zeros((512, 64))}, jdp.replicated(optax.adam(0.1)))
    >>> @jdp.train_step
    ... def step(state, batch):
    ...     grads = jax.grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2))(state.params, batch)
    ...     return state.apply_gradients(grads), {}
    >>> report = jdp.explain(step, state, jax.ShapeDtypeStruct((8, 512), jnp.float32))
    >>> report.memory.parameters, report.memory.optimizer_state, report.buckets[0].leaves
    (131072, 262148, ("grads['w']",))
    >>> [finding.kind for finding in report.findings]
    ['replicated-optimizer-state']
    """
    return explain_call(step, args, keywords, on=on, rates=rates)


def explain_call(
    step: Step,
    args: tuple,
    keywords: dict[str, Any],
    *,
    on: str | Mesh | None,
    rates: Mapping[str, float] | None,
) -> StepReport:
    """Explain a step whose keywords may have any names."""
    given = given_rates(rates)  # before minutes of compiling
    found = compile_step(step, args, keywords, on)
    where, program, num_ranks = found.where, found.program, found.num_ranks
    here = measured(where)
    chosen = rates_of(where, given, here.rates)
    laws = {} if _OF_LINKS & {*given} else here.laws
    predicted = PredictedStep(
        program, num_ranks, where.hosts, laws, [*map(kernel_of, found.traced.kernels)]
    )
    simulated = predicted.at(chosen)
    transfers = list(simulated.transfers.values())
    _require_one_host(transfers, where.num_hosts)
    matches = hlo_matching.match(program, transfers, found.traced.collectives)
    buckets = [
        _bucket(transfer, match, simulated.step_s, where.mesh)
        for transfer, match in zip(transfers, matches, strict=True)
    ]
    memory = memory_of(found.compiled, program, state_parts(found.args[0]), where.memory_bytes())
    return StepReport(
        step=found.spec.name,
        on=where.name,
        num_ranks=num_ranks,
        memory=memory,
        buckets=tuple(buckets),
        time=predicted.time(chosen, simulated),
        rates=chosen | predicted.unused(given, chosen, simulated),
        laws=tuple(laws.values()),
        findings=tuple(findings_of(Facts(found, transfers, buckets, matches, memory))),
        unknown=tuple(dict.fromkeys(simulated.unknown)),
        spans=tuple(simulated.spans),
    )


def _require_one_host(transfers: Sequence[SentArrays], num_hosts: int) -> None:
    if num_hosts > 1 and any(transfer.algorithm == "split" for transfer in transfers):
        raise ValueError(
            "this step sums by jdp.collectives.split, which needs the GPUs of one host, but the "
            f"target has {num_hosts} hosts. Write all_reduce=jdp.collectives.xla."
        )


def _bucket(transfer: SentArrays, match: Match, step_s: float, mesh: Mesh) -> Bucket:
    hidden_bytes = transfer.hidden_runs * transfer.num_bytes
    total_s = step_s or 1.0
    return Bucket(
        kind=transfer.kind,
        algorithm=transfer.algorithm,
        leaves=tuple(leaf_name(leaf, transfer.kind) for leaf in match.leaves),
        dtype="+".join(dict.fromkeys(leaf.dtype for leaf in match.leaves)),
        num_bytes=transfer.num_bytes,
        runs=transfer.runs,
        begins=transfer.begins_s / total_s,
        ends=transfer.ends_s / total_s,
        meanwhile=dict(transfer.meanwhile),
        hidden_bytes=hidden_bytes,
        exposed_bytes=transfer.runs * transfer.num_bytes - hidden_bytes,
        took_s=transfer.took_s,
        hidden_s=max(0.0, transfer.took_s - transfer.exposed_s),
        exposed_s=transfer.exposed_s,
        num_merged=match.num_planned,
        line=match.line,
        is_of_author=match.is_of_author,
        axes=_axes(transfer, mesh),
    )


def _axes(transfer: SentArrays, mesh: Mesh) -> tuple[str, ...]:
    found = set()
    for group in transfer.groups:
        places = np.unravel_index(group, mesh.devices.shape)
        found |= {x for x, own in zip(mesh.axis_names, places, strict=True) if np.ptp(own)}
    return tuple(name for name in mesh.axis_names if name in found)


def leaf_name(leaf: SentLeaf, kind: str) -> str:
    """Return a report's name of a collective's array."""
    if not leaf.path:
        return "a scalar" if leaf.num_elements == 1 else f"{leaf.dtype}[{leaf.num_elements}]"
    if kind not in ("all-reduce", "reduce-scatter") and leaf.path.startswith("grads"):
        return update_of(leaf.path)
    return leaf.path


# A rank's sent share of its arrays, over (n - 1) / n.
_SENT = {"all-reduce": 2.0}
_PERMUTE = "collective-permute"
# Each rank reads the others' arrays, or a part of each and then the other sums.
_ONE_SHOT, _TWO_SHOT = "triton one-shot", "triton two-shot"
_WHY_UNUSED = {
    "matmul_flops": ": matmuls of float32 take matmul_flops_f32",
    "matmul_flops_f32": ": matmuls of 16 bits take matmul_flops",
}


class Likely:
    """Times of operations at some rates: `which` of `value`, `low` or `high`."""

    def __init__(
        self,
        rates: Mapping[str, Rate],
        num_ranks: int,
        hosts: Sequence[int],
        which: str = "value",
        laws: Mapping[tuple[str, str], CollectiveLaw] | None = None,
    ):
        self._laws = laws or {}
        self._which = which

        def rate(name: str) -> float:
            return getattr(rates[name], which)

        other = {"low": "high", "high": "low"}.get(which, which)
        self._matmul, self._matmul_f32 = rate("matmul_flops"), rate("matmul_flops_f32")
        self._memory, self._link = rate("memory_bytes_per_s"), rate("link_bytes_per_s")
        self._start_s = getattr(rates["operation_start_s"], other)
        self._reduction_start_s = getattr(rates["reduction_start_s"], other)
        if "kernel_reduction_start_s" in rates:
            self._kernel_start_s = getattr(rates["kernel_reduction_start_s"], other)
        if len({*hosts}) > 1:
            self._host_link = rate("host_link_bytes_per_s")
            self._host_start_s = getattr(rates["host_reduction_start_s"], other)
        self._num_ranks, self._hosts = num_ranks, hosts

    def compute_s(self, work: Work) -> float:
        """Return an operation's seconds: of its matmuls or its memory."""
        wide = sum(value for dtype, value in work.flops.items() if dtype in ("f32", "f64"))
        narrow = sum(work.flops.values()) - wide
        matmul_s = wide / self._matmul_f32 + narrow / self._matmul
        return self._start_s + max(matmul_s, work.num_bytes / self._memory)

    def transfer_s(self, kind: str, algorithm: str, num_bytes: float, groups: Groups = ()) -> float:
        """Return a collective's seconds: measured, or its start and its bytes over links."""
        n = len(groups[0]) if groups else self._num_ranks
        if n == 1:
            return self._start_s
        measured = "xla" if algorithm in (_ONE_SHOT, _TWO_SHOT) else algorithm
        if n == self._num_ranks and (law := self._laws.get((kind, measured))):
            # Measured times differ from the law: between two sizes it is a line through both.
            is_between = law.points[0][0] <= num_bytes <= law.points[-1][0]
            shortest, longest = time_interval(0.0 if is_between else law.largest_error)
            factor = {"value": 1.0, "low": longest, "high": shortest}[self._which]
            return factor * law.seconds(num_bytes)
        sent = num_bytes if kind == _PERMUTE else _SENT.get(kind, 1.0) * num_bytes * (n - 1) / n
        leaving = self._leaving_host(kind, num_bytes, sent, groups or [range(len(self._hosts))])
        if algorithm == _ONE_SHOT:
            sent = num_bytes * (n - 1)
        if algorithm in (_ONE_SHOT, _TWO_SHOT):
            return self._kernel_start_s + sent / self._link
        if leaving is None:
            return self._reduction_start_s + sent / self._link
        return self._host_start_s + max(sent / self._link, leaving / self._host_link)

    def _leaving_host(
        self, kind: str, num_bytes: float, sent: float, groups: Groups
    ) -> float | None:
        """Return the most bytes that leave a host; None if each group is on one."""
        leaving: dict[int, float] = defaultdict(float)
        for group in groups:
            on_host = Counter(self._hosts[rank] for rank in group)
            if len(on_host) == 1:
                continue
            if kind == _PERMUTE:  # a pair, sender first
                on_host = Counter([self._hosts[group[0]]])
            for host, num in on_host.items():
                others = num * (len(group) - num) / len(group)  # of an array of each of its ranks
                leaving[host] += num_bytes * others if "all-to-all" in kind else sent
        return max(leaving.values(), default=None)


class PredictedStep(NamedTuple):
    """A compiled step, simulated at rates; see `Likely`."""

    program: HloProgram
    num_ranks: int
    hosts: Sequence[int]
    laws: Mapping[tuple[str, str], CollectiveLaw]
    kernels: Sequence[Kernel]

    def at(self, rates: Mapping[str, Rate], which: str = "value") -> Timeline:
        """Return the schedule at some rates; `which` as for `Likely`."""
        speeds = Likely(rates, self.num_ranks, self.hosts, which, self.laws)
        return timeline.simulate(self.program, speeds, self.kernels)

    def time(self, rates: Mapping[str, Rate], found: Timeline) -> StepTime:
        """Return the time with its interval."""
        return StepTime(
            likely_s=found.step_s,
            low_s=self.at(rates, "high").step_s,
            high_s=self.at(rates, "low").step_s,
            computing_s=found.computing_s,
            exposed_s=sum(transfer.exposed_s for transfer in found.transfers.values()),
            matmul_flops=sum(found.flops.values()),
        )

    def unused(
        self, given: Mapping[str, Rate], rates: Mapping[str, Rate], found: Timeline
    ) -> dict[str, Rate]:
        """Return given rates without effect, with a source that says so."""
        same = {}
        for name, rate in given.items():
            worst = MOST_GIVEN if name.endswith("_start_s") else LEAST_GIVEN
            if self.at({**rates, name: replace(rate, value=worst)}).step_s == found.step_s:
                same[name] = replace(rate, source=f"{UNUSED}{_WHY_UNUSED.get(name, '')}")
        return same
