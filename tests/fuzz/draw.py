"""Drawing programs, and making one simpler."""

import collections
import dataclasses
import itertools
import math

from fuzz.program import WAYS, Program, is_valid

NUM_WAYS = 3  # of computing one problem, which share a run of the oracle


class Draw:
    """An endless sequence of programs that meets every choice, and every pair of them, soon.

    Args:
      random: a `random.Random`.
      choices: field -> values.
    """

    def __init__(self, random, choices):
        self._random, self._choices = random, choices
        self._seen = collections.Counter()  # of choices, and of pairs of them

    def __iter__(self):
        while True:
            rarest = dict([self._rarest()])
            program = self._best(lambda: self._one(Program(), self._choices, rarest))  # noqa: B023
            yield program
            for _ in range(NUM_WAYS - 1):
                yield self._best(lambda program=program: self._one(program, WAYS, {}))

    def _rarest(self):
        """Return the choice that was drawn least: some are valid beside few others."""
        choices = [(name, value) for name, values in self._choices.items() for value in values]
        self._random.shuffle(choices)
        return min(choices, key=lambda choice: self._seen[choice])

    def _best(self, draw):
        candidates = [draw() for _ in range(12)]
        best = max(candidates, key=lambda p: sum(x not in self._seen for x in self._pairs(p)))
        self._seen.update(self._pairs(best))
        self._seen.update(self._values(best))
        return best

    def _one(self, program, names, fixed):
        while True:
            simple = self._random.choice([0.3, 0.6, 0.85])  # how many fields keep their default
            fields = {} if names is WAYS else {"seed": self._random.randrange(2**16)}
            for name in names:
                values, default = self._choices[name], getattr(Program, name)
                kept = default if default in values else values[0]
                is_kept = self._random.random() < simple
                fields[name] = kept if is_kept else self._random.choice(values)
            if is_valid(drawn := dataclasses.replace(program, **fields | fixed)):
                return drawn

    def _values(self, program):
        return [(name, getattr(program, name)) for name in self._choices]

    def _pairs(self, program):
        return list(itertools.combinations(self._values(program), 2))


def simpler(p):
    """Yield programs that differ from `p` in one field, which has its default there."""
    for name, value in p.features():
        default = getattr(Program, name)
        if name == "processes" or (name == "mesh" and p.processes > 1):
            continue
        values = [default]
        if name == "mesh":
            values = [v for v in [(2,), (3,), (4,), (2, 2)] if math.prod(v) < p.ranks]
        for other in values:
            changed = dataclasses.replace(p, **{name: other})
            if other != value and is_valid(changed):
                yield changed
