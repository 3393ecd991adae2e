"""Sums of integers over ranks that their type cannot hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdp
from jdp.distributed import in_flight


def state():
    return {"w": np.zeros(2, np.float32)}


def loss_fn(params, batch):
    return (params["w"] * batch.mean()).sum(), jdp.sum_over_ranks(batch[0])


PLACES = {
    "in the step": lambda state, batch: jdp.sum_over_ranks(batch[0]),
    "beside others": lambda state, batch: jdp.sum_over_ranks({"a": 1.0, "b": batch, "c": True}),
    "beside a loss": lambda state, batch: jax.grad(loss_fn, has_aux=True)(state, batch)[1],
}
# Sums over 4 ranks whose type holds them; one more does not fit.
LARGEST = {
    "int32": [2**29] * 3 + [2**29 - 1],
    "uint32": [2**30] * 3 + [2**30 - 1],
    "negative": [-(2**29)] * 4,
}


def called(place, values, weight=None, dtype="int32"):
    """Call an eval_step twice, and return its metrics."""
    jdp.init(devices=jax.devices()[:4])
    measure = jdp.eval_step(PLACES[place], weight=weight)
    found = [measure(state(), np.array(values, dtype)) for _ in range(2)]
    in_flight.drain()
    return np.ravel(found[0]["b"] if place == "beside others" else found[0])


@pytest.mark.parametrize("weight", [None, lambda batch: 2.0], ids=["plain", "weighed"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", LARGEST)
def test_a_sum_that_overflows_is_an_error_of_a_later_call(kind, place, weight):
    values, dtype = LARGEST[kind], kind if kind != "negative" else "int32"
    assert called(place, values, weight, dtype) == [sum(values)]
    values = [*values[:3], values[3] + (-1 if kind == "negative" else 1)]
    with pytest.raises(RuntimeError, match=r"call 1 .*test_integer_sums\.py:\d+ (?s:.*)JDP215"):
        called(place, values, weight, dtype)


def test_no_checkpoint_follows_from_such_a_sum():
    jdp.init(devices=jax.devices()[:4])

    @jdp.train_step
    def step(state, batch):
        return {"n": state["n"] + jdp.sum_over_ranks(batch[0])}, {}

    step({"n": jnp.int32(0)}, np.full(4, 2**30, np.int32))
    with pytest.raises(RuntimeError, match="JDP215"):
        in_flight.drain()
    with pytest.raises(RuntimeError, match="JDP215"):
        in_flight.require_right_states()
    in_flight.accept_new_state()


def test_in_64_bits():
    with jax.enable_x64(True):
        assert called("in the step", [2**40] * 4, dtype="int64") == [2**42]
        assert called("in the step", [2**61 - 1] * 4, dtype="int64") == [2**63 - 4]
        with pytest.raises(RuntimeError, match="JDP215"):
            called("in the step", [2**61] * 4, dtype="int64")


def test_a_count_of_fewer_bits_is_not_checked():
    jdp.init(devices=jax.devices()[:4])

    @jdp.eval_step
    def measure(state, batch):
        return jdp.sum_over_ranks(batch > 0), jdp.sum_over_ranks(batch.astype(jnp.int8))

    found = measure.findings(state(), np.ones(4, np.int32))
    assert found.integer_sums == ()


def test_under_a_scan_or_vmap_a_sum_stays_what_it_was():
    jdp.init(devices=jax.devices()[:4])

    @jdp.eval_step
    def measure(state, batch):
        looped = jax.lax.scan(lambda c, x: (c, jdp.sum_over_ranks(x)), 0, batch)[1]
        return looped, jax.vmap(jdp.sum_over_ranks)(batch), jax.jit(jdp.sum_over_ranks)(batch)

    for found in measure(state(), np.arange(4, dtype=np.int32)):
        np.testing.assert_array_equal(found, [6])


def test_a_sum_over_one_of_two_axes_is_checked_on_all_ranks():
    mesh = jax.make_mesh((2, 2), ("one", "other"))
    jdp.init(mesh, axis_name=("one", "other"))

    @jdp.eval_step(axis_name=("one", "other"))
    def measure(state, batch):
        total = jdp.sum_over_ranks(batch[0], axis_name="other")
        return {"n": jdp.sum_over_ranks(total % 7, axis_name="one")}

    assert measure(state(), np.array([1, 2, 3, 4], np.int32))["n"] == 3 + 0
    with pytest.raises(RuntimeError, match="JDP215"):
        for _ in range(2):  # only the ranks of one row overflow
            measure(state(), np.array([2**30, 2**30, 1, 2], np.int32))
        in_flight.drain()
