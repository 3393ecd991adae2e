"""Count the kills of the kernel's OOM killer in the cgroup of this process."""

import contextlib
from pathlib import Path


def num_oom_kills(root: Path = Path("/")) -> int | None:
    """Return the number of OOM kills in the cgroup of this process, None if it is not known."""
    for file in _of_cgroup(root):
        with contextlib.suppress(OSError):
            for line in file.read_text().splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
    return None


def _of_cgroup(root: Path) -> list[Path]:
    """Return the files that may hold the count, of cgroup v2 and v1."""
    files, mounted = [], root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own = path.lstrip("/")
            if controllers == "":
                files += [mounted / own / "memory.events", mounted / "memory.events"]
            elif controllers == "memory":
                # A container mounts its own cgroup as the root.
                at = mounted / "memory"
                files += [at / own / "memory.oom_control", at / "memory.oom_control"]
    return files
