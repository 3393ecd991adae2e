"""Compares the cost of this checkout of jdp with another one: does a change make anything slower?

    python -m benchmarks.step.beside_commit ../before            in some 10 minutes on 2 cores
    python -m benchmarks.step.beside_commit ../before --quick    one round, to see that it works

Build the other checkout first: `python setup.py build_native` there. Both use the models and clocks
of this one. Each round starts one process for each checkout, every second round in the other order.
Python calls are also counted, because noise does not change their number. If both lower a step to
the same text, it runs equally fast; if not, `step.overhead` measures the difference. Prints its
table and writes it to benchmarks/results/, that of a quick run to out/benchmarks/.
"""

import argparse
import cProfile
import gc
import hashlib
import importlib.util
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

_HERE = Path(__file__).resolve().parents[2]


def _lend_clocks_and_models() -> None:
    """Import jdp of PYTHONPATH's checkout, and all else from here; lend it `jdp.tools`, if none."""
    if importlib.util.find_spec("jdp.tools") is None:
        package = types.ModuleType("jdp.tools")
        package.__path__ = [str(_HERE / "jdp/tools")]
        sys.modules["jdp.tools"] = package
    sys.path.insert(0, str(_HERE))


_lend_clocks_and_models()

from benchmarks.harness import models, report, timing  # noqa: E402
from benchmarks.harness.report import Section  # noqa: E402

NUM_ROUNDS, GOAL = 5, 1.02
COMMANDS = {"import jdp": ["-c", "import jdp"], "jdp run --help": ["-m", "jdp", "run", "--help"]}


class Cost(NamedTuple):
    """The measurements of one operation in one process.

    Attributes:
      seconds: the median of a few runs.
      num_calls: number of Python calls; 0 if not counted.
      result: digest of the result; empty if there is nothing to compare.
    """

    seconds: float
    num_calls: int = 0
    result: str = ""


