"""A compiled program's collectives."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jdp.collectives import call_order
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.tools import hlo
from jdp.tools.costs import Costs
from jdp.tools.hlo import Array, Instruction

# {{0,1},{2,3}}, or [2,2]<=[2,2]T(1,0), or mesh['a'=2,'b'=2] {'b'}.
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)+)\}")
_COUNTED = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}")
_NUM_RANKS = re.compile(r"\bnum_ranks = (\d+)")
_ON_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}")


def replica_groups(one: Instruction) -> list[tuple[int, ...]]:
    """Return each group's ascending ranks, or (sender, receiver); empty without groups."""
    if found := one.target() and _NUM_RANKS.search(one.rest):
        return [tuple(range(int(found[1])))]  # which ones is not in the program
    text = one.attributes()
    if found := _PAIRS.search(text):
        return [tuple(_numbers(each)) for each in re.findall(r"\{(\d+,\d+)\}", found[1])]
    if found := _LISTED.search(text):
        rows = [_numbers(each) for each in re.findall(r"\{([\d,]*)\}", found[1])]
    elif found := _COUNTED.search(text):
        dims = _numbers(found[3])
        ranks = np.arange(math.prod(dims)).reshape(dims)
        ranks = ranks.transpose(_numbers(found[4] or "") or None)
        rows = ranks.reshape(int(found[1]), int(found[2])).tolist()
    elif found := _ON_MESH.search(text):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        named = re.findall(r"'([^']+)'", found[2])
        ranks = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        meeting = [i for i, axis in enumerate(sizes) if axis in named]
        ranks = np.moveaxis(ranks, meeting, range(-len(meeting), 0))
        rows = ranks.reshape(-1, math.prod(sizes[axis] for axis in named)).tolist()
    else:
        return []
    return [tuple(sorted(row)) for row in rows]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


_BUCKET = re.compile(r"\bbucket = (\d+)")
_TRITON = re.compile(r'"kernel_strategy":"KERNEL_STRATEGY_TRITON_(ONE|TWO)_SHOT"')
_NATIVE = {
    cpu_runtime.target(name, beside_xla=beside): name.removeprefix("jdp_").replace("_", "-")
    for name in cpu_runtime.TARGETS
    for beside in (False, True)
}


@dataclass
class SentArrays:
    """A collective of a program, in all of its runs.

    Attributes:
      instruction: the one that starts it.
      algorithm: `native`, `split` (the ring between GPUs), or `xla`; `triton one-shot` and
        `triton two-shot` for XLA's kernels that sum a few MiB between GPUs without NCCL.
      number: of a native call; None for XLA's.
      arrays: its operands, without padding or packing.
      num_bytes: of its whole arrays on one rank, in one run.
      groups: each group's devices; empty if all meet, or if unknown.
      ends_s: end of the first run, when its result is used.
    """

    instruction: Instruction
    computation: str
    kind: str
    algorithm: str
    number: int | None
    arrays: list[Array]
    num_bytes: int
    groups: Sequence[tuple[int, ...]] = ()
    runs: int = 0
    took_s: float = 0.0
    exposed_s: float = 0.0
    hidden_runs: int = 0
    begins_s: float = 0.0
    ends_s: float = 0.0
    meanwhile: Counter[str] = field(default_factory=Counter)
    after_last_matmul: bool = True


def number_of(inner: Instruction) -> int | None:
    """Return a native call's number, None for an XLA collective."""
    found = _BUCKET.search(inner.rest) if inner.target() else None
    return int(found[1]) if found else None


def transfer_of(
    one: Instruction, inner: Instruction, computation: str, shapes: Mapping[str, str]
) -> SentArrays:
    """Return a collective that has not run."""
    target = inner.target()
    taken = [array for x in one.operands() for array in hlo.arrays(shapes.get(x, ""))]
    if target in _NATIVE:
        skipped = call_order.TOKEN + 1
        taken = [a for x in one.operands()[skipped:] for a in hlo.arrays(shapes.get(x, ""))]
        kind, algorithm = _NATIVE[target], "native"
    elif target == call_order.START:
        if one is inner:  # the first operand is the scale
            taken = taken[1:]
        else:  # in a fusion it may be any of them
            taken = [array for array in taken if array.dims or array.dtype not in ("f32", "f64")]
        kind, algorithm = "all-reduce", "split"
    else:
        kind, algorithm = inner.op.removesuffix("-start"), "xla"
        if shots := _TRITON.search(inner.rest):
            algorithm = f"triton {shots[1].lower()}-shot"
        if any(name.startswith("all-reduce-scatter") for name in one.called()):
            kind = "reduce-scatter"  # a kernel of TPUs, for dims that their tiles do not divide
        if kind == "ragged-all-to-all":  # rows, the result's memory, and numbers
            taken = [min(taken[:2], key=Array.num_bytes)]
    num_bytes = sum(array.num_bytes() for array in taken)
    if kind == "all-gather":
        num_bytes = max(num_bytes, _gathered_bytes(inner, num_bytes, algorithm))
    return SentArrays(
        one, computation, kind, algorithm, number_of(inner), taken, num_bytes,
        replica_groups(inner),
    )  # fmt: skip


def collective_in(one: Instruction, costs: Costs) -> Instruction | None:
    """Return an instruction's collective, also inside a fusion."""
    if one.op.endswith("-done"):
        return None
    part = costs.part(one)
    if part is not None and not part.is_start:
        return None
    for each in [one, *costs.inside(one)] if one.op != "while" else []:
        if each.op.removesuffix("-start") in hlo.COLLECTIVES:
            return each
        if each.target() in _NATIVE or each.target() in (call_order.START, call_order.DONE):
            return each
    return None


def _gathered_bytes(inner: Instruction, taken_bytes: int, algorithm: str) -> int:
    found = hlo.num_bytes(inner.shape)
    # A start's type includes its operands; a native call's result a token.
    if inner.op.endswith("-start"):
        return found - taken_bytes
    return found - (4 if algorithm == "native" else 0)
