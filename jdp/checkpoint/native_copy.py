"""Copies arrays on CPU devices, or parts of them, straight into memory of the process.

Programs of the devices do it. XLA runs them after those that compute the arrays and before one that
they are donated to, so nobody waits for them, and no copy on the device is needed.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdp.checkpoint.shards import Box
from jdp.checkpoint.single_device import single_device_programs
from jdp.collectives.cpu import runtime

# Calls of one program run at the same time. MLIR compares each array of a call with every other.
_CALL_BYTES, _CALL_ARRAYS = 64 << 20, 512


class TargetBox(NamedTuple):
    """Where bytes of an array go: runs of equal length inside of loops, the outermost first."""

    offset: int
    run_bytes: int
    loops: tuple[tuple[int, int], ...] = ()  # count, stride in bytes
    first: int = 0  # byte of the array that is copied first

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes that are copied."""
        return self.run_bytes * math.prod(count for count, _ in self.loops)

    @classmethod
    def of_box(cls, offset: int, shape: Sequence[int], box: Box, itemsize: int) -> "TargetBox":
        """Return the place of a box of an array that begins at `offset`.

        Args:
          offset: bytes from the start of the memory to the array.
          itemsize: bytes of an element.

        >>> TargetBox.of_box(100, (4, 6), ((0, 4), (2, 4)), 4)
        TargetBox(offset=108, run_bytes=8, loops=((4, 24),), first=0)
        >>> TargetBox.of_box(0, (4, 6), ((2, 4), (0, 6)), 4)
        TargetBox(offset=48, run_bytes=48, loops=(), first=0)
        """
        strides = [itemsize * int(np.prod(shape[d + 1 :], dtype=np.int64)) for d in range(len(box))]
        sizes = [stop - start for start, stop in box]
        offset += sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
        cut = [d for d, size in enumerate(sizes) if size != shape[d]]
        if not cut:
            return cls(offset, itemsize * int(np.prod(sizes, dtype=np.int64)))
        last = cut[-1]
        loops = zip(sizes[:last], strides[:last], strict=True)
        return cls(offset, sizes[last] * strides[last], tuple(loops))


def takes(x: Any) -> bool:
    """Whether the library can copy an array: its elements are whole bytes on a CPU device."""
    return (
        isinstance(x, jax.Array)
        and next(iter(x.devices())).platform == "cpu"
        and _has_whole_bytes(x.dtype)
        and runtime.why_missing() is None
    )


class CopyOut:
    """The places of arrays of one device, which are copied again and again."""

    def __init__(self, places: Sequence[TargetBox]) -> None:
        self._calls: list[tuple[slice, np.ndarray, np.ndarray]] = []
        first, num_bytes = 0, 0
        for i, place in enumerate(places):
            size = place.num_bytes
            if i > first and (i - first == _CALL_ARRAYS or num_bytes + size > _CALL_BYTES):
                self._add_call(slice(first, i), places)
                first, num_bytes = i, 0
            num_bytes += size
        self._add_call(slice(first, len(places)), places)

    def begin_copy(self, arrays: Sequence[jax.Array], target: np.ndarray) -> list[jax.Array]:
        """Start copying into `target`, `[bytes]` uint8, which has to stay until the copy ends."""
        words, groups = [], []
        for chosen, relative, is_offset in self._calls:
            words.append(np.where(is_offset, relative + target.ctypes.data, relative))
            groups.append([*arrays[chosen]])
        with single_device_programs():
            return _copy_out([each.view(np.uint32) for each in words], groups)

    def _add_call(self, chosen: slice, places: Sequence[TargetBox]) -> None:
        words: list[int] = []
        is_offset: list[bool] = []
        for place in places[chosen]:
            loops = sum(place.loops, ())
            flat = [place.offset, place.first, place.run_bytes, len(place.loops), *loops]
            words += flat
            is_offset += [True, *[False] * (len(flat) - 1)]
        self._calls.append((chosen, np.array(words, np.int64), np.array(is_offset)))


# The addresses are operands: a program that held them could not be cached.
@jax.jit
def _copy_out(words: list[jax.Array], groups: list[list[jax.Array]]) -> list[jax.Array]:
    call = jax.ffi.ffi_call(runtime.COPY_OUT, jax.ShapeDtypeStruct((1,), np.uint8))
    return [call(places, *arrays) for places, arrays in zip(words, groups, strict=True)]


# XLA may store several elements of the others in a byte.
def _has_whole_bytes(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits == 8 * dtype.itemsize
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits == 8 * dtype.itemsize
    return dtype == np.bool_ or jnp.issubdtype(dtype, jnp.complexfloating)
