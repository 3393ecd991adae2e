"""Arrays of the host are copied to devices: the copy is not the caller's, and can be donated."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jdp
from jdp.distributed.placement import LARGE_BYTES, copied_from_host

LARGE = LARGE_BYTES // 4 + 7


# An array whose memory begins at `offset` bytes after an address that JAX uses without a copy.
def array_at(offset, shape, dtype=np.float32):
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.zeros(num_bytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + offset
    words = room[start : start + num_bytes]
    words[:] = np.resize(np.arange(251), num_bytes)
    return words.view(dtype).reshape(shape)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("offset", "shape", "spec"),
    [
        (0, (24, LARGE), PartitionSpec()),
        (16, (24, LARGE), PartitionSpec()),
        (0, (24, LARGE), PartitionSpec("data")),
        (16, (24, LARGE), PartitionSpec("data")),  # a part may begin where JAX copies nothing
        (48, (24, LARGE), PartitionSpec("data")),
        (16, (7, 24), PartitionSpec(None, "data")),
        (0, (3,), PartitionSpec()),
        (0, (), PartitionSpec()),
        (0, (0, 5), PartitionSpec()),
    ],
)
def test_the_array_may_change_after_it_was_copied(make_mesh, num_ranks, offset, shape, spec):
    value = array_at(offset, shape)
    right = value.copy()
    found = copied_from_host(value, NamedSharding(make_mesh(num_ranks), spec))
    value[...] = -1.0
    assert len(found.addressable_shards) == num_ranks
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), right[shard.index])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.int8, np.bool_, np.complex64])
def test_a_large_array_of_any_dtype_is_copied(make_mesh, dtype):
    value = array_at(16, (2 * LARGE_BYTES,), np.int8) % 2 != 0
    value = value.astype(dtype)
    found = copied_from_host(value, NamedSharding(make_mesh(2), PartitionSpec()))
    assert found.dtype == value.dtype
    np.testing.assert_array_equal(np.asarray(found), value)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_copy_of_a_large_array_that_is_not_aligned_can_be_donated(make_mesh, num_ranks):
    where = NamedSharding(make_mesh(num_ranks), PartitionSpec())
    found = copied_from_host(array_at(16, (LARGE,)), where)
    places = {shard.data.unsafe_buffer_pointer() for shard in found.addressable_shards}
    assert len(places) == num_ranks
    changed = jax.jit(lambda x: x + 1, donate_argnums=0)(found)
    assert {shard.data.unsafe_buffer_pointer() for shard in changed.addressable_shards} == places


# Memory of their own, not that of the caller's arrays.
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("offset", [0, 16])
def test_a_new_state_does_not_change_with_the_arrays_that_it_was_made_of(
    make_mesh, num_ranks, offset
):
    jdp.init(make_mesh(num_ranks))
    large, small = array_at(offset, (3, LARGE)), array_at(offset, (5,))
    right = large.copy(), small.copy()
    params = {"large": large, "small": small}
    state = jdp.TrainState.create(params, jdp.replicated(optax.sgd(0.1)))
    large[...] = small[...] = -1.0
    for name, expected in zip(params, right, strict=True):
        for shard in state.params[name].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), expected)


@pytest.mark.parametrize("value", [7, 0.5, np.arange(3), np.arange(3.0), np.arange(3) + 1j])
def test_numbers_of_64_bits_are_placed_as_jax_holds_them_without_a_warning(value):
    sharding = NamedSharding(jax.make_mesh((2,), ("data",)), PartitionSpec())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = copied_from_host(np.asarray(value), sharding)
    want = jnp.asarray(value)
    assert got.dtype == want.dtype and np.array_equal(got, want)
