"""Files and outputs of commands that cannot be written: refused before the work, or named after."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jdp.__main__ import main
from jdp.tools import calibration, results

FULL = Path("/dev/full")
PLAN = ["plan", "--model", "params=1e9,layers=4,tokens=8192", "--hosts", "1"]
COMMANDS = {
    "plan": PLAN,
    "bench": ["bench", "all-reduce", "-e", "4K", "-n", "1"],
    "step": ["bench", "step", "mlp", "--ranks", "1", "--rows", "2", "--rounds", "1"],
    "faults": ["bench", "faults"],
}
needs_full_disk = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")


@pytest.fixture(autouse=True)
def in_folder(before_init, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")  # as of these tests


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--json=missing/x.json", "the folder missing does not exist"),
        ("--json=.", "--json=. is a folder"),
        ("--json=new/", "--json=new/ is a folder"),
        ("--png=missing/x.png", "the folder missing does not exist"),
        ("--png=x.xyz", ".xyz"),
        ("--png=x.pgf", ".pgf"),
        ("--json=x.png --png=./x.png", "--json and --png both name ./x.png"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    command, arguments, named, capsys
):
    assert main([*COMMANDS[command], *arguments.split()]) == 2
    output = capsys.readouterr()
    assert named in output.err and output.out == ""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--trace=missing/x.gz", "the folder missing does not exist"),
        ("--trace=.", "--trace=. is a folder"),
        ("--png=x.xyz", ".xyz"),
        ("--png=x.png --trace=x.png", "--png and --trace both name x.png"),
    ],
)
def test_a_timeline_refuses_files_before_it_reads_the_profile(arguments, named, capsys):
    assert main(["timeline", ".", *arguments.split()]) == 2
    assert named in capsys.readouterr().err


def test_a_calibration_that_cannot_be_saved_is_refused_before_it_is_measured(capsys):
    Path("cache").write_text("a file")
    assert main(["bench", "--calibrate"]) == 2
    error = capsys.readouterr().err
    assert str(calibration.default_path("cpu")) in error and "XDG_CACHE_HOME" in error


@needs_full_disk
@pytest.mark.parametrize("command", ["plan", "bench", "step"])
@pytest.mark.parametrize("flag", ["--json", "--png"])
def test_a_full_disk_is_named_below_the_table(command, flag, capsys):
    assert main([*COMMANDS[command], f"{flag}={FULL}"]) == 1
    output = capsys.readouterr()
    [line] = output.err.splitlines()
    assert line.endswith("/dev/full was not written: No space left on device.")
    assert len(output.out.splitlines()) > 2


@needs_full_disk
@pytest.mark.parametrize("buffers", ["", "1"])
@pytest.mark.parametrize(
    "command", [["--help"], ["explain-error", "JDP101"], PLAN, [*PLAN, "--json"]]
)
def test_an_output_on_a_full_disk_ends_a_command_with_one_line(command, buffers):
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "jdp", *command],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
            | {"PYTHONUNBUFFERED": buffers},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=240,
        )
    [line] = done.stderr.splitlines()
    assert done.returncode == 1
    assert line == f"jdp {command[0]}: the output was not written: No space left on device."


@needs_full_disk
def test_a_help_on_a_full_disk_is_not_a_success():
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "jdp", "plan", "--help"],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
            | {"PYTHONUNBUFFERED": ""},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=240,
        )
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)


def test_other_errors_keep_their_traceback(monkeypatch):
    def lost(*_):
        raise ConnectionResetError("lost")

    monkeypatch.setattr("jdp.tools.plan.prediction.predict", lost)
    with pytest.raises(ConnectionResetError, match="lost"):
        main(PLAN)


def test_a_picture_has_exactly_the_name_that_was_given():
    assert main([*PLAN, "--png", "picture"]) == 0
    assert Path("picture").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in Path().glob("picture*")] == ["picture"]


def test_two_outputs_may_go_to_one_device():
    results.require_outputs(json=os.devnull, trace=os.devnull)


# Inputs of a command


@pytest.mark.parametrize("output", ["read.json", "./read.json", "link.json", "hard.json"])
@pytest.mark.parametrize("flag", ["--recovery", "--calibration"])
def test_a_plan_does_not_replace_what_it_reads(flag, output, capsys):
    Path("read.json").write_text("{}")
    Path("link.json").symlink_to("read.json")
    os.link("read.json", "hard.json")
    assert main([*PLAN, flag, "read.json", "--json", output]) == 2
    assert f"--json={output} would replace a file" in capsys.readouterr().err
    assert Path("read.json").read_text() == "{}"


def test_a_plan_does_not_replace_the_calibration_of_this_host(capsys):
    path = calibration.default_path("cpu")
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    assert main([*PLAN, "--calibration", f"--json={path}"]) == 2
    assert "would replace a file" in capsys.readouterr().err


def test_a_picture_does_not_replace_the_script_that_is_explained(capsys):
    Path("train").write_text("raise AssertionError('the script ran')")
    assert main(["explain", "train:step", "--png", "./train"]) == 2
    assert "--png=./train would replace a file" in capsys.readouterr().err


MODEL = """\
import os
from jdp.tools.bench.step import found_model
def make(num_rows, all_reduce):
    return found_model("mlp")(num_rows, all_reduce)
os.chdir("/")
"""


def test_a_bench_does_not_replace_the_file_of_its_model(capsys):
    Path("model.py").write_text(MODEL)
    assert main(["bench", "step", "model.py:make", *COMMANDS["step"][3:], "--json=model.py"]) == 2
    assert "--json=model.py would replace a file" in capsys.readouterr().err


# Folders: a name is of the one where the command was started


def test_a_model_that_goes_to_another_folder_does_not_take_the_results_along(tmp_path):
    Path("model.py").write_text(MODEL)
    assert main(["bench", "step", "model.py:make", *COMMANDS["step"][3:], "--json=x.json"]) == 0
    assert (tmp_path / "x.json").exists()


def test_a_script_that_goes_to_another_folder_does_not_take_the_picture_along(tmp_path):
    lines = "import os, jax.numpy as jnp, jdp\njdp.init(cpu_ranks=1)\nos.chdir('/')\n"
    lines += "@jdp.train_step\ndef step(state, x):\n    return state, {}\n"
    Path("train.py").write_text(f"{lines}step(jnp.ones(2), jnp.ones(2))\n")
    subprocess.run(
        [sys.executable, "-m", "jdp", "explain", "train.py:step", "--on=cpu:1", "--png=x.png"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=True,
        timeout=240,
    )
    assert (tmp_path / "x.png").exists()
