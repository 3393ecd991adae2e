"""Processes get the bytes of the one that has them, and only those that need them take part."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp.distributed import agree

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("processes")]

SIZES = (0, 1, 4095, 4096, 4097, 3 * 8192, 3 * 8192 + 5)


def bytes_of(size):
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


def received(source, group):
    """The bytes that this process gets from another one, in chunks of 8 KiB; None outside."""
    jdp.init()
    me = jax.process_index()
    if me not in group:
        return None
    before, agree._CHUNK_BYTES = agree._CHUNK_BYTES, 8192
    try:
        sent = [bytes_of(size) if me == source else None for size in SIZES]
        return [
            agree.broadcast_bytes(data, size, group) for data, size in zip(sent, SIZES, strict=True)
        ]
    finally:
        agree._CHUNK_BYTES = before


@pytest.mark.parametrize(
    "num, source, group", [(2, 0, (0, 1)), (3, 2, (0, 1, 2)), (3, 2, (0, 2)), (3, 1, (1,))]
)
def test_every_process_has_the_bytes_of_one(processes, num, source, group):
    for process, found in enumerate(processes(num).run(received, source, group)):
        assert (found is not None) == (process in group)
        for size, data in zip(SIZES, found or [], strict=found is not None):
            np.testing.assert_array_equal(data, bytes_of(size))


def params_of(process):
    """Values of which every bit tells the process: sums of floats would lose some of them."""
    return {
        "w": np.array([-0.0, np.inf, process], np.float32),
        "h": jnp.full((2, 3), 1.5 + process, jnp.bfloat16),
        "flags": np.arange(5) % 3 == process,
        "n": np.array(7 * process, np.int8),
        "empty": np.zeros((0, 3), np.float32),
        "key": jax.random.key(process),
    }


def created(group):
    """The bits of the parameters on this process's devices of a mesh of some processes."""
    devices = [device for device in jax.devices() if device.process_index in group]
    me = jax.process_index()
    try:
        if me not in group:
            return None
        jdp.init(devices=devices)
        tx = jdp.replicated(optax.sgd(0.5))
        state = jdp.TrainState.create(params_of(me), tx, seed=me, broadcast=True)
        arrays = jax.tree.map(as_numbers, (state.params, state.seed))
        return jax.tree.map(lambda x: [bits(s.data) for s in x.addressable_shards], arrays)
    finally:
        jdp.init()


def as_numbers(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def bits(x):
    return str(x.dtype), x.shape, np.asarray(x).tobytes()


@pytest.mark.parametrize("group", [(0, 1, 2), (0, 2), (1, 2), (1,)])
def test_a_new_state_has_the_values_of_the_first_process_of_its_mesh(processes, group):
    first = group[0]
    want = jax.tree.map(lambda x: bits(as_numbers(x)), params_of(first)), bits(np.uint32(first))
    found = processes(3).run(created, group)
    assert [process for process in range(3) if found[process] is not None] == [*group]
    for process in group:
        jax.tree.map(
            lambda shards, right: shards == [right] * 2,
            found[process],
            want,
            is_leaf=lambda x: isinstance(x, (list, tuple)) and isinstance(x[0], (str, tuple)),
        )
