"""A process knows which of its modules the next process compiles again, and how to prevent it."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jdp.worker import bytecode
from jdp.worker.bytecode import SourceFile

PACKAGES = str(Path(__file__).parents[2])
EXAMINES = """
import json, sys, warnings
from pathlib import Path
from jdp.worker import bytecode
folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
warnings.simplefilter("ignore")
import package.one, package.two, single
warnings.simplefilter("always")
found = lambda sources: sorted(it.name for it in sources if it.path.startswith(str(folder)))
missing = [it for it in bytecode.without_bytecode() if it.path.startswith(str(folder))]
answer = {"all": found(bytecode.sources()), "missing": found(missing)}
if missing:
    answer |= bytecode.examine(missing, 60.0)._asdict()
bytecode.SLOW_START_S = bytecode.LEAST_S = 0.0
answer["slow"] = bytecode.slow_imports() is not None
print(json.dumps(answer))
"""
NAMES = ["package", "package.one", "package.two", "single"]


@pytest.fixture
def site(tmp_path):
    """A folder like one of installed packages: a package of three modules, and a single one."""
    folder = tmp_path / "site-packages"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "one.py").write_text("".join(f"x{i} = {i}\n" for i in range(1000)))
    (folder / "package" / "two.py").write_text("pattern = '\\d'\n")
    (folder / "single.py").write_text("x = 1\n")
    return folder


def run(code, *arguments, flags=(), **variables):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, *flags, "-c", code, *map(str, arguments)],
        env={**kept, "PYTHONPATH": PACKAGES, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def examine(site, **how):
    return run(EXAMINES, site, **how)


def compile_as_told(command, **variables):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    subprocess.run(shlex.split(command), env={**kept, **variables}, check=True, timeout=240)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"PYTHONDONTWRITEBYTECODE": "1"}, "PYTHONDONTWRITEBYTECODE is set"),
        ({"flags": ["-B"]}, "Python runs with -B"),
        ({"flags": ["-B", "-O"]}, "Python runs with -B"),
        ({"flags": ["-B", "-OO"]}, "Python runs with -B"),
    ],
    ids=["variable", "flag", "optimized", "without docstrings"],
)
def test_modules_without_bytecode_are_counted_until_the_command_has_run(site, how, why):
    found = examine(site, **how)
    assert found["all"] == found["missing"] == NAMES
    assert found["modules"] == found["measured"] == 4
    assert found["s"] > 0 and found["why"] == why and found["slow"]
    assert found["command"].endswith(f" -m compileall -q -j0 {site}")
    compile_as_told(found["command"])
    found = examine(site, **how)
    assert (found["all"], found["missing"]) == (NAMES, [])


def test_the_first_process_that_may_write_leaves_none_to_compile(site):
    assert examine(site)["missing"] == []


def test_a_start_is_not_slow_where_each_module_has_bytecode(site, tmp_path):
    prefix = {"PYTHONPYCACHEPREFIX": str(tmp_path / "cache")}
    assert examine(site, **prefix, PYTHONDONTWRITEBYTECODE="1")["slow"]
    assert not examine(site, **prefix)["slow"]
    assert not examine(site, **prefix, PYTHONDONTWRITEBYTECODE="1")["slow"]


def test_bytecode_in_another_folder_counts_where_python_looks_for_it(site, tmp_path):
    elsewhere = {"PYTHONPYCACHEPREFIX": str(tmp_path / "cache")}
    without = examine(site, PYTHONDONTWRITEBYTECODE="1", **elsewhere)
    compile_as_told(without["command"], **elsewhere)
    assert examine(site, PYTHONDONTWRITEBYTECODE="1", **elsewhere)["missing"] == []
    assert examine(site, PYTHONDONTWRITEBYTECODE="1")["missing"] == NAMES


@pytest.mark.parametrize("damage", ["newer source", "longer source", "cut", "other Python"])
def test_bytecode_that_python_does_not_take_counts_as_none(site, damage):
    examine(site)
    source = site / "single.py"
    [cached] = (site / "__pycache__").glob("single.*.pyc")
    if damage == "newer source":
        os.utime(source, (1, 1))
    elif damage == "longer source":
        at = source.stat().st_mtime_ns
        source.write_text("x = 1234\n")
        os.utime(source, ns=(at, at))
    elif damage == "cut":
        cached.write_bytes(cached.read_bytes()[:4])
    else:
        cached.write_bytes(b"\0\0\r\n" + cached.read_bytes()[4:])
    found = examine(site, PYTHONDONTWRITEBYTECODE="1")
    assert found["missing"] == ["single"]


def test_bytecode_that_holds_a_hash_of_its_source_counts(site):
    command = examine(site, PYTHONDONTWRITEBYTECODE="1")["command"]
    compile_as_told(f"{command} --invalidation-mode unchecked-hash")
    os.utime(site / "single.py", (1, 1))
    assert examine(site, PYTHONDONTWRITEBYTECODE="1")["missing"] == []


IMPORTS_OTHERS = """
import _json, json, os, sys, types, zipfile
from jdp.worker import bytecode
folder = sys.argv[1]
os.makedirs(folder + "/space/part")
with open(folder + "/space/part/__init__.py", "w"):
    pass
with zipfile.ZipFile(folder + "/archive.zip", "w") as file:
    file.writestr("zipped.py", "")
sys.path[:0] = [folder, folder + "/archive.zip"]
sys.modules |= {"odd": object(), "made": types.ModuleType("made")}
import space.part, zipped
print(json.dumps([it.name for it in bytecode.sources()]))
"""


def test_what_python_never_caches_is_not_counted(tmp_path):
    found = {*run(IMPORTS_OTHERS, tmp_path)}
    assert {"space.part", "json"} <= found
    assert not {"space", "zipped", "odd", "made", "_json", "sys", "os", "__main__"} & found


def test_a_folder_that_cannot_be_written_is_named(site, monkeypatch):
    source = SourceFile("single", str(site / "single.py"), str(site / "none.pyc"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert bytecode.examine([source], 60.0).why == f"this process may not write to {site}"
    monkeypatch.setattr(sys, "pycache_prefix", "/elsewhere")
    assert bytecode.examine([source], 60.0).why == "this process may not write to /elsewhere"


def test_of_a_package_that_is_not_installed_its_own_folder_is_compiled(tmp_path):
    def folder(name, path):
        return SourceFile(name, str(tmp_path / path), "").folder()

    assert folder("package.part.one", "package/part/one.py") == str(tmp_path / "package")
    assert folder("package", "package/__init__.py") == str(tmp_path / "package")
    assert folder("single", "single.py") == str(tmp_path / "single.py")
    library = os.path.dirname(os.__file__)
    assert folder("json", f"{library}/json/__init__.py") == library
