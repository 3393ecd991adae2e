"""An edit of the author's files between two lives of a run is found, by its first line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import environment

from jdp.worker import source_files

LINES = ["import os", "rate = 0.1", "steps = 10"]

READS = """
import json, sys
from jdp.worker import source_files
source_files.record()
import part.model, unlisted
source_files.record()  # what is new since
print(json.dumps(source_files.digests()))
"""


@pytest.fixture
def lines(monkeypatch):
    """lines(name=[...]): take these for the files that were read; returns their digests."""

    def lines(**files):
        found = {f"{name}.py": [line.encode() for line in text] for name, text in files.items()}
        monkeypatch.setattr(source_files, "_lines", found)
        return source_files.digests()

    return lines


@pytest.mark.parametrize(
    ("after", "named"),
    [
        (LINES, None),
        (["import os", "rate = 0.2", "steps = 10"], ["train.py:2", "`rate = 0.2`"]),
        ([*LINES, "more = 1"], ["train.py:4", "`more = 1`"]),
        (["# new", *LINES], ["train.py:1", "`# new`"]),
        (LINES[:2], ["train.py", "line 2"]),
        ([], ["train.py", "line 0"]),
    ],
    ids=["equal", "changed", "longer", "begins later", "shorter", "empty"],
)
def test_the_first_line_that_differs_is_named(lines, after, named):
    saved = lines(other=["x"], train=LINES)
    lines(other=["x"], train=after)
    text = source_files.difference(saved)
    assert text is None if named is None else all(each in text for each in named)


def test_lines_with_equal_sums_still_differ_as_a_file(lines):
    saved = lines(train=LINES)
    saved["train.py"][1] = lines(train=[*LINES[:2], "steps = 11"])["train.py"][1]
    assert "train.py" in source_files.difference(saved)


def test_a_file_that_one_life_did_not_import_is_not_compared(lines):
    saved = lines(train=LINES, gone=["x"])
    lines(train=LINES, new=["y"])
    assert source_files.difference(saved) is None
    assert source_files.difference({}) is None


@pytest.mark.parametrize("command", [["train.py"], ["-m", "train"]])
def test_the_script_and_the_modules_below_its_folder_are_read(tmp_path, command):
    folder = tmp_path / "project"
    (folder / "part").mkdir(parents=True)
    (folder / "site-packages").mkdir()
    (folder / "part" / "model.py").write_text("x = 1\n")
    (folder / "site-packages" / "unlisted.py").write_text("")
    (folder / "train.py").write_text("import sys; sys.path.append('site-packages')\n" + READS)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment() | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert {*found} == {"train.py", "part/model.py"}
    assert len(found["part/model.py"][1]) == 4 and len(found["train.py"][0]) == 16
