"""Rows are read by number from arrays, trees of arrays and anything indexable."""

import collections
import dataclasses
import threading
import time
from collections.abc import Mapping

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
        (Lines(lambda i: (X[i].tolist(), [[i]])), (X[ROWS], np.array([[[3]], [[0]], [[3]]]))),
        (Lines(lambda i: [X[i], i]), [X[ROWS], np.array([3, 0, 3])]),
    ],
    ids="array jax nested tuple namedtuple list pairs dicts scalars lists pair".split(),
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


# --- Columns of other libraries


class Series:
    """As pandas: [rows] takes labels, here those of a table that was sorted backwards."""

    ndim = 1

    def __init__(self, values):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype
        self.iloc = values

    def __getitem__(self, labels):
        return self.values[::-1][labels]

    def to_numpy(self):
        return self.values


class Table(dict):
    """As a DataFrame: no dtype, and [name] is a column."""

    ndim, iloc, to_numpy = 2, None, None

    @property
    def columns(self):
        class Names(list):
            is_unique = True

        return Names(self)


class Columns(Mapping):
    """A mapping that is not a dict, as a group of an HDF5 file."""

    def __init__(self, **columns):
        self.columns = columns

    def __getitem__(self, name):
        return self.columns[name]

    def __iter__(self):
        return iter(self.columns)

    def __len__(self):
        return len(self.columns)


class Increasing:
    """As h5py: takes increasing row numbers only, each once; and uses its memory again."""

    def __init__(self, values):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype
        self.buffer = np.zeros_like(values)

    def __getitem__(self, rows):
        assert (np.diff(rows) > 0).all()
        self.buffer[: len(rows)] = self.values[rows]
        return self.buffer[: len(rows)]


COLUMNS = {"x": X, "y": Y}


@pytest.mark.parametrize(
    "dataset",
    [
        {"x": X, "y": Series(Y)},
        {"x": X, "y": Increasing(Y)},
        Columns(**COLUMNS),
        collections.OrderedDict(COLUMNS),
        Table(x=X, y=Series(Y)),
    ],
    ids=["series", "increasing rows only", "mapping", "ordered dict", "table"],
)
def test_columns_are_read_by_position(dataset):
    num_rows, read = reader(dataset)
    assert num_rows == 5
    for rows in (ROWS, np.arange(5), np.array([4, 4, 4]), np.array([2])):
        found = read(rows)
        assert isinstance(found, dict) and list(found) == ["x", "y"]
        np.testing.assert_array_equal(found["x"], X[rows])
        np.testing.assert_array_equal(found["y"], Y[rows])


def test_columns_of_pandas_are_read_by_position():
    pandas = pytest.importorskip("pandas")
    order = np.random.default_rng(0).permutation(5)
    table = pandas.DataFrame({"y": Y, "z": X[:, 1]}).iloc[order]
    repeated = pandas.concat([table["y"].iloc[:2], table["y"].iloc[:3]])
    cases = [
        (table, {"y": Y[order], "z": X[order, 1]}),
        ({"y": table["y"]}, {"y": Y[order]}),
        ({"y": repeated}, {"y": Y[order[[0, 1, 0, 1, 2]]]}),
        (table["y"], Y[order]),
        ({"table": table, "x": X}, {"table": {"y": Y[order], "z": X[order, 1]}, "x": X}),
    ]
    for dataset, columns in cases:
        num_rows, read = reader(dataset)
        assert num_rows == 5
        expected = jax.tree.map(lambda column: column[ROWS], columns)
        jax.tree.map(np.testing.assert_array_equal, read(ROWS), expected)
    with pytest.raises(ValueError, match="'y'"):
        reader(pandas.concat([table, table], axis=1))


class Frame(dict):
    """As a DataFrame of polars: it has a shape, and neither ndim nor iloc."""

    __module__ = "polars.dataframe.frame"
    to_numpy = None

    @property
    def columns(self):
        return list(self)

    @property
    def shape(self):
        return 5, len(self)


def test_a_table_of_polars_is_the_dict_of_its_columns():
    num_rows, read = reader(Frame(x=X, y=Y))
    assert num_rows == 5
    found = read(ROWS)
    np.testing.assert_array_equal(found["x"], X[ROWS])
    np.testing.assert_array_equal(found["y"], Y[ROWS])


def test_tables_of_polars_themselves():
    polars = pytest.importorskip("polars")
    _, read = reader(polars.DataFrame({"y": Y, "z": X[:, 1]}))
    np.testing.assert_array_equal(read(ROWS)["z"], X[ROWS, 1])


