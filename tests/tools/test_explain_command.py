"""`jdp explain` explains the first step of a script that stays as it is."""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jdp.__main__ import main
from jdp.tools.explain_command import NeverCalledError, first_call

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(tmp_path):
    """The training script of README.md, unchanged."""
    block = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    path = tmp_path / "train.py"
    path.write_text(block[1])
    return path


def explained(*arguments):
    # A process of its own, for the number of devices is chosen before JAX starts.
    names = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")
    environment = {name: x for name, x in os.environ.items() if name not in names}
    command = [sys.executable, "-m", "jdp", "explain", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT
    )


def test_the_script_of_the_readme_is_explained_as_it_stands(script, tmp_path):
    picture = tmp_path / "lanes.png"
    done = explained(f"{script}:step", "--on", "cpu:4", "--json", "--png", picture, "--rate",
                     "matmul_flops=1e9")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["step"], found["on"], found["num_ranks"]) == ("step", "cpu:4", 4)
    assert found["memory"]["parameters"] == 4 * (16 * 64 + 64)
    assert found["memory"]["batch"] == 256 // 4 * 4 * (16 + 1)
    assert set(found["buckets"][0]["leaves"]) == {"grads['w']", "grads['v']"}
    assert found["rates"]["matmul_flops"]["value"] == 1e9
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plans_are_compared_from_the_command_line(script):
    done = explained(f"{script}:step", "--on", "cpu:4", "--json", "--compare", "stage=0,3,3",
                     "--compare", "bucket_bytes=1k,4M,4096k")  # fmt: skip
    assert done.returncode == 0, done.stderr
    plans = json.loads(done.stdout)
    assert sorted((x["plan"]["stage"], x["plan"]["bucket_bytes"]) for x in plans) == [
        (0, 2**10), (0, 2**22), (3, 2**10), (3, 2**22)
    ]  # fmt: skip
    times = [x["time"]["likely_s"] for x in plans]
    assert times == sorted(times)


PRINTS = """\
import atexit, os, subprocess
print("own")
os.write(1, b"raw ")
subprocess.run(["echo", "child"])
atexit.register(print, "exit")
atexit.register(subprocess.run, ["echo", "child at exit"])
"""
NEVER_ENDS = """\
import multiprocessing, signal, threading
def prints():
    while not threading.Event().wait(0.001):
        print("thread")
threading.Thread(target=prints).start()
multiprocessing.get_context("fork").Process(target=signal.pause).start()
"""


@pytest.mark.parametrize("lines", [PRINTS, NEVER_ENDS], ids=["prints", "never ends"])
def test_the_report_is_alone_on_stdout_and_the_last_of_the_process(lines, script):
    script.write_text(lines + script.read_text())
    done = explained(f"{script}:step", "--on", "cpu:2", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["step"] == "step"
    words = ["own", "raw", "child", "exit", "child at exit"] if lines == PRINTS else ["thread"]
    assert all(word in done.stderr for word in words)


def test_a_script_for_two_ranks_is_explained_for_four(script):
    text = script.read_text().replace("jdp.init()", "jdp.init(cpu_ranks=2)")
    script.write_text(text.replace("\n\nx =", "\nassert mesh.size == 2\n\nx ="))
    done = explained(f"{script}:step", "--on", "cpu:4")
    assert done.returncode == 0, done.stderr
    assert "step on cpu:4 (4 ranks)" in done.stdout


def test_a_step_that_is_not_called_is_an_error_with_those_that_are(script):
    done = explained(f"{script}:train", "--on", "cpu:1")
    assert done.returncode == 1 and not done.stdout
    assert "`train`" in done.stderr and "called step" in done.stderr


@pytest.mark.parametrize("name", ["train.py", "train.py:2", ":step"])
def test_a_step_without_a_name_is_an_error(name, capsys):
    assert main(["explain", name]) == 2
    assert "train.py:step" in capsys.readouterr().err


def test_a_script_that_is_not_there_is_an_error(capsys):
    assert main(["explain", "nowhere.py:step"]) == 2
    assert "nowhere.py" in capsys.readouterr().err


@pytest.mark.parametrize(("on", "extra"), [("8xH200", "explain-gpu"), ("v5e:2x4", "explain-tpu")])
def test_what_is_missing_is_named_in_one_line(on, extra, script, monkeypatch):
    from jdp.tools import targets

    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(targets.MissingPluginError, match=re.escape(f"jdp[{extra}]")) as raised:
        targets.target(on, ("data",))
    assert "\n" not in str(raised.value)


def test_a_lock_of_libtpu_is_not_an_unknown_topology(monkeypatch):
    from jdp.tools import targets

    def locked(**keywords):
        raise ValueError("ABORTED: error when accessing libtpu multi-process lockfile")

    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(targets.topologies, "get_topology_desc", locked)
    monkeypatch.setattr(targets.os, "environ", {})
    with pytest.raises(RuntimeError, match="another process .* has loaded libtpu"):
        targets.target("v5e:2x4", ("data",))


def test_the_command_starts_without_jax(tmp_path):
    code = "import sys; from jdp.__main__ import main; main(['--help']); "
    code += "sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=240).returncode == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--on", "cpu:0"], "'cpu:0'"),
        (["--on", "9xH100"], "Write 10xH100"),
        (["--on", "17XH200"], "Write 18xH200"),
        (["--on", "cpu:1000000"], "1000000, but a process has at most 1024"),
        (["--rate", "speed=1"], "'speed'"),
        (["--lr", "0.1"], "train.py:step -- --lr 0.1"),
        (["--rate", "matmul_flops=nan"], "nan"),
        (["--on", ""], "the target '' is unknown"),
        (["--rate", "matmul_flops=1", "--rate", "matmul_flops=2"], "matmul_flops twice"),
        (["--compare", "stage=0", "stage=1", "bucket_bytes=1"], "stage twice"),
        (["--compare", "stage=0", "--compare", "stage=1"], "stage twice"),
        (["--compare", "stage=0,4"], "stage=4"),
        (["--compare", "stage=0", "--compare", "bucket_bytes=0"], "bucket_bytes=0"),
        (["--compare", "rows=1"], "'rows'"),
        (["--png", "lanes.png", "--compare", "stage=0,1"], "--compare"),
    ],
)
def test_options_that_cannot_be_are_an_error_before_the_script_runs(
    options, text, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    path = tmp_path / "train.py"
    path.write_text("raise AssertionError('the script ran')")
    assert main(["explain", f"{path}:step", *options]) == 2
    assert text in capsys.readouterr().err


def test_an_error_of_the_authors_code_has_its_line_and_one_of_jdp_is_one_line(script):
    text = script.read_text()
    wrong = text.replace("    loss, grads =", "    raise ValueError('mine')\n    loss, grads =")
    assert wrong != text
    script.write_text(wrong)
    done = explained(f"{script}:step", "--on", "cpu:1")
    assert done.returncode == 1 and "raise ValueError('mine')" in done.stderr
    script.write_text(text.replace('{"loss": loss}', '{"loss": batch["x"]}'))
    done = explained(f"{script}:step", "--on", "cpu:2")
    assert done.returncode == 1 and "(jdp explain-error JDP102)" in done.stderr
    assert "Traceback" not in done.stderr


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
