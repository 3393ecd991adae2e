"""The groups of ranks in which a collective of a compiled program runs, read from its text."""

import math
import re

import numpy as np

from jdp.inspect.hlo import Instruction

# {{0,1},{2,3}}, or [2,2]<=[2,2]T(1,0), or mesh['a'=2,'b'=2] {'b'}.
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_COUNTED = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NATIVE = re.compile(r"\bnum_ranks = (\d+)")
_ON_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}")


def first_group(one: Instruction) -> tuple[int, ...]:
    """Return the ranks of the first group, in ascending order; none where the text names none.

    Args:
      one: a collective of XLA's, or a native call, which is between ranks of one host.

    >>> text = "%x), replica_groups=[2,4]<=[4,2]T(1,0)"
    >>> first_group(Instruction("r", "f32[8]", "all-reduce", text))
    (0, 2, 4, 6)
    """
    if found := one.target() and _NATIVE.search(one.rest):
        return tuple(range(int(found[1])))  # which ranks these are is not in the program
    text = one.attributes()
    if found := _LISTED.search(text):
        return tuple(sorted(_numbers(found[1])))
    if found := _COUNTED.search(text):
        dims = _numbers(found[3])
        ranks = np.arange(math.prod(dims)).reshape(dims)
        ranks = ranks.transpose(_numbers(found[4] or "") or None)
        return tuple(sorted(ranks.reshape(int(found[1]), int(found[2]))[0].tolist()))
    if found := _ON_MESH.search(text):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        named = re.findall(r"'([^']+)'", found[2])
        ranks = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        own = ranks[tuple(slice(None) if axis in named else 0 for axis in sizes)]
        return tuple(own.reshape(-1).tolist())
    return ()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
