"""What gets the metrics of a run besides their file: a function, or a writer of TensorBoard."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Tracker(NamedTuple):
    """A function or a writer of the author's.

    Attributes:
      name: for errors.
      write: takes a step and its values by name.
      flush: brings to the disk what the writer still holds; None if it has no such method.
    """

    name: str
    write: Callable[[int, Mapping[str, Any]], Any]
    flush: Callable[[], Any] | None

    def take(self, step: int, values: Mapping[str, Any]) -> None:
        """Hand out the values of a step.

        Raises:
          RuntimeError: from the error of the tracker, naming it.
        """
        try:
            self.write(step, values)
        except Exception as error:
            raise RuntimeError(
                f"also={self.name} did not take the metrics of step {step}, which the file of "
                f"jdp.log holds: {type(error).__name__}: {error}"
            ) from error


def tracker_of(also: Any) -> Tracker | None:
    """Return the tracker that a user gave, None for none.

    Args:
      also: a function of a step and its values, or an object with `add_scalar(name, value, step)`;
        its `flush`, if it has one, is called where lines of a run must not be lost.

    Raises:
      TypeError: if it is neither.
    """
    if also is None:
        return None
    name = getattr(also, "__qualname__", None) or type(also).__qualname__
    flush = getattr(also, "flush", None)
    if callable(add := getattr(also, "add_scalar", None)):

        def add_all(step: int, values: Mapping[str, Any]) -> None:
            for each, value in values.items():
                add(each, value, step)

        return Tracker(name, add_all, flush)
    if not callable(also):
        raise TypeError(f"also={also!r} is neither a function nor has a method add_scalar.")
    return Tracker(name, also, flush)
