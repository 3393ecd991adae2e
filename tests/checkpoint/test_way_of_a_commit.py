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


def called(action):
    """Return the functions of jdp that an action calls in any thread, as `path:name`."""
    found = set()

    def record(frame, event, _):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{ROOT}/jdp/"):
            found.add(f"{Path(path).relative_to(ROOT)}:{frame.f_code.co_qualname}")

    sys.setprofile(record)
    threading.setprofile(record)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(found)


def live(path):
    jdp.init()
    rows, state, found = Rows(), {"w": jnp.zeros(4)}, {}
    ckpt = jdp.Checkpointer(path, commit_every=1)
    found["restore"] = called(lambda: ckpt.restore(state, rows))

    def step():
        ckpt.step(state, rows)
        ckpt._session._commits.wait()

    found["step"] = called(step)
    return found


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
