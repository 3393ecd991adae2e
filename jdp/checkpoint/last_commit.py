"""Writes the latest commit of a host to the directory of its run, when its processes have ended.

`jdp run` starts it with the descriptor of the commit memory, and reads its answer in JSON.
"""

import json
import sys
from typing import Any

from jdp.checkpoint.commit_memory import CommitMemory
from jdp.checkpoint.directory import Folder, TornError
from jdp.checkpoint.saved_leaves import leaves_of, to_disk, unpack


def save_last_commit(file: int) -> dict[str, Any]:
    """Write the latest commit as a checkpoint, unless an intact one is at least as recent.

    Args:
      file: descriptor of the commit memory.

    Returns:
      `life`, `step` and `directory` of the state a resumed run would restore; empty if
      there is none.

    Raises:
      OSError: if the directory is not on this host, or cannot be written to.
      RuntimeError: if another run writes there.
    """
    memory = CommitMemory(file)
    commit = memory.latest()
    if commit is None:
        return {}
    facts = commit.facts
    life, step, folder = facts["life"], facts["step"], Folder(facts["directory"])
    if not folder.path.is_dir():
        raise FileNotFoundError(f"{folder.path} is not on this host")
    folder.lock(resumes=True)  # the same command on another host may write there, too
    try:
        latest = _latest_intact(folder, (life, step))
        if latest is None:
            leaves = leaves_of(facts)
            folder.write(life, step, facts, to_disk(leaves, unpack(memory.read(commit), leaves)))
            latest = life, step
    finally:
        folder.unlock()
    return {"life": latest[0], "step": latest[1], "directory": str(folder.path)}


# Life and step of the latest intact checkpoint, unless it is older than `least`.
def _latest_intact(folder: Folder, least: tuple[int, int]) -> tuple[int, int] | None:
    for checkpoint in folder.checkpoints():
        if checkpoint[:2] < least:
            return None
        try:
            folder.facts(checkpoint)
            return checkpoint[:2]
        except TornError:
            pass
    return None


if __name__ == "__main__":
    try:
        answer = save_last_commit(int(sys.argv[1]))
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))
