"""What becomes of the parameters after an update, and which of them train."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jdp
from corpus.right.corpus import params, plain, predict, right, state


def with_average():
    return state(model_state=params())


@right(with_average)
def exponential_moving_average(state, batch):
    new, metrics = plain(state, batch)
    average = optax.incremental_update(new.params, state.model_state, 0.1)
    return new.replace(model_state=average), metrics


@right(with_average)
def target_network_every_second_step(state, batch):
    def loss_fn(p):
        target = lax.stop_gradient(predict(state.model_state, batch["rows"]))
        return jnp.mean((predict(p, batch["rows"]) - batch["targets"] - 0.9 * target) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    new = state.apply_gradients(grads)
    target = optax.periodic_update(new.params, state.model_state, new.step, 2)
    return new.replace(model_state=target), {"loss": loss}


@right(with_average)
def stochastic_weight_average_of_late_steps(state, batch):
    new, metrics = plain(state, batch)
    average = lax.cond(
        new.step > 1,
        lambda: jax.tree.map(lambda a, p: a + (p - a) / new.step, state.model_state, new.params),
        lambda: state.model_state,
    )
    return new.replace(model_state=average), metrics


@right()
def clipped_weights(state, batch):
    new, metrics = plain(state, batch)
    return new.replace(params=jax.tree.map(lambda x: jnp.clip(x, -0.5, 0.5), new.params)), metrics


@right()
def projected_onto_the_simplex(state, batch):
    new, metrics = plain(state, batch)
    b = optax.projections.projection_simplex(new.params["b"])
    return new.replace(params={**new.params, "b": b}), metrics


@right()
def lottery_ticket(state, batch):
    """Prunes the smallest weights, by a threshold of the parameters alone."""
    new, metrics = plain(state, batch)
    w = new.params["w"]
    kept = jnp.abs(w) >= jnp.sort(jnp.abs(w).ravel())[2]
    return new.replace(params={**new.params, "w": jnp.where(kept, w, 0)}), metrics


@right()
def noise_of_the_shared_key(state, batch):
    new, metrics = plain(state, batch)
    noise = 1e-3 * jax.random.normal(state.shared_key, (4, 3))
    return new.replace(params={**new.params, "w": new.params["w"] + noise}), metrics


def adapted():
    return {**params(), "down": np.full((4, 1), 0.1, np.float32), "up": np.ones((1, 3), np.float32)}


@right(
    lambda: state(adapted(), trainable=lambda path, _: path in ("['down']", "['up']")), runs=True
)
def low_rank_adaptation(state, batch):
    def loss_fn(p):
        w = p["w"] + p["down"] @ p["up"]
        return jnp.mean((jnp.tanh(batch["rows"] @ w + p["b"]) - batch["targets"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": loss}


@right(lambda: state(trainable={"w": False, "b": True}))
def frozen_by_trainable(state, batch):
    return plain(state, batch)


@right(lambda: state(tx=jdp.replicated(optax.masked(optax.sgd(0.1), {"w": True, "b": False}))))
def frozen_by_a_mask(state, batch):
    return plain(state, batch)


@right(lambda: state({**params(), "table": np.arange(3)}))
def integers_among_the_parameters(state, batch):
    def loss_fn(p):
        chosen = predict(p, batch["rows"])[:, state.params["table"]]
        return jnp.mean((chosen - batch["targets"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn, allow_int=True)(state.params)
    return state.apply_gradients(grads), {"loss": loss}


@right(lambda: state(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params())))
def bfloat16_parameters(state, batch):
    return plain(state, batch)


@right()
def bfloat16_activations(state, batch):
    def loss_fn(p):
        p = jax.tree.map(lambda x: x.astype(jnp.bfloat16), p)
        predictions = predict(p, batch["rows"].astype(jnp.bfloat16)).astype(jnp.float32)
        return jnp.mean((predictions - batch["targets"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": loss}
