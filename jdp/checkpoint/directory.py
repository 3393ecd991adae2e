"""Checkpoints on disk: one folder each, written by Orbax, with a manifest that detects damage.

    directory/lock                 held by the run that writes here
    directory/1000-1/state/        step 1000 of the run's first life: written by Orbax
    directory/1000-1/state-2/      what process 2 wrote of a state sharded over processes
    directory/1000-1/manifest      its contents, and the checksum of each of its files

A checkpoint is written under a temporary name, and renamed once all its files are on disk, the
manifest last. jdp only removes folders with such a manifest or temporary name.
"""

import contextlib
import datetime
import fcntl
import hashlib
import logging
import os
import re
import shutil
import socket
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jdp.checkpoint import manifest, orbax_files
from jdp.checkpoint.manifest import TornError
from jdp.checkpoint.saved_leaves import ArrayForm

# To wait for the lock: an NFS server keeps a dead host's for 90 s.
_TIMEOUT_S, _LOST_TIMEOUT_S = 2.0, 120.0


# Lock files of this process; a forked child, which may outlive it, closes them.
_files: weakref.WeakSet[BinaryIO] = weakref.WeakSet()


def _folder_path(given: Any) -> Path:
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(
            f"the directory of checkpoints must be a path, got {given!r}. Write "
            'jdp.Checkpointer("checkpoints").'
        )
    if not os.fspath(given):
        raise ValueError(
            "the directory of checkpoints is an empty string, which would be the working "
            'directory. Write "checkpoints", or "." for the working directory.'
        )
    if "://" in str(given):
        raise ValueError(
            f"{given} is not a folder on a disk, so its files cannot be locked against other "
            "runs. Pass a path, perhaps of a mounted bucket."
        )
    return Path(given).expanduser().absolute()


