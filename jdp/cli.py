"""The command `jdp`: which command was asked for, and nothing more."""

import sys
from collections.abc import Sequence

_HELP = """\
usage: jdp COMMAND [arguments]

commands:
  run    run a training program on several processes, and see it through

jdp COMMAND --help says more."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
      argv: its name and arguments. Default: the command line.

    Returns:
      The exit code: 2 if there is no such command or its arguments are wrong.
    """
    command, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        print(_HELP)
        return 0
    if command != "run":
        print(f"jdp: there is no command {command!r}.\n\n{_HELP}", file=sys.stderr)
        return 2
    from jdp.launch.options import options

    try:
        chosen = options.parse(arguments)
    except ValueError as error:
        print(f"jdp run: {error}", file=sys.stderr)
        return 2
    # Not needed to say what is wrong, and slower to import than all else.
    from jdp.launch.run import run

    return run(chosen)
