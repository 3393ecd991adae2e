"""The folder of compiled programs, which a process that takes over reads and need not compile."""

import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

VARIABLE = "JAX_COMPILATION_CACHE_DIR"

_SUFFIX = "-cache"  # of JAX's entries

# Longer than between two pieces of one file, shorter than between a program and its next run.
_JUST_NOW_S = 1.0


def folder(inherited: Mapping[str, str]) -> str:
    """Return the folder of programs of all runs: that of the environment, or else of the user.

    A user without a home, as in a container with an arbitrary user id, gets a new one.
    """
    if VARIABLE in inherited:
        return inherited[VARIABLE]
    caches = inherited.get("XDG_CACHE_HOME")
    if not caches:
        try:
            caches = Path.home() / ".cache"
        except RuntimeError:
            caches = tempfile.mkdtemp(prefix="jdp-cache-")
    return str(Path(caches, "jdp", "xla"))


def drop_torn(folder: Path) -> None:
    """Remove programs that were being written when a process was killed.

    JAX writes a program in place. For a truncated one, each process warns and compiles it
    again, and does not replace it.
    """
    oldest = time.time() - _JUST_NOW_S
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.name.endswith(_SUFFIX) and entry.stat().st_mtime >= oldest:
                    os.unlink(entry)
