"""`jdp run`'s options, from its command line and environment."""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jdp.launch.flags import DEFAULT_PORT, WITHOUT_MEANING, Parser, Range, dest_of, spelled
from jdp.worker import SWITCHED_ON

_VARIABLES = {
    "JOB_COMPLETION_INDEX": "an Indexed Job of Kubernetes",
    "SLURM_NODEID": "Slurm",
    "GROUP_RANK": "torchrun",
}


def node_rank(environment: Mapping[str, str], num_hosts: int) -> dict[str, int]:
    """Return the option `node_rank`, or {}."""
    if num_hosts == 1:
        return {}
    name = next((name for name in _VARIABLES if environment.get(name)), None)
    if name is None or (name == "SLURM_NODEID" and not _is_on_several_hosts(environment)):
        return {}
    text = environment[name]
    if not text.isdecimal() or int(text) >= num_hosts:
        raise ValueError(
            f"{name}={text}, the number of this host from {_VARIABLES[name]}, must be from 0 to "
            f"{num_hosts - 1}, because --nnodes allows at most {num_hosts}. Start as many "
            "launchers as --nnodes allows, or pass --node-rank to each."
        )
    return {"node_rank": int(text)}


def _warning_if_alone(environment: Mapping[str, str]) -> str | None:
    """Return a warning for a lone launcher among several.

    >>> _warning_if_alone({"SLURM_STEP_NUM_TASKS": "1"})
    """
    number = _num_launchers(environment)
    if number == 1 or environment.get("SLURM_PROCID", "0") != "0":
        return None
    return (
        f"this is one of {number} tasks of srun, and trains alone. For a run of several hosts, "
        "start one launcher on each with --nnodes and --rdzv-endpoint, as in examples/slurm.sh. "
        "For separate runs, add --standalone."
    )


# In a step on one host, such as an interactive shell, SLURM_NODEID is 0 in all programs.
def _is_on_several_hosts(environment: Mapping[str, str]) -> bool:
    num_hosts = _number("SLURM_STEP_NUM_NODES", environment)
    if 1 < num_hosts < _num_launchers(environment):
        raise ValueError(
            f"srun starts {_num_launchers(environment)} launchers on {num_hosts} hosts, but a "
            "run needs one per host. Write srun --ntasks-per-node=1. --nproc-per-node is the "
            "number of processes of a launcher."
        )
    return num_hosts > 1 or "SLURM_STEP_NUM_NODES" not in environment


def _num_launchers(environment: Mapping[str, str]) -> int:
    return _number("SLURM_STEP_NUM_TASKS", environment)


def _number(name: str, environment: Mapping[str, str]) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 1


class Options(NamedTuple):
    """Options of `jdp run`, see `jdp run --help`.

    Ranges are (minimum, maximum). None means detected, generated or absent; for
    `local_ranks_filter` all ranks. Streams are by local rank; -1 is all others.
    """

    command: tuple[str, ...]
    nnodes: Range = (1, 1)
    nproc_per_node: Range = (1, 1)
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    local_addr: str | None = None
    token: str | None = None
    max_restarts: int = 3
    restart_window_s: float = 600.0
    standbys: int | None = None
    start_method: str = "fork"
    join_timeout_s: float = 600.0
    last_call_timeout_s: float = 5.0
    heartbeat_timeout_s: float = 5.0
    shutdown_timeout_s: float = 30.0
    timeout_s: float | None = None
    resume: bool = False
    log_dir: Path | None = None
    tee: Mapping[int, int] | None = None
    redirects: Mapping[int, int] | None = None
    local_ranks_filter: frozenset[int] | None = frozenset({0})
    progress: str = "auto"
    metrics_port: int | None = None
    standalone: bool = False
    module: bool = False
    no_python: bool = False

    @property
    def num_standbys(self) -> int:
        """Standbys on this host."""
        if self.max_restarts == 0:
            return 0
        return self.nproc_per_node[1] if self.standbys is None else self.standbys

    @property
    def endpoints(self) -> list[tuple[str, int]]:
        """The (host, port) of hosts that may lead; [] for one host.

        >>> Options((), (2, 2), rdzv_endpoint="host0:7,[fe80::1]:8").endpoints
        [('host0', 7), ('fe80::1', 8)]
        """
        if self.nnodes[1] == 1:
            return []
        parts = [each.rpartition(":") for each in (self.rdzv_endpoint or "").split(",") if each]
        return [(name.strip("[]"), int(port)) for name, _, port in parts]

    def argv(self) -> list[str]:
        """Return one process's command line."""
        if self.no_python:
            return [*self.command]
        return [sys.executable, *(["-m"] if self.module else []), *self.command]

    def is_shown(self, local_rank: int, stream: int) -> bool:
        """Whether the console shows a process's `stream`."""
        tee, redirects = self.tee or {}, self.redirects or {}
        if tee.get(local_rank, tee.get(-1, 0)) & stream:
            return True
        if redirects.get(local_rank, redirects.get(-1, 0)) & stream:
            return False
        return self.local_ranks_filter is None or local_rank in self.local_ranks_filter


def parse(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Options:
    """Return the options of a command line, else of JDP_<FLAG>, else of PET_<FLAG>."""
    parser = Parser()
    given = argparse.Namespace()
    for variable, flag in _from_environment(parser, environment):
        try:
            parser.parse_args([flag], given)
        except ValueError as error:
            raise ValueError(f"{variable}={environment[variable]!r}: {error}") from None
    elsewhere = getattr(given, "nnodes", None)
    _, unknown = parser.parse_known_args(argv, given)
    if unknown:
        name = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(name, parser.spellings(), n=1)
        meant = f"Did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"the flag {name} does not exist. {meant}jdp run --help lists the flags. Write the "
            "program's own flags after its name."
        )
    if given.standalone and given.nnodes == elsewhere:
        given.nnodes = given.node_rank = given.rdzv_endpoint = None
    return _options(vars(given), environment)


