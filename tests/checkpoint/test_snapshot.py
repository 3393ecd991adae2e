import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jdp import pytrees
from jdp.checkpoint.load import fill
from jdp.checkpoint.saved_leaves import describe, pack, packed_bytes, unpack
from jdp.checkpoint.snapshot import Snapshots


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


def filled(state, values, leaves=None):
    """The state with saved values of these leaves, or of its own."""
    return fill(state, describe(state) if leaves is None else leaves, values, "X")[0]


def fetched(state):
    return Snapshots().take_snapshot(state).fetch()


def test_every_leaf_comes_back_with_its_bits_and_its_type(mesh):
    state = state_on(mesh)
    leaves, values = describe(state), fetched(state)
    data = np.concatenate(pack(values))
    assert data.size == packed_bytes(leaves)
    again = filled(zeroed(state), unpack(data, leaves))
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
        step(filled(zeroed(tree), fetched(tree)))
        assert num_traces == before


@pytest.mark.parametrize("skipped", [0, 4])
def test_a_restored_state_may_be_donated_on_every_device(mesh, skipped):
    w = jax.device_put(np.zeros(100_000, np.float32), NamedSharding(mesh, PartitionSpec()))
    # Aligned, so that JAX takes the memory as it is for all devices; and not.
    room = np.empty(100_064, np.float32)
    begin = -room.ctypes.data % 64 // 4 + skipped
    value = room[begin : begin + 100_000]
    value[:] = np.arange(100_000)
    restored = filled({"w": w}, [value])
    moved = jax.jit(lambda x: x + 1, donate_argnums=0)(restored["w"])
    for shard in moved.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.arange(100_000) + 1)


def test_a_snapshot_outlives_the_donation_of_its_state(mesh):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    w = jax.device_put(np.zeros(50_000, np.float32), NamedSharding(mesh, PartitionSpec()))
    snapshots = Snapshots()
    for i in range(5):
        taken = snapshots.take_snapshot([w])
        w = step(w)
        (value,) = taken.fetch()
        assert (value == i).all()


def test_a_state_of_other_shapes_may_follow():
    snapshots = Snapshots()
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
    (again,) = filled([w * 0], [found])
    assert again.sharding == w.sharding
    np.testing.assert_array_equal(again, value)


def test_a_donated_state_is_refused():
    x = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    with pytest.raises(ValueError, match=r"`state\['x'\]` "):
        Snapshots().take_snapshot({"x": x})


W, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("saved", "given", "named"),
    [
        (
            {"w": W, "b": B},
            {"w": np.zeros((2, 4), np.float32), "b": B},
            r"`\['w'\]` .*float32\[2, 3\] .*float32\[2, 4\]",
        ),
        (
            {"w": W, "b": B},
            {"w": W, "b": jnp.zeros(3, jnp.bfloat16)},
            r"`\['b'\]` .*float32\[3\] .*bfloat16\[3\]",
        ),
        ({"w": W}, {"w": W, "b": B}, r"`\['b'\]` float32\[3\]"),
        ({"w": W, "b": B}, {"w": W}, r"`\['b'\]` float32\[3\]"),
        ({"k": jax.random.key(0)}, {"k": jax.random.PRNGKey(0)}, r"key<.*>\[2\] .*uint32\[2\]"),
    ],
    ids=["shape", "dtype", "a leaf less", "a leaf more", "no key"],
)
def test_another_model_is_refused_by_its_first_leaf(saved, given, named):
    with pytest.raises(ValueError, match=named):
        filled(given, fetched(saved), describe(saved))


def test_leaves_are_found_by_their_names_whatever_their_order():
    b, w = describe({"w": W, "b": B})
    again = filled({"b": 0 * B, "w": 0 * W}, [W, B], [w, b])
    np.testing.assert_array_equal(again["w"], W)
    np.testing.assert_array_equal(again["b"], B)


@jax.tree_util.register_pytree_with_keys_class
class Pair:
    """A node that gives both of its leaves one name."""

    def __init__(self, one, other):
        self.leaves = one, other

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("x"), leaf) for leaf in self.leaves], None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


def test_leaves_of_one_name_stay_apart():
    state = Pair(np.float32(1), np.float32(2))
    assert filled(zeroed(state), fetched(state), describe(state)).leaves == (1, 2)


def test_a_number_that_no_array_can_hold_is_refused_by_name():
    with pytest.raises(TypeError, match=r"`\['n'\]` is 1267650600228229401496703205376"):
        describe({"n": 2**100})
