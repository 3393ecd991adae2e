"""All processes get the bytes of the one that has them."""

import jax
import numpy as np
import pytest

import jdp
from jdp.checkpoint import broadcast

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("processes")]

SIZES = (0, 1, 4095, 4096, 4097, 3 * 8192, 3 * 8192 + 5)


def bytes_of(size):
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


def received(source):
    """The bytes that this process gets from another one, in chunks of 8 KiB."""
    jdp.init()
    before, broadcast._CHUNK_BYTES = broadcast._CHUNK_BYTES, 8192
    try:
        is_source = jax.process_index() == source
        return [broadcast.broadcast(bytes_of(size) if is_source else None, size) for size in SIZES]
    finally:
        broadcast._CHUNK_BYTES = before


@pytest.mark.parametrize("num, source", [(2, 0), (3, 2)])
def test_every_process_has_the_bytes_of_one(processes, num, source):
    for found in processes(num).run(received, source):
        for size, data in zip(SIZES, found, strict=True):
            np.testing.assert_array_equal(data, bytes_of(size))
