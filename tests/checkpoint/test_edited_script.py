"""A script that is edited while it runs is not trained on by mistake."""

import re

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("processes")]

# The first life commits 3 steps, edits a module that it imports, and dies.
SCRIPT = """
import os, sys
from pathlib import Path
import jax.numpy as jnp
import jdp
import settings

mesh = jdp.init()
step = jdp.train_step(lambda state, batch: ({"n": state["n"] + settings.ADD}, {}))
with jdp.Checkpointer(Path(__file__).parent / "run", commit_every=1) as ckpt:
    state = ckpt.restore({"n": jnp.zeros(())}OPTIONS)
    first = ckpt.steps
    while ckpt.steps < 5:
        state, _ = step(state, jnp.zeros(1))
        ckpt.step(state)
        if ckpt.steps == 3 and not first:
            ckpt._session._commits.wait()
            Path(settings.__file__).write_text("# settings\\nADD = 10\\n")
            os._exit(7)
print("result", float(state["n"]), "after", first)
"""


def run(jdp_run, *flags, options=""):
    one = jdp_run(*flags, "--standbys=0", script=SCRIPT.replace("OPTIONS", options))
    one.deadline_s = 120.0
    return one


@pytest.fixture(autouse=True)
def settings(tmp_path):
    (tmp_path / "settings.py").write_text("# settings\nADD = 1\n")


def test_a_recovery_with_an_edited_module_is_refused(jdp_run):
    one = run(jdp_run, "--max-restarts=1")
    assert one.wait() != 0
    assert re.search("settings.py:2 .*`ADD = 10`", one.output) and "result" not in one.output


def test_a_recovery_with_an_edited_module_may_be_asked_for(jdp_run):
    one = run(jdp_run, "--max-restarts=1", options=', allow="new script"')
    assert one.wait() == 0, one.output
    assert "result 23.0 after 3" in one.output and "settings.py:2" in one.output


def test_a_recovery_of_an_unedited_script_goes_on(jdp_run, tmp_path):
    (tmp_path / "settings.py").write_text("# settings\nADD = 10\n")
    one = run(jdp_run, "--max-restarts=1")
    assert one.wait() == 0, one.output
    assert "result 50.0 after 3" in one.output and "settings.py" not in one.output
    assert "another program" not in one.output
