"""Run a script up to the first call of a step, to learn the step and its arguments."""

import contextlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jdp.training.step import Step


class FirstCall(NamedTuple):
    """A call of a step that was not made.

    Attributes:
      step: the step.
      args: its arguments.
      keywords: those by keyword.
    """

    step: Step
    args: tuple
    keywords: dict[str, Any]


class _FoundError(BaseException):  # no `except Exception` of the script catches it
    def __init__(self, call: FirstCall):
        self.call = call


def first_call(script: str, name: str, arguments: Sequence[str]) -> FirstCall:
    """Run a script as `python script` does, and end it where it calls a step for the first time.

    Other steps run as always.

    Args:
      script: path of the script.
      name: name of the step.
      arguments: command line of the script.

    Raises:
      ValueError: if the script ends and has not called the step.
    """
    given = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    others: list[str] = []
    try:
        # What it prints does not go between the lines of the report.
        with _intercepted(name, others), contextlib.redirect_stdout(sys.stderr):
            runpy.run_path(script, run_name="__main__")
    except _FoundError as found:
        return found.call
    finally:
        sys.argv, sys.path[0] = given
    called = f"It called {', '.join(dict.fromkeys(others))}" if others else "It called no step"
    raise ValueError(f"{script} ended, and never called the step `{name}`. {called}.")


@contextlib.contextmanager
def _intercepted(name: str, others: list[str]) -> Iterator[None]:
    run = Step.run

    def intercept(step: Step, *args: Any, **keywords: Any) -> Any:
        if step.__name__ == name:
            raise _FoundError(FirstCall(step, args, keywords))
        others.append(step.__name__)
        return run(step, *args, **keywords)

    Step.run = intercept  # type: ignore[method-assign]
    try:
        yield
    finally:
        Step.run = run  # type: ignore[method-assign]
