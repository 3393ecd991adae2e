"""The command `jdp explain`."""

import argparse
import functools
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from jdp.tools import results
from jdp.tools.bench.flags import read_bytes

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
    from jdp.tools.first_call import end_soon, take_stdout
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
    from jdp.tools.first_call import NeverCalledError, first_call

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
