"""Read whole numbers from environment variables."""

import re
from collections.abc import Mapping


def number(name: str, environment: Mapping[str, str], default: int | None = None) -> int:
    """Return the value of a variable.

    >>> number("RANK", {"RANK": "3"}), number("LOCAL_RANK", {}, 0)
    (3, 0)
    """
    text = environment.get(name, str(default))
    if not re.fullmatch(r"\d+", text):
        raise RuntimeError(
            f"{name}={text!r} should be a whole number, by which this process finds the others of "
            "its run. Correct it, or unset it and start the processes with jdp run."
        )
    return int(text)


def size_and_id(names: tuple[str, ...], environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of processes, and of this one.

    >>> size_and_id(("WORLD_SIZE", "RANK"), {"RANK": "1", "WORLD_SIZE": "2"})
    (2, 1)
    """
    of_size, of_id, *_ = names
    size, process_id = number(of_size, environment), number(of_id, environment)
    if process_id >= size:
        raise RuntimeError(
            f"{of_id}={process_id} is not one of {of_size}={size} processes, which are numbered "
            f"from 0 to {size - 1}."
        )
    return size, process_id
