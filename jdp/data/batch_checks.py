"""Checks that processes have the same dataset and consistent batches."""

import logging
import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp.data import host_arrays
from jdp.data.dataset import Read
from jdp.data.sharding import Layout
from jdp.distributed import agree
from jdp.error_codes import with_code

# Different datasets differ in nearly all rows.
_NUM_ROWS = 4
# A row with a random bit is equal in 8 readings once in 128.
_NUM_ROWS_OF_OBJECTS, _NUM_READINGS = 2, 8
# Batches between two checks of a loop.
MIN_BATCHES = 1000
_NOTE = (
    "jdp: the processes compare this row. If each process has its own rows, write "
    'rows="of this process".'
)


class RowCheck(NamedTuple):
    """Reads the rows to compare between processes; `may_be_random`: the dataset may vary them."""

    read: Read
    num_rows: int
    seed: int
    may_be_random: bool

    def drawn(self, epoch: int) -> np.ndarray:
        """Return an epoch's rows to compare, [n] int, ascending; equal on all processes."""
        size = _NUM_ROWS_OF_OBJECTS if self.may_be_random else _NUM_ROWS
        return np.unique(np.random.default_rng([self.seed, epoch]).integers(0, self.num_rows, size))

    def checksums(self, rows: np.ndarray) -> dict[str, int]:
        """Return checksums by row; {} if the dataset is random."""
        num = _NUM_READINGS if self.may_be_random else 1
        try:
            readings = [_checksums(self.read(rows)) for _ in range(num)]
        except Exception as error:
            error.add_note(_NOTE)
            raise
        first = readings[0]
        if any(each != first for each in readings) or len(first) != len(rows):
            return {}
        return dict(zip(map(str, rows.tolist()), first, strict=True))


def _checksums(batch: Any) -> list[int]:
    leaves = [leaf for leaf in jax.tree.leaves(batch) if isinstance(leaf, np.ndarray)]
    if not leaves or any(leaf.dtype.hasobject for leaf in leaves):
        return []  # raises an error of its own
    found = [0] * len(leaves[0])
    for leaf in map(host_arrays.native, leaves):
        if np.issubdtype(leaf.dtype, np.inexact):
            leaf = leaf + leaf.dtype.type(0)  # -0.0 equals 0.0
        found = [zlib.crc32(row.tobytes(), begun) for row, begun in zip(leaf, found, strict=True)]
    return found


def require_equal(peers: tuple[int, ...], sums: Mapping[str, int]) -> None:
    """Compare rows of all processes' datasets."""
    gathered = agree.all_gather(peers, dict(sums), what="rows of the dataset")
    if not all(gathered.values()):
        return
    for row in sums:
        pair = agree.odd_one({process: found[row] for process, found in gathered.items()})
        if pair is not None:
            odd, usual = pair
            text = (
                f"row {row} of the dataset differs between processes {odd} and {usual}.\n"
                "Processes read rows by number, so rows would be duplicated or skipped.\n"
                "Pass the same dataset on every process; use jdp.shard_batches for rows of one "
                'process; or write rows="of this process" if they differ by design, such as by '
                "augmentation."
            )
            raise ValueError(with_code("JDP209", text))


_TEXT_CHARACTERS = 600
_ARGUMENT = re.compile(r"\w+=[^,()]+")  # Of jdp.batches, as in seed=0.

_log = logging.getLogger("jdp")


class FirstBatch(NamedTuple):
    """A process's report about its first batch."""

    digest: str  # of all but the number of rows
    rows_per_rank: int
    text: str
    first_row: int = 0  # in the global batch
    checksum: int | None = None  # of a loader's rows


_NO_BATCH = FirstBatch("", 0, "no batches")


def require_equal_layouts(
    peers: tuple[int, ...],
    layout: Layout | None,
    facts: str,
    batch: Any = None,
    *,
    what: str = "first batches",
) -> None:
    """Compare the layouts of all processes' first, or later, batches."""
    report = _NO_BATCH if layout is None else _report(layout, facts)
    if layout is not None and batch is not None and len(peers) > 1:
        first_row = int(layout.rows[0])
        report = report._replace(first_row=first_row, checksum=_checksum(batch))
    gathered = agree.all_gather(peers, report, what=what)
    reports = {process: FirstBatch(*each) for process, each in gathered.items()}
    require_agreement(reports)
    if jax.process_index() == min(peers) and (text := why_repeated(reports)):
        _log.warning(text)


def why_repeated(reports: Mapping[int, FirstBatch]) -> str | None:
    """Return a warning if all processes pass equal rows."""
    parts = {report.first_row for report in reports.values()}
    checksums = {report.checksum for report in reports.values()}
    if len(parts) == 1 or len(checksums) > 1 or None in checksums:
        return None
    return (
        f"the {len(reports)} processes pass equal first batches to jdp.shard_batches, so each "
        f"row counts {len(parts)} times. Pass different rows on each process, such as "
        "rows[jax.process_index()::jax.process_count()]; or write jdp.batches(dataset, ...), "
        "which takes the whole dataset on every process."
    )


def _checksum(batch: Any) -> int:
    found = 0
    for leaf in jax.tree.leaves(batch):
        found = zlib.crc32(np.asarray(leaf).tobytes(), found)
    return found


def _require_equal_parts(reports: Mapping[int, FirstBatch]) -> None:
    """Refuse different rows of processes whose devices belong to the same ranks."""
    first: dict[int, int] = {}
    for process, report in sorted(reports.items()):
        other = first.setdefault(report.first_row, process)
        if None not in (own := {report.checksum, reports[other].checksum}) and len(own) > 1:
            text = (
                f"processes {other} and {process} have devices of the same ranks, along another "
                "axis than the data axis, but pass different rows to jdp.shard_batches.\n"
                "Each row must be the same on all devices of a rank. Pass equal rows there, or "
                "write jdp.batches(dataset, ...), which does."
            )
            raise ValueError(with_code("JDP209", text))


def require_agreement(reports: Mapping[int, FirstBatch]) -> None:
    """Raise a ValueError that names a process with an unusual report."""
    kinds = {process: report[:2] for process, report in reports.items()}
    pair = agree.odd_one(kinds)
    if pair is None:
        return _require_equal_parts(reports)
    odd, usual = pair
    other, ours = (set(_ARGUMENT.findall(reports[process].text)) for process in pair)
    if other and ours and other != ours:
        text = (
            f"process {odd} has {', '.join(sorted(other - ours))} where process {usual} has "
            f"{', '.join(sorted(ours - other))}, so rows would be duplicated or skipped. Pass "
            "the same arguments and the whole dataset to jdp.batches on every process; each "
            "reads its own rows."
        )
        raise ValueError(with_code("JDP209", text))
    text = (
        f"process {odd} has {reports[odd].rows_per_rank} rows per rank ({reports[odd].text}), "
        f"process {usual} with {reports[usual].rows_per_rank} ({reports[usual].text}). A step "
        "hangs or is wrong unless its ranks hold equally many rows of the same shapes and "
        "dtypes. Pass the same arguments on every process, and equally many rows per rank."
    )
    raise ValueError(with_code("JDP209", text))


def _report(layout: Layout, facts: str) -> FirstBatch:
    per_rank = layout.sharding.shard_shape((layout.num_rows,))[0]
    rows = [str(leaf._replace(shape=leaf.shape[1:])) for leaf in layout.leaves]
    text = ", ".join(filter(None, [facts, *map(str, layout.leaves)]))
    digest = agree.digest([facts, str(layout.treedef), *rows])
    return FirstBatch(digest, per_rank, text[:_TEXT_CHARACTERS])
