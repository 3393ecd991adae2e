"""All-reduces between processes of one host: jdp's against JAX's, PyTorch's and Open MPI's."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.all_reduce import bandwidth, peers
from benchmarks.all_reduce.peers import MPI, TORCH, Peers
from benchmarks.harness import exact, timing
from benchmarks.harness.report import Section
from benchmarks.harness.team import Team

NUM_PROCESSES = 2
# jdp and JAX: sums in a loop of one program, and programs with one sum, called from Python.
NAMES = {
    "direct": "direct",
    "ring": "ring",
    "psum": "JAX gloo",
    "none": "none",
    "direct, calls": "direct, calls",
    "psum, calls": "JAX gloo, calls",
}
GLOO = ["JAX gloo", "JAX gloo, calls"]
MiB = 2**20


def measure(*, at: Peers, sizes: Sequence[int], budget_s: float, min_rounds: int) -> list[Section]:
    """Time vectors in 2 processes of one device, then of two devices.

    Args:
      at: the installations of the peers.
      sizes: sizes of the vectors in bytes.
      budget_s: seconds for each size.
      min_rounds: minimum number of rounds of each size, even if they exceed the budget.
    """
    against, moved = [], []
    with contextlib.ExitStack() as stack:
        teams = stack.enter_context(peers.all_teams(at, NUM_PROCESSES))
        versions = ", ".join(team.ask("about")[0] for team in teams.values())
        teams["memcpy"] = stack.enter_context(peers.memcpy_team(NUM_PROCESSES))
        for num_bytes in sizes:
            found = _time(teams, num_bytes, budget_s, min_rounds)
            against += _against(found, 1, num_bytes, [*GLOO, TORCH, MPI])
            moved += _moved(found, 1, num_bytes)
    with contextlib.ExitStack() as stack:
        teams = {"jax": stack.enter_context(peers.jax_team(NUM_PROCESSES, 2))}
        teams["memcpy"] = stack.enter_context(peers.memcpy_team(2 * NUM_PROCESSES))
        for num_bytes in sizes:
            found = _time(teams, num_bytes, budget_s, min_rounds)
            against += _against(found, 2, num_bytes, GLOO)
            moved += _moved(found, 2, num_bytes)
    return [_against_section(against, at, versions), _moved_section(moved)]


def _time(
    teams: Mapping[str, Team], num_bytes: int, budget_s: float, min_rounds: int
) -> dict[str, np.ndarray]:
    clocks, num_calls = {}, _num_calls(num_bytes)
    for name, team in teams.items():
        if name == "memcpy":
            continue
        if name == "jax":
            team.ask("prepare", num_bytes, num_calls)
            for one, label in NAMES.items():
                clocks[label] = team.slowest("run", one, num_calls)
        else:
            team.ask("prepare", num_bytes)
            clocks[name] = team.slowest("run", num_calls)
    clocks["memcpy"] = bandwidth.memcpy_clock(teams["memcpy"], num_bytes)
    return timing.alternate(clocks, budget_s=budget_s, min_rounds=min_rounds)


# Enough to make the common start of the processes negligible.
def _num_calls(num_bytes: int) -> int:
    return 10 if num_bytes >= MiB else 100


# rival / jdp to reach. Open MPI at 1 MiB is a stretch.
def _goal(rival: str, num_bytes: int) -> float | None:
    if rival in GLOO:
        return 4.0
    if rival == TORCH:
        return 3.0 if num_bytes <= 16 * MiB else 2.0
    if num_bytes >= 16 * MiB:
        return 1.0
    return 1 / 1.5 if num_bytes == MiB else None


def _against(
    found: Mapping[str, np.ndarray], num_devices: int, num_bytes: int, rivals: Sequence[str]
) -> list[dict[str, Any]]:
    setup = {"section": "processes", "processes": NUM_PROCESSES, "devices": num_devices}
    setup |= {"bytes": num_bytes, "ring_us": float(np.median(found["ring"])) * 1e6}
    return [
        {**setup, **timing.against(found, jdp, rival, _goal(rival, num_bytes))}
        for rival in rivals
        for jdp in ["direct, calls" if rival.endswith("calls") else "direct"]
    ]


def _moved(
    found: Mapping[str, np.ndarray], num_devices: int, num_bytes: int
) -> list[dict[str, Any]]:
    rows = bandwidth.rows(
        found,
        where="processes",
        what="vector",
        num_ranks=NUM_PROCESSES * num_devices,
        num_bytes=num_bytes,
        names=[name for name in found if name != "memcpy"],
    )
    return [{"section": "processes, memory", "devices": num_devices, **row} for row in rows]


def _against_section(rows: list[dict[str, Any]], at: Peers, versions: str) -> Section:
    missing = "".join(f" {name}: {reason}." for name, reason in at.missing().items())
    return Section(
        "Processes of one host: against JAX, PyTorch and Open MPI",
        f"{NUM_PROCESSES} processes; {versions}. Microseconds of an all-reduce, of the slowest "
        "process: jdp and JAX scale them (`none` does nothing else), 10 of them, or 100 "
        "of less than 1 MiB, in a `lax.scan` inside `jit`, donated; PyTorch and Open MPI take as "
        "many sums in place, called from Python. `calls`: programs of one sum, called from Python "
        "and waited for, jdp's against JAX's. `rival / jdp` above 1: jdp's `direct` is faster. "
        "Open MPI binds each process to a core by default; the system schedules "
        "the others. All processes stay alive for all rounds, and sleep in the others' turns. "
        + exact.CHECKED
        + missing,
        rows,
        {
            "devices a process": "{devices}",
            "bytes": "{bytes}",
            "ring, us": "{ring_us:.1f}",
            **timing.AGAINST_COLUMNS,
        },
    )


def _moved_section(rows: list[dict[str, Any]]) -> Section:
    text = (
        "With n ranks, direct moves 5 n - 2 vectors (through shared memory: n - 1 parts copied in, "
        "one summed from n and written twice, n - 1 copied out), ring 6 n - 4. What is "
        "lost at small sizes: ranks wait for each other. Above 1: the shared memory is small and "
        "stays in the cache, and results are written where the vectors lay; a copy needs the lines "
        "of two places."
    )
    return bandwidth.section("Processes of one host: of memcpy", text, rows)