def locked(path: Path, *, resumes: bool, timeout_s: float | None = None) -> BinaryIO:
    """Create and lock a directory; return the file that holds the lock until it is closed.

    `resumes`: the lock may be of this same run, on a host that died.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Unbuffered, or a full disk would raise only in close.
            file = stack.enter_context(open(path / "lock", "ab+", buffering=0))
            default_s = _LOST_TIMEOUT_S if resumes else _TIMEOUT_S
            _lock(file, path, default_s if timeout_s is None else timeout_s)
            file.seek(0)
            if not b"process ".startswith(file.read(8)):  # a failed write leaves the beginning
                raise FileExistsError("its file `lock` was not written by jdp")
            file.truncate(0)
            now = datetime.datetime.now(datetime.UTC)
            owner = f"process {os.getpid()} on {socket.gethostname()} since {now:%F %T.%f} UTC"
            file.write(f"{owner}\n".encode())
            os.fsync(file)
        except OSError as error:
            raise OSError(
                f"checkpoints cannot be written to {path}: {error}. Pass a writable directory to "
                "Checkpointer."
            ) from error
        stack.pop_all()
        _files.add(file)
        return file


def _close_in_child() -> None:
    for file in _files:
        file.close()


os.register_at_fork(after_in_child=_close_in_child)


def _lock(file: BinaryIO, path: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.seek(0)
                owner = file.read().decode(errors="replace").strip()
                raise RuntimeError(
                    f"{path} is in use by another run ({owner}). Stop the other run or use "
                    "another directory: two runs would overwrite each other's checkpoints."
                ) from None
            time.sleep(0.02)


_log = logging.getLogger("jdp")

_NAME = re.compile(r"(\d+)-(\d+)")
# Only jdp uses such names, so it may remove them.
_UNFINISHED, _GATHERING = ".jdp-part", ".jdp-gathering"
_NAME_OF_GATHERING = re.compile(rf"(\d+)-(\d+)-.*{re.escape(_GATHERING)}")
_DAMAGED, _REMOVED = ".damaged", f".removed{_UNFINISHED}"


class Checkpoint(NamedTuple):
    """A checkpoint, perhaps damaged later. Sorts by life, then by step."""

    life: int  # of the run; each restore begins a new one, from 1
    step: int
    path: Path


class Folder:
    """One run's checkpoints."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _folder_path(path)
        self._lock: Any = None
        self._logged: set[str] = set()
        self._torn: set[Path] = set()

    def lock(self, *, resumes: bool = False, timeout_s: float | None = None) -> None:
        """Lock the folder until `unlock`, and remove unfinished checkpoints."""
        if self._lock is not None:
            return
        self._lock = locked(self.path, resumes=resumes, timeout_s=timeout_s)
        for left_over in self.path.glob(f"*{_UNFINISHED}"):
            self.discard(left_over)

    def unlock(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def owner(self) -> str:
        """Return the lock's text, equal in all processes with this directory."""
        try:
            return (self.path / "lock").read_text()
        except OSError:
            return ""

    def checkpoints(self) -> list[Checkpoint]:
        """Return all checkpoints, latest first, damaged or not."""
        if not self.path.is_dir():
            return []
        found = []
        for path in self.path.iterdir():
            if (numbers := _NAME.fullmatch(path.name)) is None:
                continue
            if _is_checkpoint(path):
                found.append(self._identified(Checkpoint(int(numbers[2]), int(numbers[1]), path)))
            else:
                self._warn_once(path, "is not a checkpoint of jdp and is ignored.")
        return sorted(found, reverse=True)

    def checkpoint(self, life: int, step: int) -> Checkpoint:
        """Return a checkpoint, perhaps only on another host."""
        place = Checkpoint(life, step, self.place(life, step))
        return next((each for each in self.checkpoints() if each[:2] == place[:2]), place)

    def place(self, life: int, step: int) -> Path:
        """Return a written checkpoint's folder."""
        return self.path / f"{step}-{life}"

    def facts(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Verify a checkpoint, and return the facts written with it."""
        try:
            found = _manifest_with_files(checkpoint.path)
            for name, (_, checksum) in found["files"].items():
                if _file_checksum(checkpoint.path / name) != checksum:
                    raise TornError(f"{name} has another checksum than when it was written")
            _require_arrays(checkpoint.path, found)
        except TornError:
            self._torn.add(checkpoint.path)
            raise
        return found["facts"]

    def read(self, checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Read the arrays with these names."""
        return orbax_files.read(checkpoint.path / "state", names) if names else {}

    def write(self, life: int, step: int, facts: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Write JSON facts and nonempty arrays to disk."""
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
        """Return the folder of a checkpoint while it is written."""
        name = f"{step}-{life}" if attempt is None else f"{step}-{life}.{attempt}"
        return self.path / f"{name}{_UNFINISHED}"

    def begin(self, part: Path) -> None:
        """Make an empty folder for a checkpoint."""
        self.discard(part)
        part.mkdir()

    def gathering(self, life: int, step: int, tag: str) -> Path:
        """Make and return the folder in which hosts gather a commit's shards."""
        path = self.path / f"{step}-{life}-{tag}{_GATHERING}"
        path.mkdir(exist_ok=True)
        return path

    def finish(
        self, part: Path, life: int, step: int, facts: dict[str, Any], sums: dict[str, list[Any]]
    ) -> None:
        """Make a checkpoint of the written folders; `sums` are from `sealed`."""
        manifest.write(part, facts, sums)
        _sync(part)
        place = self.place(life, step)
        if self._is_damaged(place):  # as when the last commit replaces it
            self.remove(place)
        if os.path.lexists(place):  # a rename would replace an empty folder
            raise FileExistsError(f"{place} already exists")
        os.rename(part, place)
        self._torn.discard(place)
        _sync(self.path)

    def discard(self, part: Path) -> None:
        """Remove an unfinished checkpoint."""
        shutil.rmtree(part, ignore_errors=True)

    def keep(self, count: int) -> None:
        """Remove all but `count` intact checkpoints, and gathered shards; renamed folders stay."""
        self.discard_gathering()
        num_intact = 0
        for checkpoint in self.checkpoints():
            if checkpoint.path != self.place(*checkpoint[:2]):
                continue
            if num_intact >= count:
                self.remove(checkpoint.path)
            elif self._seems_intact(checkpoint):
                num_intact += 1

    def remove(self, path: Path) -> None:
        """Remove a checkpoint; rename one that jdp may not own, without a readable manifest."""
        # Renamed first, so an interrupted removal does not look like a checkpoint.
        is_own = manifest.exists(path)
        part = path.with_name(path.name + (_REMOVED if is_own else _DAMAGED))
        with contextlib.suppress(OSError):
            if is_own:
                self.discard(part)
            os.rename(path, part)
            if is_own:
                shutil.rmtree(part)

    def discard_gathering(self, up_to: tuple[int, int] | None = None) -> None:
        """Remove incompletely gathered commits, up to (life, step)."""
        for left_over in self.path.glob(f"*{_GATHERING}"):
            numbers = _NAME_OF_GATHERING.fullmatch(left_over.name)
            if numbers and (up_to is None or (int(numbers[2]), int(numbers[1])) <= up_to):
                self.discard(left_over)

    def failure(self, step: int, arrays: dict[str, Any], error: Exception) -> OSError:
        """Return the error for an unwritable checkpoint."""
        needed = sum(array.nbytes for array in arrays.values())
        try:
            free = f"{shutil.disk_usage(self.path).free} bytes are free there"
        except OSError as missing:
            free = str(missing)
        good = [each.step for each in self.checkpoints() if self._seems_intact(each)]
        return OSError(
            f"step {step} could not be saved to {self.path}: it needs at least {needed} bytes, "
            f"and {free}. Latest intact checkpoint: {[*good, 'none'][0]}. Error of the disk: "
            f"{type(error).__name__}: {error}"
        )

    def _identified(self, named: Checkpoint) -> Checkpoint:
        try:
            facts = manifest.read(named.path)["facts"]
        except TornError:
            return named
        found = Checkpoint(facts["life"], facts["step"], named.path)
        if found != named:
            what = f"holds step {found.step} of life {found.life} and is used as such."
            self._warn_once(named.path, what)
        return found

    def _warn_once(self, path: Path, what: str) -> None:
        if path.name not in self._logged:
            self._logged.add(path.name)
            _log.warning("jdp: %s %s", path, what)

    def _seems_intact(self, checkpoint: Checkpoint) -> bool:
        if checkpoint.path in self._torn:
            return False
        with contextlib.suppress(TornError):
            return bool(_manifest_with_files(checkpoint.path))
        return False

    def _is_damaged(self, path: Path) -> bool:
        if not _is_checkpoint(path):
            return False
        try:
            self.facts(Checkpoint(0, 0, path))
        except TornError:
            return True
        return False


def _is_checkpoint(path: Path) -> bool:
    parts = (path / "state").is_dir() or any(path.glob("state-[0-9]*/"))
    return path.is_dir() and (parts or (path / "manifest").is_file())


def _manifest_with_files(path: Path) -> dict[str, Any]:
    """Return a manifest, and check the files' sizes."""
    found = manifest.read(path)
    for name, (num_bytes, _) in found["files"].items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise TornError(f"{name} cannot be read ({error})") from error
        if size != num_bytes:
            raise TornError(f"{name} has {size} bytes, not {num_bytes}")
    return found


def _require_arrays(path: Path, found: dict[str, Any]) -> None:
    arrays = manifest.arrays(found["facts"])
    for folder in sorted({Path(name).parts[0] for name in found["files"]}):
        wanted = arrays.get(folder, {})
        forms = orbax_files.forms if folder == "state" else orbax_files.forms_of_parts
        try:
            stored = forms(path / folder)
        except (OSError, ValueError, KeyError) as error:
            raise TornError(f"{folder} cannot be read ({error})") from error
        for name in {**wanted, **stored}:
            if stored.get(name) != wanted.get(name):
                held, said = _form(stored.get(name)), _form(wanted.get(name))
                raise TornError(f"{folder} has {name} as {held}, and its manifest as {said}")


def _form(form: ArrayForm | None) -> str:
    return "nothing" if form is None else f"{form[1]}{[*form[0]]}"


def sealed(state: Path) -> dict[str, list[Any]]:
    """Sync a folder to disk; return each file's size and checksum."""
    if not state.exists():
        return {}
    files = [file for file in sorted(state.rglob("*")) if file.is_file()]
    # Orbax does not sync all its files, nor its folders.
    for path in [*state.rglob("*"), state]:
        _sync(path)
    return {
        str(file.relative_to(state.parent)): [file.stat().st_size, _file_checksum(file)]
        for file in files
    }


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


# "1000" or "run_1000" of a CheckpointManager, "checkpoint_1000" of Flax.
_STEP = re.compile(r"(?:.*_)?(\d+)")
_TREE, _STEP_OF_MANAGER = "_METADATA", "_CHECKPOINT_METADATA"


class ForeignCheckpoints(NamedTuple):
    """Another tool's checkpoints in a directory."""

    path: Path
    tool: str
    steps: dict[int | None, list[Path]]  # Orbax PyTrees by step; None: without a step

    @property
    def latest(self) -> int | None:
        """The latest step."""
        return max((step for step in self.steps if step is not None), default=None)

    def __str__(self) -> str:
        step = "" if self.latest is None else f", step {self.latest}"
        return f"{self.path} holds {self.tool}{step}"

    def advice(self) -> str:
        """Return the line that reads the latest step."""
        trees = self.steps[self.latest]
        if len(trees) == 1:
            return f'state = jdp.load("{self.path}", like=state)'
        if trees:
            return f'state = jdp.load("{trees[0]}", like=state), or another of {_names(trees)}'
        if self.tool.startswith("Flax"):
            flax = "flax.training.checkpoints.restore_checkpoint"
            return f'state = {flax}("{self.path}", state)'
        return f'state = orbax.checkpoint.CheckpointManager("{self.path}").restore({self.latest})'

    def tree(self, step: int | None) -> Path:
        """Return the PyTree of a step, or of the latest one."""
        step = self.latest if step is None else step
        if step not in self.steps:
            known = sorted(each for each in self.steps if each is not None)
            raise ValueError(f"{self.path} has no step {step}. It holds {known}.")
        if len(self.steps[step]) != 1:
            names = _names(self.steps[step]) or "none"
            raise ValueError(
                f"{self}. jdp.load reads one PyTree of Orbax; the PyTrees there are: {names}. "
                f"Write {self.advice()}."
            )
        return self.steps[step][0]


def find_foreign(path: Path) -> ForeignCheckpoints | None:
    """Return another tool's checkpoints in a directory."""
    if not path.is_dir() or manifest.exists(path) or manifest.exists(path.parent):
        return None
    if (path / _TREE).is_file():
        return ForeignCheckpoints(path, "a PyTree of Orbax", {None: [path]})
    if (path / _STEP_OF_MANAGER).is_file():
        return ForeignCheckpoints(path, "a step of Orbax", {None: _trees(path)})
    steps, flax = {}, {}
    for each in path.iterdir():
        if (number := _STEP.fullmatch(each.name)) is None:
            continue
        if (each / _STEP_OF_MANAGER).is_file():
            steps[int(number[1])] = [each] if (each / _TREE).is_file() else _trees(each)
        elif each.name.startswith("checkpoint_") and _is_map_of_msgpack(each):
            flax[int(number[1])] = list[Path]()
    if steps:
        return ForeignCheckpoints(path, "checkpoints of Orbax", steps)
    return ForeignCheckpoints(path, "Flax's files of checkpoints", flax) if flax else None


def _trees(step: Path) -> list[Path]:
    return sorted(each for each in step.iterdir() if (each / _TREE).is_file())


def _names(trees: list[Path]) -> str:
    return ", ".join(each.name for each in trees)


def _is_map_of_msgpack(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        first = file.read(1)
    return first in (b"\xde", b"\xdf") or b"\x80" <= first <= b"\x8f"
