"""`check_replicas` sees every bit, and says on which rank and in which leaf one differs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import training
from support.per_rank import planted

import jdp


def on_mesh(mesh, value, *split):
    return jax.device_put(value, NamedSharding(mesh, P(*split)))


def flipped(value, bit=0):
    """The array with one bit of its last element flipped."""
    bits = np.array(value).reshape(-1).view(np.uint8)
    bits[-value.dtype.itemsize + bit // 8] ^= np.uint8(1 << bit % 8)
    return bits.view(value.dtype).reshape(value.shape)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_names_the_rank_and_the_leaf_of_a_flipped_bit(make_mesh, num_ranks):
    mesh = jdp.init(make_mesh(num_ranks))
    w = np.linspace(-1, 1, 35, dtype=np.float32).reshape(5, 7)
    good = {"step": on_mesh(mesh, np.int32(3)), "w": on_mesh(mesh, w)}
    assert jdp.check_replicas(good) == jdp.check_replicas(jax.tree.map(jnp.copy, good))
    bad = good | {"w": planted(mesh, w, flipped(w), {num_ranks - 1})}
    odd = num_ranks - 1
    text = rf"`\['w'\]` float32\[5, 7\] .*rank {odd} .*rank 0 .* 1 of 2 .*\[{odd}\].*JDP213"
    with pytest.raises(RuntimeError, match=text):
        jdp.check_replicas(bad)


def test_names_the_rank_that_differs_in_most_leaves(make_mesh):
    mesh = jdp.init(make_mesh(8))
    x = np.ones(4, np.float32)
    state = [planted(mesh, x, flipped(x), ranks) for ranks in ({2}, {5}, {5, 6}, ())]
    with pytest.raises(RuntimeError, match=r"`\[1\]` .*rank 5 .* 3 of 4 .*\[2, 5, 6\]"):
        jdp.check_replicas(state)


def values(dtype):
    return np.arange(12).astype(dtype).reshape(3, 4)


DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
    *("float16", "bfloat16", "float32", "float8_e4m3fn", "complex64"),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_flip_of_any_bit_shows(make_mesh, dtype):
    mesh = jdp.init(make_mesh(2))
    x = values(jnp.dtype(dtype))
    num_bits = 1 if dtype == "bool" else 8 * x.dtype.itemsize
    for bit in range(num_bits):
        with pytest.raises(RuntimeError, match="JDP213"):
            jdp.check_replicas(planted(mesh, x, flipped(x, bit), {1}))
    assert jdp.check_replicas(planted(mesh, x, flipped(flipped(x)), {1}))


def test_64_bits_show(make_mesh):
    mesh = jdp.init(make_mesh(2))
    with jax.enable_x64(True):
        for dtype in (np.float64, np.int64):
            x = values(dtype)
            for bit in (0, 31, 32, 63):
                with pytest.raises(RuntimeError, match="JDP213"):
                    jdp.check_replicas(planted(mesh, x, flipped(x, bit), {1}))


def test_the_payload_of_a_nan_and_the_sign_of_zero_show(make_mesh):
    mesh = jdp.init(make_mesh(2))
    nans = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    for one, other in (nans, np.array([0.0, -0.0], np.float32)):
        x, y = np.full(3, one), np.full(3, other)
        with pytest.raises(RuntimeError, match="JDP213"):
            jdp.check_replicas(planted(mesh, x, y, {1}))
        assert jdp.check_replicas(on_mesh(mesh, x)) != jdp.check_replicas(on_mesh(mesh, y))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_values_that_change_places_show(make_mesh, dtype):
    mesh = jdp.init(make_mesh(2))
    x = values(jnp.dtype(dtype))
    crossed = x.copy()
    crossed[[0, 1], [1, 0]] = x[[1, 0], [0, 1]]
    for y in (x[::-1], x[:, ::-1], crossed):
        with pytest.raises(RuntimeError, match="JDP213"):
            jdp.check_replicas(planted(mesh, x, y, {1}))


def test_keys_show(make_mesh):
    mesh = jdp.init(make_mesh(2))
    x = np.array([3, 4], np.uint32)
    key = jax.random.wrap_key_data(planted(mesh, x, flipped(x), {1}))
    with pytest.raises(RuntimeError, match=r"key<fry>\[\] .*JDP213"):
        jdp.check_replicas(key)


def state_of(num_ranks):
    training.ranks(num_ranks)
    return training.state(model_state={"seen": np.zeros((0, 3)), "key": jax.random.key(5)})


def test_the_hash_is_that_of_the_bits_on_any_number_of_ranks():
    hashes = [jdp.check_replicas(state_of(n)) for n in (1, 2, 3, 8)]
    assert len(set(hashes)) == 1
    changed = state_of(3)
    changed = changed.replace(params=changed.params | {"b": changed.params["b"] + 1e-30})
    assert jdp.check_replicas(changed) != hashes[0]


def test_a_leaf_of_another_name_shape_or_dtype_is_another_state(make_mesh):
    jdp.init(make_mesh(2))
    x = np.zeros(4, np.float32)
    states = [{"w": x}, {"v": x}, {"w": x.reshape(2, 2)}, {"w": x.view(np.int32)}, {"w": x[:3]}]
    assert len({jdp.check_replicas(state) for state in states}) == len(states)


def test_the_hash_does_not_depend_on_how_further_axes_split_a_leaf():
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jdp.init(jax.make_mesh((2, 4), ("data", "model"), axis_types=auto))
    x = np.arange(96, dtype=np.float32).reshape(8, 12)
    splits = [(), ("model",), (None, "model"), ("model", None)]
    assert len({jdp.check_replicas(on_mesh(mesh, x, *split)) for split in splits}) == 1


def test_parts_are_compared_with_the_same_parts_of_other_ranks():
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jdp.init(
        jax.make_mesh((3, 2), ("data", "model"), axis_types=auto, devices=jax.devices()[:6])
    )
    x = np.arange(8, dtype=np.float32)
    sharding = NamedSharding(mesh, P("model"))
    parts = [
        jax.device_put(np.float32(np.split(x, 2)[i % 2] + (i == 5)), device)
        for i, device in enumerate(mesh.devices.flat)
    ]
    bad = jax.make_array_from_single_device_arrays(x.shape, sharding, parts)
    with pytest.raises(RuntimeError, match=r"rank 2 .* rank 0 .* \[2\]"):
        jdp.check_replicas(bad)


def test_leaves_that_are_no_arrays_are_left_out(make_mesh):
    jdp.init(make_mesh(2))
    x = np.arange(3.0, dtype=np.float32)
    with_others = {"activation": jnp.tanh, "name": "mlp", "none": None, "w": x}
    assert jdp.check_replicas(with_others) == jdp.check_replicas({"w": x})
    assert jdp.check_replicas({"name": "mlp"})


def test_every_k_looks_at_each_kth_call_for_a_state(make_mesh):
    mesh = jdp.init(make_mesh(2))
    x = np.ones(3, np.float32)
    good = {"some": on_mesh(mesh, x)}
    bad = {"some": planted(mesh, x, flipped(x), {1})}
    assert jdp.check_replicas(good, every=3)
    assert [jdp.check_replicas(bad, every=3) for _ in range(2)] == [None, None]
    assert jdp.check_replicas({"another": x}, every=3), "counted by itself"
    with pytest.raises(RuntimeError, match="rank 1"):
        jdp.check_replicas(bad, every=3)


def test_what_cannot_be_checked_is_refused(make_mesh):
    jdp.init(make_mesh(2))
    with pytest.raises(ValueError, match="every .*1.*0"):
        jdp.check_replicas({}, every=0)
    with pytest.raises(TypeError, match="check_replicas"):
        jax.jit(jdp.check_replicas)(np.ones(4))


def test_an_array_that_is_split_over_the_ranks_has_the_hash_of_the_whole(make_mesh):
    mesh, x = jdp.init(make_mesh(2)), np.linspace(0, 1, 6, dtype=np.float32)
    assert jdp.check_replicas(on_mesh(mesh, x, "data")) == jdp.check_replicas(on_mesh(mesh, x))


def drift_on_one_process(ranks):
    mesh = jdp.init()
    x = np.linspace(0, 1, 10, dtype=np.float32)
    whole = {"w": planted(mesh, x, x, ())}
    good = jdp.check_replicas(whole)
    for _ in range(3):  # more often than the store keeps values
        assert jdp.check_replicas(whole) == good
    try:
        jdp.check_replicas({"w": planted(mesh, x, flipped(x), ranks)})
    except RuntimeError as error:
        return good, str(error)
    return good, None


@pytest.mark.parametrize("ranks", [{3}, {2, 3}])
def test_all_processes_name_the_rank_and_its_process(make_mesh, processes, ranks):
    (good, first), (other, second) = processes(2).run(drift_on_one_process, ranks)
    jdp.init(make_mesh(1))
    assert good == other == jdp.check_replicas({"w": np.linspace(0, 1, 10, dtype=np.float32)})
    assert first == second
    assert "`['w']` float32[10]" in first and f"rank {min(ranks)} (process 1, " in first
    assert "rank 0 (process 0, " in first
    assert "1 of 1" in first and str([*ranks]) in first and "JDP213" in first
