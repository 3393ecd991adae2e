"""Random training steps train as plain JAX does, on every shard of every process."""

import itertools
import random

import pytest

from fuzz import cases, hunt
from fuzz.check import Outcome
from fuzz.program import CHOICES, CHOICES_OF_PROCESSES, Draw, Program, is_valid

pytestmark = pytest.mark.xdist_group("fuzz")


@pytest.fixture(scope="module")
def runner():
    with hunt.Runner() as runner:
        yield runner


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "program"),
    [(defect, program) for defect, programs in cases.CASES.items() for program in programs],
    ids=repr,
)
def test_what_failed_once(runner, defect, program):
    outcome = runner.run(program)
    if defect in cases.KNOWN:
        assert outcome.is_failure, f"{defect!r} is mended: take it out of KNOWN in cases.py"
    else:
        assert not outcome.is_failure, hunt.describe(program, program, outcome, seed="none")


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "processes"), [(40, (1,)), (20, (2, 3))], ids=str)
def test_random_programs_train_as_plain_jax_does(seconds, processes):
    report = hunt.hunt(seconds, lanes=(processes,), most_failures=1)
    print(report)
    assert not report.failures, str(report)
    assert report.outcomes["right"]


@pytest.mark.parametrize("choices", [CHOICES, *CHOICES_OF_PROCESSES.values()])
def test_every_choice_is_drawn_within_a_few_programs(choices):
    programs = list(itertools.islice(Draw(random.Random(0), choices, {}), 200))
    assert all(is_valid(program) for program in programs)
    for name, values in choices.items():
        assert {getattr(program, name) for program in programs} == set(values), name


def test_a_failure_shrinks_to_what_it_needs():
    class Broken:
        def run(self, program):
            is_hit = program.extra == "large" and program.ranks > 2
            return Outcome("wrong" if is_hit else "right")

    drawn = Program(mesh=(8,), extra="large", dtype="float32", loop="scan", metrics="all", rows=6)
    program, outcome = hunt.shrink(Broken(), drawn, Outcome("wrong"))
    assert program == Program(mesh=(3,), extra="large") and outcome.kind == "wrong"
    assert eval(repr(program), {"Program": Program}) == program
