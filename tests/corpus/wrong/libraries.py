"""Flax and Equinox: optimizers that nobody wrapped, statistics of one rank's rows."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState as FlaxTrainState
from jax import lax

import jdp
from corpus.wrong.corpus import gradients, params, predict, right, rows, sgd, twice, wrong

SGD = sgd()


def squares(prediction, batch):
    return jnp.mean((prediction - batch["y"]) ** 2)


def flax_state(tx):
    return FlaxTrainState.create(apply_fn=predict, params=params(), tx=tx), rows()


@wrong("varies", "new state.params", "new state.opt_state", make=lambda: flax_state(
    optax.sgd(0.1, momentum=0.9)
))  # fmt: skip
def flax_train_state_with_a_bare_optimizer(state, batch):
    return state.apply_gradients(grads=gradients(state, batch)), {}


@right(make=lambda: flax_state(SGD))
def flax_train_state_with_a_wrapped_optimizer(state, batch):
    return state.apply_gradients(grads=gradients(state, batch)), {}


@twice("['w']", "['b']", make=lambda: flax_state(SGD))
def flax_train_state_with_pmean_and_a_wrapped_optimizer(state, batch):
    grads = lax.pmean(gradients(state, batch), "data")
    return state.apply_gradients(grads=grads), {}  # <- here


# Batch normalisation in linen


def linen_state():
    variables = nn.BatchNorm(use_running_average=False).init(jax.random.key(0), rows()["x"])
    p, stats = variables["params"], variables["batch_stats"]
    return jdp.TrainState.create(p, SGD, model_state=stats), rows()


def linen_step(model, state, batch):
    def loss(p):
        variables = {"params": p, "batch_stats": state.model_state}
        out, new = model.apply(variables, batch["x"], mutable=["batch_stats"])
        return squares(out.sum(1), batch), new["batch_stats"]

    grads, stats = jax.grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads).replace(model_state=stats), {}


@wrong("statistics", "new state.model_state['mean']", "new state.model_state['var']", make=(
    linen_state
))  # fmt: skip
def linen_batch_norm_of_own_rows(state, batch):
    return linen_step(nn.BatchNorm(use_running_average=False), state, batch)


@right(make=linen_state)
def linen_batch_norm_of_all_rows(state, batch):
    return linen_step(nn.BatchNorm(use_running_average=False, axis_name="data"), state, batch)


# nnx


def nnx_pair(tx, axis_name):
    model = nnx.BatchNorm(3, axis_name=axis_name, rngs=nnx.Rngs(0))
    return nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))


def nnx_state(tx=SGD, axis_name="data"):
    return nnx_pair(tx, axis_name)[1], rows()


def nnx_step(state, batch, tx=SGD, axis_name="data", reduce=lambda grads: grads):
    model, optimizer = nnx.merge(nnx_pair(tx, axis_name)[0], state)
    grads = nnx.grad(lambda model: squares(model(batch["x"]).sum(1), batch))(model)
    optimizer.update(model, reduce(grads))
    return nnx.state((model, optimizer)), {}


BARE = optax.sgd(0.1)


@wrong("varies", "new state[0]['bias']", "new state[0]['scale']", make=lambda: nnx_state(BARE))
def nnx_optimizer_that_is_bare(state, batch):
    return nnx_step(state, batch, BARE)


@right(make=nnx_state)
def nnx_optimizer_that_is_wrapped(state, batch):
    return nnx_step(state, batch)


@twice("['bias']", "['scale']", make=nnx_state)
def nnx_optimizer_after_pmean(state, batch):
    return nnx_step(state, batch, reduce=lambda grads: lax.pmean(grads, "data"))


@wrong("statistics", "new state[0]['mean']", "new state[0]['var']", make=lambda: (
    nnx_state(axis_name=None)
))  # fmt: skip
def nnx_batch_norm_of_own_rows(state, batch):
    return nnx_step(state, batch, axis_name=None)


# Equinox


def equinox_state(tx):
    model = eqx.nn.Linear(3, 1, key=jax.random.key(0))
    return {"model": model, "opt": tx.init(eqx.filter(model, eqx.is_inexact_array))}, rows()


def equinox_step(tx, state, batch):
    def loss(model):
        return squares(jax.vmap(model)(batch["x"])[:, 0], batch)

    updates, opt = tx.update(eqx.filter_grad(loss)(state["model"]), state["opt"], state["model"])
    return {"model": eqx.apply_updates(state["model"], updates), "opt": opt}, {}


@wrong("varies", "new state['model'].weight", "new state['model'].bias", make=lambda: (
    equinox_state(BARE)
))  # fmt: skip
def equinox_model_with_a_bare_optimizer(state, batch):
    return equinox_step(BARE, state, batch)


@right(make=lambda: equinox_state(SGD))
def equinox_model_with_a_wrapped_optimizer(state, batch):
    return equinox_step(SGD, state, batch)
