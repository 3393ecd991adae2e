"""The split ring in a traced program: nothing of it runs without GPUs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jdp
from jdp import collectives


def calls(jaxpr, found=None):
    """All foreign calls of a program: (target, its equation), in order."""
    found = [] if found is None else found
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "ffi_call":
            found.append((eqn.params["target_name"], eqn))
        for value in eqn.params.values():
            if hasattr(getattr(value, "jaxpr", value), "eqns"):
                calls(value, found)
    return found


def traced(make_mesh, fn, *args):
    mapped = jax.shard_map(fn, mesh=make_mesh(2), in_specs=P(), out_specs=P(), check_vma=False)
    return jax.make_jaxpr(mapped)(*args)


def attributes(eqn):
    return dict(eqn.params["attributes"])


LEAVES = {
    "a": np.ones(3, np.float32),
    "b": np.ones((2, 2), np.float32),
    "c": np.ones(5, jnp.bfloat16),
}


def test_every_bucket_is_started_and_waited_for_once(make_mesh):
    sync = functools.partial(jdp.sync_gradients, all_reduce=collectives.split)
    found = calls(traced(make_mesh, sync, LEAVES))
    assert [target for target, _ in found] == ["jdp_ring_start"] * 2 + ["jdp_ring_done"] * 2
    numbers = [attributes(eqn)["bucket"] for _, eqn in found]
    assert numbers[:2] == numbers[2:] and len(set(numbers)) == 2
    assert {attributes(eqn)["num_ranks"] for _, eqn in found} == {2}


def test_leaves_are_handed_over_as_they_are_and_come_back_in_place(make_mesh):
    sync = functools.partial(jdp.sync_gradients, all_reduce=collectives.split, bucket_bytes=100)
    found = calls(traced(make_mesh, sync, {name: LEAVES[name] for name in "ab"}))
    (_, start), (_, done) = found
    assert [v.aval.shape for v in start.invars] == [(), (2, 2), (3,)]
    assert [v.aval.shape for v in start.outvars] == [(1,)]
    assert [v.aval.shape for v in done.invars] == [(1,), (1,), (2, 2), (3,)]
    assert [v.aval.shape for v in done.outvars] == [(1,), (2, 2), (3,)]
    assert dict(done.params["input_output_aliases"]) == {1: 0, 2: 1, 3: 2}


def test_dones_are_in_one_order_and_behind_all_starts(make_mesh):
    sync = functools.partial(jdp.sync_gradients, all_reduce=collectives.split, bucket_bytes=1)
    jaxpr = traced(make_mesh, sync, LEAVES)
    dones = [eqn for target, eqn in calls(jaxpr) if target == "jdp_ring_done"]
    assert len(dones) == 3
    for before, after in zip(dones, dones[1:], strict=False):
        assert after.invars[1] is before.outvars[0]
    assert str(jaxpr).count("optimization_barrier") == 1


def test_a_step_starts_them_in_the_order_of_the_backward_pass(make_mesh):
    mesh = make_mesh(2)
    jdp.init(devices=list(mesh.devices.flat))
    # Used in no order of their names.
    params = {"m": np.ones((4, 5)), "a": np.ones((5, 6)), "z": np.ones((6, 7))}
    params = jax.tree.map(np.float32, params)
    tx = jdp.replicated(optax.sgd(0.1), all_reduce=collectives.split, bucket_bytes=1)

    @jdp.train_step
    def step(state, x):
        def loss_fn(p):
            return jnp.tanh(jnp.tanh(jnp.tanh(x @ p["m"]) @ p["a"]) @ p["z"]).sum()

        return state.apply_gradients(jax.grad(loss_fn)(state.params)), {}

    text = step.lower(jdp.TrainState.create(params, tx), np.ones((4, 4), np.float32)).as_text()
    sent = re.findall(r"@jdp_ring_start.*\(tensor<f32>, tensor<(.*?)xf32>\)", text)
    assert sent == ["6x7", "5x6", "4x5"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_mean_is_taken_by_the_ring_in_float32(dtype, make_mesh):
    sync = functools.partial(jdp.sync_gradients, all_reduce=collectives.split)
    (_, start), _ = calls(traced(make_mesh, sync, jnp.ones(3, dtype)))
    assert start.invars[0].aval.dtype == jnp.float32


def test_scanned_layers_start_before_a_layer_and_wait_behind_it(make_mesh):
    def gradient(params):
        scan = functools.partial(jdp.scan_layers, late=True, all_reduce=collectives.split)
        f = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        loss_fn = lambda params: scan(f, jnp.ones((2, 4)), params)[0].sum()  # noqa: E731
        return jax.grad(loss_fn)(params)

    found = calls(traced(make_mesh, gradient, jnp.ones((3, 4, 4))))
    # In the loop, and for the last layer behind it.
    assert [target for target, _ in found] == ["jdp_ring_start", "jdp_ring_done"] * 2
    assert len({attributes(eqn)["bucket"] for _, eqn in found}) == 2
