"""The groups of ranks in which a collective of a compiled program runs, read from its text."""

import math
import re

import numpy as np

from jdp.inspect.computation import Instruction

# {{0,1},{2,3}}, or [2,2]<=[2,2]T(1,0), or mesh['a'=2,'b'=2] {'b'}.
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)+)\}")
_COUNTED = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}")
_NATIVE = re.compile(r"\bnum_ranks = (\d+)")
_ON_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}")


def groups(one: Instruction) -> list[tuple[int, ...]]:
    """Return the ranks of each group, in ascending order; none where the text names none.

    A group of a `collective-permute` is a pair: who sends, and who receives.

    >>> text = "%x), replica_groups=[2,4]<=[4,2]T(1,0)"
    >>> groups(Instruction("r", "f32[8]", "all-reduce", text))
    [(0, 2, 4, 6), (1, 3, 5, 7)]
    """
    if found := one.target() and _NATIVE.search(one.rest):
        return [tuple(range(int(found[1])))]  # which ranks these are is not in the program
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
