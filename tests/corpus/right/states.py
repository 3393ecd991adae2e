"""Other states than one TrainState, further arguments, random keys and metrics."""

import flax.core
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import io_callback

import jdp
from corpus.right.corpus import SGD, add, distance, loss_fn, params, plain, predict, right, state

add("plain", plain, state)


def generate(p, z):
    return jnp.tanh(z @ p["w"] + p["b"])


def critic():
    return {"w": np.full((3, 1), 0.3, np.float32), "b": np.zeros(1, np.float32)}


@right(lambda: (state(), state(critic())), runs=True)
def adversarial_networks(states, batch):
    generator, discriminator = states

    def score(p, x):
        return x @ p["w"] + p["b"]

    def discriminator_loss(p):
        made = generate(generator.params, batch["rows"])
        return jnp.mean(
            jax.nn.softplus(score(p, made)) + jax.nn.softplus(-score(p, batch["targets"]))
        )

    def generator_loss(p):
        return jnp.mean(jax.nn.softplus(-score(discriminator.params, generate(p, batch["rows"]))))

    d_loss, d_grads = jax.value_and_grad(discriminator_loss)(discriminator.params)
    g_loss, g_grads = jax.value_and_grad(generator_loss)(generator.params)
    new = generator.apply_gradients(g_grads), discriminator.apply_gradients(d_grads)
    return new, {"discriminator": d_loss, "generator": g_loss}


@right(lambda: {"actor": state(), "critic": state(critic())})
def actor_and_critic(states, batch):
    actor, critic = states["actor"], states["critic"]

    def value(p, x):
        return (x @ p["w"] + p["b"])[:, 0]

    def critic_loss(p):
        return jnp.mean((value(p, batch["targets"]) - batch["counts"]) ** 2)

    def actor_loss(p):
        advantage = lax.stop_gradient(batch["counts"] - value(critic.params, batch["targets"]))
        taken = jnp.take_along_axis(
            jax.nn.log_softmax(predict(p, batch["rows"])), batch["labels"][:, None], axis=1
        )
        return -jnp.mean(taken[:, 0] * advantage)

    new = {
        "actor": actor.apply_gradients(jax.grad(actor_loss)(actor.params)),
        "critic": critic.apply_gradients(jax.grad(critic_loss)(critic.params)),
    }
    return new, {"loss": critic_loss(critic.params)}


@right()
def two_losses_one_update(state, batch):
    """The mean gradients of two tasks, made orthogonal and added."""

    def other(p):
        return jnp.mean(jnp.abs(predict(p, batch["rows"]) - batch["targets"]))

    a = jdp.sync_gradients(jax.grad(loss_fn)(state.params, batch))
    b = jdp.sync_gradients(jax.grad(other)(state.params))
    overlap = jnp.minimum(optax.tree.vdot(a, b), 0) / optax.tree.vdot(b, b)
    grads = jax.tree.map(lambda a, b: a + b - overlap * b, a, b)
    return state.apply_gradients(grads, synced=True), {}


def flax_state():
    return flax.training.train_state.TrainState.create(apply_fn=predict, params=params(), tx=SGD)


@right(flax_state)
def flax_train_state(state, batch):
    grads = jax.grad(lambda p: distance(state.apply_fn(p, batch["rows"])))(state.params)
    return state.apply_gradients(grads=grads), {}


@right(lambda: (params(), SGD.init(params()), np.int32(0)))
def optimizer_by_hand(state, batch):
    p, opt_state, step = state
    loss, grads = jax.value_and_grad(loss_fn)(p, batch)
    updates, opt_state = SGD.update(grads, opt_state, p)
    return (optax.apply_updates(p, updates), opt_state, step + 1), {"loss": loss}


@right(rest=(params(), np.float32(2.0)), runs=True)
def distilled(state, batch, teacher, temperature):
    def loss_fn(p):
        soft = jax.nn.softmax(predict(teacher, batch["rows"]) / temperature)
        logits = predict(p, batch["rows"]) / temperature
        return optax.losses.softmax_cross_entropy(logits, soft).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": loss}


