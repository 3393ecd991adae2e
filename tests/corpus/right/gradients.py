"""What happens to gradients between the backward pass and the optimizer."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

import jdp
from corpus.right.corpus import distance, loss_fn, params, plain, predict, right, state


@right()
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


@right()
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
    sums, _ = optax.per_example_global_norm_clip(rows, 1.0)
    n = batch["rows"].shape[0]
    grads = jdp.sync_gradients(jax.tree.map(lambda g: g / n, sums))
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


def private():
    noise = optax.contrib.differentially_private_aggregate(1.0, 0.5, key=jax.random.key(0))
    return state(tx=jdp.replicated(optax.chain(noise, optax.sgd(0.1))))


@right(private)
def gradients_of_the_rows_of_all_ranks(state, batch):
    """DP-SGD by Optax, which takes the gradients of single rows: those of the whole batch."""

    def of_row(x, y):
        return jax.grad(loss_fn)(state.params, {"rows": x[None], "targets": y[None]})

    rows = jax.vmap(of_row)(batch["rows"], batch["targets"])
    return state.apply_gradients(lax.all_gather(rows, "data", tiled=True), synced=True), {}


@right()
def micro_batches_of_optax(state, batch):
    grad_fn = optax.microbatching.micro_grad(loss_fn, microbatch_size=1)
    grads, _ = grad_fn(state.params, {key: batch[key] for key in ("rows", "targets")})
    n = batch["rows"].shape[0]
    return state.apply_gradients(jax.tree.map(lambda g: g / n, grads)), {}


@right()
def slope_through_an_update(state, batch):
    """Differentiates the loss after the update by a factor of the loss before it."""

    def after(factor):
        grads = jax.grad(lambda p: factor * loss_fn(p, batch))(state.params)
        return loss_fn(state.apply_gradients(grads).params, batch)

    return plain(state, batch)[0], {"slope": jax.grad(after)(1.0)}
