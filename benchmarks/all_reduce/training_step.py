"""Measures the cost of synchronisation in a training step of 2 processes: jdp and PyTorch's DDP."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.all_reduce import peers
from benchmarks.all_reduce.peers import TORCH, Peers
from benchmarks.harness import exact, timing
from benchmarks.harness.report import Section
from benchmarks.harness.timing import Word

NUM_PROCESSES, NUM_LAYERS, NUM_ROWS, NUM_STEPS = 2, 4, 32, 3
WIDTHS = (660, 2500)  # 7 MB and 100 MB of parameters
DDP, GOAL = "torch DDP", 1 / 3
# Each contestant, with its baseline step that reduces nothing.
STEPS = {"jdp direct": "jdp none", "jdp ring": "jdp none", "jdp gloo": "jdp none"}
_NAMES = {"direct": "jdp direct", "ring": "jdp ring", "psum": "jdp gloo", "none": "jdp none"}


def measure(
    *, at: Peers, widths: Sequence[int] = WIDTHS, budget_s: float, min_rounds: int
) -> Section:
    """Time whole steps with and without the reduction.

    Args:
      at: the installations of the peers.
      widths: widths of the MLP, which has 4 square layers.
      budget_s: seconds for each model.
      min_rounds: minimum number of rounds of each model, even if they exceed the budget.
    """
    rows = []
    with contextlib.ExitStack() as stack:
        jax_team = stack.enter_context(peers.jax_team(NUM_PROCESSES, 1))
        torch_team = None
        if TORCH not in at.missing():
            assert at.torch
            torch_team = stack.enter_context(peers.torch_team(at.torch, NUM_PROCESSES))
        for width in widths:
            problem = (width, NUM_LAYERS, NUM_ROWS)
            jax_team.ask("prepare_step", *problem, NUM_STEPS)
            clocks: dict[str, Callable[[], float]] = {
                name: jax_team.slowest("run_step", short, NUM_STEPS)
                for short, name in _NAMES.items()
            }
            if torch_team:
                torch_team.ask("prepare_step", *problem, NUM_STEPS)
                clocks[DDP] = torch_team.slowest("run_step", "all", NUM_STEPS)
                clocks["no_sync"] = torch_team.slowest("run_step", "none", NUM_STEPS)
            found = timing.alternate(clocks, budget_s=budget_s, min_rounds=min_rounds)
            rows += [_row(found, name, width) for name in (*STEPS, DDP)]
    return _section(rows)


def _row(found: Mapping[str, np.ndarray], name: str, width: int) -> dict[str, Any]:
    num_bytes = 4 * NUM_LAYERS * width * (width + 1)
    row: dict[str, Any] = {"section": "training", "bytes": num_bytes, "contestant": name}
    numbers = ("step_ms", "without_ms", "cost_ms", "interval", "share", "rounds")
    row |= {**dict.fromkeys(numbers, Word("missing")), "goal": Word("-"), "met": Word("-")}
    if name not in found:
        return row
    cost = functools.partial(_cost_ms, found)
    low, high = timing.interval(cost(name))
    row["step_ms"] = float(np.median(found[name])) * 1e3
    row["without_ms"] = float(np.median(found[STEPS.get(name, "no_sync")])) * 1e3
    row |= {"cost_ms": float(np.median(cost(name))), "interval": f"{low:.2f} to {high:.2f}"}
    row["rounds"] = len(found[name])
    if DDP in found:
        row["share"] = row["cost_ms"] / float(np.median(cost(DDP)))
    if name != DDP and DDP in found:
        row |= {"goal": GOAL, "met": "yes" if row["share"] <= GOAL else "no"}
    return row


def _cost_ms(found: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    return (found[name] - found[STEPS.get(name, "no_sync")]) * 1e3


def _section(rows: list[dict[str, Any]]) -> Section:
    return Section(
        "Cost of synchronisation in a training step",
        f"Milliseconds of a step of an MLP of {NUM_LAYERS} square layers, {NUM_ROWS} rows in each "
        f"of {NUM_PROCESSES} processes, SGD with momentum. `cost`: the step less the same step "
        "without the reduction, in the same rounds: jdp's on a mesh of its own process alone, "
        "PyTorch's DDP under `no_sync`. jdp's step also takes the mean of the loss. "
        "`gloo` is `jdp.collectives.xla`. All processes, the peer's too, allocate in huge pages, "
        "as under `jdp run`: XLA maps its temporaries again in each step, and 100 MB in pages of "
        "4 KiB cost more than their sum. Goal: at most a third of what DDP's costs. "
        f"Loss, parameters and momentum after each run of {NUM_STEPS} steps are those of the same "
        f"training on one device, to 1e-4 of the largest element. {exact.CHECKED}",
        rows,
        {
            "bytes": "{bytes}",
            "contestant": "{contestant}",
            "step, ms": "{step_ms:.2f}",
            "without, ms": "{without_ms:.2f}",
            "cost, ms": "{cost_ms:.2f}",
            "95 % interval": "{interval}",
            "cost / DDP's": "{share:.2f}",
            "rounds": "{rounds}",
            "goal": "{goal:.3f}",
            "met": "{met}",
        },
    )
