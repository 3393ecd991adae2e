"""The command `jdp explain`: runs a script up to a step's first call, and explains the call."""

import argparse
import concurrent.futures.thread
import contextlib
import functools
import multiprocessing
import os
import re
import runpy
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from jdp.tools import results
from jdp.tools.bench.flags import read_bytes

if TYPE_CHECKING:
    from jdp.training.step import Step

_EPILOG = """\
The script runs up to its first call of the step, on CPUs and with its own data; that call is
explained and not made. What follows the script's name and -- goes to the script:

  jdp explain train.py:step --on 8xH200 -- --batch-size 512
"""


def main(arguments: Sequence[str]) -> int:
    """Run `jdp explain`."""
    given, of_script = _split(arguments)
    options, unknown = _parser().parse_known_args(given)
    if unknown:
        text = f"{' '.join(unknown)!r} is not an option of jdp explain. Write options of the script"
        return _fail(f"{text} after --: jdp explain {options.step} -- {' '.join(unknown)}", 2)
    script, _, name = options.step.rpartition(":")
    if not script or not name.isidentifier():
        return _fail(f"{options.step!r} names no step. Write train.py:step.", 2)
    if not Path(script).is_file():
        return _fail(f"the file {script!r} does not exist.", 2)
    if options.png and options.compare:
        return _fail(
            f"--png={options.png} draws one schedule, but --compare explains several plans. "
            "Remove one of them.",
            2,
        )
    if options.on:
        # The script makes its state on CPUs; as many as ranks, if these are CPUs.
        os.environ["JAX_PLATFORMS"] = "cpu"
        if found := re.fullmatch(r"cpu:([1-9][0-9]*)", options.on):
            os.environ["JAX_NUM_CPU_DEVICES"] = found[1]
    return _explained(options, script, name, of_script)


def _explained(
    options: argparse.Namespace, script: str, name: str, of_script: Sequence[str]
) -> int:
    from jdp.tools import comparison
    from jdp.tools.rates import given_rates
    from jdp.tools.targets import require_name

    if twice := _twice(options.compare):
        return _fail(f"--compare names {twice} twice. List its values after one name.", 2)
    if twice := _twice(options.rate):
        return _fail(f"--rate sets {twice} twice. Write one value for it.", 2)
    try:
        if options.on is not None:
            require_name(options.on)
        given_rates(dict(options.rate))
        comparison.require_choices(dict(options.compare))
        results.require_outputs([script], png=options.png)
    except ValueError as error:
        return _fail(str(error), 2)
    if options.png:
        options.png = os.path.abspath(options.png)  # the script may go to another folder
    code = 1
    with take_stdout() as stdout:
        try:
            code = _explained_first_call(options, script, name, of_script, stdout)
        finally:
            end_soon(code)
    return code


def _explained_first_call(
    options: argparse.Namespace, script: str, name: str, of_script: Sequence[str], stdout: TextIO
) -> int:
    from jdp.tools import comparison, targets
    from jdp.tools.explain import explain_call

    try:
        call = first_call(script, name, of_script)
    except NeverCalledError as error:
        return _fail(str(error), 1)
    chosen: dict[str, Any] = {"on": options.on, "rates": dict(options.rate)}
    try:
        if options.compare:
            plans = comparison.compare(*call, dict(options.compare), **chosen)
            text = comparison.to_json(plans) if options.json else comparison.table(plans)
            print(text, file=stdout, flush=True)
            return 0
        report = explain_call(*call, **chosen)
    except (targets.MissingPluginError, ValueError, TypeError, RuntimeError) as error:
        if not _is_of_jdp(error):
            raise  # the traceback shows the author's failed line
        return _fail(str(error), 1)
    print(report.to_json() if options.json else report, file=stdout, flush=True)
    if options.png:
        from jdp.tools.report import draw_schedule

        draw_schedule(report, options.png)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jdp explain",
        usage="%(prog)s SCRIPT:STEP [options] [-- arguments of the script]",
        description="Print the memory, the collectives, the predicted time and the faults of a "
        "compiled step, before a device is there to run it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("step", help="script and step, such as train.py:step")
    parser.add_argument(
        "--on",
        metavar="DEVICES",
        help='"8xH200", "16xH100" (two hosts), "v5e:2x4", "cpu:4"; default: the devices here',
    )
    results.add_json(parser, "print JSON", takes_file=False)
    results.add_png(parser, "draw the schedule on two lanes")
    parser.add_argument(
        "--rate",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        type=_rate,
        help="a rate that the predicted time assumes, such as matmul_flops=600e12",
    )
    parser.add_argument(
        "--compare",
        metavar="OPTION=VALUES",
        nargs="+",
        action="extend",
        default=[],
        type=_choice,
        help="rank plans by predicted time, such as bucket_bytes=1M,4M stage=0,1,3 (0: replicated)",
    )
    return parser


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    arguments = list(arguments)
    i = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:i], arguments[i + 1 :]


def _rate(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=VALUE with a number, such as matmul_flops=600e12"
        ) from None


def _choice(text: str) -> tuple[str, list[int]]:
    name, _, values = text.partition("=")
    try:
        read = int if name == "stage" else functools.partial(read_bytes, least=0)
        numbers = [read(value) for value in values.split(",")]
    except (argparse.ArgumentTypeError, ValueError):
        numbers = []
    if not name or not numbers:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not OPTION=VALUES, such as bucket_bytes=1M,4M or stage=0,1,3"
        )
    return name, list(dict.fromkeys(numbers))


def _twice(given: Sequence[tuple[str, Any]]) -> str | None:
    counts = Counter(name for name, _ in given)
    return next((name for name, count in counts.items() if count > 1), None)


def _is_of_jdp(error: BaseException) -> bool:
    """Whether jdp raised an error, whose text says what to change."""
    from jdp.analysis import diagnostics

    frames = traceback.extract_tb(error.__traceback__)
    return diagnostics.is_of_jdp(frame.filename for frame in frames[-1:])


def _fail(text: str, code: int) -> int:
    print(f"jdp explain: {text}", file=sys.stderr)
    return code


# For threads and processes that end with the process, as an executor's.
_EXIT_S = 2.0


class FirstCall(NamedTuple):
    """A call not made."""

    step: "Step"
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
        if not found:  # else the script caught `_FoundError`, and failed later
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
    from jdp.training.step import Step

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
