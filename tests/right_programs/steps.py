"""What else a step does with gradients, parameters and state."""

import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jdp
from right_programs.corpus import SGD, distance, loss_fn, minimises, params, predict, right, state

plain = right(runs=True)(minimises(loss_fn))


def with_average():
    return state(model_state=params())


def with_number():
    return state(model_state=np.float32(0))


# The new parameters


@right(with_average, runs=True)
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


# Loops, branches


@right(runs=True)
def three_steps_in_a_scan(state, batch):
    state, metrics = lax.scan(lambda s, _: plain(s, batch), state, None, length=3)
    return state, jax.tree.map(jdp.mean_over_ranks, metrics)


@right()
def epochs_over_shuffled_rows(state, batch):
    """PPO: each rank goes through its rows one by one, in an order of its own."""

    def one_row(state, row):
        rows = jax.tree.map(lambda x: x[None], row)
        return plain(state, rows)

    mine = {key: batch[key] for key in ("rows", "targets")}
    order = jax.random.permutation(state.key, batch["rows"].shape[0])
    state, metrics = lax.scan(one_row, state, jax.tree.map(lambda x: x[order], mine))
    return state, jax.tree.map(jdp.mean_over_ranks, metrics)


@right()
def until_the_mean_loss_is_low(state, batch):
    def body(carry):
        state, _, i = carry
        state, metrics = plain(state, batch)
        return state, jdp.mean_over_ranks(metrics["loss"]), i + 1

    def high(carry):
        return (carry[1] > 0.1) & (carry[2] < 3)

    state, loss, _ = lax.while_loop(high, body, (state, jnp.float32(jnp.inf), 0))
    return state, {"loss": loss}


@right(with_number)
def skipped_after_a_spike(state, batch):
    """Compares the mean loss with its own average, and skips the whole step."""
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    loss = jdp.mean_over_ranks(loss)
    usual = 0.9 * state.model_state + 0.1 * loss
    new = lax.cond(loss < 10 * usual, lambda: state.apply_gradients(grads), lambda: state)
    return new.replace(model_state=usual), {"loss": loss}


@right()
def alternating_by_the_step_number(state, batch):
    """Switches between two losses."""

    def absolute(p, batch):
        return jnp.mean(jnp.abs(predict(p, batch["rows"]) - batch["targets"]))

    branches = [jax.value_and_grad(loss_fn), jax.value_and_grad(absolute)]
    loss, grads = lax.switch(state.step % 2, branches, state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


@right()
def stochastic_depth_by_the_shared_key(state, batch):
    """All ranks leave the same layer out, and its gradients are summed in the branch."""
    grads = jax.grad(loss_fn)(state.params, batch)
    kept = jax.random.bernoulli(state.shared_key)
    grads = lax.cond(kept, jdp.sync_gradients, lambda g: jax.tree.map(jnp.zeros_like, g), grads)
    return state.apply_gradients(grads, synced=True), {}


@right(lambda: state(model_state={"scale": np.float32(2.0), "good": np.int32(0)}))
def dynamic_loss_scale(state, batch):
    """Mixed precision in float16: a step whose mean gradients overflow is left out."""
    scale, good = state.model_state["scale"], state.model_state["good"]

    def scaled_loss(p):
        half = jax.tree.map(lambda x: x.astype(jnp.float16), p)
        rows = {key: batch[key].astype(jnp.float16) for key in ("rows", "targets")}
        return loss_fn(half, rows).astype(jnp.float32) * scale

    loss, grads = jax.value_and_grad(scaled_loss)(state.params)
    grads = jdp.sync_gradients(jax.tree.map(lambda g: g / scale, grads))
    finite = jnp.isfinite(optax.tree.norm(grads))
    stepped = state.apply_gradients(grads, synced=True)
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), stepped, state)
    scale = jnp.where(finite, jnp.where(good > 10, scale * 2, scale), scale / 2)
    good = jnp.where(finite & (good <= 10), good + 1, 0)
    return new.replace(model_state={"scale": scale, "good": good}), {"loss": loss / scale}


# Gradients


@right(runs=True)
def accumulated(state, batch):
    loss, grads = jdp.value_and_grad(loss_fn, accumulate=2)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


@right()
def accumulated_with_rows_and_a_key(state, batch):
    def noisy_loss(p, batch, key):
        predictions = predict(p, batch["rows"])
        noise = 0.1 * jax.random.normal(key, predictions.shape)
        return distance(predictions + noise), {
            "norm": jnp.mean(predictions**2),
            "rows": jdp.rows(predictions),
        }

    grad_fn = jdp.value_and_grad(noisy_loss, accumulate=2, has_aux=True)
    (loss, aux), grads = grad_fn(state.params, batch, state.key)
    return state.apply_gradients(grads), {"loss": loss, **aux}


@right(weight=lambda batch: batch["counts"].sum(), runs=True)
def accumulated_with_weights(state, batch):
    def weighted(p, batch):
        rows = jnp.mean((predict(p, batch["rows"]) - batch["targets"]) ** 2, axis=-1)
        return jnp.sum(rows * batch["counts"]) / jnp.maximum(jnp.sum(batch["counts"]), 1)

    loss, grads = jdp.value_and_grad(weighted, accumulate=2)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


