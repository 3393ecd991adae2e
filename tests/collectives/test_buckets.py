"""Every leaf goes into one bucket, whole, and comes out of it as it was."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdp.collectives.buckets import pack, plan, unpack

KiB = 2**10
DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8")


def leaf(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def num_bytes(leaves, bucket):
    return sum(math.prod(leaves[i].shape) * leaves[i].dtype.itemsize for i in bucket)


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


# Plan


def test_the_last_leaf_is_sent_first():
    assert plan([leaf(1), leaf(1), leaf(1)], bucket_bytes=4) == [[2], [1], [0]]


def test_a_bucket_is_filled_to_its_last_byte_and_not_beyond():
    leaves = [leaf(3), leaf(2), leaf(3), leaf(5)]
    assert plan(leaves, bucket_bytes=32) == [[3, 2], [1, 0]]
    assert plan(leaves, bucket_bytes=31) == [[3], [2, 1], [0]]


def test_a_leaf_larger_than_a_bucket_is_never_split():
    assert plan([leaf(1), leaf(100), leaf(1)], bucket_bytes=8) == [[2], [1], [0]]


def test_leaves_without_elements_take_no_room():
    assert plan([leaf(0, 7), leaf(2), leaf(0), leaf()], bucket_bytes=12) == [[3, 2, 1, 0]]


def test_scalars_count_for_one_element():
    assert plan([leaf(), leaf(), leaf()], bucket_bytes=8) == [[2, 1], [0]]


def test_no_leaves_need_no_bucket():
    assert plan([], bucket_bytes=1) == []


def test_dtypes_are_not_mixed():
    leaves = [leaf(2), leaf(2, dtype="bfloat16"), leaf(2), leaf(2, dtype="bfloat16")]
    assert plan(leaves, bucket_bytes=KiB) == [[3, 1], [2, 0]]


def test_a_bucket_is_sent_when_its_earliest_leaf_is_there():
    # One small float32 norm beside each bfloat16 layer: the norms' bucket is begun first and
    # complete last, so it must not hold up the layers.
    leaves = [leaf(4), leaf(64, dtype="bfloat16")] * 3
    assert plan(leaves, bucket_bytes=128) == [[5], [3], [1], [4, 2, 0]]


def test_ten_thousand_leaves_fill_whole_buckets():
    buckets = plan([leaf(256)] * 10_000, bucket_bytes=1024 * KiB)
    assert [len(bucket) for bucket in buckets] == [1024] * 9 + [784]
    assert list(itertools.chain(*buckets)) == list(reversed(range(10_000)))


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_a_bucket_must_have_room(bucket_bytes):
    with pytest.raises(ValueError, match=f"bucket_bytes.* {bucket_bytes}"):
        plan([leaf(1)], bucket_bytes)


@given(
    leaves=st.lists(st.builds(leaf, st.integers(0, 9), dtype=st.sampled_from(DTYPES)), max_size=30),
    bucket_bytes=st.integers(1, 64),
)
def test_every_plan_is_whole_ordered_and_as_full_as_it_can_be(leaves, bucket_bytes):
    buckets = plan(leaves, bucket_bytes)
    assert sorted(itertools.chain(*buckets)) == list(range(len(leaves)))
    for bucket in buckets:
        assert len({leaves[i].dtype for i in bucket}) == 1
        assert num_bytes(leaves, bucket) <= bucket_bytes or len(bucket) == 1
    for dtype in DTYPES:
        mine = [bucket for bucket in buckets if leaves[bucket[0]].dtype == dtype]
        order = list(itertools.chain(*mine))
        assert order == sorted(order, reverse=True)
        for one, following in itertools.pairwise(mine):
            assert num_bytes(leaves, [*one, following[0]]) > bucket_bytes
    complete = [min(bucket) for bucket in buckets]
    assert complete == sorted(complete, reverse=True)


# Pack and unpack


def test_pack_lays_leaves_end_to_end():
    vector = pack([jnp.array([[1, 2], [3, 4]]), jnp.array(5), jnp.array([], int), jnp.array([6])])
    np.testing.assert_array_equal(vector, [1, 2, 3, 4, 5, 6])


@settings(deadline=None, max_examples=10)  # JAX compiles each shape that it meets.
@given(shapes=st.lists(shapes, min_size=1, max_size=5), dtype=st.sampled_from(DTYPES))
def test_unpack_inverts_pack(shapes, dtype):
    first = 0
    bucket = []
    for shape in shapes:
        size = math.prod(shape)
        bucket.append(jnp.arange(first, first + size).reshape(shape).astype(dtype))
        first += size
    vector = pack(bucket)
    assert (vector.shape, vector.dtype) == ((first,), dtype)
    for got, want in zip(unpack(vector, like=bucket), bucket, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_array_equal(got, want)


def test_unpack_needs_only_shapes():
    one, two = unpack(jnp.arange(5), like=[leaf(3), leaf(2, 1)])
    np.testing.assert_array_equal(one, [0, 1, 2])
    np.testing.assert_array_equal(two, [[3], [4]])
