"""Rows are read by number from arrays, trees of arrays and anything indexable."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdp.data.dataset import reader, with_mask

X = np.arange(10.0).reshape(5, 2)
Y = np.arange(5) * 10
ROWS = np.array([3, 0, 3], np.int32)
Pair = collections.namedtuple("Pair", "x y")


class Lines:
    """Gives one row at a time, as a dataset that decodes files would."""

    def __init__(self, row):
        self.row = row

    def __len__(self):
        return 5

    def __getitem__(self, i):
        assert type(i) is int
        return self.row(i)


@pytest.mark.parametrize(
    "dataset, expected",
    [
        (X, X[ROWS]),
        (jnp.asarray(X), X[ROWS].astype(np.float32)),
        ({"x": X, "more": (Y, None)}, {"x": X[ROWS], "more": (Y[ROWS], None)}),
        ((X, Y), (X[ROWS], Y[ROWS])),
        (Pair(X, Y), Pair(X[ROWS], Y[ROWS])),
        (list(X), X[ROWS]),
        ([(x, y) for x, y in zip(X, Y, strict=True)], (X[ROWS], Y[ROWS])),
        (Lines(lambda i: {"x": X[i], "y": int(Y[i])}), {"x": X[ROWS], "y": Y[ROWS]}),
        (Lines(lambda i: float(i)), np.array([3.0, 0.0, 3.0])),
    ],
    ids=["array", "jax", "nested", "tuple", "namedtuple", "list", "pairs", "dicts", "scalars"],
)
def test_gives_the_rows_asked_for_in_their_order(dataset, expected):
    num_rows, read = reader(dataset)
    assert num_rows == 5
    rows = read(ROWS)
    assert jax.tree.structure(rows) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(rows), jax.tree.leaves(expected), strict=True):
        assert type(leaf) is np.ndarray
        assert leaf.dtype == other.dtype
        np.testing.assert_array_equal(leaf, other)


def test_reads_a_memory_mapped_file(tmp_path):
    np.save(tmp_path / "x.npy", X)
    num_rows, read = reader({"x": np.load(tmp_path / "x.npy", mmap_mode="r")})
    assert num_rows == 5
    np.testing.assert_array_equal(read(ROWS)["x"], X[ROWS])


def test_rows_are_copies():
    x = X.copy()
    _, read = reader(x)
    rows = read(np.arange(5))
    x[:] = -1
    np.testing.assert_array_equal(rows, X)


@pytest.mark.parametrize(
    "dataset, error, message",
    [
        ({"x": X, "y": Y[:3]}, ValueError, r"\['y'\] .*3.*\['x'\] .*5"),
        ((X, np.float32(1)), ValueError, r"\[1\] .*scalar"),
        (np.float32(1), ValueError, "dataset .*scalar"),
        ({"x": [1, 2, 3]}, TypeError, r"\['x'\] .*list.*np.asarray"),
        ((1, 2), TypeError, r"\[0\] .*int"),
        ((), ValueError, "dataset"),
        (
            iter([X]),
            TypeError,
            "list_iterator .*jdp.shard_batches",
        ),
        (3, TypeError, "int .*row number"),
    ],
)
def test_refuses_what_has_no_rows(dataset, error, message):
    with pytest.raises(error, match=message):
        reader(dataset)


def test_rows_of_different_shapes_are_named():
    _, read = reader(Lines(lambda i: {"text": np.zeros(i + 1)}))
    with pytest.raises(ValueError, match=r"row 2\['text'\] .*\[3\].*row 1 .*\[2\]"):
        read(np.array([1, 2]))


def test_the_mask_is_a_key_of_a_dict_and_else_the_last_element():
    mask = np.array([True, False])
    assert with_mask({"x": 1}, mask) == {"x": 1, "mask": mask}
    assert with_mask((1, 2), mask) == (1, 2, mask)
    assert with_mask(Pair(1, 2), mask) == (1, 2, mask)
    assert with_mask([1, 2], mask) == ([1, 2], mask)


def test_a_mask_of_the_datasets_own_is_not_overwritten():
    with pytest.raises(ValueError, match='"mask"'):
        with_mask({"x": 1, "mask": 2}, np.array([True]))
