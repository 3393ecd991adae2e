"""Drawing programs, running them in child processes, shrinking what fails, counting."""

import collections
import dataclasses
import itertools
import os
import random
import shlex
import threading
import time
from dataclasses import dataclass, field

from support.processes import ProcessError, Processes

from fuzz import check, idle
from fuzz.cases import known
from fuzz.draw import Draw, simpler
from fuzz.program import CHOICES, CHOICES_OF_PROCESSES

TIMEOUT_S = 1800.0  # of one program, however busy the machine is; a quiet one needs two seconds
SHRINK_S = 90.0
TURN = 9  # programs; to start several processes takes as long as two


class Runner:
    """Child processes of each kind, started when they are needed first.

    Args:
      is_cached: whether compiled programs are kept on disk, for programs that run again.
    """

    def __init__(self, *, is_cached=True):
        self._is_cached = is_cached
        self._started = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for processes in self._started.values():
            processes.close()

    def run(self, program):
        """Run one program in children of its own kind, and virtual ranks in one process, too."""
        outcome = self._run(program)
        if outcome.kind != "right" or program.processes == 1 or not check.has_equal_bits(program):
            return outcome
        alone = self._run(dataclasses.replace(program, processes=1))
        if alone.is_failure or alone.bits == outcome.bits:
            return alone
        return check.Outcome("other bits", f"{program.processes} processes and one differ")

    def _run(self, program):
        n = program.processes
        if n not in self._started:
            devices = 8 if n == 1 else 2
            self._started[n] = Processes(n, num_devices=devices, start_timeout_s=TIMEOUT_S)
        group = self._started[n]
        try:
            with idle.ended(lambda: group.pids):
                given = (program, self._is_cached)
                return check.join(group.run(check.run, *given, timeout_s=TIMEOUT_S))
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

    def count(self, program, outcome, defect=None):
        """Count a program that ran, and the known defect by which it failed, if any."""
        self.outcomes[outcome.kind] += 1
        if defect is not None:
            self.passed_over[defect] += 1
        values = [(name, getattr(program, name)) for name in CHOICES]
        for pair in itertools.combinations(values, 2):
            self.seen[pair] = self.seen.get(pair, 0) + 1

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
        return "\n".join(lines + [describe(*found, seed=self.seed) for found in self.failures])


def describe(drawn, program, outcome, seed):
    """Say what failed, and how to repeat it."""
    argument = shlex.quote(repr(program))
    return (
        f"\n{outcome.kind}: {program!r}\n{outcome.text}\n"
        f"  drawn with --seed {seed}: {drawn!r}\n"
        f"  repeat: PYTHONPATH=tests .venv/bin/python -m fuzz --program {argument}\n"
    )


def hunt(seconds, *, seed=None, lanes=((1,),), most_failures=3, say=lambda text: None):
    """Run programs for some seconds: a `Report`.

    What a lane runs follows from the seed alone: from how fast the machine is, only how far it
    gets.

    Args:
      seconds: after which no further program begins.
      seed: of the draw. Default: a random one.
      lanes: for each program that runs at the same time, how many processes train it, in turns.
      most_failures: that are shrunk before the hunt ends.
      say: gets each failure as a text at once.
    """
    seed = int.from_bytes(os.urandom(4)) if seed is None else seed
    report, start = Report(seed), time.monotonic()
    lock, errors = threading.Lock(), []

    def is_over():
        late = time.monotonic() - start >= seconds
        return late or errors or len(report.failures) >= most_failures

    def follow(index, turns):
        with Runner(is_cached=False) as runner:
            for program in _programs(f"{seed} {index}", turns):
                if is_over():
                    return
                outcome = runner.run(program)
                defect = known(program) if outcome.is_failure else None
                with lock:
                    report.count(program, outcome, defect)
                if outcome.is_failure and defect is None:
                    small, outcome = shrink(runner, program, outcome)
                    with lock:
                        report.failures.append((program, small, outcome))
                        say(describe(program, small, outcome, seed))

    def guarded(*lane):
        try:
            follow(*lane)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=lane) for lane in enumerate(lanes)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt as error:  # each lane ends its children after one more program
        errors.append(error)
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    report.seconds = time.monotonic() - start
    return report


def _programs(seed, turns):
    """Yield programs for ever, `TURN` for each number of processes by turns."""
    drawn = {}
    for n in set(turns):
        choices = CHOICES if n == 1 else CHOICES_OF_PROCESSES[n]
        drawn[n] = iter(Draw(random.Random(f"{seed} {n}"), choices))
    for n in itertools.cycle(turns):
        yield from itertools.islice(drawn[n], TURN)


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
