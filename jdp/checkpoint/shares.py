"""The share of a state that each process of a host writes to a commit which they write together."""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jdp.checkpoint.saved_leaves import SavedLeaf

Rows = tuple[int, int]  # start and stop in the first dim of a leaf; an array without dims is a row


class Share(NamedTuple):
    """The share of a process in commits that several processes of a host write together.

    Attributes:
      number: of the share, from 0.
      num_shares: how many there are, >= 1.
    """

    number: int
    num_shares: int

    def of_bytes(self, num_bytes: int) -> slice:
        """Return the share of so many bytes, about where the rows of the share lie.

        >>> Share(1, 3).of_bytes(8)
        slice(2, 5, None)
        """
        return slice(*(i * num_bytes // self.num_shares for i in (self.number, self.number + 1)))


def rows(leaves: Sequence[SavedLeaf], is_shared: Sequence[bool], share: Share) -> list[Rows]:
    """Return which rows of each leaf belong to a share.

    The shares are equal in bytes, as far as rows can be. Share 0 has all rows of the leaves that
    are not shared.

    >>> leaves = [SavedLeaf("a", (6,), "float32", None), SavedLeaf("b", (), "float64", None)]
    >>> [rows(leaves, [True, True], Share(number, 2)) for number in (0, 1)]
    [[(0, 4), (0, 0)], [(4, 6), (0, 1)]]
    """
    total = sum(leaf.num_bytes for leaf, shared in zip(leaves, is_shared, strict=True) if shared)
    begin, found = 0, []
    for leaf, shared in zip(leaves, is_shared, strict=True):
        num = _num_rows(leaf)
        if shared:
            cuts = (share.number + i for i in (0, 1))
            start, stop = (_cut(leaf, num, cut * total // share.num_shares - begin) for cut in cuts)
            # The cuts of an empty leaf say nothing.
            found.append((start, stop if leaf.num_bytes else start))
            begin += leaf.num_bytes
        else:
            found.append((0, num if share.number == 0 else 0))
    return found


def form(leaves: Sequence[SavedLeaf], is_shared: Sequence[bool]) -> int:
    """Return a checksum of the layout, which is equal on all processes that write together."""
    return zlib.crc32(repr((leaves, is_shared)).encode())


def holds_everywhere(x: Any) -> bool:
    """Whether every process of the run holds all of an array, with the same bits."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or not x.is_fully_replicated:
        return False
    return len({device.process_index for device in x.sharding.device_set}) == jax.process_count()


def is_elsewhere(x: Any) -> bool:
    """Whether an array lies on devices of other processes alone."""
    return isinstance(x, jax.Array) and not x.sharding.addressable_devices


def not_held(name: str, x: jax.Array) -> ValueError:
    """Return the error of a process that is to write a leaf of which it holds nothing."""
    owners = sorted({device.process_index for device in x.sharding.device_set})
    return ValueError(
        f"`{name}` is on devices of process {', '.join(map(str, owners))} alone, and process "
        f"{jax.process_index()}, which writes it, holds nothing of it. Place it on devices of all "
        "processes, for instance by jax.device_put(x, jax.NamedSharding(jdp.init(), jax.P())), or "
        "keep it outside the state."
    )


def _num_rows(leaf: SavedLeaf) -> int:
    return leaf.shape[0] if leaf.shape else 1


# The first row that begins at this byte of a leaf or behind it.
def _cut(leaf: SavedLeaf, num_rows: int, byte: int) -> int:
    if not leaf.num_bytes:
        return 0
    return min(max(-(-byte * num_rows // leaf.num_bytes), 0), num_rows)
