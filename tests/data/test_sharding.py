"""Which rows are a process's, for any mesh, and where they come to lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import sparse
from jax.sharding import AxisType

from jdp.data.sharding import Layout, batch_sharding, place_batch, process_rows


def mesh_of(sizes, names, order=None):
    devices = np.array(jax.devices("cpu"))[: int(np.prod(sizes))]
    devices = devices if order is None else devices[order]
    return jax.sharding.Mesh(
        devices.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names)
    )


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_the_rows_of_all_processes_are_the_batch_each_row_once(data):
    num_ranks = data.draw(st.integers(1, 8), "ranks")
    per_rank = data.draw(st.integers(1, 3), "rows per rank")
    owner = data.draw(st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks), "owner")
    mesh = mesh_of((num_ranks,), ("data",))
    batch = np.arange(num_ranks * per_rank)
    for process in set(owner):
        mine = [
            device for device, of in zip(mesh.devices.flat, owner, strict=True) if of == process
        ]
        rows = process_rows(batch_sharding(mesh, "data"), len(batch), mine)
        ranks = np.repeat(owner, per_rank) == process  # rank r holds the r-th block
        assert rows.tolist() == batch[ranks].tolist()


def test_rows_follow_the_mesh_and_not_the_numbers_of_devices():
    mesh = mesh_of((4,), ("data",), order=[2, 0, 3, 1])
    sharding = batch_sharding(mesh, "data")
    by_id = {device.id: process_rows(sharding, 8, [device]).tolist() for device in mesh.devices}
    assert by_id == {2: [0, 1], 0: [2, 3], 3: [4, 5], 1: [6, 7]}


def test_devices_along_another_axis_share_rows():
    mesh = mesh_of((2, 4), ("data", "model"))
    sharding = batch_sharding(mesh, "data")
    assert process_rows(sharding, 4, mesh.devices[0]).tolist() == [0, 1]
    assert process_rows(sharding, 4, mesh.devices[:, 1]).tolist() == [0, 1, 2, 3]


def test_several_axes_split_the_batch_in_the_order_of_their_names():
    mesh = mesh_of((2, 4), ("replica", "fsdp"))
    both = batch_sharding(mesh, ("replica", "fsdp"))
    assert process_rows(both, 16, [mesh.devices[1, 2]]).tolist() == [12, 13]
    swapped = batch_sharding(mesh, ("fsdp", "replica"))
    assert process_rows(swapped, 16, [mesh.devices[1, 2]]).tolist() == [10, 11]


def test_a_process_without_a_device_has_no_rows():
    with pytest.raises(ValueError, match="process 0 .*'data': 2"):
        process_rows(batch_sharding(mesh_of((2,), ("data",)), "data"), 4, [])


def test_an_axis_that_the_mesh_lacks_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'data'.*axis_name='dp'"):
        batch_sharding(mesh_of((2,), ("dp",)), "data")


@pytest.mark.parametrize("sizes, names, axis_name", [
    ((1,), ("data",), "data"),
    ((3,), ("data",), "data"),
    ((8,), ("data",), "data"),
    ((2, 4), ("data", "model"), "data"),
    ((2, 4), ("data", "model"), "model"),
    ((2, 2, 2), ("a", "b", "c"), ("a", "c")),
])  # fmt: skip
def test_each_device_holds_its_ranks_rows(sizes, names, axis_name):
    sharding = batch_sharding(mesh_of(sizes, names), axis_name)
    x = np.arange(24 * 2, dtype=np.float32).reshape(24, 2)
    batch = {"x": x, "y": (np.arange(24), np.ones((24, 0, 3), bool))}
    placed = Layout.of_batch(batch, sharding).place(batch)
    jax.tree.map(np.testing.assert_array_equal, placed, batch)
    assert placed["x"].dtype == np.float32
    expected = jax.device_put(x, sharding)
    assert placed["x"].sharding == sharding
    for shard, other in zip(
        placed["x"].addressable_shards, expected.addressable_shards, strict=True
    ):
        assert shard.device == other.device
        np.testing.assert_array_equal(shard.data, other.data)


@pytest.mark.parametrize(
    "batch, error, message",
    [
        (
            {"x": np.ones((4, 2)), "t": 0.5},
            ValueError,
            r"`batch\['t'\]`.*step\(state, batch, scalar\)",
        ),
        (
            {"x": np.ones((4, 2)), "y": np.ones(6)},
            ValueError,
            r"batch\['y'\]` .*6.*batch\['x'\]` .*4",
        ),
        (np.ones(6), ValueError, " 6 .* 4 .* 4"),
        (np.ones((0, 3)), ValueError, "0 rows"),
        ({}, ValueError, "0 rows"),
        (
            {"x": np.ones(4), "name": np.array(list("abcd"))},
            TypeError,
            r"batch\['name'\]` <U1\[4\]",
        ),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(batch, error, message):
    with pytest.raises(error, match=message):
        Layout.of_batch(batch, batch_sharding(mesh_of((4,), ("data",)), "data"))


@pytest.mark.all_sets
@pytest.mark.parametrize("placed_by", ["a loop", "a step"])
@pytest.mark.parametrize(
    "value, dtype, held",
    [
        (2**31 - 1, np.int64, True),
        (-(2**31), np.int64, True),
        (2**32 - 1, np.uint64, True),
        (2**31, np.int64, False),
        (-(2**31) - 1, np.int64, False),
        (2**40 + 7, np.int64, False),
        (2**32, np.uint64, False),
        (2**63, np.uint64, False),
    ],
)
def test_integers_that_32_bits_do_not_hold_are_refused(value, dtype, held, placed_by):
    mesh = mesh_of((2,), ("data",))
    ids = np.arange(8, dtype=dtype).reshape(4, 2)
    ids[3, 1] = value
    batch = {"x": np.ones(4, np.float32), "ids": ids}

    def place():
        if placed_by == "a step":
            return place_batch(batch, mesh, ("data",))
        return Layout.of_batch(batch, batch_sharding(mesh, "data")).place(batch)

    if held:
        np.testing.assert_array_equal(place()["ids"], ids)
        return
    with pytest.raises(ValueError, match=rf"batch\['ids'\]` .*{value} .*row 3.*jax_enable_x64"):
        place()
    with jax.enable_x64(True):
        np.testing.assert_array_equal(place()["ids"], ids)


@pytest.mark.parametrize("placed_by", ["a loop", "a step"])
def test_numbers_in_any_order_of_bytes_are_placed_and_records_refused(placed_by):
    sharding = batch_sharding(mesh_of((2,), ("data",)), "data")

    def place(batch):
        if placed_by == "a step":
            return place_batch(batch, sharding.mesh, ("data",))
        return Layout.of_batch(batch, sharding).place(batch)

    x = np.arange(4.0, dtype=np.float32)
    for order in "<>":
        np.testing.assert_array_equal(place({"x": x.astype(f"{order}f4")})["x"], x)
    records = np.zeros(4, [("id", np.int32), ("y", np.float32)])
    with pytest.raises(TypeError, match=r"batch\['r'\]` .*\['id', 'y'\]"):
        place({"r": records})


@pytest.mark.parametrize("later, message", [
    ({"x": np.ones((3, 3))}, "3 rows .*2 ranks .*drop_remainder"),
    ({"x": np.ones((4, 5), np.float32)}, r"\['x'\]` float32\[4, 5\].*Cast .* float64"),
    ({"x": np.ones((4, 3), np.float32)}, r"\['x'\]` float32\[4, 3\].*Cast .* float64"),
    ({"y": np.ones((4, 3))}, "'y'.*'x'"),
    ((np.ones((4, 3)),), "'x'"),
])  # fmt: skip
def test_a_later_batch_that_differs_is_refused(later, message):
    sharding = batch_sharding(mesh_of((2,), ("data",)), "data")
    layout = Layout.of_batch({"x": np.ones((4, 3))}, sharding)
    with pytest.raises(ValueError, match=message):
        layout.of_later(later)


@jax.tree_util.register_pytree_node_class
class Measured:
    """A node with a shape that follows its array, as quantised arrays have."""

    def __init__(self, values):
        self.values = values

    @property
    def shape(self):
        return self.values.shape

    def tree_flatten(self):
        return (self.values,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("n_batch", [0, 1])
def test_a_node_that_keeps_the_shape_of_all_rows_is_refused(n_batch, num_ranks):
    mesh = mesh_of((num_ranks,), ("data",))
    batch = {"a": np.ones((4, 2)), "x": sparse.BCOO.fromdense(jnp.eye(4), n_batch=n_batch)}
    for place in (
        place_batch,
        lambda batch, mesh, axes: Layout.of_batch(batch, batch_sharding(mesh, axes)),
    ):
        with pytest.raises(TypeError, match=r"batch\['x'\]` is a BCOO of shape \[4, 4\]"):
            place(batch, mesh, ("data",))
    batch["x"] = Measured(np.ones((4, 3)))
    assert place_batch(batch, mesh, ("data",))["x"].shape == (4, 3)


@jax.tree_util.register_pytree_node_class
class Picture(Measured):
    """A node with the shape of each of its rows."""

    shape = (2, 3)


def test_a_node_with_the_shape_of_one_row_is_no_mistake():
    batch = {"x": Picture(np.ones((4, 6)))}
    assert place_batch(batch, mesh_of((2,), ("data",)), ("data",))["x"].values.shape == (4, 6)


def test_a_second_set_of_rows_is_told_how_to_lie_beside_the_first():
    with pytest.raises(ValueError, match=r"\[4, 3, \.\.\.\]"):
        place_batch({"a": np.ones((4, 2)), "b": np.ones(12)}, mesh_of((2,), ("data",)), ("data",))
