"""What a leaf of a row or a batch becomes, and the error that names its leaf and row."""

import collections
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdp
from jdp.data.dataset import reader

X = np.arange(12.0, dtype="float32").reshape(6, 2)
MASKED = np.ma.masked_equal(X, 7.0)


class Rows:
    """Six rows, of which row 3 is another."""

    def __init__(self, usual, third):
        self.usual, self.third = usual, third

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return self.third() if i == 3 else self.usual(i)


@dataclasses.dataclass
class Unregistered:
    x: np.ndarray


def stops():
    raise StopIteration


def _refuses_conversion(*_, **__):
    raise RuntimeError("requires grad")


Unwilling = type("Unwilling", (), {"__array__": _refuses_conversion})


@pytest.mark.parametrize("mapping", [collections.UserDict, types.MappingProxyType])
def test_mappings_are_read_as_dicts_wherever_they_stand(mapping, make_mesh):
    mesh = make_mesh(2)
    nested = [mapping({"x": row, "more": mapping({"y": row})}) for row in X]
    _, read = reader(nested)
    found = read(np.array([4, 0]))
    assert type(found) is type(found["more"]) is dict
    np.testing.assert_array_equal(found["more"]["y"], X[[4, 0]])
    (batch,) = jdp.shard_batches([mapping({"x": X})], mesh=mesh)
    np.testing.assert_array_equal(batch["x"], X)

    @jdp.eval_step
    def total(scale, batch):
        return {"total": jdp.sum_over_ranks((scale * batch["x"]).sum())}

    scale = jax.device_put(jnp.float32(1), jax.NamedSharding(mesh, jax.P()))
    assert total(scale, mapping({"x": X}))["total"] == X.sum()


def test_a_masked_array_is_refused_where_values_are_masked_out(make_mesh):
    mesh = make_mesh(1)
    state = jax.device_put(jnp.float32(0), jax.NamedSharding(mesh, jax.P()))
    for dataset, named in [({"x": MASKED}, r"\['x'\]"), (list(MASKED), "row 3")]:
        with pytest.raises(TypeError, match=f"{named} .* 1 masked .*getmaskarray"):
            reader(dataset)[1](np.arange(6))
    with pytest.raises(TypeError, match=r"batch\['x'\].* 1 masked .*getmaskarray"):
        list(jdp.shard_batches([{"x": MASKED}], mesh=mesh))
    step = jdp.eval_step(lambda state, batch: {"mean": batch.mean()})
    with pytest.raises(TypeError, match=" 1 masked .*getmaskarray"):
        step(state, MASKED)
    _, read = reader({"x": np.ma.masked_equal(X, -1.0)})
    np.testing.assert_array_equal(read(np.array([5, 5]))["x"], X[[5, 5]])


@pytest.mark.parametrize(
    "third, error, message",
    [
        (lambda: {"x": "abc"}, TypeError, r"row 3\['x'\].*'abc'.* str"),
        (lambda: {"x": 2**70}, TypeError, r"row 3\['x'\].*118.* int"),
        (lambda: {"x": np.datetime64("2026-01-01")}, TypeError, r"row 3\['x'\]"),
        (lambda: {"x": np.zeros((), [("a", int)])}, TypeError, r"row 3\['x'\] .*\['a'\]"),
        (lambda: {"x": Unregistered(X)}, TypeError, r"row 3\['x'\].*register_dataclass"),
        (lambda: {"x": jax.random.key(0)}, TypeError, r"row 3\['x'\] .*key_data"),
        (lambda: {"x": Unwilling()}, TypeError, r"row 3\['x'\], of type Unwilling.*requires grad"),
        (lambda: {"x": 1, 2: 3}, TypeError, "row 3 .*keys"),
        (stops, RuntimeError, "row 3 of 6 .*StopIteration"),
    ],
)
def test_a_row_that_is_not_of_numbers_is_named_with_its_leaf(third, error, message):
    _, read = reader(Rows(lambda i: {"x": i}, third))
    assert read(np.array([0, 5]))["x"].tolist() == [0, 5]
    for rows in ([5, 3, 1], [3, 1]):
        with pytest.raises(error, match=message):
            read(np.array(rows))


def test_an_array_whose_reading_fails_is_named_with_its_rows():
    class Closed:
        shape, dtype = (6,), np.dtype(int)

        def __getitem__(self, rows):
            raise OSError("the file is closed")

    _, read = reader({"x": Closed()})
    with pytest.raises(OSError, match="closed") as caught:
        read(np.array([4, 2, 4]))
    assert "[2, 4] of ['x']" in caught.value.__notes__[0]


def test_a_column_that_is_no_numpy_array_is_converted_as_a_whole():
    class Nullable:  # as of pandas: the dtype depends on the rows
        shape, dtype, missing = (6,), "Int64", 3

        def to_numpy(self):
            return np.where(np.arange(6) == self.missing, np.nan, np.arange(6))

        def __getitem__(self, rows):
            return rows.astype(float) if self.missing in rows else rows

    _, read = reader({"x": Nullable()})
    assert read(np.array([1, 2]))["x"].dtype == read(np.array([2, 3]))["x"].dtype == float


@pytest.mark.parametrize("value", [2**40, -(2**31) - 1, 1e300, -1e39, 1e300j])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_number_that_does_not_fit_is_named_with_its_row(value, prefetch, make_mesh):
    x = np.zeros((6, 2), type(value))
    x[4, 1] = value
    mesh = make_mesh(1)
    state = jax.device_put(jnp.float32(0), jax.NamedSharding(mesh, jax.P()))
    batches = jdp.batches({"x": x}, 2, num_steps=3, mesh=mesh, prefetch=prefetch)
    with pytest.raises(ValueError, match=r"batch\['x'\].* row [01]") as caught:
        list(batches)
    assert "row 4 " in caught.value.__notes__[-1]
    step = jdp.eval_step(lambda state, batch: {"mean": jnp.abs(batch["x"]).mean()})
    with pytest.raises(ValueError, match=r"batch\['x'\].* row 4"):
        step(state, {"x": x})


def test_infinities_and_nan_are_numbers_like_others(make_mesh):
    x = np.array([np.inf, -np.inf, np.nan, 1e-300])
    (batch,) = jdp.batches({"x": x}, 4, num_steps=1, shuffle=False, mesh=make_mesh(1))
    np.testing.assert_array_equal(batch["x"], np.array([np.inf, -np.inf, np.nan, 0], "float32"))


def test_a_later_batch_of_another_dtype_is_named_with_its_rows(make_mesh):
    rows = Rows(lambda i: {"x": i}, lambda: {"x": 0.5})
    options = {"num_steps": 3, "shuffle": False, "mesh": make_mesh(1)}
    with pytest.raises(ValueError, match=r"batch\['x'\].*float64") as caught:
        list(jdp.batches(rows, 2, **options))
    assert "rows 2, 3 of" in caught.value.__notes__[-1]
