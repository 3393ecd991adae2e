"""A training that every contestant does, and its file. Needs NumPy alone, for PyTorch's sake."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LEARNING_RATE, MOMENTUM = 0.1, 0.9
# Steps of one run; the first is not timed, since it also places the state.
NUM_STEPS = 4

Arrays = dict[str, np.ndarray]


class TaskFile(NamedTuple):
    """A model with its batch, and the expected parameters.

    Attributes:
      params: initial parameters by name, such as "layers.0.w".
      batch: the global batch.
      expected: float64 parameters after NUM_STEPS steps of one device on the global batch.
      alone: the same for each of n ranks that trains on its own rows, `[n, ...]`, by n.
    """

    params: Arrays
    batch: Arrays
    expected: Arrays
    alone: dict[int, Arrays]


def write(path: Path, file: TaskFile) -> None:
    """Write the file of a task, in NumPy's format."""
    groups = {"params": file.params, "batch": file.batch, "expected": file.expected}
    groups |= {f"alone_{num_ranks}": arrays for num_ranks, arrays in file.alone.items()}
    flat: dict[str, Any] = {
        f"{group}:{name}": x for group, arrays in groups.items() for name, x in arrays.items()
    }
    np.savez(path, **flat)


def read(path: Path) -> TaskFile:
    """Read the file of a task."""
    groups: dict[str, Arrays] = {}
    with np.load(path) as file:
        for key in file.files:
            group, _, name = key.partition(":")
            groups.setdefault(group, {})[name] = file[key]
    alone = {int(group[6:]): x for group, x in groups.items() if group.startswith("alone_")}
    return TaskFile(groups["params"], groups["batch"], groups["expected"], alone)
