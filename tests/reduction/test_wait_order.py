"""Waits for rings stand as late as they can; the results do not change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp.reduction import wait_order

pytestmark = pytest.mark.optimized


@jax.jit
def wait(token, after, x):  # as the call that waits for a ring takes and gives them
    return after + 0 * token, 2 * x


def is_wait(eqn):
    return eqn.params.get("name") == "wait"


def step(update, params, grads):
    """All waits first, as `collectives.split` leaves them, then the update of each leaf."""
    after, reduced = jnp.zeros(1), []
    for grad in grads:
        after, grad = wait(jnp.sum(grad)[None], after, grad)
        reduced.append(grad)
    return update(params, reduced), {"norm": jnp.linalg.norm(grads[0])}


def descend(params, grads):
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)]


def clip(params, grads):
    return descend(params, [g / optax.tree.norm(grads) for g in grads])


@jax.jit
def halve(grads):  # of all leaves, as optimizers do, and called twice
    return [0.5 * g for g in grads]


def descend_twice(params, grads):
    return descend(descend(params, halve(grads)), halve(halve(grads)))


def leaves(num):
    rng = np.random.default_rng(num)
    return [jnp.asarray(rng.normal(size=(3, i + 1)), jnp.float32) for i in range(num)]


@pytest.mark.parametrize("num", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("update", [descend, descend_twice, clip])
def test_results_keep_their_bits(monkeypatch, update, num):
    monkeypatch.setattr(wait_order, "_is_wait", is_wait)
    params, grads = leaves(num), leaves(num + 1)[:num] or [jnp.ones(2)]
    params = params or [jnp.ones(2)]
    want = step(update, params, grads)
    got = wait_order.update_between(functools.partial(step, update))(params, grads)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def names(fn):
    jaxpr = jax.make_jaxpr(fn)(leaves(3), leaves(3))
    return ["wait" if is_wait(eqn) else eqn.primitive.name for eqn in jaxpr.jaxpr.eqns]


def test_each_bucket_is_updated_before_the_next_is_waited_for(monkeypatch):
    monkeypatch.setattr(wait_order, "_is_wait", is_wait)
    plain = functools.partial(step, descend)
    only = ("wait", "sub", "optimization_barrier")
    before = [name for name in names(plain) if name in only]
    after = [name for name in names(wait_order.update_between(plain)) if name in only]
    held = ["wait", "sub", "optimization_barrier"]
    assert before == ["wait"] * 3 + ["sub"] * 3
    assert after == [*held, *held, "wait", "sub"]


def test_a_jitted_function_of_all_leaves_waits_for_no_more_than_each_needs(monkeypatch):
    monkeypatch.setattr(wait_order, "_is_wait", is_wait)
    found = names(wait_order.update_between(functools.partial(step, descend_twice)))
    kinds = [name for name in found if name in ("wait", "sub")]
    assert kinds == ["wait", "sub", "sub"] * 3


def test_updates_that_need_all_gradients_stay_behind_all_waits(monkeypatch):
    monkeypatch.setattr(wait_order, "_is_wait", is_wait)
    found = names(wait_order.update_between(functools.partial(step, clip)))
    assert "optimization_barrier" not in found
    assert "sub" not in found[: len(found) - found[::-1].index("wait")]


def test_a_step_with_rings_waits_in_turns(make_mesh):
    jdp.init(make_mesh(2))
    tx = jdp.replicated(optax.adam(0.1), all_reduce=jdp.collectives.split, bucket_bytes=1)
    state = jdp.TrainState.create({"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}, tx)

    @jdp.train_step
    def train(state, x):
        grads = jax.grad(lambda p: jnp.mean((x @ p["a"] @ p["b"]) ** 2))(state.params)
        return state.apply_gradients(grads), {}

    text = train.lower(state, jnp.ones((4, 2))).as_text()
    calls = [line for line in text.splitlines() if "jdp_ring_done" in line or "barrier" in line]
    kinds = ["done" if "jdp_ring_done" in line else "barrier" for line in calls]
    assert kinds == ["barrier", "done", "barrier", "done"]
