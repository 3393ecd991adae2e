"""Drawing programs, running them in child processes, shrinking what fails, counting."""

import collections
import os
import random
import shlex
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
      seen: pair of choices -> number of programs.
      seconds: that it took.
    """

    seed: int
    outcomes: collections.Counter = field(default_factory=collections.Counter)
    passed_over: collections.Counter = field(default_factory=collections.Counter)
    failures: list = field(default_factory=list)
    seen: dict = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self):
        num = self.outcomes.total()
        pairs = len(self.seen)
        of_choice = collections.Counter()
        for pair, count in self.seen.items():
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
    argument = shlex.quote(repr(program))
    return (
        f"\n{outcome.kind}: {program!r}\n{outcome.text}\n"
        f"  drawn with --seed {seed}: {drawn!r}\n"
        f"  repeat: PYTHONPATH=tests .venv/bin/python -m fuzz --program {argument}\n"
    )


def hunt(seconds, *, seed=None, processes=(1,), most_failures=3, say=lambda text: None):
    """Run programs for some seconds: a `Report`.

    Args:
      seconds: after which no further program begins.
      seed: of the draw. Default: a random one.
      processes: how many processes train together, in turns of at most half a minute.
      most_failures: that are shrunk before the hunt ends.
      say: gets each failure as a text at once.
    """
    seed = int.from_bytes(os.urandom(4)) if seed is None else seed
    report, start = Report(seed), time.monotonic()
    programs = {n: iter(_draw(seed, n, report.seen)) for n in sorted(set(processes))}
    turn_s = min(30, seconds / len(processes))
    with Runner() as runner:
        while (now := time.monotonic() - start) < seconds and len(report.failures) < most_failures:
            program = next(programs[processes[int(now / turn_s) % len(processes)]])
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


def _draw(seed, num_processes, seen):
    choices = CHOICES if num_processes == 1 else CHOICES_OF_PROCESSES[num_processes]
    return Draw(random.Random(f"{seed} {num_processes}"), choices, seen)


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
