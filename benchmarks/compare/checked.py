"""The comparison of a contestant's parameters with one device, on every rank. Needs NumPy alone."""

import numpy as np

from benchmarks.compare.task import Arrays
from benchmarks.harness import exact

# Of the most that training changes an element of the same leaf.
TOLERANCE = 2e-3
# Of the largest element of the leaf: float32 rounds each of them once in a step.
ROUNDING = 1e-6


class ExpectedRun:
    """The expected result of a run."""

    def __init__(self, contestant: str, begin: Arrays, end: Arrays):
        """Take the parameters before and after the run.

        Args:
          contestant: its name in errors.
          begin: the initial parameters by name.
          end: the parameters after the run, float64. A further dim in front is that of ranks.

        Raises:
          ValueError: if a parameter does not change, so that a step that does nothing would pass.
        """
        self._contestant, self._begin, self._end = contestant, begin, end
        self.difference = 0.0
        for name in begin:
            if not np.abs(end[name] - begin[name]).max() > 0:
                raise ValueError(
                    f"training does not change the parameter {name}, so every result of it would "
                    "pass. Choose a model that trains all of its parameters."
                )

    def require(
        self, name: str, found: np.ndarray, rank: int, index: tuple = (), shape: tuple | None = None
    ) -> None:
        """Compare a rank's part of a parameter, and keep the largest difference.

        Args:
          name: of the parameter.
          found: the part that this rank has.
          rank: the rank.
          index: where the part lies in an array of `shape`.
          shape: of the array; further dims in front hold the same parameter of each rank.

        Raises:
          WrongResultError: if an element is wrong.
        """
        end, begin = self._end[name], self._begin[name]
        change = float(np.abs(end - begin).max())
        expected = np.broadcast_to(end, shape or end.shape)[index]
        exact.require(
            found,
            expected,
            contestant=self._contestant,
            rank=rank,
            round_number=0,
            what=f"the parameter {name}",
            tolerance=TOLERANCE * change + ROUNDING * float(np.abs(end).max()),
        )
        apart = np.abs(np.asarray(found).reshape(expected.shape) - expected).max()
        self.difference = max(self.difference, float(apart) / change)
