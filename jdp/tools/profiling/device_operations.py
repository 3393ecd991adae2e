"""The operations of a process's devices, from JAX's profile.

On CPUs each is an event of a thread, with device, program and run. On GPUs each kernel is an event
of a stream; XLA runs most of a step as a CUDA graph, whose kernels have its name.
"""

import re
import warnings
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from jdp import jax_compat
from jdp.tools import explain, hlo_matching, timeline, transfers
from jdp.tools.hlo import HloProgram
from jdp.tools.timeline import Groups, Work
from jdp.tools.transfers import SentArrays
from jdp.training.communication_plan import PlannedCollective, SentLeaf, planned

# Collectives of jdp, JAX, XLA and NCCL, without a program's text.
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
# An XLA operation that launches a CUDA graph.
_GRAPH = re.compile(r"command_buffer")
# Operations compared with all others.
_MOST_TRIED = 50


class Operation(NamedTuple):
    """An operation that ran, in ns since 1970; `run` is its program's, None on GPUs."""

    name: str
    kernel: str
    program: str
    run: int | None
    begin: int
    end: int

    def looks_like_communication(self) -> bool:
        """Whether its name is a collective's."""
        return any(_COMMUNICATES.match(name) for name in (self.name, self.kernel))

    def is_of_nccl(self) -> bool:
        """Whether it is an NCCL kernel."""
        return _NCCL.match(self.kernel) is not None

    def may_be(self, kind: str) -> bool:
        """Whether an NCCL kernel may be of a collective such as `all-reduce`."""
        found = _NCCL.match(self.kernel)
        return found is not None and kind in _NCCL_KINDS.get(found[1], {kind})


class ProgramRun(NamedTuple):
    """A program's run on a device, with first and last nanosecond."""

    program: str
    begin: int
    end: int


def read(path: Path) -> dict[int, list[Operation]]:
    """Return each device's operations, in order, without loops and branches themselves."""
    with warnings.catch_warnings():
        # The types of JAX's reader have no module, which causes a warning.
        warnings.simplefilter("ignore", DeprecationWarning)
        planes = list(ProfileData.from_file(str(path)).planes)
        start = next((int(v) for p in planes for k, v in p.stats if k == "profile_start_time"), 0)
        return operations(planes, start)


def operations(planes: Sequence[Any], start: int) -> dict[int, list[Operation]]:
    """Return a profile's operations; it began `start` ns after 1970."""
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
                # XLA's mark of an end, possibly on another thread.
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
        # A collective may wait on its own thread. Computations that end later only waited for a
        # thread.
        end = max(one.end, ends.get(key, 0)) if one.looks_like_communication() else one.end
        if one.name:
            found[device].append(one._replace(end=end))


def runs(found: Sequence[Operation], program: str, num_runs: int) -> list[ProgramRun]:
    """Return a program's runs on one device, in order."""
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
    by_name: dict[str, list[Operation]] = defaultdict(list)
    for each in own:
        by_name[each.name].append(each)
    # Operations of a branch's loop, or of a namesake program, may run equally often, but in fewer
    # runs, or not once between any two of the others.
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


_REDUCES = ("all-reduce", "reduce-scatter")


class Collective(NamedTuple):
    """A compiled program's collective.

    Attributes:
      name: in a trace, such as "bucket 3: grads['w']".
      num_bytes: of its whole arrays on one rank, in one run.
      num_groups: of ranks that run it separately; 1 if all ranks meet.
    """

    name: str
    kind: str
    num_bytes: int
    algorithm: str
    leaves: tuple[str, ...]
    num_groups: int = 1


class _NoTime:
    def compute_s(self, work: Work) -> float:
        return 0.0

    def transfer_s(self, kind: str, algorithm: str, num_bytes: float, groups: Groups = ()) -> float:
        return 0.0


