"""Flags that the commands of `jdp bench` share, and the devices that they choose."""

import argparse
import contextlib
import os
from collections.abc import Callable
from typing import Any

from jdp.inspect import results
from jdp.worker.local_devices import num_cpus, num_gpus, require_few_cpu_ranks

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def read_bytes(text: str) -> int:
    """Read a number of bytes.

    >>> read_bytes("4K"), read_bytes("64M"), read_bytes("100")
    (4096, 67108864, 100)
    """
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    number = text[: len(text) - len(unit)]
    if unit not in _UNITS or not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, such as 4K or 64M")
    return int(number) * _UNITS[unit]


def read_positive(text: str) -> int:
    """Read a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def read_cpu_ranks(text: str) -> int:
    """Read the number of virtual CPU devices of a process."""
    num = read_positive(text)
    try:
        require_few_cpu_ranks("--cpu-ranks", num)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return num


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all commands that use devices of this process."""
    text = "virtual CPU devices of each process (default on a machine without accelerators: its "
    text += "cores, at least 2)"
    parser.add_argument("--cpu-ranks", type=read_cpu_ranks, metavar="N", help=text)
    results.add_json(parser, "print JSON in place of a table, or write it to FILE (under jdp run)")
    results.add_png(parser)


def require_outputs(options: argparse.Namespace) -> None:
    """Raise a ValueError if the files of the flags of `add_common` cannot be written."""
    results.require_outputs(json=options.json, png=options.png)


def started(cpu_ranks: int | None, *, most: int = 2**30, timeout_s: float | None = None) -> Any:
    """Choose the devices, join the processes, and return the mesh.

    Args:
      cpu_ranks: of `--cpu-ranks`.
      most: virtual CPU devices where `cpu_ranks` is None.
      timeout_s: of `init`.
    """
    import jax

    from jdp.distributed.mesh import init

    is_chosen = "JAX_NUM_CPU_DEVICES" in os.environ or "XLA_FLAGS" in os.environ
    if cpu_ranks is not None or not (is_chosen or num_gpus()):
        with contextlib.suppress(RuntimeError):  # a backend runs already
            wanted = cpu_ranks or min(max(2, num_cpus()), most)
            jax.config.update("jax_num_cpu_devices", wanted)
    return init(timeout_s=timeout_s)


def require_files(mesh: Any, require: Callable[[], None]) -> None:
    """Raise a ValueError on all processes if the first one cannot write its files.

    Args:
      mesh: the mesh of all processes.
      require: raises the ValueError on the first process.
    """
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
