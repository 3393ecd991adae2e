"""Drawing programs, running them in child processes, shrinking what fails, counting."""

import collections
import os
import random
import time
from dataclasses import dataclass, field

from processes import ProcessError, Processes

from fuzz import check
from fuzz.cases import known
from fuzz.program import CHOICES, CHOICES_OF_PROCESSES, Draw, simpler

TIMEOUT_S = 60.0  # of one program; a quiet machine needs one second
SHRINK_S = 90.0


class Runner:
    """Child processes of each kind, started when they are needed first."""

    def __init__(self):
        self._started = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for processes in self._started.values():
            processes.close()

    def run(self, program):
        """Run one program in children of its own kind: an `Outcome`."""
        n = program.processes
        if n not in self._started:
            self._started[n] = Processes(n, num_devices=8 if n == 1 else 2)
        try:
            return check.join(self._started[n].run(check.run, program, timeout_s=TIMEOUT_S))
        except ProcessError as error:
            self._started.pop(n).close()
            return check.Outcome("died or hung", str(error)[-4000:])


@dataclass
class Report:
    """What a hunt found.

    Attributes:
      seed: of the draw.
      outcomes: kind -> number of programs.
      passed_over: known defect -> number of programs that failed by it.
      failures: (program drawn, program shrunk, outcome of the second).
      draw: the `Draw`, which counts pairs of choices.
      seconds: that it took.
    """

    seed: int
    outcomes: collections.Counter = field(default_factory=collections.Counter)
    passed_over: collections.Counter = field(default_factory=collections.Counter)
    failures: list = field(default_factory=list)
    draw: Draw | None = None
    seconds: float = 0.0

    def __str__(self):
        num = self.outcomes.total()
        pairs = len(self.draw.seen)
        of_choice = collections.Counter()
        for pair, count in self.draw.seen.items():
            for choice in pair:
                of_choice[choice] += count
        per_field = len({name for name, _ in of_choice}) - 1 or 1
        by_field = collections.defaultdict(list)
        for (name, value), count in sorted(of_choice.items(), key=str):
            by_field[name].append(f"{value}: {count // per_field}")
        lines = [
            f"seed {self.seed}: {num} programs in {self.seconds:.0f} s, {pairs} pairs of choices, "
            f"{dict(self.outcomes)}, known {dict(self.passed_over)}",
            *(f"  {name}: {', '.join(values)}" for name, values in by_field.items()),
        ]
        return "\n".join(lines + [describe(*failure, self.seed) for failure in self.failures])


def describe(drawn, program, outcome, seed):
    """Say what failed, and how to repeat it."""
    return (
        f"\n{outcome.kind}: {program!r}\n{outcome.text}\n"
        f"  drawn with --seed {seed}: {drawn!r}\n"
        f"  repeat: PYTHONPATH=tests .venv/bin/python -m fuzz --program '{program!r}'\n"
    )


def hunt(seconds, *, seed=None, processes=1, most_failures=3, say=lambda text: None):
    """Run programs for some seconds: a `Report`.

    Args:
      seconds: after which no further program begins.
      seed: of the draw. Default: a random one.
      processes: how many processes train together; (2, 3) takes turns, half a minute each.
      most_failures: that are shrunk before the hunt ends.
      say: gets each failure as a text at once.
    """
    seed = int.from_bytes(os.urandom(4)) if seed is None else seed
    kinds = [processes] if isinstance(processes, int) else list(processes)
    draws = [
        iter_draw(random.Random(f"{seed} {n}"), CHOICES if n == 1 else CHOICES_OF_PROCESSES[n])
        for n in kinds
    ]
    report = Report(seed, draw=draws[0][0])
    for draw, _ in draws:
        draw.seen = report.draw.seen
    start = time.monotonic()
    with Runner() as runner:
        while (now := time.monotonic() - start) < seconds and len(report.failures) < most_failures:
            _, programs = draws[int(now / min(30, seconds / len(kinds))) % len(kinds)]
            program = next(programs)
            outcome = runner.run(program)
            report.outcomes[outcome.kind] += 1
            if not outcome.is_failure:
                continue
            if (defect := known(program)) is not None:
                report.passed_over[defect] += 1
                continue
            small, outcome = shrink(runner, program, outcome)
            report.failures.append((program, small, outcome))
            say(describe(program, small, outcome, seed))
    report.seconds = time.monotonic() - start
    return report


def iter_draw(rng, choices):
    """Return a `Draw` and its iterator."""
    draw = Draw(rng, choices)
    return draw, iter(draw)


def shrink(runner, program, outcome):
    """Return the simplest program found that fails in the same way, and its outcome."""
    end = time.monotonic() + SHRINK_S
    found = True
    while found:
        found = False
        for smaller in simpler(program):
            if time.monotonic() > end:
                return program, outcome
            if known(smaller) != known(program):
                continue
            again = runner.run(smaller)
            if again.kind == outcome.kind:
                program, outcome, found = smaller, again, True
                break
    return program, outcome
