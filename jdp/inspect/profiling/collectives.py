"""Which operations of a compiled program are collectives, and which leaves they take."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jdp import jax_compat
from jdp.inspect import explain, hlo_matching, replica_groups, timeline
from jdp.inspect.hlo import HloProgram
from jdp.inspect.planned import Planned, SentLeaf, planned
from jdp.inspect.profiling.device_operations import Operation
from jdp.inspect.speeds import Groups, Work
from jdp.inspect.transfers import SentArrays

_REDUCES = ("all-reduce", "reduce-scatter")


class Collective(NamedTuple):
    """A collective of a compiled program.

    Attributes:
      name: what a trace calls it, such as "bucket 3: grads['w']".
      kind: such as `all-reduce`.
      num_bytes: of its whole arrays on one rank, in one run.
      algorithm: `native`, `split` or `xla`.
      leaves: names of the arrays that it takes.
      num_groups: of ranks, each of which runs it by itself; 1 if all ranks meet.
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
    """Return the collectives of compiled programs by program and operation."""
    texts: dict[str, list[HloProgram]] = {name: [] for name in operations}
    for name, text in jax_compat.compiled_texts(operations):
        texts[name].append(HloProgram(text))
    found = {}
    for name, ran in operations.items():
        if texts[name]:
            # Programs of other shapes may have the same name.
            program = max(texts[name], key=lambda each: len(_names(each) & set(ran)))
            found[name] = _collectives(program, jaxprs.get(name, ()))
    return found


def by_order(
    ran: Mapping[int, Sequence[Operation]], known: Mapping[str, Mapping[str, Collective]]
) -> dict[str, dict[str, Collective]]:
    """Return the collectives by the names that a profile has for them.

    XLA's collectives between GPUs bear there the name of the operation that XLA then divided into a
    start and a done, which is not in the compiled program any more. They begin in the order of the
    program, if all are in one stream. Where their number, their kinds or the devices contradict
    that order, they are left without names.

    Args:
      ran: the operations of each device, in order.
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
    """Return the collectives of a program whose operations have other names on a device."""
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


def _plan(transfers: Sequence[SentArrays], plans: Sequence[list[Planned]]) -> list[Planned]:
    """Return the plan of this program: the latest of those with most of its numbers and bytes."""
    numbers = {each.number for each in transfers}
    num_bytes = sum(each.num_bytes for each in transfers)

    def likeness(i: int) -> tuple[int, bool, int]:
        found = sum(_num_bytes(leaf) for one in plans[i] for leaf in one.leaves)
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
    num_groups = len(replica_groups.groups(transfer.instruction)) or 1
    return Collective(
        title + more, transfer.kind, transfer.num_bytes, transfer.algorithm, leaves, num_groups
    )
