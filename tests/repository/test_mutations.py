"""The daily tests find what they are for: the code is broken in a copy, and one must fail there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository.mutations import ROOMS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "jdp"
# Which tests are run for every change. They alone find each of the defects.
DAILY = ["--daily=newest"]
MUTATIONS = {each.name: each for mutations in ROOMS.values() for each in mutations}


def room_of(file):
    room, _, rest = file.partition("/")
    return room if rest else "jdp"


def test_each_room_is_broken_in_five_ways():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(ROOMS) == folders - {"error_codes"} | {"csrc", "jdp"} and len(ROOMS) == 12
    for room, mutations in ROOMS.items():
        assert [room_of(each.file) for each in mutations] == [room] * 5
    assert len(MUTATIONS) == 60
    for each in MUTATIONS.values():
        count = (PACKAGE / each.file).read_text().count(each.text)
        assert count == 1, f"say anew how to break {each.file}: {each.name}"


def run(*command, folder):
    env = {**os.environ, "PYTHONPATH": str(folder), "JDP_CUDA": "off"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # a test starts up to eight processes
    options = {"cwd": folder, "env": env, "capture_output": True, "text": True, "timeout": 600}
    return subprocess.run([sys.executable, *command], **options)


@pytest.fixture(scope="module")
def daily():
    """The names of the daily tests, of the files in which a mutation must be seen."""
    files = sorted({f"tests/{each.test.partition('::')[0]}" for each in MUTATIONS.values()})
    collected = run("-m", "pytest", "-q", "--collect-only", *DAILY, *files, folder=ROOT)
    assert collected.returncode == 0, collected.stdout + collected.stderr
    return re.findall("^tests/.*::.*$", collected.stdout, re.MULTILINE)


def chosen(daily, test):
    name = f"tests/{test}"
    found = [each for each in daily if each == name or each.startswith((f"{name}[", f"{name}::"))]
    assert found, f"no daily test is {name}"
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("copy")


@pytest.fixture
def copy(folder):
    """A copy of the code in the place of the one before, whose bytecode stays."""
    ignored = shutil.ignore_patterns("__pycache__")
    for each in ("jdp", "tests", "docs"):
        shutil.copytree(ROOT / each, folder / each, ignore=ignored, dirs_exist_ok=True)
    for each in ("conftest.py", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / each, folder)
    return folder


def outcome_of(copy, *tests):
    return run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests, folder=copy)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_copy_that_is_not_broken_passes(daily, copy):
    tests = {name for each in MUTATIONS.values() for name in chosen(daily, each.test)}
    ended = outcome_of(copy, *sorted(tests))
    assert ended.returncode == 0 and " skipped" not in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_copy_fails(name, daily, copy):
    mutation = MUTATIONS[name]
    file = copy / "jdp" / mutation.file
    source = file.read_text()
    assert source.count(mutation.text) == 1
    file.write_text(source.replace(mutation.text, mutation.instead))
    if mutation.file.startswith(("csrc/common/", "csrc/cpu/")):  # else a test compiles it
        built = run("setup.py", "-q", "build_native", folder=copy)
        assert built.returncode == 0, built.stderr
    ended = outcome_of(copy, *chosen(daily, mutation.test))
    assert ended.returncode == 1 and "1 failed" in ended.stdout, ended.stdout + ended.stderr
