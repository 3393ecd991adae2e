"""Statistics of the rows of all ranks, carried from step to step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jdp
from corpus.right.corpus import loss_fn, params, predict, right, state


def table():
    return np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


@right(
    lambda: state(model_state={"mean": np.zeros(4, np.float32), "count": np.float32(1)}), runs=True
)
def normalised_observations(state, batch):
    """Running mean of everything seen so far, by sums over ranks."""
    count = state.model_state["count"] + lax.psum(batch["rows"].shape[0], "data")
    rest = jdp.sum_over_ranks((batch["rows"] - state.model_state["mean"]).sum(0))
    mean = state.model_state["mean"] + rest / count
    loss, grads = jax.value_and_grad(loss_fn)(state.params, {**batch, "rows": batch["rows"] - mean})
    new = state.apply_gradients(grads)
    return new.replace(model_state={"mean": mean, "count": count}), {"loss": loss}


@right(lambda: state(model_state={"codes": table(), "sizes": np.ones(4, np.float32)}))
def codebook_by_moving_averages(state, batch):
    """VQ-VAE with a straight-through gradient; the codes follow the rows of all ranks."""
    codes, sizes = state.model_state["codes"], state.model_state["sizes"]

    def loss_fn(p):
        z = predict(p, batch["rows"])
        nearest = jnp.argmin(jnp.sum((z[:, None] - codes) ** 2, -1), axis=1)
        quantised = z + lax.stop_gradient(codes[nearest] - z)
        return jnp.mean((quantised - batch["targets"]) ** 2), (z, nearest)

    (loss, (z, nearest)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    chosen = jax.nn.one_hot(nearest, 4)
    counts, sums = jdp.sum_over_ranks((chosen.sum(0), chosen.T @ z))
    sizes = 0.9 * sizes + 0.1 * counts
    codes = 0.9 * codes + 0.1 * sums / jnp.maximum(counts, 1)[:, None]
    return state.apply_gradients(grads).replace(model_state={"codes": codes, "sizes": sizes}), {
        "loss": loss
    }


@right(lambda: state(model_state={"teacher": params(), "centre": np.zeros(3, np.float32)}))
def self_distilled(state, batch):
    """DINO: the teacher is an average of the student, centred over the rows of all ranks."""
    teacher, centre = state.model_state["teacher"], state.model_state["centre"]
    taught = predict(teacher, batch["rows"])

    def loss_fn(p):
        wanted = jax.nn.softmax((taught - centre) / 0.1)
        return optax.losses.softmax_cross_entropy(predict(p, batch["rows"] + 0.1), wanted).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    new = state.apply_gradients(grads)
    model_state = {
        "teacher": optax.incremental_update(new.params, teacher, 0.1),
        "centre": 0.9 * centre + 0.1 * jdp.mean_over_ranks(taught.mean(0)),
    }
    return new.replace(model_state=model_state), {"loss": loss}


@right(lambda: state(model_state=np.zeros((8, 3), np.float32)))
def queue_of_negatives(state, batch):
    """MoCo: the rows of all ranks are the next step's negatives."""
    queue = state.model_state

    def loss_fn(p):
        query, key = predict(p, batch["rows"]), predict(p, batch["rows"] + 0.1)
        right = jnp.sum(query * lax.stop_gradient(key), axis=-1, keepdims=True)
        logits = jnp.concatenate([right, query @ queue.T], axis=1)
        return -jax.nn.log_softmax(logits)[:, 0].mean(), key

    (loss, keys), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    queue = lax.all_gather(keys, "data", tiled=True)
    return state.apply_gradients(grads).replace(model_state=queue), {"loss": loss}


@right(lambda: state(model_state=np.ones(3, np.float32)))
def spectral_norm_by_power_iteration(state, batch):
    u = state.model_state
    v = state.params["w"] @ u
    u = state.params["w"].T @ v / (1e-6 + jnp.linalg.norm(state.params["w"].T @ v))

    def loss_fn(p):
        norm = jnp.linalg.norm(p["w"] @ u)
        return jnp.mean((predict({**p, "w": p["w"] / norm}, batch["rows"]) - batch["targets"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads).replace(model_state=u), {"loss": loss}


@right(lambda: state(model_state=np.ones(3, np.float32)))
def adversarial_weights_of_groups(state, batch):
    """Group DRO: groups with a high loss over all ranks weigh more in the next step."""
    weights = state.model_state

    def loss_fn(p):
        rows = jnp.mean((predict(p, batch["rows"]) - batch["targets"]) ** 2, axis=-1)
        return jnp.mean(weights[batch["labels"]] * rows), rows

    (loss, rows), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    sums = jax.ops.segment_sum(rows, batch["labels"], 3)
    counts = jax.ops.segment_sum(jnp.ones_like(rows), batch["labels"], 3)
    sums, counts = jdp.sum_over_ranks((sums, counts))
    weights = weights * jnp.exp(0.1 * sums / jnp.maximum(counts, 1))
    return state.apply_gradients(grads).replace(model_state=weights / weights.mean()), {
        "loss": loss
    }
