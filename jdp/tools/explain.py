"""`explain`: a compiled step's memory, collectives and time."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jdp.tools import hlo_matching
from jdp.tools.compiled import compile_step
from jdp.tools.costs import kernel_of
from jdp.tools.findings import Facts, findings_of
from jdp.tools.hlo_matching import Match
from jdp.tools.memory import memory_of, state_parts
from jdp.tools.prediction import PredictedStep
from jdp.tools.rates import given_rates, measured, rates_of
from jdp.tools.report import Bucket, StepReport
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
