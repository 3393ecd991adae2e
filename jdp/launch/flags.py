"""The command line of `jdp run`: torchrun's flags, and jdp's own."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from jdp.worker.local_devices import num_cpus, num_gpus

# Readers of values; argparse.ArgumentTypeError says what to write instead.


Range = tuple[int, int]  # (minimum, maximum)

DEFAULT_PORT = 29400  # torchrun's

# Bits of --tee and --redirects.
STDOUT, STDERR = 1, 2

# torchrun's names and jdp's.
_CONF = {"join_timeout": "join_timeout_s", "last_call_timeout": "last_call_timeout_s"}


def spelled(at_least_and_most: Range) -> str:
    """Format a range.

    >>> spelled((1, 4)), spelled((2, 2))
    ('1:4', '2')
    """
    low, high = at_least_and_most
    return str(low) if low == high else f"{low}:{high}"


def _read_count(what: str) -> Callable[[str], int]:

    def read(text: str) -> int:
        if not re.fullmatch(r"\d+", text):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number of {what}: write a whole number, 0 or more"
            )
        return int(text)

    return read


def _read_port(text: str) -> int:
    if not re.fullmatch(r"\d+", text) or not 0 < int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: write a number from 1 to 65535")
    return int(text)


def _read_any_port(text: str) -> int:
    return 0 if text == "0" else _read_port(text)


def _read_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time: write seconds, above 0, as in 30"
        )
    return seconds


def _read_range(what: str) -> Callable[[str], Range]:
    """Return a reader of N or MIN:MAX.

    >>> _read_range("hosts")("1:4")
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


def _read_processes(text: str) -> Range:
    if text not in ("auto", "gpu", "cpu"):
        return _read_range("processes")(text)
    gpus = num_gpus()
    if text == "gpu" and not gpus:
        raise argparse.ArgumentTypeError(
            "this host has no GPU, or CUDA_VISIBLE_DEVICES or JAX_PLATFORMS hides all: write a "
            "number"
        )
    number = num_cpus() if text == "cpu" or not gpus else gpus
    return number, number


def _read_endpoint(text: str) -> str:
    """Read host or host:port, IPv6 in brackets.

    >>> _read_endpoint("[fe80::1]:7"), _read_endpoint("host0")
    ('[fe80::1]:7', 'host0:29400')
    """
    match = re.fullmatch(r"(\[[^]]+\]|[^:\[\]\s]+)(?::(\d+))?", text)
    if not match or not _is_name(match[1]) or not 0 < int(match[2] or DEFAULT_PORT) < 2**16:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an address: write address:port, as in "
            f"10.0.0.1:{DEFAULT_PORT} or [fe80::1]:{DEFAULT_PORT}"
        )
    return f"{match[1]}:{match[2] or DEFAULT_PORT}"


def _is_name(text: str) -> bool:
    try:
        return bool(text.encode("idna"))
    except UnicodeError:
        return False


def _read_endpoints(text: str) -> str:
    endpoints = [_read_endpoint(each) for each in text.split(",")]
    if len({*endpoints}) < len(endpoints):
        raise argparse.ArgumentTypeError(
            f"{text!r} repeats an address: each host that may lead needs its own"
        )
    return ",".join(endpoints)


def _read_streams(text: str) -> dict[int, int]:
    """Read torchrun's stream bits by local rank; -1 is all.

    >>> _read_streams("3"), _read_streams("0:1,1:2")
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


def _read_ranks(text: str) -> frozenset[int]:
    if text.strip() in ("", "all"):
        return frozenset()
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} are not local ranks: write 0, or 0,2, or all")
    return frozenset(map(int, text.split(",")))


def _read_conf(text: str) -> dict[str, float]:
    conf = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in _CONF:
            raise argparse.ArgumentTypeError(
                f"{name!r} is not supported here: write {' or '.join(_CONF)}, as in "
                "join_timeout=600"
            )
        conf[_CONF[name]] = _read_seconds(value)
    return conf


# Accepted without effect, as from a torchrun command.
WITHOUT_MEANING = {
    "--monitor-interval": "jdp detects the end of a process at once",
    "--signals-to-handle": "SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 request a save, SIGINT an end",
    "--role": "all processes have the same role",
    "--event-log-handler": "jdp prints its log",
    "--logs-specs": "--log-dir, --tee and --redirects choose the logs",
}

# Refused, since the run would differ from the intended one.
REFUSED = {
    "--run-path": "it runs a script inside the launcher's own code. Remove it.",
    "--virtual-local-rank": "each process gets its devices, and LOCAL_RANK stays its number. "
    "Remove it.",
    "--numa-binding": "jdp binds no memory. Remove it, or write --no-python numactl before the "
    "program.",
}

_DESCRIPTION = """\
Run a training program on several processes. Processes that fail are replaced,
and the run continues from the last commit."""

_EPILOG = f"""\
examples:
  jdp run --nproc-per-node 2 train.py --lr 0.1
      two processes on this host
  jdp run --nnodes 2 --rdzv-endpoint host0:{DEFAULT_PORT} --token-file token train.py
      the same command on each of two hosts; host0 leads
  jdp run --nnodes 1:4 ...
      continues with the remaining ones of four hosts, and grows again

