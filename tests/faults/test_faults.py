"""One process fails in whatever way: the run goes on, and ends as if nothing had happened.

All faults happen to one run, one after the other, each when the standbys wait again.
"""

import re
from pathlib import Path
from typing import NamedTuple

import harness
import pytest
from victim import COMMIT_EVERY, SAVE_EVERY

from jdp.tools.bench.injector import strike

pytestmark = [
    pytest.mark.xdist_group("processes"),
    pytest.mark.slow,
    pytest.mark.all_sets,  # of one run
]


class Case(NamedTuple):
    """Faults that happen together, and what the launcher must say of it.

    Attributes:
      faults: (kind, rank, steps since the case before, from 4 to 20); None for the steps: in the
        generation that comes next. After 20 steps there are a commit and a checkpoint.
      cause: a pattern of the text.
      codes: of the causes, each a pattern.
    """

    faults: list[tuple[str, int, int | None]]
    cause: str
    codes: tuple[str, ...] = ("JDP302",)


# Others are like these, and come more often.
RARE = (
    "raises",
    "out of memory",
    "dies when a commit begins",
    "hangs",
    "is stopped",
    "hangs and holds the GIL",
    "dies when a commit ends",
    "exits at once",
    "dies in a checkpoint",
)

# The same rank not too often within a minute: its place would stay empty for a while.
CASES = {
    "killed": Case([("kill", 1, 7)], "process 1 .* SIGKILL"),
    "raises": Case([("fail", 2, 5)], "process 2 .* exit code 1", ("JDP301",)),
    "process 0 killed": Case([("kill", 0, 18)], "process 0 .* SIGKILL"),
    "out of memory": Case([("out of memory", 1, 9)], "process 1 .* exit code 1", ("JDP301",)),
    "exits early": Case([("exit early", 2, 8)], "exit code 1|process 2 ", ("JDP30[134]",)),
    "dies when a commit begins": Case([("kill in a commit 1", 0, 16)], "process 0 .* SIGKILL"),
    "hangs": Case([("hang", 1, 11)], "process 1 ", ("JDP303",)),
    "hangs in a collective": Case([("hang in a collective", 2, 6)], "process 2 ", ("JDP303",)),
    "dies inside a commit": Case([("kill in a commit 2", 0, 16)], "process 0 .* SIGKILL"),
    "is stopped": Case([("stop", 1, 10)], "process 1 ", ("JDP303",)),
    "hangs and holds the GIL": Case([("hang with the GIL", 2, 5)], "process 2 ", ("JDP303",)),
    "dies when a commit ends": Case([("kill in a commit 3", 0, 16)], "process 0 .* SIGKILL"),
    "exits at once": Case([("exit at once", 1, 4)], "^process 1 ", ("JDP30[14]",)),
    "two at once": Case([("kill", 1, 12), ("kill", 2, 12)], "process [12] .* SIGKILL"),
    "dies in a checkpoint": Case([("kill in a checkpoint", 0, SAVE_EVERY)], "process 0 .* SIGKILL"),
    "the next generation fails, too": Case(
        [("kill", 1, 13), ("kill", 2, None)],
        "process 1 .* SIGKILL.*, then process 2 .* SIGKILL",
        ("JDP302", "JDP302"),
    ),
    "without standbys": Case([("kill", 0, 14)], "process 0 .* SIGKILL"),
}


def cases_of(session):
    """The cases of the tests that run."""
    items = [item for item in session.items if item.path == Path(__file__)]
    names = {item.callspec.params["name"] for item in items if hasattr(item, "callspec")}
    return {name: case for name, case in CASES.items() if name in (names or CASES)}


@pytest.fixture(scope="module")
def run(request, trainings):
    """The run, and what the launcher wrote of each recovery."""
    training = trainings(leash=SAVE_EVERY + 3)
    launcher = training.start("--nproc-per-node=3")
    records = {}
    for number, (name, case) in enumerate(cases_of(request.session).items(), 1):
        print(name, end=": ")
        launcher.until_ready()
        if name == "without standbys":
            strike(launcher.standbys(launcher.generation(), 3))
        begin = SAVE_EVERY * number
        faults = [(kind, r, None if at is None else begin + at) for kind, r, at in case.faults]
        training.order(begin + SAVE_EVERY + 3, *faults)
        records[name] = launcher.until_recovered(number)
        print(records[name])
    training.order(None)
    assert launcher.wait() == 0, launcher.output
    training.close()
    return training, launcher, records


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in RARE)) for name in CASES]
)
def test_the_run_goes_on_if_one(run, name):
    _, _, records = run
    case, record = CASES[name], records[name]
    assert re.search(case.cause, record["cause"])
    codes = zip(case.codes, record["error_codes"], strict=True)
    assert all(re.fullmatch(*each) for each in codes), record
    assert 0 <= record["lost_steps"] <= 2 * COMMIT_EVERY


def test_no_more_is_lost_than_two_commits_are_apart(run):
    training, _, _ = run
    assert max(training.lost_steps()) <= 2 * COMMIT_EVERY


def test_every_process_ends_with_the_bits_of_an_uninterrupted_run(run, oracle):
    training, _, _ = run
    assert not harness.wrong_bits(training, oracle)


def test_each_row_counts_once_in_each_epoch(run):
    training, _, _ = run
    assert not training.miscounted()


def test_who_left_its_loop_early_is_named(run):
    _, launcher, records = run
    if "exits early" not in records:
        pytest.skip("needs the case that exits early")
    assert re.search(r"process 2 .*\(break.*JDP210", launcher.output)


def test_only_what_failed_is_restarted(run):
    _, launcher, records = run
    # One generation dies before it makes a step.
    num_deaths = len(records) + ("the next generation fails, too" in records)
    assert len(launcher.events("formed")) == 1 + num_deaths
