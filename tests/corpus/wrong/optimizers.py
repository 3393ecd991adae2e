"""Optimizers that see, beside the gradients, what one rank sees alone."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

import jdp
from corpus.wrong.corpus import gradients, holding, loss_fn, params, right, sgd, training, wrong


def trained_by(tx):
    return lambda: training(tx=jdp.replicated(tx))


CHAIN = optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9), optax.scale(-0.1))


@wrong("varies", "new state['p']", "new state['opt']", make=(
    holding(p=params(), opt=CHAIN.init(params()))
))  # fmt: skip
def hand_made_chain_without_a_reduction(state, batch):
    grads = jax.grad(loss_fn)(state["p"], batch)
    updates, opt = CHAIN.update(grads, state["opt"], state["p"])
    return {"p": optax.apply_updates(state["p"], updates), "opt": opt}, {}


PLATEAU = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())


@wrong("varies", "new state.opt_state", "new state.params", make=trained_by(PLATEAU))
def plateau_of_the_own_loss(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads, value=loss), {"loss": loss}


@right(make=trained_by(PLATEAU))
def plateau_of_the_mean_loss(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads, value=jdp.mean_over_ranks(loss)), {"loss": loss}


@wrong("varies", "new state.params", make=trained_by(optax.polyak_sgd(9.0)))
def polyak_step_by_the_own_loss(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads, value=loss), {}


@wrong("varies", "new state.params", "new state.opt_state", make=trained_by(
    optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
))  # fmt: skip
def learning_rate_by_the_own_loss(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    rate = {**state.opt_state.hyperparams, "learning_rate": 0.1 / (1 + loss)}
    state = state.replace(opt_state=state.opt_state._replace(hyperparams=rate))
    return state.apply_gradients(grads), {}


def noisy():
    """Adds noise of a key that it is given to the mean gradient."""

    def update(updates, state, params=None, *, key):
        return jax.tree.map(lambda u: u + jax.random.normal(key, u.shape), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


@wrong("drawn", "new state.params", "new state.opt_state", make=lambda: training(tx=sgd(noisy())))
def optimizer_that_draws_with_this_ranks_key(state, batch):
    return state.apply_gradients(gradients(state, batch), key=state.key), {}


@right(make=lambda: training(tx=sgd(noisy())))
def optimizer_that_draws_with_the_shared_key(state, batch):
    return state.apply_gradients(gradients(state, batch), key=state.shared_key), {}


# Those that differentiate or search by themselves


def searched(state, fn):
    value, grads = jax.value_and_grad(fn)(state.params)
    return state.apply_gradients(grads, synced=True, value=value, grad=grads, value_fn=fn), {}


@wrong("varies", "new state", make=trained_by(optax.lbfgs()))
def lbfgs_of_the_own_loss(state, batch):
    return searched(state, lambda p: loss_fn(p, batch))


@wrong("deadlock", "psum", "new state", make=trained_by(optax.lbfgs()))
def lbfgs_of_pmean_of_the_loss(state, batch):
    def fn(p):
        return lax.pmean(loss_fn(p, batch), "data")  # <- here

    return searched(state, fn)


@right(make=trained_by(optax.lbfgs()))
def lbfgs_of_the_global_mean(state, batch):
    return searched(state, jdp.global_mean(lambda p: loss_fn(p, batch)))


@wrong("varies", "new state", make=trained_by(
    optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=5))
))  # fmt: skip
def backtracking_by_the_own_loss(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    mean = jdp.sync_gradients(grads)
    return state.apply_gradients(
        mean,
        synced=True,
        value=jdp.mean_over_ranks(loss),
        grad=mean,
        value_fn=lambda p: loss_fn(p, batch),
    ), {}


SAM = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True, sync_period=2)


@wrong("varies", "new state", make=trained_by(SAM))
def opaque_sam_with_own_gradients(state, batch):
    def grad_fn(p, _):
        return jax.grad(loss_fn)(p, batch)

    return state.apply_gradients(gradients(state, batch), grad_fn=grad_fn), {}


@right(make=trained_by(SAM))
def opaque_sam_with_mean_gradients(state, batch):
    def grad_fn(p, _):
        return jax.grad(jdp.global_mean(loss_fn))(p, batch)

    return state.apply_gradients(gradients(state, batch), grad_fn=grad_fn), {}


@wrong("varies", "new state.opt_state", "new state.params", make=trained_by(
    optax.chain(optax.sgd(0.1), optax.scale(jnp.float32(1)))
))  # fmt: skip
def momentum_kept_in_an_optimizer_of_the_ranks_own(state, batch):
    grads = gradients(state, batch)
    updates, opt_state = optax.trace(0.9).update(grads, optax.trace(0.9).init(state.params))
    new = state.apply_gradients(updates)
    return new.replace(opt_state=opt_state, params=optax.apply_updates(new.params, updates)), {}
