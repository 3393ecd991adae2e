"""Check before a loop that the batches of all processes are consistent."""

from collections.abc import Mapping
from typing import NamedTuple

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


def require_equal_layouts(peers: tuple[int, ...], layout: Layout | None, facts: str) -> None:
    """Compare the layouts of the first batches of all processes.

    Args:
      peers: the processes, which all call this.
      layout: layout of this process's first batch, None if it has no batch.
      facts: a text of further values that must be equal.

    Raises:
      ValueError: if the processes' layouts or facts differ.
      RuntimeError: if another process failed to make its first batch, or does not call this.
    """
    report = _NO_BATCH if layout is None else _report(layout, facts)
    gathered = agree.all_gather(peers, report, what="first batches")
    require_agreement({process: FirstBatch(*each) for process, each in gathered.items()})


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
