"""Checkpoints on disk: one folder each, written by Orbax, with a manifest that shows damage.

    directory/lock                 held by the run that writes here
    directory/1000-1/state/        step 1000 of the run's first life: written by Orbax
    directory/1000-1/manifest      its contents, and the checksum of each of its files

A checkpoint is written under a temporary name and renamed once all its files, the manifest last,
are on disk. Its checksums detect later damage by a power cut or a bad disk.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jdp.checkpoint.directory_lock import locked

_NAME = re.compile(r"(\d+)-(\d+)")
_UNFINISHED = ".part"


class Checkpoint(NamedTuple):
    """A checkpoint, intact when it was written. Sorts by life of the run, then by step."""

    life: int  # of the run that wrote it: each restore begins a new one, counting from 1
    step: int
    path: Path


class TornError(Exception):
    """A checkpoint is not as it was written."""


class Folder:
    """The checkpoints of one run, in a folder that is made when it is locked."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if "://" in str(path):
            raise ValueError(
                f"{path} is not a folder on a disk: a file there could not be locked against other "
                "runs. Give a path, perhaps of a bucket that is mounted."
            )
        self.path = Path(path).expanduser().absolute()
        self._lock: Any = None

    def lock(self, *, resumes: bool = False) -> None:
        """Keep other runs out until `unlock`, as `locked` does; remove unfinished checkpoints."""
        if self._lock is not None:
            return
        self._lock = locked(self.path, resumes=resumes)
        for left_over in self.path.glob(f"*{_UNFINISHED}"):
            if _NAME.fullmatch(left_over.stem):  # otherwise it is not a file of jdp
                shutil.rmtree(left_over, ignore_errors=True)

    def unlock(self) -> None:
        """Let other runs in."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints, latest first, damaged or not."""
        if not self.path.is_dir():
            return []
        names = [(_NAME.fullmatch(path.name), path) for path in self.path.iterdir()]
        found = [Checkpoint(int(m[2]), int(m[1]), path) for m, path in names if m]
        return sorted(found, reverse=True)

    def facts(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return the facts written with a checkpoint.

        Raises:
          TornError: if a byte differs from what was written, naming the file.
        """
        try:
            document = json.loads((checkpoint.path / "manifest").read_bytes())
            manifest, checksum = document["manifest"], document["sha256"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise TornError(f"its manifest cannot be read ({error})") from error
        if checksum != _checksum(manifest):
            raise TornError("its manifest has another checksum than when it was written")
        for name, (num_bytes, checksum) in manifest["files"].items():
            file = checkpoint.path / name
            try:
                found = file.stat().st_size
                if found != num_bytes:
                    raise TornError(f"{name} has {found} bytes, not {num_bytes}")
                if _file_checksum(file) != checksum:
                    raise TornError(f"{name} has another checksum than when it was written")
            except OSError as error:
                raise TornError(f"{name} cannot be read ({error})") from error
        return manifest["facts"]

    def read(self, checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Read the arrays with these names."""
        if not names:
            return {}
        import orbax.checkpoint as ocp

        wanted = ocp.args.PyTreeRestore(
            item=dict.fromkeys(names, 0),
            restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names},
            partial_restore=True,
        )
        with _orbax() as orbax:
            return orbax.restore(checkpoint.path / "state", args=wanted)

    def write(self, life: int, step: int, facts: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Write JSON-serializable facts and nonempty arrays; return when they are on disk.

        Raises:
          OSError: if they cannot be written; earlier checkpoints are kept.
        """
        final = self.path / f"{step}-{life}"
        part = final.with_name(final.name + _UNFINISHED)
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            _write(part, facts, arrays)
            os.rename(part, final)
            _sync(self.path)
        except Exception as error:
            shutil.rmtree(part, ignore_errors=True)
            raise self._failure(step, arrays, error) from error

    def keep(self, count: int) -> None:
        """Remove all but the latest `count` checkpoints."""
        for checkpoint in self.checkpoints()[count:]:
            # Renamed first, so that an interrupted removal does not look like a checkpoint.
            part = checkpoint.path.with_name(checkpoint.path.name + _UNFINISHED)
            with contextlib.suppress(OSError):
                os.rename(checkpoint.path, part)
                shutil.rmtree(part)

    def _failure(self, step: int, arrays: dict[str, Any], error: Exception) -> OSError:
        needed = sum(array.nbytes for array in arrays.values())
        try:
            free = f"{shutil.disk_usage(self.path).free} bytes are free there"
        except OSError as missing:
            free = str(missing)
        last = next((str(found.step) for found in self.checkpoints()), "none")
        return OSError(
            f"step {step} could not be saved to {self.path}: it takes {needed} bytes or a little "
            f"more, and {free}. The last good checkpoint stays: {last}. What the disk said: "
            f"{type(error).__name__}: {error}"
        )


def prepare() -> None:
    """Import Orbax ahead of the first write."""
    import orbax.checkpoint  # noqa: F401


# Configures Orbax for a single process, regardless of the number of processes: only process 0 calls
# this, with unsharded host arrays.
@contextlib.contextmanager
def _orbax() -> Iterator[Any]:
    import jax
    import orbax.checkpoint as ocp

    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix="jdp"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as orbax:
        yield orbax


def _write(part: Path, facts: dict[str, Any], arrays: dict[str, Any]) -> None:
    import orbax.checkpoint as ocp

    if arrays:  # Orbax rejects an empty tree
        with _orbax() as orbax:
            orbax.save(part / "state", args=ocp.args.PyTreeSave(arrays))
    files = [file for file in sorted((part / "state").rglob("*")) if file.is_file()]
    sums = {str(f.relative_to(part)): [f.stat().st_size, _file_checksum(f)] for f in files}
    manifest = {"facts": facts, "files": sums}
    with open(part / "manifest", "w") as file:
        json.dump({"sha256": _checksum(manifest), "manifest": manifest}, file, indent=1)
    # Orbax does not sync some of its files, nor any of its folders.
    for path in [*part.rglob("*"), part]:
        _sync(path)


def _checksum(manifest: Any) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _file_checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
