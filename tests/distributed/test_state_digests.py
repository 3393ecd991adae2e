"""Processes compare digests of their states, which differ where the states do."""

import zlib

import jax.numpy as jnp
import numpy as np
import pytest

from jdp.distributed.checks.state import digests

PIECE = 1 << 20


def values(num_bytes):
    return np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)


@pytest.mark.parametrize("num_bytes", [1, 3, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 13])
def test_a_change_of_any_byte_changes_the_digest(num_bytes):
    value = values(num_bytes)
    [right] = digests([value])
    for at in {0, num_bytes // 2, num_bytes - 1, min(PIECE, num_bytes - 1)}:
        for bit in (1, 128):
            other = value.copy()
            other[at] ^= bit
            assert digests([other]) != [right]
    assert digests([value.copy()]) == [right]


# CRC-32 is linear: that of a multiple of its polynomial is that of zeros.
def test_small_arrays_are_not_compared_by_a_checksum():
    multiple = np.array([3681617473, 1], np.uint32)
    assert zlib.crc32(multiple) == zlib.crc32(np.zeros_like(multiple))
    assert digests([multiple]) != digests([np.zeros_like(multiple)])


def test_pieces_in_another_order_have_another_digest():
    value = values(3 * PIECE).reshape(3, PIECE)
    assert digests([value]) != digests([value[[1, 0, 2]]])
    assert digests([values(64)]) != digests([values(64)[::-1]])


def test_the_digest_is_that_of_the_elements_however_they_lie():
    value = np.arange(3 * PIECE // 4, dtype=np.float32).reshape(3, -1)
    strided = np.stack([value, -value], axis=-1)[..., 0]
    assert digests([value]) == digests([np.asfortranarray(value)]) == digests([strided])
    assert digests([np.asarray(jnp.ones(5, jnp.bfloat16))]) == digests([np.ones(5, jnp.bfloat16)])


def test_each_array_has_its_own_digest():
    many = [values(n) for n in (0, 1, 2 * PIECE, 5)] + [np.float32(2.0).reshape(())]
    found = digests(many)
    assert len(set(found)) == len(many)
    assert found == [digests([each])[0] for each in many]
    assert digests([]) == []
