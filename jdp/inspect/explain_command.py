"""`jdp explain`: its arguments, and what it prints."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

_EPILOG = """\
The script runs up to its first call of the step, on CPUs and with its own data; that call is
explained and not made. What follows the script's name and -- goes to the script:

  jdp explain train.py:step --on 8xH200 -- --batch-size 512
"""


def main(arguments: Sequence[str]) -> int:
    """Run `jdp explain`.

    Args:
      arguments: of the command line.

    Returns:
      The exit code: 1 if the step cannot be explained, 2 if the arguments are wrong.
    """
    given, _, of_script = _split(arguments)
    options = _parser().parse_args(given)
    script, _, name = options.step.rpartition(":")
    if not script or not name.isidentifier():
        return _fail(f"{options.step!r} names no step. Write train.py:step.", 2)
    if not Path(script).is_file():
        return _fail(f"there is no file {script!r}.", 2)
    if options.on:
        # The script makes its state on CPUs; as many as there are ranks, if these are CPUs.
        os.environ["JAX_PLATFORMS"] = "cpu"
        if found := re.fullmatch(r"cpu:(\d+)", options.on):
            os.environ["JAX_NUM_CPU_DEVICES"] = found[1]
    return _explained(options, script, name, of_script)


def _explained(
    options: argparse.Namespace, script: str, name: str, of_script: Sequence[str]
) -> int:
    from jdp.inspect.explain import explain
    from jdp.inspect.first_call import first_call
    from jdp.inspect.targets import MissingPluginError

    try:
        call = first_call(script, name, of_script)
    except ValueError as error:
        if "never called" not in str(error):
            raise
        return _fail(str(error), 1)
    try:
        report = explain(
            call.step, *call.args, on=options.on, rates=dict(options.rate), **call.keywords
        )
    except (MissingPluginError, ValueError) as error:
        return _fail(str(error), 1)
    print(report.to_json() if options.json else report)
    if options.png:
        from jdp.inspect.drawing import draw

        draw(report, options.png)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jdp explain",
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
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--png", metavar="FILE", help="draw the schedule on two lanes")
    parser.add_argument(
        "--rate",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        type=_rate,
        help="a rate that the predicted time assumes, such as matmul_flops=600e12",
    )
    return parser


def _split(arguments: Sequence[str]) -> tuple[list[str], str, list[str]]:
    arguments = list(arguments)
    if "--" not in arguments:
        return arguments, "", []
    i = arguments.index("--")
    return arguments[:i], "--", arguments[i + 1 :]


def _rate(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=VALUE with a number, such as matmul_flops=600e12"
        ) from None


def _fail(text: str, code: int) -> int:
    print(f"jdp explain: {text}", file=sys.stderr)
    return code