def _options(given: dict, environment: Mapping[str, str]) -> Options:
    for flag, why in WITHOUT_MEANING.items():
        if given.get(dest_of(flag)) is not None:
            print(f"jdp run: {flag} has no effect: {why}", file=sys.stderr)
    for name, value in (given.pop("rdzv_conf") or {}).items():
        if given[name] is None:
            given[name] = value
    address, port = given.pop("master_addr"), given.pop("master_port")
    if given["rdzv_endpoint"] is None and (address or port):
        given["rdzv_endpoint"] = f"{address or '127.0.0.1'}:{port or 29500}"
    file = given.pop("token_file")
    given["token"] = _read_token(file) if file else environment.get("JDP_TOKEN")
    command = given["command"]
    given["command"] = tuple(command[1:] if command[:1] == ["--"] else command)
    chosen = {name: given[name] for name in Options._fields if given.get(name) is not None}
    if "local_ranks_filter" in chosen:
        chosen["local_ranks_filter"] = chosen["local_ranks_filter"] or None
    if "node_rank" not in chosen:
        chosen |= node_rank(environment, chosen.get("nnodes", (1, 1))[1])
    options = Options(**chosen)
    _require_consistent(options)
    warning = _warning_if_alone(environment)
    if warning and options.nnodes[1] == 1 and not options.standalone:
        print(f"jdp run: {warning}", file=sys.stderr)
    return options


def _require_consistent(options: Options) -> None:
    if not options.command:
        raise ValueError("the program is missing. Write jdp run train.py")
    if options.module and options.no_python:
        raise ValueError(
            "--no-python (not a Python program) and -m (a Python module) exclude each other. "
            "Remove one."
        )
    if options.redirects and options.log_dir is None:
        raise ValueError(
            "--redirects sends output to files, which need a folder. Add --log-dir logs"
        )
    _require_consistent_hosts(options)


def _require_consistent_hosts(options: Options) -> None:
    at_most = options.nnodes[1]
    if options.standalone and at_most > 1:
        raise ValueError(f"--standalone means one host, but --nnodes allows {at_most}. Remove one.")
    if options.node_rank is not None and not 0 <= options.node_rank < at_most:
        raise ValueError(
            f"--node-rank {options.node_rank} must be from 0 to {at_most - 1}, because of "
            f"--nnodes {spelled(options.nnodes)}."
        )
    if at_most == 1:
        return
    if options.rdzv_endpoint is None:
        raise ValueError(
            f"{at_most} hosts need a common address. Add, the same on all of them, "
            f"--rdzv-endpoint FIRST_HOST:{DEFAULT_PORT}"
        )
    if len(options.endpoints) > at_most:
        raise ValueError(
            f"--rdzv-endpoint lists {len(options.endpoints)} hosts that may lead, but --nnodes "
            f"allows {at_most} hosts. List at most as many as run."
        )
    if not options.token:
        raise ValueError(
            f"{at_most} hosts connect over the network, where anyone could join, so they need a "
            "shared secret. Make one with `openssl rand -hex 16 > token`, and pass --token-file "
            "token on each host, or its text in JDP_TOKEN."
        )


def _read_token(file: Path) -> str:
    try:
        token = file.read_text().strip()
    except OSError as error:
        raise ValueError(f"--token-file {file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ValueError(
            f"--token-file {file} holds bytes that are not text. Try openssl rand -hex 16 > {file}"
        ) from None
    if not token:
        raise ValueError(f"--token-file {file} is empty. Try openssl rand -hex 16 > {file}")
    return token


# JDP_ comes last and wins.
def _from_environment(parser: Parser, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for prefix in ("PET_", "JDP_"):
        for action in parser.flags:
            variable = prefix + action.dest.upper()
            value = environment.get(variable)
            if not value:
                continue
            flag = action.option_strings[-1]
            if action.nargs != 0:
                yield variable, f"{flag}={value}"
            elif value.lower() in SWITCHED_ON:
                yield variable, flag


# Flags unlikely in a training program.
_OF_THE_LAUNCHER = (
    "--nproc-per-node",
    "--nnodes",
    "--node-rank",
    "--rdzv-endpoint",
    "--max-restarts",
)


def require_program(command: Sequence[str]) -> None:
    """Refuse Python as the program."""
    name, *arguments = command
    if not name:
        raise ValueError("the path of the program is an empty string. Write jdp run train.py")
    if re.fullmatch(r"python[\d.]*", Path(name).name) and arguments:
        raise ValueError(
            f"jdp run starts Python itself. Remove {name!r}, as in jdp run {arguments[0]}"
        )


def require_file(name: str) -> None:
    """Refuse a missing program file.

    >>> require_file("no_such.py")
    Traceback (most recent call last):
    ValueError: ... has no file 'no_such.py'. ... a module: jdp run -m package.train
    """
    if not Path(name).exists():
        raise ValueError(
            f"{Path.cwd()} has no file {name!r}. Write the path of the program, or, if it is a "
            "module: jdp run -m package.train"
        )


def misplaced_flags(command: Sequence[str]) -> str | None:
    """Return a warning about flags of `jdp run` after the program."""
    name, *arguments = command
    given = [each.partition("=")[0].replace("_", "-") for each in arguments]
    found = next((flag for flag in given if flag in _OF_THE_LAUNCHER), None)
    if found is None:
        return None
    text = f"{found} comes after {name}, which gets it. "
    return f"{text}If it is for jdp run, write it before {name}"
