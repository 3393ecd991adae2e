"""`PYTHONPATH=tests python -m fuzz`: see `tests/fuzz/__init__.py`."""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import conftest  # noqa: E402, F401 - platform and compilation cache, as for tests
from fuzz import hunt  # noqa: E402
from fuzz.program import Program  # noqa: E402


def main():
    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("--seed", type=int, help="of the draw; default: a random one")
    parser.add_argument("--seconds", type=float, default=os.environ.get("FUZZ_SECONDS", 60))
    parser.add_argument("--processes", type=int, choices=[1, 2, 3], help="default: all")
    parser.add_argument("--program", help="run this one: Program(...)")
    args = parser.parse_args()
    if args.program:
        with hunt.Runner() as runner:
            outcome = runner.run(eval(args.program, {"Program": Program}))
        print(outcome.kind, outcome.text, sep="\n")
        return outcome.is_failure
    # Two at once, for two cores.
    lanes = ((args.processes,),) * 2 if args.processes else ((1,), (2, 1, 3))
    report = hunt.hunt(float(args.seconds), seed=args.seed, lanes=lanes, say=print)
    print(report)
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(main())
