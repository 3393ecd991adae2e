"""The first call of a step is found whatever the script does with the end of its run."""

import threading

import pytest

from jdp.tools.explain_command import NeverCalledError, first_call

STEP = """\
import sys, threading
import jdp

@jdp.train_step
def step(state, batch):
    return state, {}

@jdp.train_step
def warm_up(state, batch):
    raise AssertionError

jdp.init(cpu_ranks=1)
"""


@pytest.fixture
def called(tmp_path):
    def called(lines, name="step"):
        path = tmp_path / "a script \u00fc.py"
        path.write_text(STEP + lines, encoding="utf-8")
        return first_call(str(path), name, ["--lr", "1"])

    yield called
    for thread in threading.enumerate():  # one that ends in a later test fails that
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(10)


@pytest.mark.parametrize(
    "lines",
    [
        "step(1, batch=sys.argv[1:])",
        "sys.exit(step(1, batch=sys.argv[1:]))",
        # A script that tries again would go on without the step's result.
        "try:\n    step(1, batch=sys.argv[1:])\nexcept:\n    pass\nstep(2, 3)",
        "try:\n    step(1, batch=sys.argv[1:])\nexcept BaseException:\n    sys.exit(1)",
        "try:\n    step(1, batch=sys.argv[1:])\nexcept:\n    state, _ = None",
    ],
)
def test_the_first_call_is_found(lines, called):
    found = called(lines)
    assert (found.args, found.keywords) == ((1,), {"batch": ["--lr", "1"]})


def test_another_step_that_is_called_before_is_named_once(called, capsys):
    script = "def warm_up(state, batch):\n    return state, {}\n"
    script += "warm_up = jdp.train_step(warm_up)\n"
    script += "import jax.numpy as jnp\nstate = jnp.ones(2)\n"
    script += "for _ in range(2):\n    state, _ = warm_up(state, jnp.ones(2))\nstep(1, 2)\n"
    assert called(script).args == (1, 2)
    assert capsys.readouterr().err.count("`warm_up`, and runs on until `step`") == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_call_in_another_thread_is_found(called):
    thread = "thread = threading.Thread(target=step, args=(1, 2))"
    assert called(f"{thread}\nthread.start()\nthread.join()").args == (1, 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("end", ["", "sys.exit(0)", "sys.exit(3)"])
def test_a_call_in_a_thread_that_outlives_the_script_is_found(end, called):
    later = "def later():\n    time.sleep(0.3)\n    step(1, 2)\nimport time\n"
    assert called(f"{later}threading.Thread(target=later).start()\n{end}").args == (1, 2)


def test_threads_that_python_does_not_wait_for_are_not_waited_for(called):
    daemon = "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    pool = "from concurrent import futures\nsys.pool = futures.ThreadPoolExecutor(1)\n"
    with pytest.raises(NeverCalledError, match="never called"):
        called(f"{daemon}{pool}sys.pool.submit(print).result()")


def test_the_script_knows_its_file_also_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(f"{STEP}import os\nos.chdir('/')\nstep(__file__, 2)")
    assert first_call("train.py", "step", []).args == (str(tmp_path / "train.py"), 2)


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("", "ended and"),
        ("sys.exit(0)", "ended and"),
        ("sys.exit(3)", r"ended with `exit\(3\)`"),
        ("sys.exit('no data')", r"ended with `exit\('no data'\)`"),
    ],
)
def test_a_script_that_ends_before_it_calls_the_step_is_an_error(end, how, called):
    with pytest.raises(NeverCalledError, match=f"ü.py {how}.*`step`.*no step.*jdp.train_step"):
        called(end)


def test_an_error_of_the_script_is_its_own(called):
    with pytest.raises(ZeroDivisionError):
        called("1 / 0")


def test_a_call_with_keywords_of_any_name_is_found(called):
    found = called("step(state=1, batch=2)")
    assert (found.args, found.keywords) == ((), {"state": 1, "batch": 2})
    other = "@jdp.train_step\ndef other(state, batch, *, step, args):\n    return state, {}\n"
    assert called(f"{other}other(1, 2, step=3, args=4)", "other").keywords == {"step": 3, "args": 4}
