"""`find_batch_size`: the most rows that fit into memory."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jdp.tools.compiled import (
    TooLargeError,
    compile_step,
    devices_of,
    require_equal_rows,
    with_rows,
)
from jdp.tools.memory import allocated_bytes
from jdp.tools.report import of_bytes
from jdp.tools.targets import TargetDevices
from jdp.training.step import Step
from jdp.validation import int_at_least


class Search:
    """The search for the most rows that fit; `bytes_of` is inf if XLA does not compile a step."""

    def __init__(self, bytes_of: Callable[[int], float], limit: int, candidates: Sequence[int]):
        self._bytes_of, self._limit, self._candidates = bytes_of, limit, candidates
        self.known: dict[int, float] = {}

    def last_that_fits(self) -> int:
        """Return the last position that fits."""
        if not self.fits(0):
            took = self.known[0]
            took = of_bytes(took) if math.isfinite(took) else "more than the memory of a device"
            raise ValueError(
                f"the fewest rows, {self._candidates[0]}, take {took} on each rank, but the "
                f"limit is {of_bytes(self._limit)}. Shard the state (jdp.sharded), or use a "
                "smaller model."
            )
        fits = max(i for i in self.known if self.fits(i))
        beyond = min((i for i in self.known if i > fits), default=None)
        while fits < len(self._candidates) - 1 and beyond != fits + 1:
            i = self._next(fits, beyond)
            if self.fits(i):
                fits = i
            else:
                beyond = i
        return fits

    def fits(self, i: int) -> bool:
        """Whether the step fits; compiles it once."""
        if i not in self.known:
            self.known[i] = self._bytes_of(self._candidates[i])
        return self.known[i] <= self._limit

    def bytes_at(self, i: int) -> int | None:
        """Return the bytes; None if not compiled."""
        found = self.known.get(i, math.inf)
        return int(found) if math.isfinite(found) else None

    def _next(self, fits: int, beyond: int | None) -> int:
        """Try where a line meets the limit, or the middle."""
        guess = 2 * fits + 1 if beyond is None else (fits + beyond) // 2
        others = [i for i in self.known if i != fits]
        # Every third try is the middle, because memory may not grow along a line.
        if others and len(self.known) % 3:
            other = beyond or max(others)
            slope = (self.known[fits] - self.known[other]) / (fits - other)
            if 0 < slope < math.inf:
                guess = fits + int((self._limit - self.known[fits]) / slope)
        largest = len(self._candidates) - 1 if beyond is None else beyond - 1
        return min(max(guess, fits + 1), largest)


# JAX's default for XLA_PYTHON_CLIENT_MEM_FRACTION.
_OF_GPU = 0.75


class BatchSize(NamedTuple):
    """The most rows that fit into memory.

    Attributes:
      rows: of the batch over all ranks, or of a micro-batch of one rank.
      num_bytes: memory of the step on one rank.
      next_rows: the next larger number of rows; None if `rows` is the largest.
      next_bytes: memory with `next_rows`; None without `next_rows`, or if XLA does not compile that
        step, as for TPUs with too little memory.
      num_compiled: number of compiled steps.
    """

    rows: int
    num_bytes: int
    next_rows: int | None
    next_bytes: int | None
    num_compiled: int


def find_batch_size(
    step: Step | Callable[[int], Step],
    /,
    *args: Any,
    limit_bytes: int | None = None,
    granularity: int | None = None,
    max_rows: int | None = None,
    on: str | Mesh | None = None,
    **keywords: Any,
) -> BatchSize:
    """Find the largest batch whose step fits into memory, by compiling steps and running none.

    Leave memory for prefetched batches of `jdp.batches`, a copy of the state during a save, and
    fragments.

    Args:
      step: a decorated step, or a function `micro_batch_rows -> step`: then the batch stays
        unchanged, and the result is the rows of a micro-batch of one rank.
      *args: arguments of the step, as for `jdp.explain`. For a step, the first dim of the batch
        changes, and that of arrays of `jdp.per_rank` with as many rows.
      limit_bytes: memory of the step on one rank, > 0. Default for GPUs named in `on`: JAX's 75 %
        of their memory.
      granularity: the rows are a multiple of it, >= 1. Default: the number of ranks, or 1 for
        micro-batches, whose rows also divide those of a rank.
      max_rows: the most rows to try. Default: those of one rank's batch for micro-batches, else
        1024 times those of the batch, or one per rank if that is more.
      on: the devices, as for `jdp.explain`.
      **keywords: keyword arguments of the step. Pass those named `limit_bytes`, `granularity`,
        `max_rows` or `on` by position, or in a `functools.partial`.

    Returns:
      The rows, and the memory of that step and the next larger one.

    Raises:
      ValueError: the fewest rows do not fit, there is no limit, there is no number of rows to
        try, or the batch's arrays have different first dims.
      TypeError: a number is not an integer, or `step` is neither a step nor returns one.

    >>> import jax, jax.numpy as jnp, optax, jdp
    >>> mesh = jdp.init(cpu_ranks=2)
    >>> state = jdp.TrainState.create({"w": jnp.zeros((64, 64))}, jdp.replicated(optax.sgd(0.1)))
    >>> @jdp.train_step
    ... def step(state, x):
    ...     grads = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p["w"]) ** 2))(state.params)
    ...     return state.apply_gradients(grads), {}
    >>> rows = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    >>> found = jdp.find_batch_size(step, state, rows, limit_bytes=2**20)
    >>> found.num_bytes <= 2**20 < found.next_bytes, found.next_rows - found.rows
    (True, 2)
    """
    is_step = isinstance(step, Step)
    first = step if is_step else _made(step, 1)
    spec, bound = first.bound(args, keywords)
    (state, batch, *rest), by_keyword = spec.by_keyword(bound)
    num_rows = _num_rows(batch)
    where, num_ranks = devices_of(first, args, keywords, on)
    if not is_step:
        require_equal_rows(batch, spec, num_ranks)
    tried = _of_batch if is_step else _of_micro_batch
    candidates = tried(num_rows, num_ranks, granularity, max_rows)

    def bytes_of(rows: int) -> float:
        used = step if is_step else _made(step, rows)
        given = with_rows(spec, state, batch, rows) if is_step else (state, batch)
        try:
            return allocated_bytes(compile_step(used, (*given, *rest), by_keyword, on).compiled)
        except TooLargeError:
            return math.inf

    search = Search(bytes_of, _limit(where, limit_bytes), candidates)
    if is_step and num_rows in candidates:
        search.fits(candidates.index(num_rows))
    most = search.last_that_fits()
    return BatchSize(
        rows=candidates[most],
        num_bytes=int(search.known[most]),
        next_rows=candidates[most + 1] if most + 1 < len(candidates) else None,
        next_bytes=search.bytes_at(most + 1),
        num_compiled=len(search.known),
    )


def _of_batch(
    num_rows: int, num_ranks: int, granularity: int | None, max_rows: int | None
) -> Sequence[int]:
    unit = num_ranks if granularity is None else granularity
    unit = int_at_least("granularity", unit, least=1)
    if unit % num_ranks:
        raise ValueError(
            f"granularity={unit}, but the rows of a batch are split over {num_ranks} ranks. "
            f"Write granularity={-(-unit // num_ranks) * num_ranks}, or remove it."
        )
    if max_rows is not None:
        most = int_at_least("max_rows", max_rows, least=unit)
    else:
        most = max(1024 * num_rows, num_ranks)
    if unit > most:
        raise ValueError(
            f"granularity={unit}, but at most {most} rows are tried. Write a smaller "
            f"granularity, or max_rows={unit} or more."
        )
    return range(unit, most + 1, unit)


def _of_micro_batch(
    num_rows: int, num_ranks: int, granularity: int | None, max_rows: int | None
) -> Sequence[int]:
    of_rank = num_rows // num_ranks
    unit = int_at_least("granularity", 1 if granularity is None else granularity, least=1)
    most = of_rank if max_rows is None else int_at_least("max_rows", max_rows, least=1)
    # Others would pad the last micro-batch with copies.
    found = [rows for rows in range(unit, most + 1, unit) if of_rank % rows == 0]
    if not found:
        raise ValueError(
            f"a rank has {of_rank} rows, which no multiple of granularity={unit} up to {most} "
            "divides. Pass a smaller granularity, or another number of rows."
        )
    return found


def _num_rows(batch: Any) -> int:
    named = jax.tree_util.tree_leaves_with_path(batch)
    shapes = {f"batch{jax.tree_util.keystr(path)}": jnp.shape(leaf) for path, leaf in named}
    rows = {shape[:1] for shape in shapes.values()}
    if len(rows) != 1 or () in rows or (0,) in rows:
        found = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(
            f"the batch has {found or 'no arrays'}, but find_batch_size changes the first dim of "
            "all arrays, which must be equal and at least 1."
        )
    return rows.pop()[0]


def _made(make_step: Callable[[int], Step], rows: int) -> Step:
    found = make_step(rows) if _takes_rows(make_step) else None
    if not isinstance(found, Step):
        raise TypeError(
            f"find_batch_size got {make_step!r}. Pass a step decorated with jdp.train_step or "
            "jdp.eval_step, or a function that returns one for a number of rows."
        )
    return found


def _takes_rows(make_step: Any) -> bool:
    try:
        inspect.signature(make_step).bind(1)
    except (TypeError, ValueError):  # an undecorated step
        return False
    return True


def _limit(where: TargetDevices, limit_bytes: int | None) -> int:
    if limit_bytes is not None:
        return int_at_least("limit_bytes", limit_bytes, least=1)
    memory = where.memory_bytes()
    if memory is None:
        raise ValueError(
            f"the memory of {where.name} is unknown. Write limit_bytes=, the memory of the step "
            "on one rank."
        )
    return int(_OF_GPU * memory)