def test_arrays_and_groups_of_hdf5_are_read(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["more/y"] = X, Y
    with h5py.File(tmp_path / "data.h5") as file:
        for dataset in (file, {"x": file["x"], "more": {"y": Y}}):
            num_rows, read = reader(dataset)
            assert num_rows == 5
            expected = {"x": X[ROWS], "more": {"y": Y[ROWS]}}
            jax.tree.map(np.testing.assert_array_equal, read(ROWS), expected)


@pytest.mark.parametrize("wrong", [np.array([0]), np.array([0, 1, 2, 3]), 0, slice(0)])
def test_another_number_of_rows_than_asked_for_is_refused(wrong):
    class Wrong(Increasing):
        def __getitem__(self, rows):
            return self.values[wrong]

    _, read = reader({"x": X, "y": Wrong(Y)})
    with pytest.raises(ValueError, match=r"\['y'\] .*Wrong .*2 row numbers"):
        read(ROWS)


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 50])
def test_rows_come_in_order_however_many_threads_read_them(threads, num_rows):
    readers, everybody = set(), threading.Barrier(min(threads, num_rows))

    def row(i):
        if threading.get_ident() not in readers:
            readers.add(threading.get_ident())
            everybody.wait(10)  # so that all threads take part
        return i, np.full(2, -i)

    class Rows(Lines):
        def __getitem__(self, i):
            if i:
                time.sleep(0)
            return row(i) if i else (0, np.zeros(2, int))

    _, read = reader(Rows(row), threads)
    rows = np.arange(num_rows)[::-1]
    found = read(np.concatenate([[0], rows + 1]))
    assert found[0].tolist() == [0, *(rows + 1)]
    assert found[1].tolist() == [[0, 0], *([-i - 1] * 2 for i in rows)]
    assert len(readers) == min(threads, num_rows)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_row_whose_reading_fails_is_named(threads):
    def row(i):
        if i == 7:
            raise OSError("cannot be read")
        return i

    _, read = reader(Lines(row), threads)
    with pytest.raises(OSError, match="cannot be read") as caught:
        read(np.array([3, 1, 7, 2]))
    assert "row 7 " in caught.value.__notes__[0]


def test_rows_with_other_keys_are_named():
    _, read = reader(Lines(lambda i: {"x": 1} if i < 3 else {"x": 1, "y": 2}))
    with pytest.raises(ValueError, match="row 3 .*'y'.*row 1 "):
        read(np.array([1, 2, 3]))


def test_numbers_of_several_dtypes_are_stacked_as_the_widest():
    _, read = reader(Lines(lambda i: [1, 2.5, 3, True, 1j][i]))
    assert read(np.array([0, 2])).dtype == int
    assert read(np.array([0, 1, 2])).tolist() == [1.0, 2.5, 3.0]
    assert read(np.array([3, 0, 4])).tolist() == [1, 1, 1j]


def test_a_row_may_use_the_memory_of_the_one_before():
    buffer = np.empty(2)

    def row(i):
        buffer[:] = i
        return {"x": buffer}

    _, read = reader(Lines(row))
    assert read(ROWS)["x"].tolist() == [[3, 3], [0, 0], [3, 3]]


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
        (iter([X]), TypeError, "list_iterator .*jdp.shard_batches"),
        (3, TypeError, "int .*row number"),
    ],
)
def test_refuses_a_dataset_without_rows(dataset, error, message):
    with pytest.raises(error, match=message):
        reader(dataset)


def test_rows_of_different_shapes_are_named():
    _, read = reader(Lines(lambda i: {"text": np.zeros(i + 1)}))
    with pytest.raises(ValueError, match=r"row 2\['text'\] .*\[3\].*row 1 .*\[2\]"):
        read(np.array([1, 2]))
    _, read = reader(Lines(lambda i: {"text": [0] * (i + 1)}))
    with pytest.raises(ValueError, match=r"row 2\['text'\] .*\[3\].*row 1 .*\[2\].*Pad"):
        read(np.array([1, 2]))
    _, read = reader(Lines(lambda i: [0] * (i + 1)))
    with pytest.raises(ValueError, match=r"row 2 .*row 1 .*np\.asarray.*padded"):
        read(np.array([1, 2]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Rows:
    x: np.ndarray
    y: np.ndarray


def test_a_registered_dataclass_is_a_dataset():
    num_rows, read = reader(Rows(X, Y))
    batch = read(ROWS)
    assert num_rows == 5 and type(batch) is Rows
    np.testing.assert_array_equal(batch.x, X[ROWS])
    np.testing.assert_array_equal(batch.y, Y[ROWS])
    mask = np.ones(3, bool)
    assert with_mask(batch, mask) == (batch, mask)


def test_a_dataclass_that_is_not_registered_is_no_dataset():
    with pytest.raises(TypeError, match="Unregistered"):
        reader(dataclasses.make_dataclass("Unregistered", ["x"])(X))
