"""Tests that failed once are mended or explained, and only those that start processes run twice."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The second test depends on the files of the first run.
TESTS = """
import subprocess, sys
from pathlib import Path
import pytest

def has_been_here(name):
    file = Path(__file__).with_name(name)
    been = file.exists()
    file.touch()
    return been

def test_passes():
    pass

def test_starts_a_process():
    subprocess.run([sys.executable, "-c", ""])
    assert has_been_here("first")

@pytest.fixture
def process(n):
    yield
    subprocess.run([sys.executable, "-c", ""])
    assert has_been_here(f"fixture {n}")

@pytest.mark.parametrize("n", ["a-1@b", "[2]"])
def test_starts_one_at_the_end(process, n):
    pass

def test_starts_none():
    assert has_been_here("none") or NONE_PASSES

def test_always_fails():
    subprocess.run([sys.executable, "-c", ""])
    assert ALL_PASS, "the reason"

@pytest.mark.parametrize("n", range(6))
def test_many(n):
    subprocess.run([sys.executable, "-c", ""])
    assert has_been_here(f"many {n}") or n >= MANY
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*flags, NAME=value ...): the exit code, the output and the lines of flaky.txt."""
    (tmp_path / "second_try.py").write_text((ROOT / "tests/second_try.py").read_text())
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["second_try"]')
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .")

    def run(*flags, **values):
        values = {"NONE_PASSES": True, "ALL_PASS": True, "MANY": 0, **values}
        lines = [f"{name} = {value}" for name, value in values.items()]
        (tmp_path / "test_it.py").write_text("\n".join([TESTS, *lines]))
        command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *flags]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        flaky = tmp_path / "flaky.txt"
        lines = flaky.read_text().splitlines() if flaky.exists() else []
        return done.returncode, done.stdout + done.stderr, lines

    return run


def test_every_flaky_test_is_explained():
    lines = (ROOT / "tests" / "flaky.txt").read_text().splitlines()
    tests = [line for line in lines if line and not line.startswith("#")]
    unexplained = [test for test in tests if not test.partition(": ")[2].strip()]
    assert not unexplained, "mend these tests, or write why they failed behind their names"


@pytest.mark.parametrize("flags", [(), ("-n", "2", "--dist", "loadgroup")], ids=["alone", "xdist"])
def test_what_starts_processes_is_run_again_and_named(run, flags):
    code, output, flaky = run("--second-try", *flags)
    assert code == 0, output
    assert "11 passed, 3 flaky" in output.splitlines()[-1], output
    names = ["a_process", "one_at_the_end[[2]]", "one_at_the_end[a-1@b]"]
    assert sorted(flaky) == [f"test_it.py::test_starts_{name}" for name in names]
    assert output.count("passed by itself") == 3 and 'has_been_here("first")' in output


@pytest.mark.parametrize("values", [{"NONE_PASSES": False}, {"ALL_PASS": False}, {"MANY": 6}])
def test_what_is_no_excuse_fails_the_run(run, values):
    code, output, _ = run("--second-try", **values)
    assert code == 1, output
    assert " failed" in output.splitlines()[-1]
