"""The path of a directory of checkpoints, and the lock that keeps two runs out of it."""

import contextlib
import datetime
import fcntl
import os
import socket
import time
import weakref
from pathlib import Path
from typing import Any, BinaryIO

# A process that was just killed may still be exiting. An NFS server keeps the lock of a process
# that died with its host for 90 s.
_TIMEOUT_S, _LOST_TIMEOUT_S = 2.0, 120.0


# Lock files of this process. A forked child shares them, and may outlive this process.
_files: weakref.WeakSet[BinaryIO] = weakref.WeakSet()


def folder_path(given: Any) -> Path:
    """Return the absolute path of a directory of checkpoints."""
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(
            f"the directory of checkpoints is {given!r}, which is not a path. Write "
            'jdp.Checkpointer("checkpoints").'
        )
    if not os.fspath(given):
        raise ValueError(
            "the directory of checkpoints is an empty text, which would be the working directory. "
            'Write "checkpoints", or "." if that is meant.'
        )
    if "://" in str(given):
        raise ValueError(
            f"{given} is not a folder on a disk: a file there could not be locked against other "
            "runs. Give a path, perhaps of a bucket that is mounted."
        )
    return Path(given).expanduser().absolute()


def locked(path: Path, *, resumes: bool, timeout_s: float | None = None) -> BinaryIO:
    """Return the file that keeps other runs out of a directory until it is closed.

    Creates the directory. `resumes`: the lock holder may be this same run, on a host that died.
    `timeout_s`: how long to wait for it, if not as long as that takes.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Unbuffered, or a full disk would raise only in close.
            file = stack.enter_context(open(path / "lock", "ab+", buffering=0))
            default_s = _LOST_TIMEOUT_S if resumes else _TIMEOUT_S
            _lock(file, path, default_s if timeout_s is None else timeout_s)
            file.seek(0)
            if not b"process ".startswith(file.read(8)):  # a write that failed leaves its beginning
                raise FileExistsError("the file `lock` there is not of jdp")
            file.truncate(0)
            now = datetime.datetime.now(datetime.UTC)
            owner = f"process {os.getpid()} on {socket.gethostname()} since {now:%F %T.%f} UTC"
            file.write(f"{owner}\n".encode())
            os.fsync(file)  # processes of other hosts read it
        except OSError as error:
            raise OSError(
                f"checkpoints cannot be written to {path}: {error}. Give Checkpointer a directory "
                "that this process may write to."
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
                    f"{path} is in use by another run ({owner}). Two runs in one directory would "
                    "mix their checkpoints: end the other one, or give this one a directory of "
                    "its own."
                ) from None
            time.sleep(0.02)
