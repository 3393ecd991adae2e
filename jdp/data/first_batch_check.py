"""Checks before a loop that the batches of all processes are consistent."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jax.sharding import Mesh, NamedSharding

from jdp.data.sharding import Layout
from jdp.distributed import agree
from jdp.error_codes import with_code

_TEXT_CHARACTERS = 600


class FirstBatch(NamedTuple):
    """The report of one process about its first batch."""

    digest: str  # equal if everything except the number of rows is equal
    rows_per_rank: int
    text: str


_NO_BATCH = FirstBatch("", 0, "no batches")


def first_batch(
    batches: Iterator[Any], sharding: NamedSharding, facts: str = ""
) -> tuple[Any, Layout] | None:
    """Take the first host batch and its layout, and compare them over the mesh's processes.

    All processes must call this, in the same order. It fails on all of them or on none, so that no
    process waits in its first step for one that failed.

    Args:
      batches: this process's host batches; the first is taken.
      sharding: that of the batch.
      facts: further values that must be equal, as text.

    Returns:
      The first batch and its layout, or None if there are no batches, on any process.

    Raises:
      ValueError: if the layout is wrong, or the processes' layouts or facts differ.
      RuntimeError: if another process failed to make its first batch, or does not make this call.
    """
    assert isinstance(sharding.mesh, Mesh)
    peers, found, report = agree.peers(sharding.mesh), None, _NO_BATCH
    with agree.propagating_errors(peers, "while it made its first batch"):
        for batch in batches:
            found = batch, Layout.of(batch, sharding)
            report = _report(found[1], facts)
            break
    gathered = agree.all_gather(peers, report, what="first batches")
    require_agreement({process: FirstBatch(*each) for process, each in gathered.items()})
    return found


def require_agreement(reports: Mapping[int, FirstBatch]) -> None:
    """Raise ValueError, naming a process that differs from most, if the reports differ.

    >>> same = FirstBatch("3f", 2, "x float32[4, 8]")
    >>> require_agreement({0: same, 1: same, 2: same._replace(rows_per_rank=3)})
    Traceback (most recent call last):
    ValueError: process 2 begins with 3 rows per rank ...
    """
    kinds = {process: report[:2] for process, report in reports.items()}
    pair = agree.odd_one(kinds)
    if pair is None:
        return
    odd, usual = pair
    text = (
        f"process {odd} begins with {reports[odd].rows_per_rank} rows per rank "
        f"({reports[odd].text}), process {usual} with {reports[usual].rows_per_rank} "
        f"({reports[usual].text}): a step hangs or goes wrong unless its ranks hold equally many "
        "rows of the same shapes and dtypes. Give every process the same arguments, and equally "
        "many rows per rank."
    )
    raise ValueError(with_code("JDP209", text))


def _report(layout: Layout, facts: str) -> FirstBatch:
    per_rank = layout.sharding.shard_shape((layout.num_rows,))[0]
    rows = [str(leaf._replace(shape=leaf.shape[1:])) for leaf in layout.leaves]
    text = ", ".join(filter(None, [facts, *map(str, layout.leaves)]))
    digest = agree.digest([facts, str(layout.treedef), *rows])
    return FirstBatch(digest, per_rank, text[:_TEXT_CHARACTERS])
