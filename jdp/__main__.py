"""The command `jdp`, and `python -m jdp`; imports only the chosen command."""

import os
import signal
import sys
from collections.abc import Sequence

_HELP = """\
usage: jdp COMMAND [arguments]

commands:
  run             run a training program on several processes, and replace those that fail
  bench           time collectives, steps and recoveries, with every result checked
  doctor          say whether this machine, or the hosts of a run, can train
  explain         memory, collectives and predicted time of a step, compiled and not run
  plan            predicted time, memory and efficiency of training on many hosts
  timeline        where the time of profiled steps went, on every rank
  explain-error   explain the code of an error, such as JDP101

jdp COMMAND --help prints the help of a command, jdp --version the version."""

_EXPLAIN_HELP = """\
usage: jdp explain-error CODE

Print the cause of an error, why it matters, what to write instead, and an example.

codes:"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    command, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command == "run":
        return _run(arguments)
    try:
        return _print_all(command, arguments)
    except BrokenPipeError:
        _discard_stdout()
        return 128 + signal.SIGPIPE
    except OSError as error:
        from jdp.tools.results import NotWrittenError

        reason = str(error)
        if not isinstance(error, NotWrittenError):
            if _is_writable():
                raise
            _discard_stdout()
            reason = f"the output was not written: {error.strerror or error}."
        print(f"jdp {command}: {reason}", file=sys.stderr)
        return 1


def _print_all(command: str, arguments: Sequence[str]) -> int:
    try:
        code = _print_answer(command, arguments)
    except SystemExit:
        print(end="", flush=True)
        raise
    print(end="", flush=True)  # raises where stdout is broken
    return code


def _is_writable() -> bool:
    try:
        print(flush=True)
    except OSError:
        return False
    return True


def _discard_stdout() -> None:
    """Keep Python's flush at exit from raising."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_answer(command: str, arguments: Sequence[str]) -> int:
    if command in ("-h", "--help"):
        print(_HELP)
        return 0
    if command == "--version":
        from jdp.worker.build_info import version

        print(f"jdp {version()}")
        return 0
    if command == "bench":
        from jdp.tools.bench.command import main as bench

        return bench(arguments)
    if command == "doctor":
        from jdp.tools.doctor.command import main as doctor

        return doctor(arguments)
    if command == "explain":
        from jdp.tools import explain_command

        return explain_command.main(arguments)
    if command == "plan":
        from jdp.tools.plan.command import main as plan

        return plan(arguments)
    if command == "timeline":
        from jdp.tools.profiling.command import main as timeline

        return timeline(arguments)
    if command == "explain-error":
        return _explain_error(arguments)
    print(f"{_HELP}\n\njdp: the command {command!r} does not exist.", file=sys.stderr)
    return 2


def _run(arguments: Sequence[str]) -> int:
    from jdp.launch import options

    try:
        chosen = options.parse(arguments)
        if not (chosen.module or chosen.no_python):
            options.require_program(chosen.command)
            options.require_file(chosen.command[0])
    except ValueError as error:
        print(f"jdp run: {error}", file=sys.stderr)
        return 2
    if misplaced := options.misplaced_flags(chosen.command):
        print(f"jdp run: {misplaced}", file=sys.stderr)
    # Slow to import; not needed for --help and errors.
    from jdp.launch.run import run

    return run(chosen)


def _explain_error(arguments: Sequence[str]) -> int:
    from jdp import error_codes

    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print(_EXPLAIN_HELP)
        for code in error_codes.codes():
            print(f"  {code}  {error_codes.title(code)}")
        return 0 if arguments in (["-h"], ["--help"]) else 2
    page = error_codes.page(arguments[0])
    if page is None:
        known = f"{error_codes.codes()[0]} to {error_codes.codes()[-1]}"
        print(
            f"jdp explain-error: the code {arguments[0]!r} does not exist. `jdp explain-error "
            f"--help` lists those from {known}.",
            file=sys.stderr,
        )
        return 2
    print(page, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
