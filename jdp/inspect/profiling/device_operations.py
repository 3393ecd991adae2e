"""The operations that ran on the devices of a process, read from JAX's profile.

On CPUs each operation of a program is an event of a thread, with its device, its program and its
run. On GPUs each kernel is an event of a stream; XLA runs most of a step as a CUDA graph, whose
kernels all bear the name of the graph.
"""

import re
import warnings
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

# XLA names these plainly, if a program's text is not at hand: those of jdp, JAX, XLA, and NCCL.
_COMMUNICATES = re.compile(
    r"(jdp_(all|reduce|ring|take_rows|add_rows)|(void )?jdp::.*\breduce_kernel\b|"
    r"psum|pmax|pmin|ppermute|all[-_]reduce|"
    r"all[-_]gather|reduce[-_]scatter|all[-_]to[-_]all|collective[-_]permute|nccl\w*Kernel)"
)
# ncclKernel up to NCCL 2.18, then ncclDevKernel; in symmetric memory ncclSymDevKernel (2.27) and
# ncclSymkDevKernel (since 2.28).
_NCCL = re.compile(r"nccl\w*Kernel_([A-Za-z]+)")
_NCCL_KINDS = {
    "AllReduce": {"all-reduce"},
    "AllGather": {"all-gather"},
    "ReduceScatter": {"reduce-scatter"},
    "SendRecv": {"all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast"},
}
_CONTAINS = re.compile(r"(while|conditional|call)(\.\d+)?$")
_GPU = re.compile(r"/device:GPU:(\d+)$")
_STREAM = re.compile(r"Stream #")
# An operation of XLA that launches a CUDA graph.
_GRAPH = re.compile(r"command_buffer")
# Operations with which all others are compared.
_MOST_TRIED = 50


class Operation(NamedTuple):
    """An operation that ran.

    Attributes:
      name: of the instruction of the program; of the kernel where that is not known.
      kernel: name of the event.
      program: name of the program; empty if it is not known.
      run: number of the program's run in this process; None on GPUs.
      begin: nanoseconds since 1970.
      end: the same.
    """

    name: str
    kernel: str
    program: str
    run: int | None
    begin: int
    end: int

    def looks_like_communication(self) -> bool:
        """Whether it is a collective, by its name alone."""
        return any(_COMMUNICATES.match(name) for name in (self.name, self.kernel))

    def is_of_nccl(self) -> bool:
        """Whether it is a kernel of NCCL."""
        return _NCCL.match(self.kernel) is not None

    def may_be(self, kind: str) -> bool:
        """Whether a kernel of NCCL may belong to a collective such as `all-reduce`."""
        found = _NCCL.match(self.kernel)
        return found is not None and kind in _NCCL_KINDS.get(found[1], {kind})


class ProgramRun(NamedTuple):
    """A run of a program on a device: its name, and its first and last nanosecond."""

    program: str
    begin: int
    end: int


def read(path: Path) -> dict[int, list[Operation]]:
    """Return the operations of each device, by its number in the profile, in order.

    Loops and branches are left out: their operations are there.
    """
    with warnings.catch_warnings():
        # The types of JAX's reader have no module, which Python warns of.
        warnings.simplefilter("ignore", DeprecationWarning)
        planes = list(ProfileData.from_file(str(path)).planes)
        start = next((int(v) for p in planes for k, v in p.stats if k == "profile_start_time"), 0)
        return operations(planes, start)


def operations(planes: Sequence[Any], start: int) -> dict[int, list[Operation]]:
    """Return the operations in the planes of a profile that began `start` ns after 1970."""
    found: dict[int, list[Operation]] = defaultdict(list)
    for plane in planes:
        gpu = _GPU.match(plane.name)
        if gpu:
            lines = [line for line in plane.lines if _STREAM.match(line.name)]
            found[int(gpu[1])] += [each for line in lines for each in _kernels(line, start)]
        elif plane.name == "/host:CPU":
            _read_threads(plane.lines, start, found)
    return {device: sorted(found[device], key=lambda x: x.begin) for device in sorted(found)}


