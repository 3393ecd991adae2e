"""The run that a file of metrics belongs to, so that no run continues the file of another one.

`jdp run` gives a run an id, which is kept beside the file, in `metrics.jsonl.run`: a line of its
own in the file would be a row without a step for all that read it.
"""

from pathlib import Path

from jdp.distributed import this_process
from jdp.worker import launcher_client
from jdp.worker.launcher_client import Assignment

# Files that this process has opened.
_claimed: set[Path] = set()


def may_continue(path: Path, *, is_later: bool) -> bool:
    """Whether this run may append to a file that has lines.

    A run that begins may not, whatever its first step is; its later generations may, if the file is
    of this run. Without `jdp run` there is no id, and a script may keep checkpoints of its own: it
    may append if it begins later than the file.
    """
    assigned = _assignment()
    if launcher_client.is_asked_to_resume():
        return True
    if assigned is None:
        return is_later or this_process.current.has_restored
    if assigned.generation == 0:
        return assigned.resumes or this_process.current.has_restored or path in _claimed
    return _read(path) == assigned.run_id


def claim(path: Path) -> None:
    """Write down that a file belongs to this run."""
    _claimed.add(path)
    assigned = _assignment()
    if assigned is None or _read(path) == assigned.run_id:
        return
    # Renamed, since a process that dies here must leave all of it or nothing.
    part = path.with_name(f"{path.name}.run.part")
    part.write_text(assigned.run_id)
    part.rename(_beside(path))


def _assignment() -> Assignment | None:
    member = launcher_client.current()
    return None if member is None else member.assignment


def _read(path: Path) -> str | None:
    try:
        return _beside(path).read_text(errors="replace")  # of no run, if it is damaged
    except FileNotFoundError:
        return None


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.run")
