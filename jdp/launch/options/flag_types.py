"""Readers of the values of the flags of `jdp run`.

Each takes the text of a value, and raises argparse.ArgumentTypeError with what to write instead.
"""

import argparse
import re
from collections.abc import Callable

from jdp.worker.local_devices import num_cpus, num_gpus

Range = tuple[int, int]  # at least, at most

DEFAULT_PORT = 29400  # torchrun's

# Bits of --tee and --redirects.
STDOUT, STDERR = 1, 2

# torchrun's names in --rdzv-conf, and ours.
_CONF = {"join_timeout": "join_timeout_s", "last_call_timeout": "last_call_timeout_s"}


def spelled(at_least_and_most: Range) -> str:
    """Write a range as the command line does.

    >>> spelled((1, 4)), spelled((2, 2))
    ('1:4', '2')
    """
    low, high = at_least_and_most
    return str(low) if low == high else f"{low}:{high}"


def read_count(what: str, low: int) -> Callable[[str], int]:
    """Return a reader of a whole number of `what`, at least `low`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < low:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number of {what}: write a whole number, {low} or more"
            )
        return int(text)

    return read


def read_port(text: str) -> int:
    """Read the number of a port."""
    if not re.fullmatch(r"\d+", text) or not 0 < int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: write a number from 1 to 65535")
    return int(text)


def read_any_port(text: str) -> int:
    """Read the number of a port; 0 is any free one."""
    return 0 if text == "0" else read_port(text)


def read_seconds(text: str) -> float:
    """Read a time."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time: write seconds, above 0, as in 30"
        )
    return seconds


def read_range(what: str) -> Callable[[str], Range]:
    """Return a reader of N or MIN:MAX.

    >>> read_range("hosts")("1:4")
    (1, 4)
    """

    def read(text: str) -> Range:
        match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= low <= high:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number of {what}: write 2, or 1:4 for at least 1 and at most 4"
            )
        return low, high

    return read


def read_processes(text: str) -> Range:
    """Read a range of processes, or one for each GPU or CPU of this host: gpu, cpu, auto."""
    if text not in ("auto", "gpu", "cpu"):
        return read_range("processes")(text)
    gpus = num_gpus()
    if text == "gpu" and not gpus:
        raise argparse.ArgumentTypeError(
            "there is no GPU on this host, or CUDA_VISIBLE_DEVICES or JAX_PLATFORMS hides all: "
            "write a number"
        )
    number = num_cpus() if text == "cpu" or not gpus else gpus
    return number, number


def read_endpoint(text: str) -> str:
    """Read host:port or host; an IPv6 address stands in brackets.

    >>> read_endpoint("[fe80::1]:7"), read_endpoint("host0")
    ('[fe80::1]:7', 'host0:29400')
    """
    match = re.fullmatch(r"(\[[^]]+\]|[^:\[\]\s]+)(?::(\d+))?", text)
    if not match or not _is_name(match[1]) or not 0 < int(match[2] or DEFAULT_PORT) < 2**16:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an address: write address:port, as in "
            f"10.0.0.1:{DEFAULT_PORT} or [fe80::1]:{DEFAULT_PORT}"
        )
    return f"{match[1]}:{match[2] or DEFAULT_PORT}"


# Whether DNS can have it: parts of 1 to 63 characters.
def _is_name(text: str) -> bool:
    try:
        return bool(text.encode("idna"))
    except UnicodeError:
        return False


def read_endpoints(text: str) -> str:
    """Read the addresses of hosts that may lead, separated by commas, the first claim first.

    >>> read_endpoints("host0,host1:7")
    'host0:29400,host1:7'
    """
    endpoints = [read_endpoint(each) for each in text.split(",")]
    if len({*endpoints}) < len(endpoints):
        raise argparse.ArgumentTypeError(
            f"{text!r} has an address twice: each host that may lead needs its own"
        )
    return ",".join(endpoints)


def read_streams(text: str) -> dict[int, int]:
    """Read torchrun's form of streams: bits by local rank; -1 stands for all.

    >>> read_streams("3"), read_streams("0:1,1:2")
    ({-1: 3}, {0: 1, 1: 2})
    """
    if re.fullmatch(r"[0-3]", text):
        return {-1: int(text)}
    if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        return {int(rank): int(bits) for rank, bits in (p.split(":") for p in text.split(","))}
    raise argparse.ArgumentTypeError(
        f"{text!r} does not name streams: write 1 for standard output, 2 for standard error, 3 "
        "for both, or 0:1,1:2 to choose by local rank"
    )


def read_ranks(text: str) -> frozenset[int]:
    """Read local ranks; an empty set is all of them."""
    if text.strip() in ("", "all"):
        return frozenset()
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} are not local ranks: write 0, or 0,2, or all")
    return frozenset(map(int, text.split(",")))


def read_conf(text: str) -> dict[str, float]:
    """Read torchrun's --rdzv-conf as seconds by our names.

    >>> read_conf("join_timeout=60")
    {'join_timeout_s': 60.0}
    """
    conf = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in _CONF:
            raise argparse.ArgumentTypeError(
                f"{name!r} has no meaning here: write {' or '.join(_CONF)}, as in join_timeout=600"
            )
        conf[_CONF[name]] = read_seconds(value)
    return conf
