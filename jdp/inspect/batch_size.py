"""`find_batch_size`: the most rows that fit into memory, from compiled steps."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jdp.inspect.compiled import StepForDevices, compile_step
from jdp.inspect.memory import allocated_bytes
from jdp.inspect.report import of_bytes
from jdp.training.step import Step
from jdp.validation import int_at_least

# JAX takes this part of a GPU's memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
_OF_GPU = 0.75


class BatchSize(NamedTuple):
    """The most rows that fit into memory.

    Attributes:
      rows: of the batch over all ranks, or of a micro-batch of one rank.
      num_bytes: of memory that the step takes on one rank.
      next_rows: the next larger number of rows; None if `rows` is the largest.
      next_bytes: that it would take: more than the limit.
      num_compiled: how many steps were compiled to find out.
    """

    rows: int
    num_bytes: int
    next_rows: int | None
    next_bytes: int | None
    num_compiled: int


def find_batch_size(
    step: Step | Callable[[int], Step],
    state: Any,
    batch: Any,
    *rest: Any,
    limit_bytes: int | None = None,
    granularity: int | None = None,
    max_rows: int | None = None,
    on: str | Mesh | None = None,
    **keywords: Any,
) -> BatchSize:
    """Find the largest batch whose step fits into memory, without running it once.

    Steps are compiled for more and fewer rows, as `jdp.explain` compiles them, until one fits and
    the next larger one does not. Leave some memory for what is not the step's: the prefetched
    batches of `jdp.batches`, a copy of the state while it is saved, fragments.

    Args:
      step: a decorated step. Or a function that returns one for a given `micro_batch_rows`: then
        the batch stays as it is, and the rows of a micro-batch of one rank are found.
      state: arrays or shapes, as for `jdp.explain`.
      batch: a batch: arrays or shapes. Of a step, its first dim is what changes.
      *rest: further arguments of the step.
      limit_bytes: memory that the step may take on one rank, > 0. Default, for GPUs that are named
        in `on`: the part of their memory that JAX takes, 75 %.
      granularity: the rows are a multiple of it, >= 1. Default: the number of ranks, or 1 for
        micro-batches, whose rows also divide those of a rank.
      max_rows: the most rows to try. Default: those of one rank's batch for micro-batches, else
        1024 times those of `batch`.
      on: the devices, as for `jdp.explain`.
      **keywords: arguments that the step takes by keyword.

    Returns:
      The rows, and the memory of that step and of the next larger one.

    Raises:
      ValueError: if not even the fewest rows fit, or there is no limit.
      TypeError: if a number is not an integer.

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
    args = (batch, *rest)

    def compiled(rows: int) -> StepForDevices:
        if not isinstance(step, Step):
            return compile_step(step(rows), (state, *args), keywords, on)
        given = jax.tree.map(lambda leaf: _with_rows(leaf, rows), batch)
        return compile_step(step, (state, given, *rest), keywords, on)

    num_rows = max((jnp.shape(leaf)[0] for leaf in jax.tree.leaves(batch)), default=1)
    is_step = isinstance(step, Step)
    first = compiled(num_rows if is_step else 1)
    if granularity is None:
        granularity = first.num_ranks if is_step else 1
    of_rank = num_rows // first.num_ranks
    if max_rows is None:
        max_rows = 1024 * num_rows if is_step else of_rank
    candidates = _multiples(granularity, max_rows)
    if not is_step:  # others would fill up the last micro-batch with a copy of the rows
        candidates = [rows for rows in candidates if of_rank % rows == 0]
    search = _Search(
        lambda rows: allocated_bytes(compiled(rows).compiled),
        _limit(first, limit_bytes),
        candidates,
    )
    if num_rows in candidates and is_step:
        search.known[candidates.index(num_rows)] = allocated_bytes(first.compiled)
    return search.largest()


class _Search:
    """The search among numbers of rows, by their positions.

    Attributes:
      known: bytes of memory of the steps that were compiled, by position.
    """

    def __init__(self, bytes_of: Callable[[int], int], limit: int, candidates: Sequence[int]):
        self._bytes_of, self._limit, self._candidates = bytes_of, limit, candidates
        self.known: dict[int, int] = {}

    def largest(self) -> BatchSize:
        """Return the largest batch that fits.

        Raises:
          ValueError: if not even the fewest rows fit.
        """
        most = self._most()
        larger = self.known.get(most + 1)
        return BatchSize(
            rows=self._candidates[most],
            num_bytes=self.known[most],
            next_rows=None if larger is None else self._candidates[most + 1],
            next_bytes=larger,
            num_compiled=len(self.known),
        )

    def _most(self) -> int:
        """Return the last position that fits, where the next one does not."""
        if not self._candidates or not self._fits(0):
            took = of_bytes(self.known.get(0, 0))
            raise ValueError(
                f"the fewest rows, {next(iter(self._candidates), 0)}, take {took} on each rank, "
                f"and the limit is {of_bytes(self._limit)}. Shard the state (jdp.sharded), or take "
                "a smaller model."
            )
        fits = max(i for i in self.known if self._fits(i))
        beyond = min((i for i in self.known if i > fits), default=None)
        while fits < len(self._candidates) - 1 and beyond != fits + 1:
            i = self._next(fits, beyond)
            if self._fits(i):
                fits = i
            else:
                beyond = i
        return fits

    def _fits(self, i: int) -> bool:
        if i not in self.known:
            self.known[i] = self._bytes_of(self._candidates[i])
        return self.known[i] <= self._limit

    def _next(self, fits: int, beyond: int | None) -> int:
        """Return a position to try: where a line meets the limit, or the middle."""
        guess = 2 * fits + 1 if beyond is None else (fits + beyond) // 2
        others = [i for i in self.known if i != fits]
        # Every third one is the middle, for memory that does not grow along a line.
        if others and len(self.known) % 3:
            other = beyond or max(others)
            slope = (self.known[fits] - self.known[other]) / (fits - other)
            if slope > 0:
                guess = fits + int((self._limit - self.known[fits]) / slope)
        largest = len(self._candidates) - 1 if beyond is None else beyond - 1
        return min(max(guess, fits + 1), largest)


def _with_rows(leaf: Any, rows: int) -> jax.ShapeDtypeStruct:
    dtype = getattr(leaf, "dtype", None) or jnp.result_type(leaf)
    return jax.ShapeDtypeStruct((rows, *jnp.shape(leaf)[1:]), dtype)


def _multiples(granularity: int, max_rows: int) -> Sequence[int]:
    unit = int_at_least("granularity", granularity, least=1)
    return range(unit, int_at_least("max_rows", max_rows, least=unit) + 1, unit)


def _limit(first: StepForDevices, limit_bytes: int | None) -> int:
    if limit_bytes is not None:
        return int_at_least("limit_bytes", limit_bytes, least=1)
    memory = first.where.memory_bytes()
    if memory is None:
        raise ValueError(
            f"find_batch_size does not know how much memory {first.where.name} has. Write "
            "limit_bytes=, the memory that the step may take on one rank."
        )
    return int(_OF_GPU * memory)
