"""Random training steps train as plain JAX does, on every shard of every process."""

import collections
import itertools
import random
import time

import pytest
from support.processes import ProcessError, Processes

from fuzz import cases, hunt, idle
from fuzz.check import Outcome
from fuzz.draw import Draw
from fuzz.program import CHOICES, CHOICES_OF_PROCESSES, Program, is_valid

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


SHARDED = [
    Program(mesh=(2, 2), tx="stage=2", over="inner", grad="jdp", weight="mask", compiler="default"),
    Program(mesh=(3,), tx="stage=3", split="accumulate=2", rows=4, width=24, loop="evaluated"),
]


@pytest.mark.parametrize("program", SHARDED, ids=repr)
def test_sharded_programs_train_as_plain_jax_does(runner, program):
    outcome = runner.run(program)
    assert not outcome.is_failure, hunt.describe(program, program, outcome, seed="none")


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "processes"), [(20, (1,)), (12, (2, 3))], ids=str)
def test_random_programs_train_as_plain_jax_does(seconds, processes):
    report = hunt.hunt(seconds, lanes=(processes,), most_failures=1)
    print(report)
    assert not report.failures, str(report)
    assert report.outcomes["right"]


@pytest.mark.parametrize("choices", [CHOICES, *CHOICES_OF_PROCESSES.values()])
def test_every_choice_is_drawn_within_a_few_programs(choices):
    programs = list(itertools.islice(Draw(random.Random(0), choices), 200))
    assert all(is_valid(program) for program in programs)
    for name, values in choices.items():
        assert {getattr(program, name) for program in programs} == set(values), name


def test_every_choice_is_drawn_once_in_60_programs_on_average():
    seen, num_draws = collections.Counter(), 10
    for seed in range(num_draws):
        for program in itertools.islice(Draw(random.Random(seed), CHOICES), 60):
            seen.update((name, getattr(program, name)) for name in CHOICES)
    rare = {
        (name, value): seen[name, value] / num_draws
        for name, values in CHOICES.items()
        for value in values
        if seen[name, value] < num_draws
    }
    assert not rare


def test_what_is_drawn_follows_from_the_seed_alone():
    first, again = hunt._programs("7 0", (2, 1)), hunt._programs("7 0", (2, 1))
    drawn = list(itertools.islice(first, 40))
    # Another lane draws in between, as on a faster machine.
    list(itertools.islice(hunt._programs("7 1", (1,)), 10))
    assert drawn == list(itertools.islice(again, 40))
    assert {program.processes for program in drawn} == {1, 2}


def test_a_failure_shrinks_to_what_it_needs():
    class Broken:
        def run(self, program):
            is_hit = program.extra == "large" and program.ranks > 2
            return Outcome("wrong" if is_hit else "right")

    drawn = Program(mesh=(8,), extra="large", dtype="float32", loop="scan", metrics="all", rows=6)
    program, outcome = hunt.shrink(Broken(), drawn, Outcome("wrong"))
    assert program == Program(mesh=(3,), extra="large") and outcome.kind == "wrong"
    assert eval(repr(program), {"Program": Program}) == program


def compute(seconds):
    while time.process_time() < seconds:
        pass
    return "done"


def test_children_that_wait_for_ever_are_ended_and_slow_ones_are_not():
    alone = Processes(1)
    try:
        alone.run(compute, 0)  # started
        with idle.ended(lambda: alone.pids, idle_s=2):
            assert alone.run(compute, 6) == ["done"]
        message = "(?s)status -6.*in evaluate"
        with idle.ended(lambda: alone.pids, idle_s=2), pytest.raises(ProcessError, match=message):
            alone.run(time.sleep, 600, timeout_s=600)
    finally:
        alone.close()


def test_an_error_of_the_fuzzer_ends_the_hunt_and_its_children(monkeypatch):
    started = []

    class Broken(hunt.Runner):
        def __exit__(self, *details):
            started.append("ended")
            super().__exit__(*details)

        def run(self, program):
            raise RuntimeError("of the fuzzer")

    monkeypatch.setattr(hunt, "Runner", Broken)
    with pytest.raises(RuntimeError, match="of the fuzzer"):
        hunt.hunt(600, lanes=((1,), (2,)))
    assert started == ["ended"] * 2
