"""Before a loop begins: do all processes bring batches that fit together?"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jax.sharding import Mesh, NamedSharding

from jdp.data.sharding import Layout
from jdp.distributed import agree
from jdp.error_codes import with_code

_TEXT_CHARACTERS = 600


class FirstBatch(NamedTuple):
    """What one process says about its first batch."""

    state: str  # "batch", "end" (there is none) or "error"
    digest: str  # equal if all but the number of rows is
    rows_per_rank: int
    text: str


def first_batch(
    batches: Iterator[Any], sharding: NamedSharding, facts: str = ""
) -> tuple[Any, Layout] | None:
    """Take the first host batch and its layout, and compare them over the mesh's processes.

    All processes must come here, in the same order. It fails on all of them or on none, so that
    none waits in its first step for one that has given up.

    Args:
      batches: this process's host batches; the first is taken.
      sharding: that of the batch.
      facts: what else must be the same, as text.

    Returns:
      The first batch and its layout, or None if there are no batches, on any process.

    Raises:
      ValueError: if the layout is wrong, or the processes' layouts or facts differ.
      RuntimeError: if another process failed to make its first batch, or does not come here.
    """
    found, error, report = None, None, FirstBatch("end", "", 0, "no batches")
    try:
        for batch in batches:
            found = batch, Layout.of(batch, sharding)
            report = _report(found[1], facts)
            break
    except Exception as failure:
        error, report = failure, FirstBatch("error", "", 0, repr(failure))
    report = report._replace(text=report.text[:_TEXT_CHARACTERS])
    assert isinstance(sharding.mesh, Mesh)
    gathered = agree.all_gather(agree.peers(sharding.mesh), report, what="first batches")
    if error is None:
        require_agreement({process: FirstBatch(*each) for process, each in gathered.items()})
    if error is not None:
        raise error
    return found


def require_agreement(reports: Mapping[int, FirstBatch]) -> None:
    """Compare the reports of all processes, by index.

    Raises:
      ValueError: if they differ; names one that differs from most.
      RuntimeError: if a process reports an error.

    >>> same = FirstBatch("batch", "3f", 2, "x float32[4, 8]")
    >>> require_agreement({0: same, 1: same, 2: same._replace(rows_per_rank=3)})
    Traceback (most recent call last):
    ValueError: process 2 begins with 3 rows per rank ...
    """
    for process, report in reports.items():
        if report.state == "error":
            text = (
                f"process {process} could not make its first batch, so no process can begin: "
                f"{report.text}"
            )
            raise RuntimeError(with_code("JDP208", text))
    kinds = {process: report[:3] for process, report in reports.items()}
    usual = Counter(kinds.values()).most_common(1)[0][0]
    odd = next((process for process, kind in kinds.items() if kind != usual), None)
    if odd is not None:
        like = next(process for process, kind in kinds.items() if kind == usual)
        text = (
            f"process {odd} begins with {reports[odd].rows_per_rank} rows per rank "
            f"({reports[odd].text}), process {like} with {reports[like].rows_per_rank} "
            f"({reports[like].text}): a step hangs or goes wrong unless its ranks hold equally "
            "many rows of the same shapes and dtypes. Give every process the same arguments, and "
            "equally many rows per rank."
        )
        raise ValueError(with_code("JDP209", text))


def _report(layout: Layout, facts: str) -> FirstBatch:
    per_rank = layout.sharding.shard_shape((layout.num_rows,))[0]
    rows = [leaf._replace(shape=leaf.shape[1:]) for leaf in layout.leaves]
    same = repr((facts, str(layout.treedef), [str(row) for row in rows]))
    text = ", ".join(filter(None, [facts, *map(str, layout.leaves)]))
    return FirstBatch("batch", hashlib.sha256(same.encode()).hexdigest(), per_rank, text)
