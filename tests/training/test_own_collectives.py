"""Collectives of the author's own in a step read whole arrays, also of a state that is sharded."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState as FlaxTrainState
from jax import lax
from jax.sharding import PartitionSpec as P
from support.training import fetched, ranks

import jdp


def next_rank():
    n = lax.axis_size("data")
    return [(i, (i + 1) % n) for i in range(n)]


def of_the_first_rank(x):
    return lax.psum(jnp.where(lax.axis_index("data") == 0, x, jnp.zeros_like(x)), "data")


def scattered_and_gathered(x):
    part = lax.psum_scatter(x, "data", scatter_dimension=x.ndim - 1, tiled=True)
    return lax.all_gather(part, "data", axis=x.ndim - 1, tiled=True) / lax.axis_size("data")


def through_all_to_all(x):
    """Send the k-th part of the last dim to rank k, and back."""
    parts = x.reshape(*x.shape[:-1], lax.axis_size("data"), -1)
    for _ in range(2):
        parts = lax.all_to_all(parts, "data", parts.ndim - 2, parts.ndim - 2)
    return lax.pmax(parts.reshape(x.shape), "data")


def in_a_loop(x):
    return lax.fori_loop(0, 2, lambda _, y: lax.pmean(y, "data"), x)


# Each returns an array that all ranks have the same as it was.
COLLECTIVES = {
    "pmean": lambda x: lax.pmean(x, "data"),
    "psum": lambda x: lax.psum(x, "data") / lax.axis_size("data"),
    "pmax": lambda x: lax.pmax(x, "data"),
    "pmin": lambda x: lax.pmin(x, "data"),
    "ppermute": lambda x: lax.pmax(lax.ppermute(x, "data", next_rank()), "data"),
    "of the first rank": of_the_first_rank,
    "all_gather": lambda x: lax.all_gather(x, "data")[0],
    "all_to_all": through_all_to_all,
    "psum_scatter": scattered_and_gathered,
    "mean_over_ranks": jdp.mean_over_ranks,
    "sum_over_ranks": lambda x: jdp.sum_over_ranks(x) / lax.axis_size("data"),
    "max_over_ranks": jdp.max_over_ranks,
    "min_over_ranks": jdp.min_over_ranks,
    "nested": jax.jit(lambda x: lax.pmean(x * 2, "data") / 2),
    "remat": jax.checkpoint(lambda x: lax.pmean(x, "data")),
    "scan": in_a_loop,
    "elementwise around": lambda x: lax.pmean(x + 1, "data") * 1 - 1,
}


def params():
    # 24 and 48 divide by 2 and 3 ranks.
    draw = np.random.default_rng(0).integers
    return {"w": draw(-4, 5, (24, 48)).astype("f"), "b": draw(-4, 5, 48).astype("f")}


def rows():
    return {"x": np.random.default_rng(1).integers(-1, 2, (12, 24)).astype("f")}


def loss_fn(p, rows):
    return (rows["x"] @ p["w"] + p["b"]).sum()


class WithAverage(FlaxTrainState):
    average: Any


class Flax:
    """With collectives on parameters before and after the update, on gradients and an average."""

    def state(self, tx):
        given = params()
        return WithAverage.create(apply_fn=None, params=given, tx=tx, average=given)

    def step(self, state, rows, collective):
        on = lambda tree: jax.tree.map(collective, tree)  # noqa: E731
        state = state.replace(params=on(state.params))
        grads = jdp.value_and_grad(loss_fn)(state.params, rows)[1]
        average = jax.tree.map(lambda a, g: a + lax.pmean(g, "data"), state.average, grads)
        new = state.apply_gradients(grads=on(jdp.sync_gradients(grads)))
        average = jax.tree.map(lambda a, p: 0.5 * a + 0.5 * p, average, on(new.params))
        return new.replace(params=on(new.params), opt_state=on(new.opt_state), average=average)


class ByHand(Flax):
    """With updates of its own, from gradients of JAX."""

    def step(self, state, rows, collective):
        on = lambda tree: jax.tree.map(collective, tree)  # noqa: E731
        grads = on(jdp.sync_gradients(jax.grad(loss_fn)(state.params, rows)))
        average = jax.tree.map(lambda a, g: a - 0.25 * g, state.average, on(grads))
        return state.apply_gradients(grads=grads).replace(average=average)


class Jdp:
    def state(self, tx):
        return jdp.TrainState.create(params(), tx)

    def step(self, state, rows, collective):
        on = lambda tree: jax.tree.map(collective, tree)  # noqa: E731
        grads = jdp.value_and_grad(loss_fn)(on(state.params), rows)[1]
        new = state.apply_gradients(on(jdp.sync_gradients(grads)))
        return new.replace(params=on(new.params))


class Model(nnx.Module):
    def __init__(self):
        self.w, self.b = (nnx.Param(jnp.asarray(x)) for x in params().values())


class Nnx:
    def state(self, tx):
        model = Model()
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def step(self, state, rows, collective):
        model, optimizer = state

        def loss(model):
            return loss_fn({"w": model.w[...], "b": model.b[...]}, rows)

        grads = jdp.sync_gradients(nnx.grad(loss)(model))
        optimizer.update(model, jax.tree.map(collective, grads))
        nnx.update(model, jax.tree.map(collective, nnx.state(model)))
        return model, optimizer


@flax.struct.dataclass
class Plain:
    """A tree of the author's own, with an optimizer that it calls."""

    weights: Any = None
    opt_state: Any = None
    tx: Any = flax.struct.field(pytree_node=False, default=None)

    def state(self, tx):
        return Plain(params(), tx.init(params()), tx)

    def step(self, state, rows, collective):
        on = lambda tree: jax.tree.map(collective, tree)  # noqa: E731
        grads = jdp.value_and_grad(loss_fn)(state.weights, rows)[1]
        updates, opt_state = state.tx.update(grads, state.opt_state, state.weights)
        weights = optax.apply_updates(on(state.weights), on(updates))
        return state.replace(weights=on(weights), opt_state=opt_state)