def collectives_of(
    operations: Mapping[str, Collection[str]], jaxprs: Mapping[str, Sequence[tuple[Any, list[str]]]]
) -> dict[str, dict[str, Collective]]:
    """Return programs' collectives by program and operation."""
    texts: dict[str, list[HloProgram]] = {name: [] for name in operations}
    for name, text in jax_compat.compiled_texts(operations):
        texts[name].append(HloProgram(text))
    found = {}
    for name, ran in operations.items():
        if texts[name]:
            # Programs of other shapes may share the name.
            program = max(texts[name], key=lambda each: len(_names(each) & set(ran)))
            found[name] = _collectives(program, jaxprs.get(name, ()))
    return found


def by_order(
    ran: Mapping[int, Sequence[Operation]], known: Mapping[str, Mapping[str, Collective]]
) -> dict[str, dict[str, Collective]]:
    """Return the collectives by their names in a profile.

    XLA's collectives between GPUs have the name before the division into start and done. They run
    in program order; if the profile contradicts it, they stay unnamed.
    """
    found = {name: dict(of_program) for name, of_program in known.items()}
    for name, of_program in found.items():
        owns = [[each for each in of_device if each.program == name] for of_device in ran.values()]
        pairs = [_paired(own, of_program) for own in owns if own]
        if pairs and all(each == pairs[0] for each in pairs):
            of_program |= pairs[0]
    return found


def _paired(
    own: Sequence[Operation], of_program: Mapping[str, Collective]
) -> dict[str, Collective]:
    names = {each.name for each in own}
    strange = {x.name: x for x in reversed(own) if x.is_of_nccl() and x.name not in of_program}
    left = [x for old, x in of_program.items() if old not in names and x.algorithm == "xla"]
    first = sorted(strange.values(), key=lambda x: x.begin)
    if len(first) != len(left) or not all(map(Operation.may_be, first, [x.kind for x in left])):
        return {}
    return {one.name: collective for one, collective in zip(first, left, strict=True)}


def _names(program: HloProgram) -> set[str]:
    return {one.name for each in program.computations.values() for one in each}


def _collectives(
    program: HloProgram, jaxprs: Sequence[tuple[Any, list[str]]]
) -> dict[str, Collective]:
    transfers = list(timeline.simulate(program, _NoTime()).transfers.values())
    plan = _plan(transfers, [planned(*each).collectives for each in jaxprs])
    return {
        transfer.instruction.name: _collective(transfer, match)
        for transfer, match in zip(
            transfers, hlo_matching.match(program, transfers, plan), strict=True
        )
    }


def _plan(
    transfers: Sequence[SentArrays], plans: Sequence[list[PlannedCollective]]
) -> list[PlannedCollective]:
    """Return the latest of the plans that share most numbers and bytes."""
    numbers = {each.number for each in transfers}
    num_bytes = sum(each.num_bytes for each in transfers)

    def likeness(i: int) -> tuple[int, bool, int]:
        found = sum(_num_bytes(leaf) for one in plans[i] for leaf in one.operands)
        return -len(numbers ^ {one.number for one in plans[i]}), found == num_bytes, i

    return plans[max(range(len(plans)), key=likeness)] if plans else []


def _num_bytes(leaf: SentLeaf) -> int:
    bits = int("".join(filter(str.isdigit, leaf.dtype)) or 8)
    return leaf.num_elements * bits // 8


def _collective(transfer: SentArrays, match: hlo_matching.Match) -> Collective:
    leaves = tuple(explain.leaf_name(leaf, transfer.kind) for leaf in match.leaves)
    has_arrays = any(leaf.path or leaf.num_elements > 1 for leaf in match.leaves)
    is_bucket = transfer.kind in _REDUCES and has_arrays and not match.is_of_author
    number = transfer.instruction.name if transfer.number is None else transfer.number
    more = f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""
    title = f"{'bucket' if is_bucket else transfer.kind} {number}: {leaves[0] if leaves else ''}"
    num_groups = len(transfers.replica_groups(transfer.instruction)) or 1
    return Collective(
        title + more, transfer.kind, transfer.num_bytes, transfer.algorithm, leaves, num_groups
    )
