"""A process knows how many of its modules each start compiles again, and how to prevent it."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = str(Path(__file__).parents[2])
EXAMINES = """
import json, sys, types, zipfile
from jdp.tools.doctor import versions
from jdp.worker import bytecode
folder = sys.argv[1]
sys.modules |= {"odd": object(), "made": types.ModuleType("made")}
bytecode._INSTALLED = bytecode.re.compile(bytecode.re.escape(folder))
sys.path.insert(0, folder)
import package.one, package.two, single
bytecode.SLOW_START_S = 0.0
slow = bytecode.slow_imports() is not None
line = versions.bytecode()
print(json.dumps([bytecode.imports()._asdict(), slow, vars(line)]))
"""


@pytest.fixture
def site(tmp_path):
    """A folder of installed packages: a package of three modules, and a single one."""
    folder = tmp_path / "site-packages"
    (folder / "package").mkdir(parents=True)
    for name in ("package/__init__", "package/one", "package/two", "single"):
        (folder / f"{name}.py").write_text("x = 1\n")
    return folder


def run(arguments, **variables):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        arguments,
        env={**kept, "PYTHONPATH": PACKAGES, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert not done.returncode, done.stderr
    return done.stdout


def examine(site, *flags, **variables):
    return json.loads(run([sys.executable, *flags, "-c", EXAMINES, str(site)], **variables))


@pytest.mark.parametrize("flags", [[], ["-O"], ["-OO"]], ids=["", "optimized", "no docstrings"])
def test_modules_without_bytecode_are_counted_until_the_command_has_run(site, flags):
    found, slow, line = examine(site, *flags, PYTHONDONTWRITEBYTECODE="1")
    assert (found["modules"], found["without"], slow) == (4, 4, True)
    assert found["command"].endswith(f" -m compileall -q -j0 {site}") and found["s"] > 0
    assert (line["level"], line["facts"]) == ("warning", {"modules": 4, "without": 4})
    assert found["command"] in line["do"] and "PYTHONDONTWRITEBYTECODE" in line["why"]
    run(shlex.split(found["command"]))
    found, slow, line = examine(site, *flags, PYTHONDONTWRITEBYTECODE="1")
    assert (found["modules"], found["without"], slow, line["level"]) == (4, 0, False, "ok")


def test_the_first_process_that_may_write_leaves_none_to_compile(site):
    assert examine(site)[0]["without"] == 0


def test_bytecode_in_another_folder_counts_where_python_looks_for_it(site, tmp_path):
    elsewhere = {"PYTHONPYCACHEPREFIX": str(tmp_path / "cache")}
    found, *_ = examine(site, PYTHONDONTWRITEBYTECODE="1", **elsewhere)
    run(shlex.split(found["command"]), **elsewhere)
    assert examine(site, PYTHONDONTWRITEBYTECODE="1", **elsewhere)[0]["without"] == 0
    assert examine(site, PYTHONDONTWRITEBYTECODE="1")[0]["without"] == 4