KINDS = {"flax": Flax(), "by hand": ByHand(), "jdp": Jdp(), "nnx": Nnx(), "plain": Plain()}


def trained(kind, stage, collective):
    tx = optax.sgd(0.25, momentum=0.5)
    tx = jdp.sharded(tx, stage=stage, min_size=1) if stage else jdp.replicated(tx)
    state = kind.state(tx)
    step = jdp.train_step(lambda state, rows: (kind.step(state, rows, collective), {}))
    for _ in range(2):
        state, _ = step(state, rows())
    return fetched(jax.tree.leaves(state))


@pytest.mark.filterwarnings("ignore:.*JDP12[0-9]")
@pytest.mark.few_sets(12)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("kind", KINDS)
def test_collectives_of_the_author_have_whole_arrays(kind, name, stage, n):
    ranks(n)
    want = trained(KINDS[kind], 0, lambda x: x)
    try:
        found = trained(KINDS[kind], stage, COLLECTIVES[name])
    except ValueError:  # the proof refuses it of whole states, too
        with pytest.raises(ValueError):
            trained(KINDS[kind], 0, COLLECTIVES[name])
        return
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def own_keys():
    return jax.random.split(jax.random.fold_in(jax.random.key(0), lax.axis_index("data")), 2)


GATHERED_KEYS = {
    "stacked": lambda keys: lax.all_gather(keys, "data", axis=1),
    "one": lambda keys: lax.all_gather(keys[0], "data"),
    "tiled": lambda keys: lax.all_gather(keys, "data", tiled=True),
    "key_data": lambda keys: jax.random.wrap_key_data(
        lax.all_gather(jax.random.key_data(keys), "data")
    ),
}


@pytest.mark.all_sets
@pytest.mark.parametrize("kind", GATHERED_KEYS)
def test_typed_keys_are_gathered_or_refused_with_the_line(kind):
    ranks(3)

    @jdp.eval_step
    def measure(state, batch):
        keys = GATHERED_KEYS[kind](own_keys())
        return {"first": jax.random.normal(keys.ravel()[0])}

    args = jnp.ones(2), np.ones(3, np.float32)
    if kind in ("stacked", "one"):
        named = r"`all_gather` at test_own_collectives\.py:\d+ .*wrap_key_data.*key_data"
        with pytest.raises(ValueError, match=named):
            measure(*args)
    else:
        want = jax.random.normal(jax.random.split(jax.random.fold_in(jax.random.key(0), 0), 2)[0])
        assert measure(*args)["first"] == want


@pytest.mark.parametrize("reduce", [jdp.sum_over_ranks, jdp.mean_over_ranks])
def test_a_sum_of_random_keys_is_refused(reduce):
    with pytest.raises(TypeError, match=r"_over_ranks of key<fry>\[\].*(?s:.*)key_data"):
        reduce({"key": jax.random.key(0)})


def over_no_axis(x):
    return jax.shard_map(lambda x: x, in_specs=P(), out_specs=P(), axis_names=set())(x)


# Each takes its mesh from the context of the step.
NAMING_NO_AXIS = {
    "constraint": lambda x: lax.with_sharding_constraint(x, P(None)),
    "reshard": lambda x: jax.sharding.reshard(x, P()),
    "shard_map": over_no_axis,
}


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", NAMING_NO_AXIS)
def test_a_sharding_that_names_no_axis_of_the_mesh_changes_nothing(kind, stage):
    def train(change):
        def loss_fn(w, x):
            return (change(x @ w) ** 2).mean()

        @jdp.train_step
        def step(state, x):
            grads = jdp.value_and_grad(loss_fn)(state.params, x)[1]
            return state.apply_gradients(grads), {}

        ranks(2)
        sgd = optax.sgd(0.1)
        tx = jdp.sharded(sgd, stage=stage, min_size=1) if stage else jdp.replicated(sgd)
        x = np.arange(24, dtype=np.float32).reshape(6, 4) / 24
        return step(jdp.TrainState.create(jnp.ones((4, 2)), tx), x)[0].params

    np.testing.assert_array_equal(train(NAMING_NO_AXIS[kind]), train(lambda x: x))
