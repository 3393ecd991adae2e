"""Each code of an error has a page with an example that runs, and each page a code that is used."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jdp import __main__ as cli
from jdp import error_codes

ROOT = Path(__file__).parents[2]
SOURCES = [path for path in (ROOT / "jdp").rglob("*.py") if "error_codes" not in path.parts]
USED = {code for path in SOURCES for code in re.findall(r'"(JDP\d+)"', path.read_text())}
DEADLINE_S = 120
PACKED = ("__init__.py", "pages/JDP310.md")
PARTS = ["**Cause.** ", "**Why it matters.** ", "**What to write.** ", "```python\n"]


def test_the_codes_that_are_used_are_those_with_a_page():
    assert len(USED) > 30
    assert sorted(USED) == error_codes.codes()


def test_the_pages_are_found_in_a_zip_file(tmp_path):
    package = ROOT / "jdp"
    with zipfile.ZipFile(tmp_path / "jdp.zip", "w") as packed:
        for name in ("__init__.py", "__main__.py", *("error_codes/" + x for x in PACKED)):
            packed.write(package / name, f"jdp/{name}")
    done = subprocess.run(
        [sys.executable, "-m", "jdp", "explain-error", "JDP310"],
        env={"PYTHONPATH": str(tmp_path / "jdp.zip")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.stdout == error_codes.page("JDP310"), done.stderr


@pytest.mark.parametrize("code", error_codes.codes())
def test_a_page_has_its_parts_in_order(code):
    page = error_codes.page(code)
    assert page.startswith(f"# {code}: ") and error_codes.title(code)
    places = [page.find(part) for part in PARTS]
    assert -1 not in places and places == sorted(places), places


# The examples are the same on the oldest JAX, where nothing slow is tested.
@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("code", error_codes.codes())
def test_the_example_of_a_page_runs_and_shows_its_code(code, tmp_path):
    (example,) = re.findall(r"^```python\n(.*?)^```", error_codes.page(code), re.M | re.S)
    assert code in example
    if code < "JDP2" and "jax.config" not in example:
        exec(compile(example, code, "exec"), {})
        return
    # These want JAX as it starts, or no step of the same process can be trusted after them.
    command = [sys.executable, "-c", example]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S)
    assert run.returncode == 0, run.stderr[-3000:]


def test_explain_error_prints_the_page(capsys):
    assert cli.main(["explain-error", "jdp101"]) == 0
    assert capsys.readouterr().out == error_codes.page("JDP101")


def test_explain_error_lists_all_codes_with_their_titles(capsys):
    assert cli.main(["explain-error", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{code}  {error_codes.title(code)}" in shown for code in error_codes.codes())


@pytest.mark.parametrize("arguments", [[], ["JDP999"], ["../../cli"], ["JDP101", "JDP102"]])
def test_explain_error_refuses_what_is_not_one_code(arguments, capsys):
    assert cli.main(["explain-error", *arguments]) == 2
    assert "jdp explain-error" in "".join(capsys.readouterr())
