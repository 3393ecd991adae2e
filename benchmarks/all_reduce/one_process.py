"""All-reduces between the devices of one process: jdp's against `lax.psum`."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import jdp
from benchmarks.all_reduce import bandwidth, loops, peers
from benchmarks.harness import exact, timing
from benchmarks.harness.report import Section

NUM_CALLS = 10
TREE = [65_536] * 100  # elements of each leaf: 25 MiB
GOAL = 3.0


def measure(
    *, sizes: Sequence[int], tree: Sequence[int] = TREE, budget_s: float, min_rounds: int
) -> list[Section]:
    """Time vectors and the tree, on 2 and on 4 ranks.

    Args:
      sizes: sizes of the vectors in bytes.
      tree: number of elements of each leaf.
      budget_s: seconds for each case.
      min_rounds: minimum number of rounds of each case, even if they exceed the budget.
    """
    time_rows = functools.partial(_rows, budget_s=budget_s, min_rounds=min_rounds)
    against, moved = [], []
    for num_ranks in (2, 4):
        mesh = jdp.init(devices=jax.devices()[:num_ranks])
        with peers.memcpy_team(num_ranks) as copies:
            for num_bytes in sizes:
                rows, more = time_rows(mesh, [num_bytes // 4], copies)
                against += rows
                moved += more
            rows, more = time_rows(mesh, tree, copies)
            against += rows + time_rows(mesh, tree, None)[0]
            moved += more
    return [_against(against), _moved(moved)]


def _rows(mesh: Any, sizes: Sequence[int], copies: Any, *, budget_s: float, min_rounds: int) -> Any:
    num_calls, num_bytes = NUM_CALLS if copies else 1, sum(sizes) * 4
    made = {
        name: loops.Loop(name, mesh, sizes, num_calls, donate=bool(copies)) for name in loops.SUMS
    }
    clock = functools.partial(_per_call, num_calls=num_calls)
    clocks = {name: exact.checked(loop, clock) for name, loop in made.items()}
    if copies:
        clocks["memcpy"] = bandwidth.memcpy_clock(copies, num_bytes)
    found = timing.alternate(clocks, budget_s=budget_s, min_rounds=min_rounds)
    what = "vector" if len(sizes) == 1 else "tree"
    how = "loop" if copies else "one call"
    setup = {
        "section": "one process",
        "what": what,
        "how": how,
        "ranks": mesh.size,
        "bytes": num_bytes,
    }
    setup["none_us"] = float(np.median(found["none"])) * 1e6
    setup["ring_us"] = float(np.median(found["ring"])) * 1e6
    goal = GOAL if what == "tree" and copies else None
    against = [{**setup, **timing.against(found, "direct", "psum", goal)}]
    if not copies:
        return against, []
    names = ["direct", "ring", "psum", "none"]
    size = {"num_ranks": mesh.size, "num_bytes": num_bytes}
    moved = bandwidth.rows(found, where="in process", what=what, names=names, **size)
    return against, [{"section": "one process, memory", **row} for row in moved]


def _per_call(loop: exact.Contestant, num_calls: int) -> float:
    return timing.until_ready(loop) / num_calls


def _against(rows: list[dict[str, Any]]) -> Section:
    return Section(
        "One process: against lax.psum",
        f"Microseconds of a scaled sum over the devices of one process: {NUM_CALLS} in a "
        "`lax.scan` inside `jit`, donated. `rival / jdp` above 1: jdp's `direct` is faster. "
        "`none`: the same loop with the multiplication alone. `tree`: 100 leaves, 25 MiB. "
        "`one call`: the tree reduced once by a call from Python that does not donate. Most of "
        "that time goes to new memory for the results (page faults) with any contestant, as `none` "
        "shows. " + exact.CHECKED,
        rows,
        {
            "what": "{what}",
            "how": "{how}",
            "ranks": "{ranks}",
            "bytes": "{bytes}",
            "none, us": "{none_us:.1f}",
            "ring, us": "{ring_us:.1f}",
            **timing.AGAINST_COLUMNS,
        },
    )


def _moved(rows: list[dict[str, Any]]) -> Section:
    text = (
        "With n ranks, direct moves 2 n vectors, each rank's read and written once; ring 6 n - 4. "
        "Losses at small sizes: ranks wait for each other, and XLA starts the body of a "
        "loop (also in `none`). Above 1: results are written in place, into "
        "cached lines, while a copy needs the lines of two places."
    )
    return bandwidth.section("One process: of memcpy", text, rows)
