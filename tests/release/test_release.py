"""The wheel and the sdist that `make wheel` wrote run in empty environments."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import jdp

ROOT = Path(__file__).parents[2]
DIST = Path(os.environ.get("JDP_DIST", ""))
COMPILERS = ("g++", "gcc", "c++", "cc", "clang", "clang++", "nvcc")
DEADLINE_S = 300

pytestmark = pytest.mark.skipif("JDP_DIST" not in os.environ, reason="runs by make release-check")


def the(pattern):
    [found] = DIST.glob(pattern)
    return found


def metadata_of(path):
    """Return the fields that a package index reads, of a wheel or an sdist."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
            text = wheel.read(name).decode()
    else:
        with tarfile.open(path) as sdist:
            [name] = [n for n in sdist.getnames() if re.fullmatch(r"[^/]+/PKG-INFO", n)]
            text = sdist.extractfile(name).read().decode()
    return Parser().parsestr(text)


class Environment:
    """An environment with the packages that jdp requires, but without jdp.

    Args:
      folder: where it is made.
      path: the folders in which commands are found, beside its own.
    """

    def __init__(self, folder, path):
        self.path = os.pathsep.join([str(folder / "bin"), *path])
        venv.create(folder, with_pip=True)
        self._python = folder / "bin" / "python"
        # Their .pth files, and with them an editable jdp, have no effect there.
        below = [path for path in sys.path if path.endswith("site-packages")]
        [own] = folder.glob("lib/python*/site-packages")
        (own / "below.pth").write_text("".join(f"{path}\n" for path in below))
        self._variables = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "CXX", "JDP_CUDA")
        } | {"PATH": self.path, "VIRTUAL_ENV": str(folder)}
        self._folder = folder

    def run(self, *arguments):
        """Run Python, and return its output."""
        done = subprocess.run(
            [str(self._python), *arguments],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            env=self._variables,
            cwd=self._folder,
        )
        assert done.returncode == 0, f"{arguments}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def install(self, package):
        """Install a file with pip, without its requirements, from no index."""
        pip = ("-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation")
        self.run(*pip, "--force-reinstall", str(package))


def trains_natively(environment):
    """Run README's first example, the self-test of collectives, and a native sum."""
    assert "True" in environment.run(
        "-c",
        "import jdp, pathlib, sys; from jdp.collectives.cpu import runtime;"
        "print(runtime.why_missing() is None and str(pathlib.Path(jdp.__file__)).startswith("
        "sys.prefix))",
    )
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    environment.run("-c", "\n".join(blocks))
    report = environment.run("-m", "jdp", "doctor", "--json")
    assert '"healthy": true' in report


def test_versions_and_descriptions_agree():
    wheel, sdist = metadata_of(the("*.whl")), metadata_of(the("*.tar.gz"))
    assert wheel["Version"] == sdist["Version"] == jdp.__version__
    assert wheel.get_payload() == sdist.get_payload() == (ROOT / "README.md").read_text()
    assert wheel.get_all("Requires-Dist") == sdist.get_all("Requires-Dist")


def test_the_wheel_is_for_all_pythons_and_has_the_library_but_no_sources():
    path = the("*.whl")
    assert re.fullmatch(r"jdp-[\d.]+-py3-none-manylinux_2_\d+_\w+\.whl", path.name)
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
    assert "jdp/lib/libjdp_cpu.so" in names and "jdp/py.typed" in names
    assert not [name for name in names if name.endswith((".cc", ".h", ".cu"))]
    in_tree = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "jdp").rglob("*")
        if path.suffix in (".py", ".md") and "__pycache__" not in path.parts
    }
    assert in_tree - set(names) == set()


def test_the_wheel_trains_natively_without_a_compiler(tmp_path):
    environment = Environment(tmp_path / "env", path=[])
    assert not [name for name in COMPILERS if shutil.which(name, path=environment.path)]
    environment.install(the("*.whl"))
    trains_natively(environment)


def test_the_sdist_compiles_and_trains_natively(tmp_path):
    if not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        pytest.skip("there is no C++ compiler")
    environment = Environment(tmp_path / "env", path=os.environ["PATH"].split(os.pathsep))
    environment.install(the("*.tar.gz"))
    trains_natively(environment)