@right(runs=True)
def counts_and_rows(state, batch):
    new, metrics = plain(state, batch)
    predictions = predict(new.params, batch["rows"])
    hits = predictions.argmax(-1) == batch["labels"]
    return new, {
        **metrics,
        "hits": jdp.sum_over_ranks(hits.sum()),
        "by_class": jdp.sum_over_ranks(jnp.bincount(batch["labels"], length=3)),
        "mean": jdp.mean_over_ranks(predictions.mean(0)),
        "best": lax.pmax(predictions.max(), "data"),
        "predictions": jdp.rows(predictions),
        "step": new.step,
    }


@right()
def masks_of_this_rank(state, batch):
    """Dropout and augmentation with the rank's own key."""
    mask_key, shift_key = jax.random.split(state.key)

    def loss_fn(p):
        x = batch["rows"] + 0.1 * jax.random.normal(shift_key, batch["rows"].shape)
        kept = jax.random.bernoulli(mask_key, 0.5, (x.shape[0], 3))
        return jnp.mean((jnp.where(kept, predict(p, x), 0) - batch["targets"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": loss}


@right(lambda: state(model_state=jax.random.key(0)))
def a_key_of_the_user(state, batch):
    key, now = jax.random.split(state.model_state)
    mine = jax.random.fold_in(now, lax.axis_index("data"))
    noisy = batch["rows"] + 0.1 * jax.random.normal(mine, batch["rows"].shape)
    new, metrics = plain(state, {**batch, "rows": noisy})
    return new.replace(model_state=key), metrics


def three_states():
    scales = np.arange(1.0, 4.0, dtype=np.float32)
    return jax.vmap(lambda scale: state(jax.tree.map(lambda x: scale * x, params())))(scales)


@right(three_states)
def population(states, batch):
    """Three states side by side, each with its own gradient."""
    return jax.vmap(lambda state: plain(state, batch)[0])(states), {}


@right(lambda: state(jax.tree.map(lambda x: np.stack([x, 2 * x]), params())))
def ensemble_in_one_state(state, batch):
    losses, grads = jax.vmap(jax.value_and_grad(loss_fn), in_axes=(0, None))(state.params, batch)
    return state.apply_gradients(grads), {"losses": jdp.mean_over_ranks(losses)}


@right(lambda: state(flax.core.freeze(params())))
def frozen_dict(state, batch):
    return plain(state, batch)


@right(lambda: state(model_state=np.ones(3, np.complex64)))
def complex_numbers_carried_along(state, batch):
    new, metrics = plain(state, batch)
    filtered = jnp.fft.ifft(1j * jnp.fft.fft(state.model_state)) + new.params["b"]
    return new.replace(model_state=filtered), metrics


@right(lambda: state(model_state=jax.random.key(0, impl="rbg")))
def a_key_of_another_generator(state, batch):
    key, now = jax.random.split(state.model_state)
    new, metrics = plain(state, batch)
    b = new.params["b"] + 1e-3 * jax.random.normal(now, (3,))
    return new.replace(params={**new.params, "b": b}, model_state=key), metrics


@right(lambda: state(model_state=np.zeros(2, np.uint32)))
def a_raw_key(state, batch):
    key, now = jax.random.split(state.model_state)
    new, metrics = plain(state, batch)
    b = new.params["b"] + 1e-3 * jax.random.uniform(now, (3,))
    return new.replace(params={**new.params, "b": b}, model_state=key), metrics


@right()
def rounded_on_the_host(state, batch):
    """A pure function of numpy of what is the same on every rank."""
    new, metrics = plain(state, batch)
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    b = jax.pure_callback(lambda b: np.round(b, 3), shape, new.params["b"])
    return new.replace(params={**new.params, "b": b}), metrics


@right()
def logged_from_every_rank(state, batch):
    new, metrics = plain(state, batch)
    io_callback(lambda loss: None, None, metrics["loss"])
    jax.debug.print("loss {loss}", loss=metrics["loss"], ordered=True)
    return new, metrics


@right(runs=True)
def masks_by_infinity(state, batch):
    """Constants without a reciprocal, among them a factor that removes what is not chosen."""

    def masked_loss(p):
        chosen = jnp.tril(jnp.ones((3, 3), bool))[batch["labels"]]
        logits = predict(p, batch["rows"]) + jnp.where(chosen, 0.0, -jnp.inf)
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    grads = jax.grad(masked_loss)(state.params)
    reach = (batch["targets"] * jnp.inf).max()
    return state.apply_gradients(grads), {"reach": jdp.max_over_ranks(reach)}