One process drives all GPUs of its host, so one host needs no launcher for them.

Each flag has a variable: JDP_NPROC_PER_NODE=2, or PET_NPROC_PER_NODE=2 as for
torchrun, whose flags are understood in both spellings, --nproc_per_node too.

exit codes:
  75 saved after a signal: run it again with --resume   124 ended by the watchdog
  128 + n killed by signal n   130 Ctrl-C   else that of the first failed process"""


class Parser(argparse.ArgumentParser):
    """Reads flags up to the program; raises ValueError."""

    def __init__(self) -> None:
        super().__init__(
            prog="jdp run",
            usage="jdp run [flags] train.py [its arguments]\n"
            "       jdp run [flags] -m package.train [its arguments]",
            description=_DESCRIPTION,
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.flags: list[argparse.Action] = []
        for add in (_add_processes, _add_faults, _add_hosts, _add_output):
            add(self)
        for flag in WITHOUT_MEANING:
            self.flag(self, flag, None)
        for flag, why in REFUSED.items():
            self.flag(self, flag, None, action=_Refuse, nargs="?", const=why)
        self.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        """Raise the message as ValueError."""
        raise ValueError(message.removeprefix("argument "))

    def spellings(self) -> list[str]:
        """Return all spellings of the listed flags."""
        listed = [flag for flag in self.flags if flag.help != argparse.SUPPRESS]
        return [spelling for flag in listed for spelling in flag.option_strings]

    def flag(self, group: Any, names: str, text: str | None, **keywords: Any) -> None:
        """Add a flag, hidden without `text`, and hidden its spelling with underscores."""
        spellings = names.split()
        dest = dest_of(spellings[-1])
        keywords |= {"dest": dest, "default": None}
        text = argparse.SUPPRESS if text is None else text
        self.flags.append(group.add_argument(*spellings, help=text, **keywords))
        keywords |= {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        others = {"--" + dest_of(name) for name in spellings if name.startswith("--")}
        for other in others - set(spellings):
            group.add_argument(other, **keywords)


def dest_of(flag: str) -> str:
    """Return the attribute of a flag's value."""
    return flag.lstrip("-").replace("-", "_")


class _Refuse(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None) -> None:
        parser.error(f"{option_string} is not supported: {self.const}")


def _add_processes(parser: Parser) -> None:
    group = parser.add_argument_group("processes")
    text = "processes on this host: 2, or 1:4 for at least 1 and at most 4, or gpu: one for each "
    text += "GPU, or cpu, or auto: gpu if there are any (default 1)"
    parser.flag(group, "--nproc-per-node", text, type=_read_processes, metavar="N")
    text = "fork (default): one process of this host runs the script up to jdp.init(), and the "
    text += "others are copies of it, if that is safe; spawn: each process runs all of the script"
    parser.flag(group, "--start-method", text, choices=("fork", "spawn", "forkserver"))
    text = "the program is a module, as for python -m"
    parser.flag(group, "-m --module", text, action="store_true")
    parser.flag(group, "--no-python", "the program is not Python", action="store_true")


