"""The command `jdp bench`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jdp.tools import results
from jdp.tools.bench import flags

OPERATIONS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")
_DESCRIPTION = """\
How fast are collectives, steps and recoveries here? Every result that is timed
is compared with the exact one on every rank; a wrong one ends the command with
exit code 1.

  jdp bench all-reduce -b 4K -e 64M -f 4           about a minute
  jdp bench reduce-scatter | all-gather | all-to-all
  jdp bench step mlp | transformer | FILE.py:NAME  about a minute
  jdp bench faults --mtbf 60                       13 minutes for two states
  jdp bench --calibrate                            2 to 5 minutes

All but the faults also run across processes:
  jdp run --nproc-per-node 2 -m jdp bench all-reduce

jdp bench WHAT --help prints the flags of each."""
_CALIBRATE = """\
Fit alpha (seconds) and beta (bytes per second) of each collective and
algorithm on 2, 4, 8, ... ranks, measure matmuls and memory, and save them for
`jdp explain`: ~/.cache/jdp/calibration/HOST_PLATFORM.json (docs/bench.md).
Takes 2 to 5 minutes."""


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    what, *rest = list(arguments) or ["--help"]
    if what in ("-h", "--help"):
        print(_DESCRIPTION)
        return 0
    commands: dict[str, Callable[[str, Sequence[str]], int]] = {
        **dict.fromkeys(OPERATIONS, _collective),
        "step": _step,
        "faults": _faults,
        "--calibrate": _calibrate,
    }
    if what not in commands:
        known = ", ".join(commands)
        print(f"jdp bench: {what!r} does not exist. Write one of {known}.", file=sys.stderr)
        return 2
    from jdp.tools.known_values import WrongResultError

    try:
        return commands[what](what, rest)
    except WrongResultError as error:
        print(f"jdp bench {what}: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"jdp bench {what}: {error}", file=sys.stderr)
        return 2


def _collective(operation: str, arguments: Sequence[str]) -> int:
    from jdp.tools.bench import collectives

    known = collectives.algorithms(operation)
    parser = argparse.ArgumentParser(
        prog=f"jdp bench {operation}",
        description=f"How fast is an {operation} of each size, by each algorithm? Sizes, out of "
        "place, and bandwidths are those of nccl-tests. Takes about a minute.",
    )
    for flag, default, text in (
        ("-b", "4K", "smallest size: bytes of a rank's array"),
        ("-e", "64M", "largest size"),
    ):
        size, text = flags.read_bytes(default), f"{text} (default {default})"
        parser.add_argument(flag, type=flags.read_bytes, default=size, metavar="BYTES", help=text)
    text = "factor between sizes (default 4)"
    parser.add_argument("-f", type=flags.read_positive, default=4, metavar="N", help=text)
    text = "timed rounds, in each of which every algorithm runs twice (default 10)"
    parser.add_argument("-n", type=flags.read_positive, default=10, metavar="N", help=text)
    parser.add_argument(
        "-w", type=flags.read_positive, default=1, metavar="N", help="runs before them"
    )
    parser.add_argument("-d", default="float32", metavar="DTYPE", help="default float32")
    text = f"some of {','.join(known)} (default on CPUs: all but auto)"
    parser.add_argument("-a", metavar="NAMES", help=text)
    text = "let results take the memory of inputs, as in a compiled step"
    parser.add_argument("--in-place", action="store_true", help=text)
    flags.add_common(parser)
    options = parser.parse_args(arguments)
    names = options.a.split(",") if options.a is not None else None
    if wrong := {*(names or [])} - set(known):
        own = " jdp's own are direct and ring." if "native" in wrong else ""
        raise ValueError(
            f"the algorithm {min(wrong)!r} does not exist.{own} Write some of {','.join(known)}."
        )
    if options.f < 2:
        raise ValueError(f"-f {options.f} would never reach the largest size. Write at least 2.")
    if options.b > options.e:
        raise ValueError(
            f"the smallest size, -b {options.b}, is above the largest, -e {options.e}. Exchange "
            "them."
        )
    return _timed(operation, names, options)


def _timed(operation: str, names: Sequence[str] | None, options: argparse.Namespace) -> int:
    import jax
    import jax.numpy as jnp

    from jdp.tools import known_values
    from jdp.tools.bench import collectives, output

    if options.d in ("float64", "int64", "uint64"):
        jax.config.update("jax_enable_x64", True)
    mesh = flags.started(options.cpu_ranks)
    facts, is_first = output.machine(), jax.process_index() == 0
    flags.require_files(mesh, lambda: flags.require_outputs(options))
    known_values.modulus(mesh.size, options.d)  # refuses a dtype without exact sums
    names = names or collectives.default_algorithms(operation, facts["platform"])
    setting = collectives.Setting(options.d, options.n, options.w, options.in_place)
    elements = collectives.sizes(
        options.b, options.e, options.f,
        itemsize=jnp.dtype(options.d).itemsize, num_ranks=mesh.size,
    )  # fmt: skip
    title = _title(operation, mesh, options)
    shows = is_first and options.json != results.STDOUT
    if shows:
        print(f"{output.heading(facts)}\n{title}; every result checked on every rank")
        print(output.aligned(list(output.COLUMNS)))
    skipped: dict[str, str] = {}
    rows = []
    for row in collectives.measure(mesh, operation, names, elements, setting, skipped.__setitem__):
        rows.append(row)
        if shows:
            print(output.line(row), flush=True)
    if shows:
        for name, reason in skipped.items():
            print(f"{name} was skipped: {reason}")
    if is_first and options.json:
        result = {**facts, "in_place": options.in_place, "rows": rows, "skipped": skipped}
        results.write(results.to_json(result), options.json)
    if is_first and options.png:
        output.draw(options.png, rows, title)
    return 0


def _title(operation: str, mesh: Any, options: argparse.Namespace) -> str:
    processes = len({device.process_index for device in mesh.devices.flat})
    return (
        f"{operation} of {mesh.size} ranks in {processes} process{'es' * (processes > 1)}, "
        f"{options.d}, {'in' if options.in_place else 'out of'} place"
    )


def _step(_: str, arguments: Sequence[str]) -> int:
    from jdp.tools.bench import step

    return step.main(arguments)


def _faults(_: str, arguments: Sequence[str]) -> int:
    from jdp.tools.bench import faults

    return faults.main(arguments)


def _calibrate(_: str, arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="jdp bench --calibrate",
        description=_CALIBRATE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cpu-ranks", type=flags.read_cpu_ranks, metavar="N", help="virtual CPU devices"
    )
    options = parser.parse_args(arguments)
    import jax

    from jdp.tools import calibration
    from jdp.tools.bench.calibrate import calibrate

    mesh = flags.started(options.cpu_ranks)
    platform = mesh.devices.flat[0].platform
    flags.require_files(mesh, lambda: calibration.require_writable(platform))
    found = calibrate(mesh, print if jax.process_index() == 0 else lambda text: None)
    if found is not None:
        _say_rates(found)
        print(f"wrote {found.save()}")
    return 0


def _say_rates(found: Any) -> None:
    for rates in found.computation:
        who = f"each of {rates.num_ranks} ranks" if rates.num_ranks > 1 else "one rank by itself"
        flops = rates.matmul_flops_per_s.items()
        matmuls = ", ".join(f"{x / 1e9:.1f} GFLOP/s in {dtype}" for dtype, x in flops)
        print(f"{who}: matmuls {matmuls}; memory {rates.memory_bytes_per_s / 1e9:.1f} GB/s")
