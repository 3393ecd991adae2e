"""How far a script without a launcher is: below its output, and never in it."""

import os
import re
import subprocess
import sys

import pytest
from support.launcher import DEADLINE_S, PACKAGES
from support.terminal import Terminal

# Trains without JAX, after `before` and with `each` behind the steps of these numbers.
SCRIPT = """
import os, sys, time
from jdp.worker import progress, progress_line, watching
progress_line._TICK_S, progress_line._QUIET_S, progress_line.PLAIN_S = 0.02, 0.1, 0.1
progress_line._OWN_BAR_S = 0.2
{before}
watching.begin_watching(600.0{options})
def go(steps):
    for _ in range(steps):
        with progress.DATA:
            progress.own.slot.counter.next_rows = 25
        with progress.TRAIN_STEP:
            pass
        time.sleep(0.01)
{script}
"""
LINE = r"step \d+ · [\d,.]+ examples/s · data wait \d+ %"


def command(script, before="", options=""):
    return [sys.executable, "-c", SCRIPT.format(script=script, before=before, options=options)]


@pytest.fixture
def terminal():
    started = []

    def start(script, **options):
        started.append(Terminal(command(script, **options)))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.close()


def plain(script, options="", **variables):
    done = subprocess.run(
        command(script, options=options),
        env={**os.environ, "PYTHONPATH": PACKAGES, **variables},
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_output_is_whole_and_above_the_line(terminal):
    found = terminal(
        "for i in range(20):\n go(5); print(f'out {i}', file=(sys.stdout, sys.stderr)[i % 2])"
    )
    found.until(lambda: found.lines and re.fullmatch(LINE, found.lines[-1]), "line")
    *above, last = found.end()
    assert above == [f"out {i}" for i in range(20)] and re.fullmatch(LINE, last)
    assert last.startswith("step 100 · ")


def test_the_traceback_of_a_script_that_fails_is_last(terminal):
    found = terminal("go(40)\n1 / 0")
    assert found.end(1)[-1] == "ZeroDivisionError: division by zero" and b"step" in found.data


def test_what_is_logged_is_in_the_line(terminal):
    found = terminal(
        "count = progress.own.slot.counter\n"
        "count.write_metrics(1, loss=0.5, learning_rate=0.01)\n"
        "count.write_metrics(2, gradient_norm=float('nan'))\ngo(60)"
    )
    wanted = r"step \d+ · loss 0.5 · .* · lr 0.01 · grad norm nan"
    assert re.fullmatch(wanted, found.end()[-1])


def test_a_phase_that_takes_long_is_named_before_the_first_step_and_later(terminal):
    found = terminal(
        "from jdp.worker import process_status\nprocess_status._LONG_S = 0.1\n"
        "with progress.phase('downloading'): time.sleep(1.0)\n"
        "go(30)\n"
        "with progress.EVALUATING:\n"
        " for i in range(20):\n  with progress.EVAL_STEP: time.sleep(0.05)"
    )
    found.until(lambda: "downloading for 1 s" in found.lines, "phase")
    found.until(lambda: found.lines and " · evaluating for " in found.lines[-1], "phase")
    assert found.lines[-1].startswith("step 30 · ")
    found.end()


@pytest.mark.parametrize("ask", ["input('? ')", "breakpoint()"])
def test_a_prompt_has_a_row_of_its_own(terminal, ask):
    found = terminal(f"go(40)\n{ask}\ngo(40)")
    prompt = "?" if "input" in ask else "(Pdb)"
    found.until(lambda: found.lines and found.lines[-1] == prompt, "prompt")
    found.type("c\n")
    *_, asked, last = found.end()
    assert asked == f"{prompt} c" and re.fullmatch(LINE, last)


def test_a_script_with_a_bar_of_its_own_keeps_the_terminal(terminal):
    found = terminal(
        "for i in range(40):\n go(2); sys.stderr.write(f'\\rbar {i}'); sys.stderr.flush()\n"
        "print(file=sys.stderr)\ngo(60)"
    )
    assert found.end()[0] == "bar 39"
    before, _, after = found.data.decode().partition("bar 39")
    assert "step" not in before and "step" in after


def test_a_row_that_has_not_ended_stays(terminal):
    found = terminal("print('loading', end=' ', flush=True)\ngo(40)\nprint('done')")
    assert found.end()[0] == "loading done"


def test_streams_are_given_back_and_a_forked_child_has_none_of_it(terminal):
    found = terminal(
        "go(40)\n"
        "if os.fork() == 0:\n"
        " assert 'write' not in vars(sys.stdout); print('child'); sys.stdout.flush(); os._exit(0)\n"
        "os.wait()\ngo(20)\nwatching._stop_watch()\n"
        "print({**vars(sys.stdout), **vars(sys.stderr)} == {'mode': 'w'}, input)"
    )
    assert found.end()[-1] == "True <built-in function input>"


def test_without_a_terminal_a_line_follows_now_and_then():
    done = plain("go(60)")
    assert done.stdout == ""
    wanted = r"(jdp: step \d+, [\d,.]+ examples/s, data wait \d+ %\n)+"
    assert re.fullmatch(wanted, done.stderr)


@pytest.mark.parametrize(
    ("options", "variables"),
    [(", shows_progress=False", {}), ("", {"JDP_PROGRESS": "off"}), (", 1, 2", {})],
)
def test_nothing_is_shown_where_nobody_wants_it_and_by_other_processes(options, variables):
    done = plain("go(40)", options, **variables)
    assert not done.stdout + done.stderr


def test_a_script_that_does_not_step_says_nothing():
    assert plain("time.sleep(0.5)").stderr == ""


def test_a_restored_run_counts_on(terminal):
    found = terminal(
        "progress.own.restored = {'step': 1000, 'base': 1000, 'tier': 'checkpoint'}\ngo(40)"
    )
    assert re.fullmatch(r"step 1040 · .* · checkpoint 1000", found.end()[-1])


STREAMS = {
    "none": "sys.stderr = None",
    "closed": "sys.stderr.close()",
    "tee": """
class Tee:
    def write(self, text): return len(text)
    def flush(self): pass
sys.stderr = Tee()
""",
    "no file": "import io; sys.stderr = io.StringIO(); sys.stderr.isatty = lambda: True",
}


@pytest.mark.parametrize("stream", STREAMS)
def test_a_stream_of_the_scripts_own_is_accepted(terminal, stream):
    found = terminal("go(40)\nprint('done')", before=STREAMS[stream])
    assert found.end() == ["done"]


def test_streams_that_are_closed_later_and_replaced_end_nothing(terminal):
    found = terminal(
        "go(40)\nsys.stderr.close()\nsys.stderr = open(os.devnull, 'w')\n"
        "print('out')\ngo(20)\nwatching.begin_watching(600.0)\nprint('end')"
    )
    assert [line for line in found.end() if not re.fullmatch(LINE, line)] == ["out", "end"]


def test_a_method_that_others_have_set_stays(terminal):
    found = terminal(
        "watching.begin_watching(600.0)\ngo(40)\nprint('out')\nwatching._stop_watch()\n"
        "assert vars(sys.stdout)['write'] is tee and len(seen) == 2",
        before="seen, write = [], sys.stdout.write\n"
        "def tee(text): seen.append(text); return write(text)\nsys.stdout.write = tee",
    )
    assert "out" in found.end()
    found = terminal(
        "theirs = lambda text: 1\nsys.stdout.write = theirs\nwatching._stop_watch()\n"
        "assert vars(sys.stdout)['write'] is theirs"
    )
    found.end()
