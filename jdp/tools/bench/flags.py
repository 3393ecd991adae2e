"""`jdp bench`'s common flags, and their devices."""

import argparse
import contextlib
import os
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from jdp.tools import results
from jdp.tools.rate import MOST_GIVEN
from jdp.worker.local_devices import num_cpus, num_gpus, require_few_cpu_ranks

_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)(?:([kmgt])(i?b)?|b)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MOST_BYTES = 2**60


def read_bytes(text: str, *, least: int = 1) -> int:
    """Read bytes: K and KiB are 1024, KB 1000, up to T.

    >>> read_bytes("4K"), read_bytes("1.5MiB"), read_bytes("40GB"), read_bytes("1e6")
    (4096, 1572864, 40000000000, 1000000)
    """
    if found := _SIZE.fullmatch(text.strip()):
        number, unit, suffix = (part or "" for part in found.groups())
        factor = (1000 if suffix.lower() == "b" else 1024) ** _POWERS[unit.lower()]
        if least <= float(number) * factor <= _MOST_BYTES:
            return round(Decimal(number) * factor)
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a number of bytes from {least} to {_MOST_BYTES // 2**40}T, such as 4K, "
        "1.5GiB (of 1024) or 40GB (of 1000)"
    )


def read_positive(text: str) -> int:
    """Read a whole number from 1 to `MOST_GIVEN`."""
    if not text.isdecimal() or not 1 <= float(text) <= MOST_GIVEN:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {MOST_GIVEN:g}")
    return int(text)


def read_cpu_ranks(text: str) -> int:
    """Read a process's number of virtual CPU devices."""
    num = read_positive(text)
    try:
        require_few_cpu_ranks("--cpu-ranks", num)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return num


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add flags of commands that use this process's devices."""
    text = "virtual CPU devices of each process (default on a machine without accelerators: its "
    text += "cores, at least 2)"
    parser.add_argument("--cpu-ranks", type=read_cpu_ranks, metavar="N", help=text)
    results.add_json(parser, "print JSON in place of a table, or write it to FILE (under jdp run)")
    results.add_png(parser)


def require_outputs(options: argparse.Namespace, inputs: Sequence[str] = ()) -> None:
    """Raise a ValueError if files of `add_common` cannot be written."""
    results.require_outputs(inputs, json=options.json, png=options.png)


def started(cpu_ranks: int | None, *, most: int = 2**30, timeout_s: float | None = None) -> Any:
    """Choose devices, join the processes, and return the mesh."""
    import jax

    from jdp.distributed.mesh import init

    is_chosen = "JAX_NUM_CPU_DEVICES" in os.environ or "XLA_FLAGS" in os.environ
    if cpu_ranks is not None or not (is_chosen or num_gpus()):
        with contextlib.suppress(RuntimeError):  # a backend already runs
            wanted = cpu_ranks or min(max(2, num_cpus()), most)
            jax.config.update("jax_num_cpu_devices", wanted)
    return init(timeout_s=timeout_s)


def require_files(mesh: Any, require: Callable[[], None]) -> None:
    """Raise a ValueError on all processes if the first cannot write its files."""
    import jax

    from jdp.distributed import agree

    refused = None
    if jax.process_index() == 0:
        try:
            require()
        except ValueError as error:
            refused = str(error)
    found = agree.all_gather(agree.peers(mesh), refused, what="the files of jdp bench")
    for text in found.values():
        if text is not None:
            raise ValueError(text)
