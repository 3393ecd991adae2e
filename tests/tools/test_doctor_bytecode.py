"""Modules without bytecode are a warning with their number, the seconds, and the line to write."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jdp.tools.doctor import versions
from jdp.worker.bytecode import Uncompiled, sources

PACKAGES = str(Path(__file__).parents[2])
EXAMINES = """
import json, sys
from jdp.tools.doctor.versions import bytecode
sys.path.insert(0, sys.argv[1])
import package.one, package.two
print(json.dumps([vars(bytecode(least_s)) for least_s in (0.0, 60.0)]))
"""


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "site-packages"
    (folder / "package").mkdir(parents=True)
    for name in ("__init__", "one", "two"):
        (folder / "package" / f"{name}.py").write_text("x = 1\n" * 1000)
    return folder


@pytest.fixture
def examine(site, tmp_path):
    """examine(): the diagnoses for a limit of 0 s and of 60 s, in a process of its own."""

    def examine(**variables):
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        cache = {"PYTHONPATH": PACKAGES, "PYTHONPYCACHEPREFIX": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", EXAMINES, str(site)],
            env={**kept, **cache, **variables},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert not done.returncode, done.stderr
        return json.loads(done.stdout)

    return examine


def test_modules_with_bytecode_are_counted(examine):
    found, _ = examine()  # the first import writes it
    assert (found["level"], found["do"]) == ("ok", "")
    assert found["facts"]["modules"] > 3 and found["facts"]["without"] == 0


def test_modules_without_bytecode_are_a_warning_with_the_line_to_write(examine, site):
    found, quick = examine(PYTHONDONTWRITEBYTECODE="1")
    assert (found["level"], quick["level"]) == ("warning", "ok")
    facts = found["facts"]
    assert facts["without"] == facts["modules"] and facts["compile_s"] > 0
    assert found["found"].startswith(f"{facts['without']} imported modules")
    assert "PYTHONDONTWRITEBYTECODE" in found["why"]
    assert f"{sys.executable} -m compileall -q -j0 " in found["do"]
    assert quick["do"] == "" and str(facts["without"]) in quick["found"]


def test_a_package_that_uv_has_installed_is_one_for_an_option_of_uv(examine, site):
    examine()
    for path in site.glob("package/*.py"):
        os.utime(path, (1, 1))
    installer = site / "package-1.0.dist-info" / "INSTALLER"
    installer.parent.mkdir()
    for name, is_uv in (("pip\n", False), ("uv", True)):
        installer.write_text(name)
        found, _ = examine(PYTHONDONTWRITEBYTECODE="1")
        assert found["facts"]["without"] == 3
        assert f"-j0 {site}`" in found["do"]
        assert ("--compile-bytecode" in found["do"]) == is_uv


@pytest.mark.parametrize(("seconds", "shown"), [(0.7, "0.5"), (0.8, "1"), (3.4, "3.5"), (12, "12")])
def test_processes_that_measure_nearly_the_same_have_one_line(monkeypatch, seconds, shown):
    found = Uncompiled(900, seconds, 100, "", "python -m compileall")
    monkeypatch.setattr(versions.modules, "without_bytecode", lambda: [None] * 900)
    monkeypatch.setattr(versions.modules, "examine", lambda missing, budget_s: found)
    monkeypatch.setattr(versions, "_do", lambda command, missing: command)
    line = versions.bytecode()
    assert f"about {shown} s" in line.found
    assert line.facts["compile_s"] == seconds and line.facts["measured"] == 100


def test_a_long_compile_is_measured_by_a_part_of_it(monkeypatch):
    monkeypatch.setattr(versions, "_BUDGET_S", 0.0)
    monkeypatch.setattr(versions.modules, "without_bytecode", lambda: sources()[:50])
    facts = versions.bytecode().facts
    assert (facts["without"], facts["measured"]) == (50, 1)
