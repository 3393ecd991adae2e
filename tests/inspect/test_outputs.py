"""Files and outputs of commands that cannot be written: refused before the work, or named after."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jdp.__main__ import main
from jdp.inspect import calibration, results

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
        ("--json=missing/x.json", "there is no folder missing"),
        ("--json=.", "--json=. is a folder"),
        ("--json=new/", "--json=new/ is a folder"),
        ("--png=missing/x.png", "there is no folder missing"),
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
        ("--trace=missing/x.gz", "there is no folder missing"),
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

    monkeypatch.setattr("jdp.inspect.plan.prediction.predict", lost)
    with pytest.raises(ConnectionResetError, match="lost"):
        main(PLAN)


def test_a_picture_has_exactly_the_name_that_was_given():
    assert main([*PLAN, "--png", "picture"]) == 0
    assert Path("picture").read_bytes().startswith(b"\x89PNG") and os.listdir() == ["picture"]


def test_two_outputs_may_go_to_one_device():
    results.require_outputs(json=os.devnull, trace=os.devnull)
