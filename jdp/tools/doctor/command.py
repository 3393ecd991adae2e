"""The command `jdp doctor`."""

import argparse
import functools
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jdp.tools import results
from jdp.tools.bench import flags
from jdp.tools.doctor.diagnosis import ERROR, Diagnosis, checked, is_healthy, text
from jdp.worker.build_info import version

_DESCRIPTION = """\
Can this machine train, and if not, what is wrong? Examines devices, versions,
libraries and limits, and compares every collective with exact sums on every
rank. Takes some 10 s on 2 CPU cores, most of it to compile.

  jdp doctor                                  this machine, all its devices
  jdp run --nproc-per-node 2 -m jdp doctor    2 processes of this host
  jdp run --nnodes 2 --rdzv-endpoint host0:29400 --token-file token -m jdp doctor
                                              two hosts: the same command on each
"""
_EPILOG = """\
exit codes: 0 healthy (there may be warnings)   1 an error was found
            2 the arguments are wrong"""
_INIT_TIMEOUT_S = 120.0
_MAX_CPU_RANKS = 4


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="jdp doctor",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text_of = "print JSON, to paste into an issue, or write it to FILE (under jdp run, which marks "
    text_of += "the lines of each process)"
    results.add_json(parser, text_of)
    text_of = "virtual CPU devices on a machine without accelerators (default: its cores, 2 to 4)"
    parser.add_argument("--cpu-ranks", type=flags.read_cpu_ranks, metavar="N", help=text_of)
    options = parser.parse_args(arguments)
    try:
        by_process = _examined(options.cpu_ranks)
    except Exception as error:
        by_process = {0: [_unable(error)]}
    healthy = is_healthy(by_process)
    if min(by_process) == _own_number():
        try:
            _show(by_process, healthy, options.json)
        except results.NotWrittenError as error:
            print(f"jdp doctor: --json: {error}", file=sys.stderr)
            return 2
    return 0 if healthy else 1


def _examined(cpu_ranks: int | None) -> dict[int, list[Diagnosis]]:
    from jdp.distributed import agree

    mesh = flags.started(cpu_ranks, most=_MAX_CPU_RANKS, timeout_s=_INIT_TIMEOUT_S)
    group = agree.peers(mesh)
    found = [*_of_machine(mesh, len(group)), *_of_hosts(group), *_of_sums(mesh, group)]
    gathered = agree.all_gather(group, [vars(it) for it in found], what="the reports of jdp doctor")
    return {process: [Diagnosis(**it) for it in its] for process, its in gathered.items()}


def _of_machine(mesh, num_processes: int) -> list[Diagnosis]:
    from jdp.tools.doctor import devices, limits, versions

    platform = mesh.devices.flat[0].platform
    here = versions.installed(platform, num_processes)
    checks: dict[str, Callable[[], Diagnosis]] = {
        "versions": lambda: versions.versions(here),
        "devices": lambda: devices.devices(mesh),
        "links": lambda: devices.links(mesh),
        "auto": lambda: devices.algorithms(mesh),
        "file descriptors": lambda: limits.files(num_processes),
        "shared memory": lambda: limits.shared_memory(platform),
        "locked memory": limits.locked_memory,
        "memory": limits.memory,
        "proxies": limits.proxies,
        "bytecode": versions.bytecode,
    }
    made = [checked(name, examine) for name, examine in checks.items()]
    return [made[0], *versions.known_bad(here), *made[1:3], *devices.libraries(platform), *made[3:]]


def _of_hosts(group: tuple[int, ...]) -> list[Diagnosis]:
    from jdp.distributed import agree
    from jdp.tools.doctor import hosts

    if len(group) == 1:
        return []
    me = _own_number()
    space = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    space += os.readlink("/proc/self/ns/net")
    with hosts.listening() as port:
        own = hosts.Listener(me, socket.gethostname(), _address(), port, space)
        everyones = agree.all_gather(group, list(own), what="the addresses of jdp doctor")
        listeners = {process: hosts.Listener(*its) for process, its in everyones.items()}
        found = [hosts.reach(other, space) for other in hosts.to_reach(me, listeners)]
        agree.all_gather(group, None, what="the connections of jdp doctor")
    return [hosts.reachability(found), hosts.clocks(found)]


def _address() -> str:
    """Return this host's address, where Gloo listens."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:  # no host finds this one's name
        return "127.0.0.1"


def _of_sums(mesh, group: tuple[int, ...]) -> list[Diagnosis]:
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from jdp.tools.doctor import devices

    found = []
    local = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    if len(local) > 1 or len(group) == 1:
        axis = mesh.axis_types
        here = mesh if len(group) == 1 else Mesh(np.array(local), mesh.axis_names, axis_types=axis)
        found += devices.self_test(here, "devices of a process")
    if len(group) > 1:
        found += devices.self_test(mesh, "all processes")
    return found


@functools.cache
def _own_number() -> int:
    try:
        import jax

        return jax.process_index()
    except Exception:  # the report says that JAX does not start
        return 0


def _unable(error: Exception) -> Diagnosis:
    return Diagnosis(
        "start",
        ERROR,
        f"JAX or the other processes could not be started: {type(error).__name__}: {error}",
        "Training would end in the same way.",
        "Look for the first such error of any process. `jdp run --log-dir` keeps all output.",
    )


def _show(by_process, healthy: bool, json_to: str | None) -> None:
    if json_to != results.STDOUT:  # first: the file may fail
        print(_report(by_process, healthy))
    if json_to is not None:
        results.write(_json(by_process, healthy), json_to)


def _report(by_process, healthy: bool) -> str:
    counts = {level: 0 for level in ("error", "warning")}
    for it in {(it.check, it.level) for found in by_process.values() for it in found}:
        if it[1] in counts:
            counts[it[1]] += 1
    verdict = "healthy" if healthy else "not healthy"
    numbers = ", ".join(f"{n} {level}{'s' * (n != 1)}" for level, n in counts.items())
    return f"{text(by_process)}\n\njdp {version()}: {verdict} ({numbers})"


def _json(by_process, healthy: bool) -> str:
    checks = [
        {"process": process, **vars(it)} for process, found in by_process.items() for it in found
    ]
    return results.to_json({"jdp": version(), "healthy": healthy, "checks": checks})
