"""A commit takes the path that ARCHITECTURE.md describes, through few files."""

import re
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
from support.launched import Launcher

import jdp

ROOT = Path(__file__).parents[2]


class Rows:
    position = 0


class Calls:
    """Records the functions of jdp that are called, as `path:name`, phase by phase.

    In the main thread and in the one that writes commits: others only watch.
    """

    def __init__(self):
        self.phases = {}
        self.phase = None

    def __enter__(self):
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile(None)

    def __call__(self, frame, event, _):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{ROOT}/jdp/") and self._is_on_the_way():
            name = f"{Path(path).relative_to(ROOT)}:{frame.f_code.co_qualname}"
            self.phases.setdefault(self.phase, set()).add(name)

    def _is_on_the_way(self):
        thread = threading.current_thread()
        return thread is threading.main_thread() or thread.name.startswith("jdp commit")


def live(path):
    jdp.init()
    rows, state = Rows(), {"w": jnp.zeros(4)}
    ckpt = jdp.Checkpointer(path, commit_every=1)
    with Calls() as calls:
        calls.phase = "restore"
        ckpt.restore(state, rows)
        ckpt._session._commits.wait()
        for calls.phase in ("first step", "step"):
            ckpt.step(state, rows)
            ckpt._session._commits.wait()
    return {phase: sorted(names) for phase, names in calls.phases.items()}


def way():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text.partition("### A state in a commit")[2].partition("\n#")[0]
    return [
        f"{file}:{function}"
        for file, function in re.findall(r"^\| `(jdp/[^`]+)` \| `([^`]+)` \|", table, re.MULTILINE)
    ]


def test_a_commit_takes_the_way_that_is_written_down_through_at_most_10_files(tmp_path):
    with Launcher() as launcher:
        launcher.process("test_way_of_a_commit:live", tmp_path).result()
        again = launcher.process("test_way_of_a_commit:live", tmp_path, generation=1).result()
    files = {name.partition(":")[0] for name in again["step"]}
    assert len({file for file in files if "/checkpoint/" in file}) <= 10, sorted(files)
    assert len({name.partition(":")[0] for name in way()}) <= 10
    assert way() and not {*way()} - {*again["step"], *again["restore"]}
