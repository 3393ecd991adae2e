"""A checkpoint of a state that is split over processes: each writes its parts to one directory."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdp.checkpoint import part_files, shards
from jdp.checkpoint.directory import Folder, sealed
from jdp.checkpoint.saved_leaves import to_disk_named
from jdp.distributed import agree, kv_store

# The store does not accept an infinite timeout.
_SLICE_S = 60.0


def write(folder: Folder, facts: dict[str, Any], values: Sequence[np.ndarray], number: int) -> None:
    """Write the parts of this process; return when the checkpoint is complete.

    All processes call it, in the thread that writes checkpoints. Process 0 makes the folder, and
    the manifest when all have written.

    Args:
      number: of this call in this life of the run, from 0.
    """
    names = shards.names(facts)
    arrays = to_disk_named([names[n] for n in shards.stored(facts)], values)
    me, step = jax.process_index(), facts["step"]
    # One folder for each attempt: a process that comes too late for one does not disturb the next.
    part = folder.part(facts["life"], step, attempt=number)
    store = _Store(f"jdp/saved/{facts['tag']}", number, step)
    failure, sums = None, {}
    try:
        if me == 0:
            folder.begin(part)
            store.put("begun", {"owner": folder.owner()})
        else:
            require_shared(folder, _right(store.get("begun", 0))["owner"])
        state = part / shards.folder_name(me)
        part_files.write(state, arrays.items())
        sums = sealed(state)
        store.put(f"{me}", {"files": sums})
    except Exception as error:
        failure = folder.failure(step, arrays, error)
        failure.__cause__ = error
        store.put("begun" if me == 0 else f"{me}", {"error": str(failure)})
    if me == 0:
        failure = _finish(folder, part, facts, store, sums, failure)
    answer = store.get("done", 0)
    if failure is not None:
        raise failure
    _right(answer)


def require_shared(folder: Folder, owner: str) -> None:
    """Refuse a directory that is not the one in which process 0 holds the lock."""
    if folder.owner() != owner:
        raise OSError(
            f"process {jax.process_index()} does not see the directory {folder.path} of process 0. "
            "The state is split over the processes, and each writes its own part of a checkpoint "
            "there. Give Checkpointer a directory on a file system that all hosts share."
        )


def _finish(
    folder: Folder,
    part: Path,
    facts: dict[str, Any],
    store: "_Store",
    sums: dict[str, list[Any]],
    failure: OSError | None,
) -> OSError | None:
    """Make a checkpoint of the parts of all, or remove them; return why it is not one."""
    end = time.monotonic() + agree.timeout_s()
    # Wait after a failure, too: files that others still write could not be removed.
    for process in range(1, jax.process_count()):
        try:
            sums |= _right(store.get(f"{process}", process, end))["files"]
        except Exception as error:
            failure = failure or _failure(folder, facts, error)
    try:
        if failure is None:
            store.delete_previous()  # all processes have read it
            kept = shards.of_all_processes(facts)
            folder.finish(part, facts["life"], facts["step"], kept, sums)
    except Exception as error:
        failure = _failure(folder, facts, error)
    if failure is not None:
        folder.discard(part)
    store.put("done", {} if failure is None else {"error": str(failure)})
    return failure


def _failure(folder: Folder, facts: dict[str, Any], error: Exception) -> OSError:
    failure = folder.failure(facts["step"], {}, error)
    failure.__cause__ = error
    return failure


def _right(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise OSError(answer["error"])
    return answer


class _Store:
    """Messages of processes about one checkpoint, through JAX's store."""

    def __init__(self, run: str, number: int, step: int) -> None:
        self._run, self._number, self._step = run, number, step

    def put(self, key: str, value: Any) -> None:
        kv_store.offer(f"{self._run}/{self._number}/{key}", json.dumps(value))

    def get(self, key: str, process: int, end: float | None = None) -> Any:
        """Return the message of a process, from before a deadline; default: the usual one."""
        timeout_s = agree.timeout_s()
        end = time.monotonic() + timeout_s if end is None else end
        left_s = end - time.monotonic()
        while True:  # Once at least: it may be there already.
            slice_s = max(0.0, min(left_s, _SLICE_S))
            text = kv_store.get(f"{self._run}/{self._number}/{key}", timeout_s=slice_s)
            if text is not None:
                return json.loads(text)
            if (left_s := end - time.monotonic()) <= 0:
                break
        raise OSError(
            f"process {process} did not write its part of step {self._step} within {timeout_s:g} s."
        )

    def delete_previous(self) -> None:
        if self._number:
            kv_store.delete(f"{self._run}/{self._number - 1}/")