def _add_faults(parser: Parser) -> None:
    group = parser.add_argument_group("faults")
    text = "failures to recover from within --restart-window-s (default 3); 0: the first one ends "
    text += "the run"
    parser.flag(group, "--max-restarts", text, type=_read_count("restarts"), metavar="N")
    text = "failures longer ago than S seconds (default 600), and at earlier steps, do not count"
    parser.flag(group, "--restart-window-s", text, type=_read_seconds, metavar="S")
    text = "processes on this host that wait to take over, with their imports done (default: as "
    text += "many as run)"
    parser.flag(group, "--standbys", text, type=_read_count("standbys"), metavar="N")
    text = "continue from the latest checkpoint of an earlier run"
    parser.flag(group, "--resume", text, action="store_true")
    text = "end a run in which no step finished for S seconds (default: as jdp.init says, 600)"
    parser.flag(group, "--timeout-s", text, type=_read_seconds, metavar="S")
    text = "seconds from a signal to SIGKILL, unless it is saving (default 30)"
    # torchrun lacks the unit.
    names = "--shutdown-timeout --shutdown-timeout-s"
    parser.flag(group, names, text, type=_read_seconds, metavar="S")


def _add_hosts(parser: Parser) -> None:
    group = parser.add_argument_group("several hosts")
    text = "hosts: 2, or 1:4 for at least 1 and at most 4 (default 1)"
    parser.flag(group, "--nnodes", text, type=_read_range("hosts"), metavar="N")
    text = f"where they meet: one of the hosts, which leads (port {DEFAULT_PORT} if left out), or "
    text += "several, as in host0,host1,host2: if the one that leads is lost, the next one leads"
    parser.flag(group, "--rdzv-endpoint", text, type=_read_endpoints, metavar="HOST:PORT")
    text = "with --master-port: another way to write --rdzv-endpoint"
    parser.flag(group, "--master-addr", text, metavar="HOST")
    parser.flag(group, "--master-port", None, type=_read_port)
    text = "a secret, the same on all hosts, without which none may join; or JDP_TOKEN"
    parser.flag(group, "--token-file", text, type=Path, metavar="FILE")
    text = "number of this host, from 0; taken from Slurm or Kubernetes where they tell it"
    parser.flag(group, "--node-rank", text, type=_read_count("a host"), metavar="I")
    text = "where the other hosts reach this one, if it has several addresses"
    parser.flag(group, "--local-addr", text, metavar="ADDRESS")
    parser.flag(group, "--rdzv-id", "name of the run, the same on all hosts", metavar="NAME")
    parser.flag(group, "--rdzv-backend", None, choices=("c10d", "static"))
    parser.flag(group, "--rdzv-conf", None, type=_read_conf)
    text = "one host, whatever the environment says"
    parser.flag(group, "--standalone", text, action="store_true")
    text = "give up if too few have met after S seconds (default 600)"
    parser.flag(group, "--join-timeout-s", text, type=_read_seconds, metavar="S")
    text = "wait S seconds for more than the least number of hosts (default 5)"
    parser.flag(group, "--last-call-timeout-s", text, type=_read_seconds, metavar="S")
    text = "a host that is silent for S seconds is lost, the same S on all hosts (default 5)"
    parser.flag(group, "--heartbeat-timeout-s", text, type=_read_seconds, metavar="S")


def _add_output(parser: Parser) -> None:
    group = parser.add_argument_group("output")
    text = "whose output is shown, of this host's processes: 0,2 or all (default 0; what the first "
    text += "that fails wrote last is always shown)"
    parser.flag(group, "--local-ranks-filter", text, type=_read_ranks, metavar="RANKS")
    text = "how far the run is: a line that changes on a terminal, else a line every 30 s (auto, "
    text += "the default); always the latter (plain); off"
    parser.flag(group, "--progress", text, choices=("auto", "plain", "off"))
    text = "the host that leads serves metrics for Prometheus at port N of all its addresses, to "
    text += "anyone; 0: any free port, which is printed"
    parser.flag(group, "--metrics-port", text, type=_read_any_port, metavar="N")
    text = "write all output to DIR/generation_K/process_P.log, too"
    parser.flag(group, "--log-dir", text, type=Path, metavar="DIR")
    text = "streams to show whatever the filter says: 1 output, 2 errors, 3 both, or 0:1,1:2 by "
    text += "local rank"
    parser.flag(group, "-t --tee", text, type=_read_streams, metavar="STREAMS")
    text = "streams to write to the file only, in the same form"
    parser.flag(group, "-r --redirects", text, type=_read_streams, metavar="STREAMS")
