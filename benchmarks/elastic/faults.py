"""Injects faults into one training run of 3 processes, again and again.

    python -m benchmarks.elastic.faults                      100 faults, 10 minutes at most
    python -m benchmarks.elastic.faults --faults 20 --quick   what the tests run

A seed determines the kind, the process and the time of each fault. In the end, the state of every
process must have the same bits as a run without faults, and each row must have counted once in each
epoch, over all processes. Prints its tables and writes them to benchmarks/results/, those of a
quick run to out/benchmarks/.
"""

import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import report
from benchmarks.harness.report import Section
from jdp.tools.bench.faults import bars_of_parts
from jdp.tools.bench.injector import strike

_TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path += [str(_TESTS), str(_TESTS / "faults")]

import harness  # noqa: E402 - tests are no package, and found by their folder
from harness import Training  # noqa: E402
from support.launcher import Launcher  # noqa: E402
from victim import BATCH_SIZE, COMMIT_EVERY, NUM_ROWS, SAVE_EVERY  # noqa: E402

SIZE = 3
MINUTES = 10.0
GOAL_S = 0.5  # for a process that is killed, on a quiet machine


class Pace(NamedTuple):
    """The frequency of faults.

    Attributes:
      stride: number of steps in which one fault happens.
      changes: Python code that changes settings of the launcher.
    """

    stride: int
    changes: str

    def num_steps(self, num_faults: int) -> int:
        """Return the number of steps of the whole run, which ends with an epoch."""
        # Includes lost steps, and one step for each generation; most faults happen earlier.
        most, whole = self.stride + 8, NUM_ROWS // 2
        return -(-num_faults * most // whole) * whole


FULL = Pace(stride=24, changes="")
QUICK = Pace(stride=10, changes=harness.SHORT_BACKOFF)


class Incident(NamedTuple):
    """One fault and its recovery.

    Attributes:
      kind: kind of the fault.
      began: time.time().
      record: the launcher's record of the recovery.
      rest_s: seconds for which the launcher left the slot of a repeatedly failing process empty.
    """

    kind: str
    began: float
    record: dict[str, Any]
    rest_s: float

    @property
    def seconds(self) -> float:
        """Seconds from the fault until all processes of a generation had made a step."""
        return self.record["at"] - self.began


class Outcome(NamedTuple):
    """The result of a run.

    Attributes:
      incidents: faults in their order.
      lost_steps: number of steps lost in each restore.
      miscounted: rows and steps that did not count exactly once.
      wrong_bits: leaves of a process whose bits differ from those of the run without faults.
      seconds: duration of the whole run.
    """

    incidents: list[Incident]
    lost_steps: list[int]
    miscounted: list[str]
    wrong_bits: list[str]
    seconds: float


def main() -> None:
    parser = report.parser(__doc__, quick="faster and shorter, to see that it works")
    parser.add_argument("--faults", type=int, default=100, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    args = parser.parse_args()
    pace = QUICK if args.quick else FULL
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        oracle = harness.uninterrupted(folder / "oracle", pace.num_steps(args.faults))
        outcome = chaos(folder / "chaos", oracle, args.faults, args.seed, pace)
    sections = [run_section(outcome), kinds_section(outcome)]
    if wrong := outcome.wrong_bits + outcome.miscounted:
        sys.exit(f"The result is wrong in {len(wrong)} places: {'; '.join(wrong[:9])}")
    page = report.publish("faults", sections, quick=args.quick)
    draw(page.with_suffix(".svg"), sections[1].rows)


def chaos(folder: Path, oracle: Training, num_faults: int, seed: int, pace: Pace) -> Outcome:
    """Train with faults.

    Args:
      folder: folder of the run.
      oracle: the same run without faults.
      num_faults: number of faults; fewer if they take longer than MINUTES.
      seed: seed of the faults.
      pace: frequency of the faults.
    """
    training = Training(folder, oracle.num_steps, pace.stride, pace.changes)
    with contextlib.closing(training):
        began = time.monotonic()
        launcher = training.start(f"--nproc-per-node={SIZE}")
        incidents = []
        fate = Fate(training, launcher, random.Random(seed), pace.stride)
        while len(incidents) < num_faults and time.monotonic() - began < MINUTES * 60:
            incidents.append(fate.strike())
        training.order(None)
        if launcher.wait():
            raise RuntimeError(launcher.output)
        seconds = time.monotonic() - began
    return Outcome(
        incidents,
        training.lost_steps(),
        training.miscounted(),
        harness.wrong_bits(training, oracle, SIZE),
        seconds,
    )


class Fate:
    """Chooses the faults of a run, and injects them.

    Args:
      training: the run.
      launcher: the launcher of the run.
      rng: source of the choices.
      stride: number of steps in which one fault happens.
    """

    def __init__(
        self, training: Training, launcher: Launcher, rng: random.Random, stride: int
    ) -> None:
        self._training, self._launcher, self._rng = training, launcher, rng
        self._stride = stride
        self._num = self._generation = 0
        self._kinds: dict[str, Callable[[str, int], float]] = {
            "SIGKILL": self._signal,
            "SIGSTOP": self._signal,
            "SIGKILL of two": self._signal,
            "SIGKILL, and one of the next": self._signal_twice,
            "SIGKILL, no standby left": self._signal_without_standbys,
            "SIGKILL, a standby lost": self._signal_without_standbys,
            **dict.fromkeys(
                [
                    "fail",
                    "out of memory",
                    "exit at once",
                    "exit early",
                    "hang",
                    "hang with the GIL",
                    "hang in a collective",
                    "kill in a checkpoint",
                    "kill in a commit 1",
                    "kill in a commit 2",
                    "kill in a commit 3",
                ],
                self._order,
            ),
        }
        # A plain kill is the most frequent fault.
        self._weights = {kind: 6 if kind == "SIGKILL" else 1 for kind in self._kinds}
        self._victims = self._each_in_turn()

    def strike(self) -> Incident:
        """Inject a fault, and wait until the run has recovered."""
        self._launcher.until_ready()
        rank = next(self._victims)
        weights = {kind: it for kind, it in self._weights.items() if rank in _ranks(kind)}
        [kind] = self._rng.choices([*weights], [*weights.values()])
        self._num += 1
        print(f"{self._num}: {kind}", end=": ")
        began = self._kinds[kind](kind, rank)
        record = self._launcher.until_recovered(self._num)
        print(f"{record['whole_s']:.3f} s: {record}")
        generation, self._generation = self._generation, record["generation"]
        return Incident(kind, began, record, self._rest_s(generation, self._generation))

    # In a new random order for each round: the slot of a process that fails too often within a
    # minute stays empty for a while.
    def _each_in_turn(self) -> Iterator[int]:
        while True:
            yield from self._rng.sample(range(SIZE), SIZE)

    # By the script itself, before a step.
    def _order(self, kind: str, rank: int) -> float:
        # Processes read orders after their leash.
        begin = max(self._training.step(), self._training.leash or 0) + 2
        end = begin + self._stride
        step = self._rng.randrange(begin, end)
        if kind == "kill in a checkpoint":
            step = -(-begin // SAVE_EVERY) * SAVE_EVERY
        fault = self._training.order(max(step, end) + COMMIT_EVERY, (kind, rank, step))
        self._launcher.until_true(lambda: os.path.lexists(fault), kind)
        return os.lstat(fault).st_mtime

    # From outside, at any moment.
    def _signal(self, kind: str, rank: int) -> float:
        pids = self._launcher.pids(self._launcher.generation(), SIZE)
        victims = [pids[rank]] + [pids[rank - 1]] * (kind == "SIGKILL of two")
        delay_s = self._rng.uniform(0.0, 0.15)
        self._training.order(self._training.step() + self._stride)
        time.sleep(delay_s)
        return strike(victims, signal.SIGSTOP if kind == "SIGSTOP" else signal.SIGKILL)

    def _signal_twice(self, kind: str, rank: int) -> float:
        generation = self._launcher.generation()
        began = self._signal(kind, rank)
        # As soon as the members of the new generation are known.
        formed = self._launcher.until("joined", generation=generation + 1)
        strike([formed[0]["pid"]])
        return began

    def _signal_without_standbys(self, kind: str, rank: int) -> float:
        standbys = self._launcher.standbys(self._launcher.generation(), SIZE)
        strike(standbys if kind.endswith("left") else standbys[:1])
        return self._signal(kind, rank)

    # Between the end of each generation and the beginning of the next.
    def _rest_s(self, first: int, last: int) -> float:
        formed = {e["generation"]: e["at"] for e in self._launcher.events("formed")}
        ended = {e["generation"]: e["at"] for e in self._launcher.events("generation ended")}
        return sum(formed[i + 1] - ended[i] for i in range(first, last))


# Process 0 writes the checkpoint of all.
def _ranks(kind: str) -> Sequence[int]:
    return [0] if kind.startswith("kill in a") else range(SIZE)


def run_section(outcome: Outcome) -> Section:
    """The result of the whole run."""
    incidents = outcome.incidents
    killed = [it.seconds - it.rest_s for it in incidents if it.kind == "SIGKILL"]
    seconds = [it.seconds - it.rest_s for it in incidents]
    row = {
        "faults": len(incidents),
        "minutes": outcome.seconds / 60,
        "lost_median": statistics.median(outcome.lost_steps),
        "lost_worst": max(outcome.lost_steps),
        "miscounted": len(outcome.miscounted),
        "bits": "different" if outcome.wrong_bits else "equal",
        "median_s": statistics.median(seconds),
        "worst_s": max(seconds),
        "killed_median_s": statistics.median(killed) if killed else float("nan"),
        "killed_worst_s": max(killed, default=float("nan")),
        "goal_s": GOAL_S,
        "met": "yes" if killed and statistics.median(killed) <= GOAL_S else "no",
    }
    return Section(
        "The run",
        f"{SIZE} processes, batches of {BATCH_SIZE} rows (padded to divide), epochs of {NUM_ROWS}; "
        f"a commit every {COMMIT_EVERY} steps, a checkpoint every {SAVE_EVERY}; no step for "
        f"{harness.TIMEOUT_S:g} s counts as a hang. Each fault is injected when the standbys are "
        "ready again. "
        "`lost`: steps that all processes had begun and that were repeated. `rows`: rows that "
        "did not count once in their epoch. `bits`: the final state of every process compared with "
        "a run without faults. `recovery`: seconds from the fault until all "
        "processes of a generation had made a step, without the time for which the slot of a "
        "repeatedly failing process stays empty; `killed`: the same if one process got SIGKILL "
        "and standbys were ready; the goal is for its median.",
        [row],
        {
            "faults": "{faults}",
            "minutes": "{minutes:.1f}",
            "lost, median": "{lost_median:g}",
            "lost, worst": "{lost_worst}",
            "rows": "{miscounted}",
            "bits": "{bits}",
            "recovery, median": "{median_s:.3f}",
            "recovery, worst": "{worst_s:.3f}",
            "killed, median": "{killed_median_s:.3f}",
            "killed, worst": "{killed_worst_s:.3f}",
            "goal": "{goal_s:g}",
            "met": "{met}",
        },
    )


def kinds_section(outcome: Outcome) -> Section:
    """The recovery time of each kind of fault, and its parts."""
    by_kind = defaultdict(list)
    for incident in outcome.incidents:
        by_kind[incident.kind].append(incident)
    rows = [_kind_row(kind, incidents) for kind, incidents in sorted(by_kind.items())]
    parts = {name: f"{{{name}_s:.3f}}" for name in PARTS}
    return Section(
        "By kind of fault",
        "Seconds. `median` and `worst` are the whole recovery, from the fault itself. Then the "
        "medians of "
        "its parts. `detected`: until the launcher noticed; `ended`: the other processes are "
        "killed and waited "
        "for; `formed`: standbys are activated or processes started, until all have connected; "
        "`restored`: devices, mesh, state and the comparison of all processes; `stepped`: the "
        "first "
        "step; `compiled`: the part of it for tracing and for reading the program from the cache. "
        "`rested`: the "
        "time for which the slot of a repeatedly failing process stayed empty, which is in no "
        "other column. If the next generation also dies, the parts are those of the last one.",
        rows,
        {"what": "{kind}", "times": "{times}", "median": "{median_s:.3f}", "worst": "{worst_s:.3f}"}
        | parts,
    )


PARTS = ("detected", "ended", "formed", "restored", "stepped", "compiled", "rested")


def _kind_row(kind: str, incidents: list[Incident]) -> dict[str, Any]:
    seconds = [it.seconds - it.rest_s for it in incidents]

    def median(part: Callable[[Incident], float]) -> float:
        return statistics.median(map(part, incidents))

    return {
        "kind": kind,
        "times": len(incidents),
        "median_s": statistics.median(seconds),
        "worst_s": max(seconds),
        "seconds": seconds,
        "detected_s": median(lambda it: it.record["detect_s"]),
        "ended_s": median(lambda it: it.record["end_s"]),
        "formed_s": median(lambda it: max(it.record["form_s"] - it.rest_s, 0.0)),
        "restored_s": median(lambda it: it.record["restore_s"]),
        "stepped_s": median(lambda it: it.record["step_s"]),
        "compiled_s": median(lambda it: it.record["compile_s"]),
        "rested_s": median(lambda it: it.rest_s),
    }


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Plot the recovery time of each kind of fault, and its parts in sequence."""
    rows = sorted(rows, key=lambda row: row["median_s"], reverse=True)
    parts = ("detected", "ended", "formed", "restored", "compiled", "stepped")
    widths = {part: [row[f"{part}_s"] for row in rows] for part in parts}
    widths["stepped"] = [row["stepped_s"] - row["compiled_s"] for row in rows]

    def panel(figure: Any) -> None:
        panel = figure.subplots()
        names = [f"{row['kind']} ({row['times']})" for row in rows]
        bars_of_parts(panel, names, widths, alpha=0.75)
        for i, row in enumerate(rows):
            panel.plot(row["seconds"], [i] * len(row["seconds"]), "k.", markersize=4)
        panel.set(xlabel="seconds from the fault to a step of all processes; a dot is one fault")
        panel.grid(axis="x", alpha=0.3)
        where = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
        panel.legend(ncols=len(parts), fontsize="small", **where)

    report.picture(path, (9, 1.2 + 0.35 * len(rows)), panel)


if __name__ == "__main__":
    main()