@right()
def accumulated_by_hand(state, batch):
    def add(grads, row):
        more = jax.grad(loss_fn)(state.params, jax.tree.map(lambda x: x[None], row))
        return jax.tree.map(jnp.add, grads, more), None

    mine = {key: batch[key] for key in ("rows", "targets")}
    grads, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, state.params), mine)
    n = batch["rows"].shape[0]
    return state.apply_gradients(jax.tree.map(lambda g: g / n, grads)), {}


@right(runs=True)
def norm_of_the_mean_gradient(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    grads = jdp.sync_gradients(grads)
    metrics = {"loss": loss, "norm": optax.tree.norm(grads)}
    return state.apply_gradients(grads, synced=True), metrics


@right()
def gradient_of_the_global_mean(state, batch):
    loss, grads = jax.value_and_grad(jdp.global_mean(loss_fn))(state.params, batch)
    return state.apply_gradients(grads, synced=True), {"loss": loss}


@right(params)
def descent_by_hand(p, batch):
    loss, grads = jax.value_and_grad(loss_fn)(p, batch)
    grads = jdp.sync_gradients(grads)
    return jax.tree.map(lambda x, g: x - 0.1 * g, p, grads), {"loss": loss}


@right(params)
def descent_with_pmean(p, batch):
    loss, grads = jax.value_and_grad(loss_fn)(p, batch)
    grads = lax.pmean(grads, "data")
    return jax.tree.map(lambda x, g: x - 0.1 * g, p, grads), {"loss": loss}


@right(params)
def signs_in_one_bit(p, batch):
    """Each rank votes with the sign of its gradient."""
    votes = jax.tree.map(jnp.sign, jax.grad(loss_fn)(p, batch))
    votes = jdp.sum_over_ranks(votes)
    return jax.tree.map(lambda x, v: x - 0.01 * jnp.sign(v), p, votes), {}


@right(params)
def scattered_and_gathered(p, batch):
    """ZeRO by hand: each rank owns a quarter of the flat gradient."""
    grads = jax.grad(loss_fn)(p, batch)
    flat, unravel = jax.flatten_util.ravel_pytree(grads)
    flat = jnp.pad(flat, (0, 1))
    mine = lax.psum_scatter(flat, "data", tiled=True) / lax.axis_size("data")
    whole = lax.all_gather(mine, "data", tiled=True)
    return jax.tree.map(lambda x, g: x - 0.1 * g, p, unravel(whole[:-1])), {}


@right(lambda: state(tx=jdp.replicated(optax.sgd(0.1), all_reduce=jdp.collectives.ring)), runs=True)
def ring(state, batch):
    return plain(state, batch)


@right(lambda: state(tx=jdp.replicated(optax.sgd(0.1), bucket_bytes=8)))
def many_buckets(state, batch):
    return plain(state, batch)


@right(lambda: state(tx=jdp.replicated(optax.sgd(0.1), mean=False)))
def sum_of_gradients(state, batch):
    return plain(state, batch)


@right()
def private_gradients(state, batch):
    """DP-SGD: rows are clipped one by one, then comes noise that all ranks share."""

    def of_row(x, y):
        return jax.grad(loss_fn)(state.params, {"rows": x[None], "targets": y[None]})

    rows = jax.vmap(of_row)(batch["rows"], batch["targets"])
    clip = optax.per_example_global_norm_clip(1.0)
    grads, _ = clip.update(rows, clip.init(state.params))
    grads = jdp.sync_gradients(grads)
    key = state.shared_key
    grads = jax.tree.map(lambda g: g + 0.1 * jax.random.normal(key, g.shape), grads)
    return state.apply_gradients(grads, synced=True), {}


@right()
def clipped_row_by_row(state, batch):
    def of_row(x, y):
        grad = jax.grad(loss_fn)(state.params, {"rows": x[None], "targets": y[None]})
        return jax.tree.map(lambda g: g / jnp.maximum(1, optax.tree.norm(grad)), grad)

    rows = jax.vmap(of_row)(batch["rows"], batch["targets"])
    return state.apply_gradients(jax.tree.map(lambda g: g.mean(0), rows)), {}


@right()
def gradient_noise_scale(state, batch):
    """Compares the norm of a rank's gradient with that of the mean one."""
    grads = jax.grad(loss_fn)(state.params, batch)
    own = jdp.mean_over_ranks(optax.tree.norm(grads, squared=True))
    grads = jdp.sync_gradients(grads)
    mean = optax.tree.norm(grads, squared=True)
    return state.apply_gradients(grads, synced=True), {"noise": own - mean}


# Which parameters train


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


# Several states, several losses


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
    """The gradients of two tasks, made orthogonal on each rank and added."""

    def other(p):
        return jnp.mean(jnp.abs(predict(p, batch["rows"]) - batch["targets"]))

    a = jax.grad(loss_fn)(state.params, batch)
    b = jax.grad(other)(state.params)
    overlap = jnp.minimum(optax.tree.vdot(a, b), 0) / optax.tree.vdot(b, b)
    grads = jax.tree.map(lambda a, b: a + b - overlap * b, a, b)
    return state.apply_gradients(grads), {}


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


# Further arguments, metrics


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
