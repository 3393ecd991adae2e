"""`jdp explain --compare`: ranks the optimizer's options."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jdp.distributed import mesh as meshes
from jdp.reduction.local_steps import LocalSteps
from jdp.reduction.optimizer import has_optimizer, replicated, sharding_of
from jdp.reduction.sharded import sharded
from jdp.tools import results
from jdp.tools.explain import explain_call
from jdp.tools.rate import UNUSED
from jdp.tools.report import StepReport, of_bytes, of_s
from jdp.training.step import Step

OPTIONS = {"stage": range(4), "bucket_bytes": range(1, 2**63)}


class RankedPlan(NamedTuple):
    """A step with options of its optimizer; stage 0 is `jdp.replicated`."""

    options: dict[str, int]
    report: StepReport


def compare(
    step: Step,
    args: tuple,
    keywords: dict[str, Any],
    choices: Mapping[str, Sequence[int]],
    *,
    on: str | Mesh | None = None,
    rates: Mapping[str, float] | None = None,
) -> list[RankedPlan]:
    """Explain a step with each combination of options, ranked."""
    require_choices(choices)
    spec, given = step.bound(args, keywords)
    (state, *others), keywords = spec.by_keyword(given)
    if not any(map(_has_options, jax.tree.leaves(state, is_leaf=has_optimizer))):
        raise ValueError(
            "the state of this step has no jdp.replicated or jdp.sharded in a TrainState, so it "
            "has no options to compare."
        )
    on = meshes.mesh_of(jax.tree.leaves(state), spec.axis_name) if on is None else on
    if isinstance(on, str) or set(on.axis_names) == set(spec.axis_name):
        # Options, not the state's sharding, decide where an array is.
        state = jax.tree.map(_shape, state)
    plans = []
    for values in itertools.product(*choices.values()):
        options = dict(zip(choices, values, strict=True))
        changed = jax.tree.map(
            lambda node, options=options: _changed(node, options), state, is_leaf=has_optimizer
        )
        report = explain_call(step, (changed, *others), keywords, on=on, rates=rates)
        plans.append(RankedPlan(options, report))
    return sorted(plans, key=lambda plan: plan.report.time.likely_s)


def require_choices(choices: Mapping[str, Sequence[int]]) -> None:
    """Raise an error if values of options cannot be compared.

    >>> require_choices({"stage": [0, 4]})
    Traceback (most recent call last):
    ValueError: cannot compare stage=4. The values of stage are 0 to 3.
    """
    for name, values in choices.items():
        if name not in OPTIONS:
            raise ValueError(f"cannot compare {name!r}. Options are {', '.join(OPTIONS)}.")
        known = OPTIONS[name]
        for value in values:
            if value not in known:
                raise ValueError(
                    f"cannot compare {name}={value}. The values of {name} are {known[0]} to "
                    f"{known[-1]}."
                )


def table(plans: Sequence[RankedPlan]) -> str:
    """Return a line per plan and unused given rate."""
    first = plans[0].report
    lines = [
        f"{first.step} on {first.on}: {len(plans)} plan{'s' * (len(plans) > 1)} by predicted step "
        "time",
        f"  {'plan':<34}{'step':>10}{'interval':>24}{'exposed':>10}{'memory':>12}",
    ]
    for options, report in plans:
        name = " ".join(f"{key}={value}" for key, value in options.items())
        time = report.time
        interval = f"{of_s(time.low_s)} to {of_s(time.high_s)}"
        lines.append(
            f"  {name:<34}{of_s(time.likely_s):>10}{interval:>24}{of_s(time.exposed_s):>10}"
            f"{of_bytes(report.memory.total):>12}"
        )
    taken = (
        {name for name, rate in report.rates.items() if not rate.source.startswith(UNUSED)}
        for _, report in plans
    )
    unused = {*first.rates}.difference(*taken)
    lines += [f"  {name} = {rate}" for name, rate in first.rates.items() if name in unused]
    return "\n".join(lines)


def to_json(plans: Sequence[RankedPlan]) -> str:
    """Return each plan's options and report, in order."""
    values = [{"plan": plan.options, **json.loads(plan.report.to_json())} for plan in plans]
    return results.to_json(values)


def _shape(leaf: Any) -> Any:
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array else leaf


def _has_options(node: Any) -> bool:
    return has_optimizer(node) and not isinstance(node.tx, LocalSteps)


def _changed(node: Any, options: Mapping[str, int]) -> Any:
    if not _has_options(node):
        return node
    sharding = sharding_of(node.tx)
    given: dict[str, Any] = {
        **node.tx.options,
        **{k: v for k, v in options.items() if k != "stage"},
    }
    stage = options.get("stage", 0 if sharding is None else sharding.stage)
    tx = given.pop("tx")
    if stage == 0:
        return dataclasses.replace(node, tx=replicated(tx, **given))
    if sharding is not None:
        given |= {"min_size": sharding.min_size, "over": sharding.axes}
        if stage == 3:
            given |= {"keep_gathered": sharding.keep_gathered}
            given |= {"gather_dtype": sharding.gather_dtype}
    return dataclasses.replace(node, tx=sharded(tx, stage=stage, **given))
