"""Copies the pieces of a state on their devices, safe from donation."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jdp.checkpoint.pieces import StatePiece, on_devices
from jdp.checkpoint.shares import Rows
from jdp.checkpoint.single_device import single_device_programs

# Smaller arrays are copied on the first device that holds them: each device that copies something
# runs a program for it, which a state of small arrays is not worth.
LARGE_BYTES = 1 << 20


class DeviceCopies:
    """Takes successive copies of pieces.

    A large array, or part of one, that several devices of this process hold is copied on one of
    them, chosen so that the copies take about as much memory on each device.

    `reuse` keeps the memory of one copy for the next one: on a CPU, mapping new memory takes four
    times as long as the copy itself.
    """

    def __init__(self, *, reuse: bool) -> None:
        self._reuse = reuse
        self._spare: dict[jax.Device, list[jax.Array]] = {}

    def take(self, pieces: Sequence[StatePiece]) -> list[StatePiece]:
        """Start copying pieces, so that the next step may donate them, without waiting for it.

        Of a piece with rows only these are copied. The copies before must no longer be in use.
        """
        found = _spread(pieces)
        before, self._spare = self._spare, {}
        for i, piece in enumerate(found):
            if not isinstance(piece.values, jax.Array):
                found[i] = piece._replace(values=np.array(piece.values))
        for device, positions in on_devices(found).items():
            chosen = [found[i] for i in positions]
            spare = before.pop(device, [])
            if [(x.shape, x.dtype) for x in spare] != [*map(_form, chosen)]:
                spare = []
            arrays, rows = [x.values for x in chosen], tuple(x.rows for x in chosen)
            with single_device_programs():
                copies = _copy(spare, arrays, rows)
            if self._reuse:
                self._spare[device] = copies
            for i, values in zip(positions, copies, strict=True):
                found[i] = found[i]._replace(values=values, rows=None)
        return found

    def reservation(self, pieces: Sequence[StatePiece]) -> Callable[[], None]:
        """Return a function that allocates the first copies and may run in a thread."""
        found = _spread(pieces)
        kinds = {
            device: [_form(found[i]) for i in positions]
            for device, positions in on_devices(found).items()
        }

        def reserve() -> None:
            for device, forms in kinds.items():
                zeros = jax.jit(
                    lambda forms=forms: [jnp.zeros(*form) for form in forms],
                    out_shardings=SingleDeviceSharding(device),
                )
                with single_device_programs():
                    self._spare[device] = jax.block_until_ready(zeros())

        return reserve


# Large arrays go to the device with the least so far, the largest first, after all others, as in
# R. L. Graham, Bounds on multiprocessing timing anomalies (1969, https://doi.org/10.1137/0117039).
def _spread(pieces: Sequence[StatePiece]) -> list[StatePiece]:
    """Return pieces with their values on the devices that are to copy them."""
    found, loads = [*pieces], defaultdict[jax.Device, int](int)
    on_device = [i for positions in on_devices(pieces).values() for i in positions]
    shards = {i: _equal_shards(pieces[i]) for i in on_device}
    for i in sorted(on_device, key=lambda i: (len(shards[i]) > 1, -_num_bytes(pieces[i]))):
        values = pieces[i].values
        if len(shards[i]) > 1:
            values = min(shards[i], key=lambda shard: loads[shard.device]).data
        loads[_device(values)] += _num_bytes(pieces[i])
        found[i] = pieces[i]._replace(values=values, array=None)
    return found


def _equal_shards(piece: StatePiece) -> list[Any]:
    """Return the shards on devices of this process that have the values of a large piece."""
    if piece.array is None or _num_bytes(piece) < LARGE_BYTES:
        return []
    shards, device = piece.array.addressable_shards, _device(piece.values)
    [index] = [shard.index for shard in shards if shard.device == device]
    return [shard for shard in shards if shard.index == index]


def _device(x: jax.Array) -> jax.Device:
    return next(iter(x.devices()))


# Of the values that are copied.
def _num_bytes(piece: StatePiece) -> int:
    shape, dtype = _form(piece)
    return math.prod(shape) * dtype.itemsize


def _form(piece: StatePiece) -> Any:
    shape = piece.values.shape
    if piece.rows is not None:
        shape = (piece.rows[1] - piece.rows[0], *shape[1:])
    return shape, piece.values.dtype


def _copies(
    spare: list[jax.Array], arrays: list[jax.Array], rows: tuple[Rows | None, ...]
) -> list[jax.Array]:
    return [
        jnp.copy(x) if r is None else jax.lax.slice_in_dim(x, *r)
        for x, r in zip(arrays, rows, strict=True)
    ]


# keep_unused: the spare arrays are donated for their memory; their values are not read.
_copy = jax.jit(_copies, donate_argnums=0, static_argnums=2, keep_unused=True)
