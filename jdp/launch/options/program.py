"""The program that `jdp run` starts: mistakes in its name, and in the order of the flags."""

import re
from collections.abc import Sequence
from pathlib import Path

# Flags that a training program hardly has itself.
_OF_THE_LAUNCHER = (
    "--nproc-per-node",
    "--nnodes",
    "--node-rank",
    "--rdzv-endpoint",
    "--max-restarts",
)


def require_program(command: Sequence[str]) -> None:
    """Refuse Python in the place of a Python program, before any process is started.

    >>> require_program(["python", "train.py"])
    Traceback (most recent call last):
    ValueError: Python is started for the program: leave 'python' out, as in jdp run train.py
    """
    name, *arguments = command
    if not name:
        raise ValueError("the path of the program is an empty text. Write jdp run train.py")
    if re.fullmatch(r"python[\d.]*", Path(name).name) and arguments:
        raise ValueError(
            f"Python is started for the program: leave {name!r} out, as in jdp run {arguments[0]}"
        )


def require_file(name: str) -> None:
    """Refuse a program that is not there, before any process is started.

    >>> require_file("no_such.py")
    Traceback (most recent call last):
    ValueError: there is no file 'no_such.py' in ... a module: jdp run -m package.train
    """
    if not Path(name).exists():
        raise ValueError(
            f"there is no file {name!r} in {Path.cwd()}. Write the path of the program, or, if it "
            "is a module: jdp run -m package.train"
        )


def misplaced_flags(command: Sequence[str]) -> str | None:
    """Return a sentence about flags of `jdp run` that stand behind the program, None without any.

    >>> misplaced_flags(["train.py", "--nnodes=2"])
    '--nnodes stands behind train.py, which gets it. If it is for jdp run, write it before train.py'
    >>> misplaced_flags(["train.py", "--lr", "3"])
    """
    name, *arguments = command
    given = [each.partition("=")[0].replace("_", "-") for each in arguments]
    found = next((flag for flag in given if flag in _OF_THE_LAUNCHER), None)
    if found is None:
        return None
    text = f"{found} stands behind {name}, which gets it. "
    return f"{text}If it is for jdp run, write it before {name}"
