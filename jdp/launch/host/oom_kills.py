"""How many processes the kernel has killed because memory ran out, as it counts them."""

import contextlib
from pathlib import Path


def num_oom_kills(root: Path = Path("/")) -> int | None:
    """Return the kernel's count for the cgroup of this process, else for the host.

    Args:
      root: of the file system.

    Returns:
      The count; None if no file has it.
    """
    for file in [*_of_cgroup(root), root / "proc/vmstat"]:
        with contextlib.suppress(OSError):
            for line in file.read_text().splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
    return None


def _of_cgroup(root: Path) -> list[Path]:
    """Return the files of the memory cgroup: of version 2, or of version 1."""
    files, mounted = [], root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own = path.lstrip("/")
            if controllers == "":
                files += [mounted / own / "memory.events", mounted / "memory.events"]
            elif controllers == "memory":
                # In a container its own cgroup is mounted as the root.
                at = mounted / "memory"
                files += [at / own / "memory.oom_control", at / "memory.oom_control"]
    return files
