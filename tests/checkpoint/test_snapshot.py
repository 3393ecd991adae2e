import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jdp import pytrees
from jdp.checkpoint.saved_leaves import (
    SavedLeaf,
    describe,
    pack,
    packed_bytes,
    require_same,
    unpack,
)
from jdp.checkpoint.snapshot import Snapshots, place


def bits(tree):
    def of(x):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.asarray(x).tobytes() if pytrees.is_array(x) else x

    return jax.tree.map(of, tree)


def state_on(mesh):
    everywhere = NamedSharding(mesh, PartitionSpec())
    return {
        "f32": jax.device_put(np.array([1.5, -0.0, np.nan], np.float32), everywhere),
        "bf16": jax.device_put(jnp.ones((2, 3), jnp.bfloat16), everywhere),
        "empty": jax.device_put(np.zeros((0, 4), np.float32), everywhere),
        "key": jax.device_put(jax.random.key(3), everywhere),
        "keys": jax.device_put(jax.random.split(jax.random.key(3, impl="rbg"), 2), everywhere),
        "weak": jnp.asarray(2.5),
        "plain": jnp.arange(3),
        "numpy": np.arange(4.0),
        "number": np.float16(0.25),
        "python": (True, 3, 1.5, 2j),
        "function": jnp.tanh,
        "none": None,
    }


def zeroed(state):
    def zero(x):
        if not pytrees.is_array(x):
            return x
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = jnp.zeros_like(jax.random.key_data(x))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return type(x)(0) if not hasattr(x, "dtype") else x * 0

    return jax.tree.map(zero, state)


def fetched(state):
    return Snapshots(reuse=False).take_snapshot(state).fetch()


def test_every_leaf_comes_back_with_its_bits_and_its_type(mesh):
    state = state_on(mesh)
    leaves, values = describe(state), fetched(state)
    data = np.concatenate(pack(values))
    assert data.size == packed_bytes(leaves)
    again = place(zeroed(state), unpack(data, leaves))
    assert bits(again) == bits(state)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        assert type(new) is type(old)
        if isinstance(old, jax.Array):
            assert jax.typeof(new) == jax.typeof(old)
            assert (new.sharding, new.committed) == (old.sharding, old.committed)


def test_a_restored_state_is_not_traced_again(mesh):
    num_traces = 0

    @jax.jit
    def step(arrays):
        nonlocal num_traces
        num_traces += 1
        return arrays

    state = state_on(mesh)
    del state["function"], state["none"]
    together = {name: state[name] for name in ("f32", "bf16", "key", "keys", "numpy", "number")}
    alone = {name: state[name] for name in ("weak", "plain", "python")}
    for tree in (together, alone):
        step(tree)
        before = num_traces
        step(place(zeroed(tree), fetched(tree)))
        assert num_traces == before


@pytest.mark.parametrize("skipped", [0, 4])
def test_a_restored_state_may_be_donated_on_every_device(mesh, skipped):
    w = jax.device_put(np.zeros(100_000, np.float32), NamedSharding(mesh, PartitionSpec()))
    # Aligned, so that JAX takes the memory as it is for all devices; and not.
    room = np.empty(100_064, np.float32)
    begin = -room.ctypes.data % 64 // 4 + skipped
    value = room[begin : begin + 100_000]
    value[:] = np.arange(100_000)
    restored = place({"w": w}, [value])
    moved = jax.jit(lambda x: x + 1, donate_argnums=0)(restored["w"])
    for shard in moved.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.arange(100_000) + 1)


@pytest.mark.parametrize("reuse", [False, True])
def test_a_snapshot_outlives_the_donation_of_its_state(mesh, reuse):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    w = jax.device_put(np.zeros(50_000, np.float32), NamedSharding(mesh, PartitionSpec()))
    snapshots = Snapshots(reuse=reuse)
    for i in range(5):
        taken = snapshots.take_snapshot([w])
        w = step(w)
        (value,) = taken.fetch()
        assert (value == i).all()


def test_the_memory_of_a_snapshot_is_used_again(make_mesh):
    w = jax.device_put(np.zeros(50_000, np.float32), NamedSharding(make_mesh(2), PartitionSpec()))
    snapshots = Snapshots(reuse=True)
    places = {
        snapshots.take_snapshot([w]).pieces[0][0][1].unsafe_buffer_pointer() for _ in range(4)
    }
    assert len(places) == 1


def test_a_state_of_other_shapes_may_follow():
    snapshots = Snapshots(reuse=True)
    for size in (3, 4, 4):
        assert snapshots.take_snapshot([jnp.ones(size)]).fetch()[0].shape == (size,)


@pytest.mark.parametrize(
    "spec", [("model",), (None, "model"), ("data", "model"), (("data", "model"),)]
)
def test_a_split_leaf_is_written_as_a_whole(spec):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    value = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    w = jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))
    (found,) = fetched([w])
    np.testing.assert_array_equal(found, value)
    (again,) = place([w * 0], [found])
    assert again.sharding == w.sharding
    np.testing.assert_array_equal(again, value)


def test_a_donated_state_is_refused():
    x = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    with pytest.raises(ValueError, match=r"`state\['x'\]` was donated"):
        Snapshots(reuse=False).take_snapshot({"x": x})


W, B = SavedLeaf("['w']", (2, 3), "float32", None), SavedLeaf("['b']", (3,), "float32", None)


@pytest.mark.parametrize(
    ("saved", "given", "text"),
    [
        (
            [W, B],
            [W._replace(shape=(2, 4)), B],
            r"`\['w'\]` is float32\[2, 3\] in X, and float32\[2, 4\]",
        ),
        (
            [W, B],
            [W, B._replace(dtype="bfloat16")],
            r"`\['b'\]` is float32\[3\] in X, and bfloat16\[3\]",
        ),
        ([W], [W, B], r"`\['b'\]` float32\[3\] is not in X"),
        ([W, B], [W], r"`\['b'\]` float32\[3\] is in X, not in the state"),
        ([W, B], [B, W], "another order"),
        (
            [SavedLeaf("k", (2,), "uint32", "threefry2x32")],
            [SavedLeaf("k", (2,), "uint32", None)],
            r"key<threefry2x32>\[2\] in X, and uint32\[2\]",
        ),
    ],
)
def test_another_model_is_refused_by_its_first_leaf(saved, given, text):
    with pytest.raises(ValueError, match=text):
        require_same(saved, given, "X")


def test_a_number_that_no_array_can_hold_is_refused_by_name():
    with pytest.raises(TypeError, match=r"`\['n'\]` is 1267650600228229401496703205376"):
        describe({"n": 2**100})
