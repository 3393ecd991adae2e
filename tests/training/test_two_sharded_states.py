"""Two states in one step, split at different stages, train as on one rank."""

import jax
import numpy as np
import optax
import pytest
from support.sharded_training import optimizer
from support.training import assert_close, fetched, ranks

import jdp


def made(seed, stage, **options):
    draw = np.random.default_rng(seed).integers
    params = {"w": draw(-2, 3, (8, 24)).astype("f"), "b": draw(-2, 3, 24).astype("f")}
    tx = optimizer(stage, optax.sgd(0.5, momentum=0.5), **options)
    return jdp.TrainState.create(params, tx)


def linear(params, rows):
    return (rows @ params["w"] + params["b"]).sum(-1).mean()


def rows_of(step):
    return np.random.default_rng(10 + step).integers(-2, 3, (48, 8)).astype("f")


def entangled(states, rows):
    """Each is trained by a loss of both, and the first takes over half of the second."""
    one, other = states["one"], states["other"]

    def product(params, rows):
        return linear(params, rows) + linear(params, rows[:, ::-1])

    first = jdp.value_and_grad(lambda p, r: product(p, r) + linear(other.params, r))
    second = jdp.value_and_grad(lambda p, r: product(p, r) - linear(one.params, r))
    loss, grads = first(one.params, rows)
    loss_of_other, grads_of_other = second(other.params, rows)
    one, other = one.apply_gradients(grads), other.apply_gradients(grads_of_other)
    halves = jax.tree.map(lambda x, y: 0.5 * x + 0.5 * y, one.params, other.params)
    return {"one": one.replace(params=halves), "other": other}, {"loss": loss + loss_of_other}


def swapped(states, rows):
    """Each takes the other's place: a part must not be taken for that of the same shape."""
    one, other = states["one"], states["other"]
    loss, grads = jdp.value_and_grad(linear)(one.params, rows)
    return {"one": other, "other": one.apply_gradients(grads)}, {"loss": loss}


def trained(program, n, stages, **options):
    ranks(n)
    states = {"one": made(1, stages[0], **options), "other": made(2, stages[1])}
    step, metrics = jdp.train_step(program), {}
    for i in range(4):
        states, metrics = step(states, rows_of(i))
    jdp.check_replicas(states)
    leaves = [(state.params, state.opt_state) for state in states.values()]
    return fetched([*jax.tree.leaves(leaves), metrics["loss"]])


@pytest.mark.parametrize(
    ("n", "stages", "options"),
    [(2, (3, 1), {}), (8, (3, 0), {"keep_gathered": True}), (3, (2, 3), {"bucket_bytes": 1})],
)
def test_states_of_different_stages_read_each_other(n, stages, options):
    want = trained(entangled, 1, (0, 0))
    assert_close(trained(entangled, n, stages, **options), want)


@pytest.mark.parametrize(("n", "stage"), [(2, 3), (3, 2), (8, 3), (8, 1)])
def test_states_that_swap_places_keep_their_own_parts(n, stage):
    want = trained(swapped, 1, (0, 0))
    assert_close(trained(swapped, n, (stage, stage)), want)
