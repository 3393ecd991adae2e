"""Checkpoints on disk: one folder each, written by Orbax, with a manifest that shows damage.

    directory/lock                 held by the run that writes here
    directory/1000-1/state/        step 1000 of the run's first life: written by Orbax
    directory/1000-1/state-2/      what process 2 wrote, if the state was split over processes
    directory/1000-1/manifest      its contents, and the checksum of each of its files

A checkpoint is written under a temporary name and renamed once all its files, the manifest last,
are on disk. Its checksums detect later damage by a power cut or a bad disk. Only what holds such a
manifest, or has such a temporary name, is ever removed.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jdp.checkpoint import orbax_files
from jdp.checkpoint.directory_lock import folder_path, locked

_log = logging.getLogger("jdp")

_NAME = re.compile(r"(\d+)-(\d+)")
# Nobody else gives such names, so what has them may be removed.
_UNFINISHED, _GATHERING = ".jdp-part", ".jdp-gathering"
_NAME_OF_GATHERING = re.compile(rf"(\d+)-(\d+)-.*{re.escape(_GATHERING)}")
_DAMAGED = ".damaged"


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
        self.path = folder_path(path)
        self._lock: Any = None
        self._foreign: set[str] = set()  # names that were logged
        self._torn: set[Path] = set()

    def lock(self, *, resumes: bool = False, timeout_s: float | None = None) -> None:
        """Keep other runs out until `unlock`, as `locked` does; remove unfinished checkpoints."""
        if self._lock is not None:
            return
        self._lock = locked(self.path, resumes=resumes, timeout_s=timeout_s)
        for left_over in self.path.glob(f"*{_UNFINISHED}"):
            self.discard(left_over)

    def unlock(self) -> None:
        """Let other runs in."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def owner(self) -> str:
        """Return the text in the lock, equal in all processes that see the same directory."""
        try:
            return (self.path / "lock").read_text()
        except OSError:
            return ""

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints, latest first, damaged or not."""
        if not self.path.is_dir():
            return []
        found = []
        for path in self.path.iterdir():
            if (numbers := _NAME.fullmatch(path.name)) is None:
                continue
            if _is_checkpoint(path):
                found.append(Checkpoint(int(numbers[2]), int(numbers[1]), path))
            elif path.name not in self._foreign:
                self._foreign.add(path.name)
                _log.warning("jdp: %s is not a checkpoint of jdp and is left alone.", path)
        return sorted(found, reverse=True)

    def checkpoint(self, life: int, step: int) -> Checkpoint:
        """Return a checkpoint, which may be on another host only."""
        return Checkpoint(life, step, self.path / f"{step}-{life}")

    def facts(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return the facts written with a checkpoint.

        Raises:
          TornError: if a byte differs from what was written, naming the file.
        """
        try:
            manifest = _manifest_with_files(checkpoint.path)
            for name, (_, checksum) in manifest["files"].items():
                if _file_checksum(checkpoint.path / name) != checksum:
                    raise TornError(f"{name} has another checksum than when it was written")
        except TornError:
            self._torn.add(checkpoint.path)
            raise
        return manifest["facts"]

    def read(self, checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Read the arrays with these names."""
        return orbax_files.read(checkpoint.path / "state", names) if names else {}

    def write(self, life: int, step: int, facts: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Write JSON-serializable facts and nonempty arrays; return when they are on disk.

        Args:
          life, step: the name of the checkpoint.
          facts: about the state, see `Session`.
          arrays: name on disk -> array.

        Raises:
          OSError: if they cannot be written; earlier checkpoints are kept.
        """
        part = self.part(life, step)
        try:
            self.begin(part)
            if arrays:  # Orbax rejects an empty tree
                orbax_files.write(part / "state", arrays)
            self.finish(part, life, step, facts, sealed(part / "state"))
        except Exception as error:
            self.discard(part)
            raise self.failure(step, arrays, error) from error

    def part(self, life: int, step: int, *, attempt: int | None = None) -> Path:
        """Return where a checkpoint is while it is written, perhaps in the n-th attempt."""
        name = f"{step}-{life}" if attempt is None else f"{step}-{life}.{attempt}"
        return self.path / f"{name}{_UNFINISHED}"

    def begin(self, part: Path) -> None:
        """Make an empty folder for a checkpoint that is to be written."""
        self.discard(part)
        part.mkdir()

    def gathering(self, life: int, step: int, tag: str) -> Path:
        """Return the folder in which hosts gather the parts of a commit, and make it if need be."""
        path = self.path / f"{step}-{life}-{tag}{_GATHERING}"
        path.mkdir(exist_ok=True)
        return path

    def finish(
        self,
        part: Path,
        life: int,
        step: int,
        facts: dict[str, Any],
        sums: dict[str, list[Any]],
    ) -> None:
        """Make a checkpoint of the written folders, given the results of `sealed`.

        Args:
          part: the folder from `part`, in which all arrays are written.
          life, step: the name of the checkpoint.
          facts: JSON-serializable.
          sums: size and checksum of each file.
        """
        manifest = {"facts": facts, "files": sums}
        with open(part / "manifest", "w") as file:
            json.dump({"sha256": _checksum(manifest), "manifest": manifest}, file, indent=1)
        _sync(part / "manifest")
        _sync(part)
        os.rename(part, self.checkpoint(life, step).path)
        _sync(self.path)

    def discard(self, part: Path) -> None:
        """Remove an unfinished checkpoint."""
        shutil.rmtree(part, ignore_errors=True)

    def keep(self, count: int) -> None:
        """Remove what is older than the latest `count` intact checkpoints, and gathered parts.

        A damaged one takes the place of none: known damage, a manifest or sizes that are wrong.
        """
        self.discard_gathering()
        num_intact = 0
        for checkpoint in self.checkpoints():
            if num_intact >= count:
                self.remove(checkpoint)
            elif checkpoint.path not in self._torn:
                with contextlib.suppress(TornError):
                    _manifest_with_files(checkpoint.path)
                    num_intact += 1

    def remove(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint, if it is there and can be removed.

        One without a readable manifest is renamed: nothing proves that jdp wrote its files.
        """
        # Renamed first, so that an interrupted removal does not look like a checkpoint.
        is_own = _has_manifest(checkpoint.path)
        end = _UNFINISHED if is_own else _DAMAGED
        part = checkpoint.path.with_name(checkpoint.path.name + end)
        with contextlib.suppress(OSError):
            os.rename(checkpoint.path, part)
            if is_own:
                shutil.rmtree(part)

    def discard_gathering(self, up_to: tuple[int, int] | None = None) -> None:
        """Remove commits that were not gathered completely, since there is a later checkpoint.

        Args:
          up_to: life and step of that checkpoint; commits after it are kept. None removes all.
        """
        for left_over in self.path.glob(f"*{_GATHERING}"):
            numbers = _NAME_OF_GATHERING.fullmatch(left_over.name)
            if numbers and (up_to is None or (int(numbers[2]), int(numbers[1])) <= up_to):
                self.discard(left_over)

    def failure(self, step: int, arrays: dict[str, Any], error: Exception) -> OSError:
        """Return the error for a checkpoint that could not be written."""
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


def _is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, perhaps a damaged one, rather than a folder of others."""
    return path.is_dir() and ((path / "manifest").is_file() or any(path.glob("state*/")))


def _manifest_with_files(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint whose files have the sizes that it says.

    Raises:
      TornError: naming the file that is missing or has another size.
    """
    try:
        document = json.loads((path / "manifest").read_bytes())
        manifest, checksum = document["manifest"], document["sha256"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TornError(f"its manifest cannot be read ({error})") from error
    if checksum != _checksum(manifest):
        raise TornError("its manifest has another checksum than when it was written")
    for name, (num_bytes, _) in manifest["files"].items():
        try:
            found = (path / name).stat().st_size
        except OSError as error:
            raise TornError(f"{name} cannot be read ({error})") from error
        if found != num_bytes:
            raise TornError(f"{name} has {found} bytes, not {num_bytes}")
    return manifest


def _has_manifest(path: Path) -> bool:
    """Whether a folder has a manifest of jdp, whatever it says."""
    try:
        document = json.loads((path / "manifest").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and {*document} == {"sha256", "manifest"}


def sealed(state: Path) -> dict[str, list[Any]]:
    """Bring a folder of a checkpoint to the disk; return size and checksum of each file."""
    if not state.exists():
        return {}
    files = [file for file in sorted(state.rglob("*")) if file.is_file()]
    # Orbax does not sync some of its files, nor any of its folders.
    for path in [*state.rglob("*"), state]:
        _sync(path)
    return {
        str(file.relative_to(state.parent)): [file.stat().st_size, _file_checksum(file)]
        for file in files
    }


def _checksum(manifest: Any) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _file_checksum(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TornError(f"{path.name} cannot be read ({error})") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
