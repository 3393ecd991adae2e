"""A commit takes the way that ARCHITECTURE.md describes, through few files."""

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
    """Records the functions of jdp that any thread calls, as `path:name`, phase by phase."""

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
        if event == "call" and path.startswith(f"{ROOT}/jdp/"):
            name = f"{Path(path).relative_to(ROOT)}:{frame.f_code.co_qualname}"
            self.phases.setdefault(self.phase, set()).add(name)


def live(path):
    jdp.init()
    rows, state = Rows(), {"w": jnp.zeros(4)}
    ckpt = jdp.Checkpointer(path, commit_every=1)
    with Calls() as calls:
        calls.phase = "restore"
        ckpt.restore(state, rows)
        ckpt._session._commits.wait()
        calls.phase = "step"
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
    # Beside the way, the launcher is told of the progress.
    others = [name for name in again["step"] if not name.startswith("jdp/worker/")]
    files = {name.partition(":")[0] for name in others}
    assert len(files) <= 10, sorted(files)
    assert len({name.partition(":")[0] for name in way()}) <= 10
    assert way() and not {*way()} - {*again["step"], *again["restore"]}
