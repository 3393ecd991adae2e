"""This process's last calls, in the order common to all processes."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# A process may be ahead by the steps in flight and a few comparisons.
NUM_KEPT = 32


class Call:
    """A call of a step, or a comparison between the processes.

    Args:
      what: such as "call 3 of `step`".
      name: of the step; "" for a comparison.
      shapes: returns path -> dtype and shape of the step's arrays.

    Attributes:
      was_refused: whether all processes raised an error instead.
    """

    __slots__ = ("name", "shapes", "was_refused", "what")

    def __init__(
        self, what: str, name: str = "", shapes: Callable[[], Mapping[str, str]] = dict
    ) -> None:
        self.what, self.name, self.shapes = what, name, shapes
        self.was_refused = False


class Described(NamedTuple):
    """A `Call` as other processes read it."""

    what: str
    name: str
    shapes: dict[str, str]


class CallLog:
    """One group's calls."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._latest: deque[tuple[int, Call]] = deque(maxlen=NUM_KEPT)

    def record(self, call: Call) -> Call:
        """Record a call that starts."""
        # The number is kept with the call, since another thread may read meanwhile.
        self._latest.append((self.num_calls + 1, call))
        self.num_calls += 1
        return call

    def latest(self) -> dict[int, Described | None]:
        """Return number -> call for the last calls; None for a refused one."""
        return {
            number: None if call.was_refused else Described(call.what, call.name, {**call.shapes()})
            for number, call in self._latest.copy()
        }


# Threads of this process in a comparison, or at a loop's end.
num_waiting = 0
# This process's loops over batches, and the awaited one.
open_loops: set[str] = set()
awaited_loop, num_awaited = "", 0
logs: dict[tuple[int, ...], CallLog] = {}


def log_of(group: tuple[int, ...]) -> CallLog:
    """Return a group's log."""
    return logs.setdefault(group, CallLog())


def first_difference(
    mine: Mapping[int, Described | None], theirs: Mapping[int, Described | None]
) -> tuple[int, Any, Any] | None:
    """Return (number, call, call) of the first call that two processes make differently."""
    for number in sorted(mine.keys() & theirs.keys()):
        one, other = mine[number], theirs[number]
        if one and other and (one.name, one.shapes) != (other.name, other.shapes):
            return number, one, other
    return None
