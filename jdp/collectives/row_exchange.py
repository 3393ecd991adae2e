"""Exchange rows of a table that is split over ranks, without gathering the table.

If the rows are split, each rank sends the numbers of the rows that it needs to their owners, each
number once, and receives the rows. To add, it sends the rows too. This happens in rounds of a fixed
size: one round if all ranks own about equally many of the needed rows, up to n rounds if one rank
owns all of them. No row is ever dropped. If another dim is split, every rank gets all row numbers,
and each sends its part of the rows back in one round.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


def take(
    part: jax.Array, ids: jax.Array, *, dim: int, axes: tuple[str, ...], num_ranks: int
) -> jax.Array:
    """Return rows of the table, as `split_rows.take_rows` does.

    Args:
      part, ids, dim, axes: as for `split_rows.take_rows`.
      num_ranks: number of ranks along `axes`.
    """
    flat = ids.reshape(-1)
    if dim == 0:
        rows = _take_from_rows(part, flat, axes, num_ranks)
    else:
        everyones = lax.all_gather(flat, axes, tiled=True)
        found = part.at[everyones].get(mode="promise_in_bounds")
        rows = lax.all_to_all(found, axes, 0, dim, tiled=True)
    return rows.reshape(*ids.shape, *rows.shape[1:])


def add(
    rows: jax.Array,
    ids: jax.Array,
    *,
    num_rows: int,
    dim: int,
    axes: tuple[str, ...],
    num_ranks: int,
) -> jax.Array:
    """Return this rank's part of the sum of the rows of all ranks, as `split_rows.add_rows` does.

    Args:
      rows, ids, num_rows, dim, axes: as for `split_rows.add_rows`.
      num_ranks: number of ranks along `axes`.
    """
    flat, rows = ids.reshape(-1), rows.reshape(ids.size, *rows.shape[ids.ndim :])
    if dim == 0:
        return _add_to_rows(rows, flat, num_rows // num_ranks, axes, num_ranks)
    everyones = lax.all_gather(flat, axes, tiled=True)
    parts = lax.all_to_all(rows, axes, dim, 0, tiled=True)
    total = jnp.zeros((num_rows, *parts.shape[1:]), rows.dtype)
    return total.at[everyones].add(parts, mode="promise_in_bounds")


def round_size(num_ids: int, rows_per_rank: int, num_ranks: int) -> int:
    """Return how many rows a rank requests from each rank in one round.

    This is a little more than an equal share, and at most `num_ids` and `rows_per_rank`.

    Args:
      num_ids: number of rows that a rank looks up, counting repeated ones.
      rows_per_rank: number of rows that a rank owns.
      num_ranks: number of ranks.

    >>> round_size(8000, 10**6, 8), round_size(100, 10**6, 8), round_size(8000, 20, 8)
    (1282, 48, 20)
    """
    equal = -(-num_ids // num_ranks)
    return min(num_ids, rows_per_rank, equal + equal // 4 + 32)


class _Route(NamedTuple):
    """The rows that this rank requests, and the ranks that own them.

    Attributes:
      wanted: `[ids]`, each needed row once, ascending, padded with a number that is not a row.
      start: `[n + 1]`, the place in `wanted` where the rows of each rank begin.
      place: `[ids]`, the place of each id in `wanted`.
      owner: `[ids]`, the rank that owns each id.
      num_rounds: `[]`, the same on every rank; or an int.
      size: rows per round, see `round_size`.
    """

    wanted: jax.Array
    start: jax.Array
    place: jax.Array
    owner: jax.Array
    num_rounds: Any
    size: int

    def asked(self, round_number: Any, rows_per_rank: int) -> tuple[jax.Array, jax.Array]:
        """Return places in `wanted` and the row numbers at their owners, each `[n, size]`.

        After the last row that is wanted from a rank, places are out of range and row numbers
        arbitrary.

        Args:
          round_number: `[]`, from 0.
          rows_per_rank: number of rows that a rank owns.
        """
        index = self.start[:-1, None] + round_number * self.size + jnp.arange(self.size)
        rank = jnp.arange(len(self.start) - 1)[:, None]
        rows = self.wanted.at[index].get(mode="clip") - rank * rows_per_rank
        return jnp.where(index < self.start[1:, None], index, len(self.wanted)), rows


def _route(ids: jax.Array, rows_per_rank: int, num_ranks: int, axes: tuple[str, ...]) -> _Route:
    (num_ids,) = ids.shape
    order = jnp.argsort(ids)
    in_order = ids[order]
    is_first = jnp.concatenate([jnp.ones(1, bool), in_order[1:] != in_order[:-1]])
    place_in_order = jnp.cumsum(is_first) - 1
    end = num_ranks * rows_per_rank
    wanted = jnp.full_like(ids, end).at[place_in_order].set(in_order, indices_are_sorted=True)
    place = jnp.zeros_like(order).at[order].set(place_in_order, unique_indices=True)
    start = jnp.searchsorted(wanted, jnp.arange(num_ranks + 1, dtype=ids.dtype) * rows_per_rank)
    size = round_size(num_ids, rows_per_rank, num_ranks)
    num_rounds: Any = 1
    if size < min(num_ids, rows_per_rank):
        num_rounds = lax.pmax(-(-jnp.max(jnp.diff(start)) // size), axes)
    return _Route(wanted, start, place, ids // rows_per_rank, num_rounds, size)


def _rounds(route: _Route, body: Callable[[Any, jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    if isinstance(route.num_rounds, int):
        return body(0, x)
    return lax.fori_loop(0, route.num_rounds, body, x)


def _take_from_rows(part: jax.Array, ids: jax.Array, axes: tuple[str, ...], n: int) -> jax.Array:
    route = _route(ids, len(part), n, axes)
    offset = route.place - route.start[route.owner]
    slot = route.owner * route.size + offset % route.size

    def one_round(i: Any, found: jax.Array) -> jax.Array:
        _, asked = route.asked(i, len(part))
        to_find = lax.all_to_all(asked, axes, 0, 0)
        rows = part.at[to_find].get(mode="fill", fill_value=0)
        rows = lax.all_to_all(rows, axes, 0, 0).reshape(-1, *part.shape[1:])
        is_here = (offset // route.size == i).reshape(-1, *[1] * (part.ndim - 1))
        return jnp.where(is_here, rows[slot], found)

    return _rounds(route, one_round, jnp.zeros((len(ids), *part.shape[1:]), part.dtype))


def _add_to_rows(
    rows: jax.Array, ids: jax.Array, per_rank: int, axes: tuple[str, ...], n: int
) -> jax.Array:
    route = _route(ids, per_rank, n, axes)
    sums = jnp.zeros_like(rows).at[route.place].add(rows)

    def one_round(i: Any, total: jax.Array) -> jax.Array:
        index, asked = route.asked(i, per_rank)
        to_add = sums.at[index].get(mode="fill", fill_value=0)
        where, received = (lax.all_to_all(x, axes, 0, 0) for x in (asked, to_add))
        return total.at[where].add(received, mode="drop")

    return _rounds(route, one_round, jnp.zeros((per_rank, *rows.shape[1:]), rows.dtype))
