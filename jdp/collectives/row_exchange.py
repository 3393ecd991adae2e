"""Exchange rows of a table that is split over ranks, without gathering the table.

If the rows are split, each rank sends the numbers of the rows that it needs to their owners, each
number once, and receives the rows. To add, it sends the rows too. This happens in rounds of a fixed
size: one round if all ranks own about equally many of the needed rows, up to n rounds if one rank
owns all of them. No row is ever dropped. If another dim is split, every rank gets all row numbers,
and each sends its part of the rows back in one round.

In a round with s rows for each of n ranks, a rank sends n s numbers and n s rows, in two calls; to
add, in one. One call before the first round finds the number of rounds if it may be more than one.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

# A token that orders the calls of an exchange; None for XLA's, which XLA orders.
Token = Any


class Collectives(Protocol):
    """The calls that an exchange makes, each with a name that no other call of the exchange has."""

    num_ranks: int

    def gathered(self, token: Token, x: jax.Array, name: str) -> tuple[Token, jax.Array]:
        """Return the arrays of all ranks, joined along dim 0.

        Args:
          x: `[r, ...]`, of the same shape on all ranks.
        """
        ...

    def sent(
        self, token: Token, leaves: Sequence[jax.Array], split: int, joined: int, name: str
    ) -> tuple[Token, list[jax.Array]]:
        """Return the slices that arrive, as `shards.all_to_all` does."""
        ...


class XlaCollectives(NamedTuple):
    """XLA's collectives over the ranks of `axes`."""

    axes: tuple[str, ...]
    num_ranks: int

    def gathered(self, token: Token, x: jax.Array, name: str) -> tuple[Token, jax.Array]:
        """Implement `Collectives`."""
        return token, lax.all_gather(x, self.axes, tiled=True)

    def sent(
        self, token: Token, leaves: Sequence[jax.Array], split: int, joined: int, name: str
    ) -> tuple[Token, list[jax.Array]]:
        """Implement `Collectives`."""
        return token, [lax.all_to_all(x, self.axes, split, joined, tiled=True) for x in leaves]


def take(
    calls: Collectives, token: Token, part: jax.Array, ids: jax.Array, *, dim: int
) -> tuple[Token, jax.Array]:
    """Return a token and rows of the table, as `split_rows.take_rows` does."""
    flat = ids.reshape(-1)
    if dim == 0:
        token, rows = _take_from_rows(calls, token, part, flat)
    else:
        token, everyones = calls.gathered(token, flat, "ids")
        found = part.at[everyones].get(mode="promise_in_bounds")
        token, [rows] = calls.sent(token, [found], 0, dim, "rows")
    return token, rows.reshape(*ids.shape, *rows.shape[1:])


def add(
    calls: Collectives,
    token: Token,
    rows: jax.Array,
    ids: jax.Array,
    *,
    num_rows: int,
    dim: int,
) -> tuple[Token, jax.Array]:
    """Return a token and this rank's part of a sum of rows, as `split_rows.add_rows` does."""
    flat, rows = ids.reshape(-1), rows.reshape(ids.size, *rows.shape[ids.ndim :])
    if dim == 0:
        return _add_to_rows(calls, token, rows, flat, num_rows // calls.num_ranks)
    token, everyones = calls.gathered(token, flat, "ids")
    token, [parts] = calls.sent(token, [rows], dim, 0, "rows")
    total = jnp.zeros((num_rows, *parts.shape[1:]), rows.dtype)
    return token, total.at[everyones].add(parts, mode="promise_in_bounds")


def round_size(num_ids: int, rows_per_rank: int, num_ranks: int) -> int:
    """Return how many rows a rank requests from each rank in one round.

    This is a little more than an equal share, and at most `num_ids` and `rows_per_rank`.

    Args:
      rows_per_rank: number of rows that a rank owns.

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


def _route(
    calls: Collectives, token: Token, ids: jax.Array, rows_per_rank: int
) -> tuple[Token, _Route]:
    (num_ids,), num_ranks = ids.shape, calls.num_ranks
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
        own = -(-jnp.max(jnp.diff(start)) // size)
        token, everyones_rounds = calls.gathered(token, own[None], "rounds")
        num_rounds = jnp.max(everyones_rounds)
    return token, _Route(wanted, start, place, ids // rows_per_rank, num_rounds, size)


_Turn = tuple[Token, jax.Array]


def _rounds(route: _Route, body: Callable[[Any, _Turn], _Turn], start: _Turn) -> _Turn:
    if isinstance(route.num_rounds, int):
        return body(0, start)
    return lax.fori_loop(0, route.num_rounds, body, start)


def _take_from_rows(calls: Collectives, token: Token, part: jax.Array, ids: jax.Array) -> _Turn:
    token, route = _route(calls, token, ids, len(part))
    offset = route.place - route.start[route.owner]
    slot = route.owner * route.size + offset % route.size

    def one_round(i: Any, turn: _Turn) -> _Turn:
        token, found = turn
        _, asked = route.asked(i, len(part))
        token, [to_find] = calls.sent(token, [asked], 0, 0, "ids")
        rows = part.at[to_find].get(mode="fill", fill_value=0)
        token, [rows] = calls.sent(token, [rows], 0, 0, "rows")
        is_here = (offset // route.size == i).reshape(-1, *[1] * (part.ndim - 1))
        return token, jnp.where(is_here, rows.reshape(-1, *part.shape[1:])[slot], found)

    nothing = jnp.zeros((len(ids), *part.shape[1:]), part.dtype)
    return _rounds(route, one_round, (token, nothing))


def _add_to_rows(
    calls: Collectives, token: Token, rows: jax.Array, ids: jax.Array, per_rank: int
) -> _Turn:
    token, route = _route(calls, token, ids, per_rank)
    sums = jnp.zeros_like(rows).at[route.place].add(rows)

    def one_round(i: Any, turn: _Turn) -> _Turn:
        token, total = turn
        index, asked = route.asked(i, per_rank)
        to_add = sums.at[index].get(mode="fill", fill_value=0)
        token, [where, received] = calls.sent(token, [asked, to_add], 0, 0, "rows")
        return token, total.at[where].add(received, mode="drop")

    nothing = jnp.zeros((per_rank, *rows.shape[1:]), rows.dtype)
    return _rounds(route, one_round, (token, nothing))