def _kernels(line: Any, start: int) -> list[Operation]:
    found = []
    for event in line.events:
        stats = dict(event.stats)
        begin = start + round(event.start_ns)
        end = begin + round(event.duration_ns)
        name, program = str(stats.get("hlo_op") or event.name), str(stats.get("hlo_module", ""))
        if _GRAPH.match(name):
            name = event.name
        found.append(Operation(name, event.name, program, None, begin, end))
    return found


def _read_threads(lines: Sequence[Any], start: int, found: dict[int, list[Operation]]) -> None:
    begun: list[tuple[int, Any, Operation]] = []
    ends: dict[int, int] = {}
    for line in lines:
        open_ones: list[tuple[int, int]] = []  # end, and position in `begun`
        with_others = set()
        first = len(begun)
        for event in sorted(line.events, key=lambda x: (x.start_ns, -x.duration_ns)):
            begin = start + round(event.start_ns)
            end = begin + round(event.duration_ns)
            if event.name.startswith("end: "):
                # XLA writes this where an operation ends that another thread may have begun.
                stats = dict(event.stats)
                ends[stats.get("_c", 0)] = begin
                continue
            stats = dict(event.stats)
            if "hlo_op" not in stats or "device_ordinal" not in stats:
                continue
            while open_ones and open_ones[-1][0] <= begin:
                open_ones.pop()
            if open_ones:
                with_others.add(open_ones[-1][1])
            open_ones.append((end, len(begun)))
            run = stats.get("run_id")
            program = str(stats.get("hlo_module", ""))
            one = Operation(str(stats["hlo_op"]), event.name, program, run, begin, end)
            begun.append((int(stats["device_ordinal"]), stats.get("_p"), one))
        for i in range(first, len(begun)):
            device, key, one = begun[i]
            is_leaf = i not in with_others and not _CONTAINS.match(one.name)
            begun[i] = device, key, one if is_leaf else one._replace(name="")
    for device, key, one in begun:
        # A collective may wait on a thread of its own. What else ends later waits for a free
        # thread, and these may all be in collectives: that is not computation.
        end = max(one.end, ends.get(key, 0)) if one.looks_like_communication() else one.end
        if one.name:
            found[device].append(one._replace(end=end))


def runs(found: Sequence[Operation], program: str, num_runs: int) -> list[ProgramRun]:
    """Return the runs of a program on one device, in order."""
    own = [each for each in found if each.program == program]
    if all(each.run is not None for each in own):
        numbered: dict[Any, list[Operation]] = defaultdict(list)
        for each in own:
            numbered[each.run].append(each)
        groups = list(numbered.values())
    else:
        groups = [list(group) for group in zip(*_once_in_each_run(own, num_runs), strict=True)]
    spans = [(min(x.begin for x in group), max(x.end for x in group)) for group in groups]
    return [ProgramRun(program, begin, end) for begin, end in sorted(spans)]


def _once_in_each_run(own: Sequence[Operation], num_runs: int) -> list[list[Operation]]:
    """Return the times of each operation that ran once in each run of a program.

    Args:
      own: the operations of the program on one device, in order.
    """
    by_name: dict[str, list[Operation]] = defaultdict(list)
    for each in own:
        by_name[each.name].append(each)
    # A loop in a branch, or another program of that name, may also have run one so often: but in
    # fewer runs, or not once between any two times of the others.
    often = {name: [x.begin for x in own] for name, own in by_name.items() if len(own) == num_runs}
    longest = max((own[-1] - own[0] for own in often.values()), default=0)
    often = {name: own for name, own in often.items() if 2 * (own[-1] - own[0]) >= longest}
    tried = list(often.values())[:: 1 + len(often) // _MOST_TRIED]
    fitting = [[name for name, own in often.items() if _take_turns(one, own)] for one in tried]
    return [by_name[name] for name in max(fitting, key=len, default=[])]


def _take_turns(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether exactly one time of each lies between two times of the other; both ascend."""
    shifts = {bisect_right(one, begin) - k for k, begin in enumerate(other)}
    return shifts in ({0}, {1})