def main() -> None:
    options = _options()
    if options.one:
        print(json.dumps(_measure(options.other, options.quick)))
        return
    checkouts = (_HERE, options.other.resolve())
    rounds: tuple[list[dict[str, Cost]], list[dict[str, Cost]]] = ([], [])
    for number in range(1 if options.quick else NUM_ROUNDS):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            rounds[which].append(_in_a_process(checkouts[which], options.quick))
    section = _section(rounds[0], rounds[1], _commit(checkouts[1]))
    report.publish("beside_commit", [section], quick=options.quick)


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("other", type=Path, help="a checkout of jdp, built")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_a_process(checkout: Path, quick: bool) -> dict[str, Cost]:
    """Measure one checkout: imports its jdp, but the benchmarks of this checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed jdp is compiled
    environment["PYTHONPYCACHEPREFIX"] = str(report.SCRATCH / "bytecode")

    def output(command: list[str]) -> str:
        python = [sys.executable, *command]
        return subprocess.check_output(python, env=environment, cwd=checkout, text=True)

    costs = {}
    for what, command in COMMANDS.items():
        output(command)  # compiles it
        costs[what] = Cost(_median(lambda command=command: output(command), 5))
    one = [str(Path(__file__).resolve()), str(checkout), "--one", *["--quick"] * quick]
    measured = json.loads(output(one).splitlines()[-1])
    return costs | {what: Cost(*cost) for what, cost in measured.items()}


def _measure(checkout: Path, quick: bool) -> dict[str, Cost]:
    import jdp  # of the checkout that this process measures

    if not Path(jdp.__file__).is_relative_to(checkout):
        raise RuntimeError(f"jdp came from {jdp.__file__}, not from {checkout}.")
    jdp.init(cpu_ranks=4)
    costs = {}
    for problem in (
        models.problem_of("mlp"),
        models.problem_of("transformer"),
        models.many_leaves(1_000 if quick else 3_000),
    ):
        for num_ranks, k in [(4, 1)] if problem.name.endswith("leaves") else [(4, 1), (2, 8)]:
            what = f"trace and lower {problem.name}, {num_ranks} ranks, k={k}"
            costs[what] = _lowering(problem, num_ranks, k)
    for num_leaves in (10, 1_000):
        costs[f"call, {num_leaves} leaves"] = _call(num_leaves, 20 if quick else 500)
    return costs


def _lowering(problem: models.Problem, num_ranks: int, k: int) -> Cost:
    import jdp
    from benchmarks.step import contestants

    mesh = jdp.init(devices=jax.devices()[:num_ranks])
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    state = jdp.TrainState.create(problem.params, jdp.replicated(models.TX))
    batch = jax.device_put(problem.batch, rows)
    texts = []

    def clear() -> None:
        jax.clear_caches()
        gc.collect()  # takes longer the more is imported

    def lower() -> None:
        step = contestants.jdp_step(problem.loss_fn, mesh, k)
        texts.append(step.lower(state, batch).as_text())

    clear()
    num_calls = _num_calls(lower)
    seconds = _median(lower, 3, before=clear)
    return Cost(seconds, num_calls, hashlib.sha256(texts[-1].encode()).hexdigest())


def _call(num_leaves: int, num_times: int) -> Cost:
    import jdp
    from benchmarks.step import call_cost

    ours, _ = call_cost.contestants_of(num_leaves, jdp.init(devices=jax.devices()[:1]))
    times = [timing.until_returned(ours) for _ in range(num_times)]
    cost = Cost(statistics.median(times), _num_calls(ours))
    ours.check()
    return cost


def _num_calls(fn: Callable[[], Any]) -> int:
    profile = cProfile.Profile()
    profile.runcall(fn)
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


def _median(
    fn: Callable[[], Any], num_times: int, before: Callable[[], Any] = lambda: None
) -> float:
    times = []
    for _ in range(num_times):
        before()
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _section(ours: list[dict], theirs: list[dict], commit: str) -> Section:
    return Section(
        "Beside another commit",
        f"This commit beside {commit}: milliseconds, the median over {len(ours)} processes of "
        "each, started in turns; the median ratio of the rounds, and its 95 % bootstrap interval; "
        f"Python calls, counted once in each process. Below 1, this commit is faster; goal {GOAL}. "
        "A trace has empty caches; a call is until it returns. Same result: the text of the "
        "lowered program.",
        list(_rows(ours, theirs)),
        {
            "what": "{what}",
            "this, ms": "{this_ms:.2f}",
            "other, ms": "{other_ms:.2f}",
            "this / other": "{ratio:.3f}",
            "95 % interval": "{low:.3f} to {high:.3f}",
            "calls": "{this_calls}",
            "other calls": "{other_calls}",
            "same result": "{same}",
            "met": "{met}",
        },
    )


def _rows(ours: list[dict], theirs: list[dict]) -> Iterator[dict[str, Any]]:
    for what in ours[0]:
        mine, other = ([one[what] for one in rounds] for rounds in (ours, theirs))
        seconds = np.array([[a.seconds, b.seconds] for a, b in zip(mine, other, strict=True)])
        ratios = seconds[:, 0] / seconds[:, 1]
        low, high = timing.interval(ratios)
        results = {cost.result for cost in [*mine, *other]}
        this_ms, other_ms = np.median(seconds, axis=0) * 1e3
        yield {
            "section": "beside_commit",
            "what": what,
            "this_ms": float(this_ms),
            "other_ms": float(other_ms),
            "ratio": float(np.median(ratios)),
            "low": low,
            "high": high,
            "this_calls": statistics.median(cost.num_calls for cost in mine) or "",
            "other_calls": statistics.median(cost.num_calls for cost in other) or "",
            "same": "" if results == {""} else "yes" if len(results) == 1 else "no",
            "met": "yes" if np.median(ratios) <= GOAL else "no",
        }


def _commit(checkout: Path) -> str:
    git = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.check_output(git, text=True).strip()


if __name__ == "__main__":
    main()
