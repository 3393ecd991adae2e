"""The padding mask of a batch: where it is put, and how it is found again."""

import collections

import jax
import numpy as np
import pytest

from jdp.data.dataset import find_mask, record_mask, with_mask

X, Y = np.arange(10.0).reshape(5, 2), np.arange(5)


Pair = collections.namedtuple("Pair", "x y")


def test_the_mask_is_a_key_of_a_dict_and_else_the_last_element():
    mask = np.array([True, False])
    assert with_mask({"x": 1}, mask) == {"x": 1, "mask": mask}
    assert with_mask((1, 2), mask) == (1, 2, mask)
    assert with_mask(Pair(1, 2), mask) == (1, 2, mask)
    assert with_mask([1, 2], mask) == ([1, 2], mask)


def test_a_mask_beside_keys_that_are_not_strings_is_refused():
    with pytest.raises(TypeError, match=r"\[0, 1\].*strings"):
        with_mask({0: 1, "x": 2, 1: 2}, np.array([True]))


def test_a_mask_of_the_datasets_own_is_not_overwritten():
    with pytest.raises(ValueError, match='"mask"'):
        with_mask({"x": 1, "mask": 2}, np.array([True]))


def test_a_named_tuple_keeps_its_type_and_fields_with_a_mask():
    mask = np.array([True, False])
    batch = with_mask(Pair(X[:2], Y[:2]), mask)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, batch)
    for each, factor in ((batch, 1), (doubled, 2)):
        assert isinstance(each, Pair) and each._fields == ("x", "y", "mask")
        np.testing.assert_array_equal(each.x, factor * X[:2])
        np.testing.assert_array_equal(each.y, factor * Y[:2])
        np.testing.assert_array_equal(each.mask, factor * mask)
    assert jax.tree.structure(with_mask(Pair(X, Y), mask)) == jax.tree.structure(batch)
    assert batch._replace(x=Y).mask is mask
    assert find_mask(batch) is None  # only the mask of jdp.batches itself
    record_mask(batch)
    assert find_mask(batch) is mask


def test_a_named_tuple_with_a_field_mask_cannot_have_another():
    with pytest.raises(ValueError, match="`mask`"):
        with_mask(collections.namedtuple("Masked", "x mask")(X, Y), np.ones(5, bool))


def test_a_named_tuple_may_have_fields_that_were_renamed():
    renamed = collections.namedtuple("Renamed", "x class", rename=True)
    batch = with_mask(renamed(X, Y), np.ones(5, bool))
    assert isinstance(batch, renamed) and batch._fields == ("x", "_1", "mask")
