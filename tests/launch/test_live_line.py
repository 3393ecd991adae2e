"""How far a run is, on a terminal: one line below the output, which stays as it is."""

import os
import re
import signal
import termios

import pytest
from support.launcher import DEADLINE_S
from support.screen import Screen
from support.terminal import AFTER, OFTEN, TRAINS, RunTerminal

from jdp.worker.run_progress import LiveLine, RunSummary

PARTS = ["step 7", "loss 0.5", "ETTR 100.0 %"]
DRAWN = "step 7 · loss 0.5 · ETTR 100.0 %"


def test_output_is_above_the_line_and_whole():
    line, screen = LiveLine(), Screen()
    line.set_text(PARTS)
    for i in range(3):
        screen.write(line.draw(80))
        assert screen.lines == [f"out {j}" for j in range(i)] + [DRAWN]
        screen.write(line.above(f"out {i}\n".encode()))
        assert screen.lines == [f"out {j}" for j in range(i + 1)]


def test_several_lines_of_output_need_one_drawing():
    line = LiveLine()
    line.set_text(PARTS)
    line.draw(80)
    assert not line.is_due
    assert line.above(b"a\n") != b"a\n" and line.above(b"b\n") == b"b\n" and line.is_due


def test_a_progress_bar_of_a_script_moves_above_the_line():
    line, screen = LiveLine(), Screen()
    line.set_text(PARTS)
    screen.write(line.above(b"before\n") + line.draw(80))
    for percent in (10, 20, 100):
        screen.write(line.above(f"{percent} %\r".encode()) + line.draw(80) + line.draw(80))
        assert screen.lines == ["before", f"{percent} %", DRAWN]
    screen.write(line.above(b"100 %\n") + line.draw(80))
    assert screen.lines == ["before", "100 %", DRAWN]


def test_a_long_line_fills_a_wide_terminal():
    line, screen = LiveLine(), Screen(300)
    line.set_text(["x" * 100, "y" * 100])
    screen.write(line.draw(300))
    assert screen.lines == ["x" * 100 + " · " + "y" * 100]


@pytest.mark.parametrize("columns", [2, 10, 31, 32, 33, 80, 300])
def test_the_line_never_fills_a_row(columns):
    line, screen = LiveLine(), Screen(columns)
    line.set_text(PARTS)
    screen.write(line.draw(columns))  # Screen refuses what wraps
    [shown] = screen.lines or [""]
    assert shown == DRAWN if columns > len(DRAWN) else DRAWN.startswith(shown.rstrip("…"))


def test_a_line_is_erased_before_a_shorter_one_is_drawn():
    line, screen = LiveLine(), Screen()
    for parts in (PARTS, ["step 8"]):
        line.set_text(parts)
        screen.write(line.draw(80))
    assert screen.lines == ["step 8"]


def test_the_last_line_stays_and_what_follows_is_below_it():
    line, screen = LiveLine(), Screen()
    line.set_text(PARTS)
    screen.write(line.draw(80) + line.end() + b"jdp run: over\n")
    assert screen.lines == [DRAWN, "jdp run: over"] and line.end() == b""


def test_words_have_the_unit_and_what_is_not_known_is_left_out():
    summary = RunSummary(3, float("nan"), 0.5, None, None, None, None, 2, 0.5)
    assert str(summary) == "step 3, loss nan, 0.5 steps/s, ETTR 50.0 %, 2 recoveries"


@pytest.fixture
def terminal(tmp_path):
    started = []

    def start(*flags, **options):
        started.append(RunTerminal(tmp_path, *flags, **options))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.close()


def test_a_run_on_a_terminal_shows_its_step_loss_and_recovery_below_all_output(terminal):
    run = terminal()
    run.until(lambda: re.search(r"step \d+", "".join(run.lines[-1:])), "live line")
    run.until(run.trained(0), "training")
    run.until(lambda: run.lines[-1].startswith("step 40 · loss 0.25 · "), "step 40")
    os.kill(run.events("first_step")[1]["pid"], signal.SIGKILL)
    run.until(run.trained(1), "training")
    run.until(lambda: "1 recovery" in run.lines[-1], "recovery")
    *above, last = run.end()
    assert re.fullmatch(r"step 50 · loss 0\.125 · (.* · )?ETTR .* % · 1 recovery · commit 10", last)
    for rank in (0, 1):  # once for each generation, and whole
        assert above.count(f"[process {rank}] {'x' * 30} of {rank}") == 2
    assert not any("ETTR" in line for line in above)


def test_the_last_event_has_the_numbers_of_the_run(terminal):
    run = terminal("--progress=off")
    run.until(run.trained(0), "training")
    lines = run.end()
    assert not any("ETTR" in line for line in lines)
    *_, last = run.events("progress")
    assert (last["step"], last["loss"], last["recoveries"]) == (40, 0.25, 0)
    assert last["rows_per_s"] == pytest.approx(25 * last["steps_per_s"])
    assert last["ettr"] == 1.0 and 0 <= last["data_share"] <= 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_the_terminal_as_it_was(terminal, number):
    run = terminal()
    run.until(run.trained(0), "training")
    run.until(lambda: "step 40" in "".join(run.lines[-1:]), "live line")
    run.process.send_signal(number)
    run.process.wait(DEADLINE_S)
    assert termios.tcgetattr(run._theirs) == run.before
    lines = run.close()
    assert not re.search(rb"\x1b\[\?", run.data)  # no mode was set, not even the cursor's
    if number != signal.SIGKILL:
        assert sum("ETTR" in line for line in lines) == 1
        assert run.data.endswith(b"\n")


def test_a_terminal_that_becomes_narrow_has_a_line_that_fits(terminal):
    run = terminal()
    run.until(run.trained(0), "training")
    run.until(lambda: "ETTR" in "".join(run.lines[-1:]), "live line")
    num = len(run.data)
    run.resize(20)
    (run.folder / "train.py").touch()
    run.until(lambda: "…" in run.data[num:].decode(errors="ignore"), "short line")
    run.end()


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"TERM": "unknown"}, {"NO_COLOR": "1"}])
def test_a_plain_terminal_gets_no_sequence_that_it_does_not_know(terminal, variables):
    run = terminal(
        changes="from jdp.launch.host import console; console.PLAIN_S = 0.1", **variables
    )
    run.until(run.trained(0), "training")
    run.until(lambda: "step 40" in "".join(run.lines), "step 40")
    run.end()
    codes = {*re.findall(rb"\x1b\[([\d;]*.)", run.data)}
    assert codes <= ({b"K", b"0m", b"1m", b"2m"} if "NO_COLOR" in variables else set())


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
