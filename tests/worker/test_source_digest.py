"""Two builds of jdp that differ only in comments and docstrings understand each other."""

import json
import os
import shutil
import socket
import subprocess
import sys
from importlib import metadata

import pytest

from jdp.worker import build_info
from jdp.worker.build_info import PACKAGE, PROTOCOL, version
from jdp.worker.launcher_client import VARIABLE, invitation

SOURCE = '"""A room."""\n\n# why\ndef f(x):\n    """Return it."""\n    return "text", x\n'


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("# why\n", "", True),
        ("Return it.", "Give it.", True),
        ('    """Return it."""\n', "", True),
        ('"""A room."""\n', '"""Another\n\nroom."""\n\n\n', True),
        ("return", "return  ", True),
        ('"text"', '"other text"', False),
        ("def f(x)", "def f(x, /)", False),
        ("x\n", "-x\n", False),
    ],
)
def test_comments_and_docstrings_do_not_count(tmp_path, old, new, is_same):
    packages = [tmp_path / "one", tmp_path / "other"]
    for package, source in zip(packages, [SOURCE, SOURCE.replace(old, new)], strict=True):
        (package / "launch").mkdir(parents=True)
        (package / "launch" / "room.py").write_text(source)
    one, other = (build_info.code_digest(PROTOCOL, package) for package in packages)
    assert (one == other) == is_same
    one, other = (build_info.source_digest(PROTOCOL, package) for package in packages)
    assert one != other


def test_another_name_of_a_file_counts(tmp_path):
    for name in "one", "other":
        (tmp_path / name / "launch").mkdir(parents=True)
        (tmp_path / name / "launch" / f"{name}.py").write_text(SOURCE)
    packages = [tmp_path / "one", tmp_path / "other"]
    assert len({build_info.code_digest(PROTOCOL, package) for package in packages}) == 2


@pytest.mark.parametrize(
    ("change", "returncode"), [("# a comment\n", 0), ("A_NAME = 1\n", 1), ("no Python", 1)]
)
def test_a_process_takes_a_launcher_with_other_comments_and_no_other_one(
    tmp_path, change, returncode
):
    package = tmp_path / "jdp"
    for room in PROTOCOL:
        shutil.copytree(PACKAGE / room, package / room)
    with (package / "launch" / "run.py").open("a") as file:
        file.write(change)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fds = {"socket": theirs.fileno(), "board": 0, "commit": 0}
        facts = json.loads(invitation(**fds, slot=0)[VARIABLE])
        facts |= {"protocol": "of others", "package": str(package)}
        done = subprocess.run(
            [sys.executable, "-c", "from jdp.worker import launcher_client as c; c.current()"],
            env=os.environ | {VARIABLE: json.dumps(facts)},
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == returncode
    assert ("python -m jdp run" in done.stderr) == (returncode > 0)


def test_sources_that_were_built_and_not_installed_have_their_version(tmp_path, monkeypatch):
    (tmp_path / "jdp.egg-info").mkdir()
    text = "Metadata-Version: 2.4\nName: jdp\nVersion: 7.8.9\n\nVersion: 1\n"
    (tmp_path / "jdp.egg-info" / "PKG-INFO").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert version.__wrapped__() == metadata.version("jdp") == "7.8.9"


def test_sources_that_were_never_built_have_none(monkeypatch):
    def distribution(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    assert version.__wrapped__() == "0+unknown"
