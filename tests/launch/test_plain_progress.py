"""How far a run is, where there is no terminal: a line now and then."""

import os
import re
import signal

from support.terminal import AFTER, OFTEN, TRAINS


def lines(run):
    return [line for line in run.output.splitlines() if "ETTR" in line]


def test_a_line_now_and_then_has_the_numbers_of_all_processes(jdp_run):
    run = jdp_run("--nproc-per-node=3", init=TRAINS, after=AFTER, changes=OFTEN)
    run.until_true(lambda: any("step 40, loss 0.25" in line for line in lines(run)), "step 40")
    os.kill(run.pids(0, 3)[2], signal.SIGKILL)
    run.until_true(lambda: any("step 50, loss 0.125" in line for line in lines(run)), "step 50")
    assert run.finish() == 0
    assert "\x1b" not in run.output
    found = re.fullmatch(
        r"jdp run: step 50, loss 0\.125, .* examples/s, data wait .* %, "
        r"ETTR (.*) %, 1 recovery, commit 10",
        lines(run)[-1],
    )
    assert found and 0 < float(found[1]) < 100


def test_a_short_run_says_nothing_and_one_that_is_quiet_neither(jdp_run):
    for flags, changes in ([], ""), (["--progress=off"], OFTEN):
        run = jdp_run(*flags, init=TRAINS, after=AFTER, changes=changes)
        assert run.finish(0, 1) == 0
        assert not lines(run)


def test_plain_lines_are_asked_for_by_a_variable(jdp_run):
    run = jdp_run(init=TRAINS, after=AFTER, changes=OFTEN, JDP_PROGRESS="plain")
    run.until_true(lambda: lines(run), "a line")
    assert run.finish() == 0
