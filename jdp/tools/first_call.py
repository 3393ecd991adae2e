"""Runs a script up to a step's first call."""

import concurrent.futures.thread
import contextlib
import multiprocessing
import os
import runpy
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from jdp.training.step import Step

# For threads and processes that end with the process, as an executor's.
_EXIT_S = 2.0


class FirstCall(NamedTuple):
    """A call not made."""

    step: Step
    args: tuple
    keywords: dict[str, Any]


class NeverCalledError(ValueError):
    """The script ended without calling the step."""


class _FoundError(BaseException):
    """Ends the script; an `except Exception` does not catch it."""


def first_call(script: str, name: str, arguments: Sequence[str]) -> FirstCall:
    """Run a script up to the step's first call."""
    given = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    found: list[FirstCall] = []
    others: list[str] = []
    how, before = "ended", {*threading.enumerate()}
    try:
        with _intercepted(name, found, others):
            try:
                runpy.run_path(os.path.abspath(script), run_name="__main__")
            except SystemExit as error:
                if error.code not in (None, 0):
                    how = f"ended with `exit({error.code!r})`"
            _wait_for_threads(before, name, found)
    except _FoundError:
        pass
    except Exception:
        if not found:  # a script that catches everything may fail where the step returned nothing
            raise
    finally:
        sys.argv, sys.path[0] = given
    if found:
        return found[0]
    called = f"It called {', '.join(others)}." if others else "It called no step."
    raise NeverCalledError(
        f"{script} {how} and never called the step `{name}`. {called} A step is a function "
        "decorated with jdp.train_step or jdp.eval_step, and has the name of the function."
    )


def _wait_for_threads(before: set[threading.Thread], name: str, found: list[FirstCall]) -> None:
    # Threads of executors wait for work; Python lets them end.
    pools = getattr(concurrent.futures.thread, "_threads_queues", {})
    said = False
    while not found:
        threads = {*threading.enumerate()} - before
        left = [it for it in threads if not it.daemon and it not in pools]
        if not left:
            return
        left[0].join(0.1)
        if not said and left[0].is_alive():
            said = True
            text = f"jdp explain: the script has ended, but its thread {left[0].name} runs on until"
            print(f"{text} `{name}`.", file=sys.stderr)


def take_stdout() -> TextIO:
    """Return stdout for the report; send other output, also of libraries at the exit, to stderr."""
    encoding, errors = (getattr(sys.stdout, name, None) for name in ("encoding", "errors"))
    try:
        stdout = os.fdopen(os.dup(1), "w", encoding=encoding, errors=errors)
    except OSError:
        stdout = open(os.devnull, "w")
    else:
        print(end="", flush=True)
        os.dup2(2, 1)
    sys.stdout = sys.stderr
    return stdout


def end_soon(code: int) -> None:
    """End this process after `_EXIT_S` if the script's threads or processes keep it alive."""

    def end() -> None:
        time.sleep(_EXIT_S)
        children = multiprocessing.active_children()
        threads = {*threading.enumerate()} - {threading.main_thread()}
        if children or not all(thread.daemon for thread in threads):
            for child in children:
                child.terminate()
            os._exit(code)

    threading.Thread(target=end, daemon=True).start()


@contextlib.contextmanager
def _intercepted(name: str, found: list[FirstCall], others: list[str]) -> Iterator[None]:
    run = Step.run

    def intercept(step: Step, /, *args: Any, **keywords: Any) -> Any:
        if step.__name__ == name:
            found.append(FirstCall(step, args, keywords))
            if threading.current_thread() is threading.main_thread():
                raise _FoundError
            raise SystemExit  # without a thread's traceback
        if step.__name__ not in others:
            others.append(step.__name__)
            text = f"jdp explain: the script calls `{step.__name__}`, and runs on until `{name}`."
            print(text, file=sys.stderr)
        return run(step, *args, **keywords)

    Step.run = intercept  # type: ignore[method-assign]
    try:
        yield
    finally:
        Step.run = run  # type: ignore[method-assign]
