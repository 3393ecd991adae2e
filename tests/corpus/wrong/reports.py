"""What a step reports, rows that do not count, and gathers with a wrong gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jdp
from corpus.wrong import corpus
from corpus.wrong.corpus import (
    gradients,
    local,
    loss_fn,
    masked_rows,
    numbers,
    predict,
    right,
    training,
)

wrong = functools.partial(corpus.wrong, "metric", make=numbers)


@wrong("metrics['correct']")
def count_of_own_rows(state, batch):
    return state, {"correct": jnp.sum(batch["y"] > 0)}


@right(make=numbers)
def count_of_all_rows(state, batch):
    return state, {"correct": jdp.sum_over_ranks(jnp.sum(batch["y"] > 0))}


@wrong("metrics['positive']")
def bool_of_own_rows(state, batch):
    return state, {"positive": jnp.all(batch["y"] > 0)}


@wrong("metrics['mean']")
def vector_of_own_rows(state, batch):
    return state, {"mean": batch["x"].mean(0)}


@wrong("metrics['one']")
def vector_of_one_own_number(state, batch):
    return state, {"one": batch["x"].mean(keepdims=True), "loss": local(batch)}


@wrong("metrics['predictions']")
def predictions_that_are_not_marked_as_rows(state, batch):
    return state, {"predictions": batch["x"].sum(1)}


@right(make=numbers)
def predictions_that_are_marked_as_rows(state, batch):
    return state, {"predictions": jdp.rows(batch["x"].sum(1))}


@wrong("metrics[0]['histogram']")
def histogram_of_own_rows_in_a_list(state, batch):
    return state, [{"histogram": jnp.histogram(batch["y"], range=(-1, 1))[0]}]


@wrong("metrics['w']", "metrics['b']", make=training)
def gradients_as_metrics(state, batch):
    grads = gradients(state, batch)
    return state.apply_gradients(grads), jax.tree.map(jnp.atleast_1d, grads)


@wrong("metrics['key']", make=training)
def key_of_this_rank(state, batch):
    return state, {"key": jax.random.key_data(state.key)}


@wrong("metrics['worst']")
def index_of_the_worst_row(state, batch):
    return state, {"worst": jnp.argmax(batch["y"])}


@wrong("metrics['spectrum']")
def complex_number_of_own_rows(state, batch):
    return state, {"spectrum": jnp.fft.fft(batch["y"])[0]}


@wrong("metrics['losses']", make=training)
def losses_of_steps_in_a_scan(state, batch):
    def body(state, _):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads), loss

    state, losses = lax.scan(body, state, None, length=3)
    return state, {"losses": losses}


@right()
def mean_losses_of_steps_in_a_scan(state, batch):
    def body(state, _):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads), jdp.mean_over_ranks(loss)

    state, losses = lax.scan(body, state, None, length=3)
    return state, {"losses": losses}


# Padding


def masked():
    return training(batch=masked_rows())


def masked_tuple():
    rows = masked_rows()
    (batch,) = jdp.batches((rows["x"], rows["y"]), len(rows["x"]), epochs=1)
    return training(batch=batch)


unread = functools.partial(corpus.wrong, "mask")


@unread("batch['mask']", make=masked)
def mask_that_nobody_reads(state, batch):
    return state.apply_gradients(gradients(state, batch)), {}


@unread("batch[2]", make=masked_tuple)
def last_of_a_tuple_that_nobody_reads(state, batch):
    x, y, _ = batch
    return state.apply_gradients(gradients(state, {"x": x, "y": y})), {}


@unread("batch['mask']", make=masked)
def mask_that_goes_through_a_remat_unread(state, batch):
    grads = jax.grad(jax.checkpoint(loss_fn))(state.params, batch)
    return state.apply_gradients(grads), {}


@unread("batch['mask']", make=masked)
def mask_that_goes_through_a_jit_unread(state, batch):
    return state.apply_gradients(jax.grad(jax.jit(loss_fn))(state.params, batch)), {}


@unread("batch['mask']", make=masked)
def mask_that_is_only_split_into_micro_batches(state, batch):
    _, grads = jdp.value_and_grad(loss_fn, accumulate=2)(state.params, batch)
    return state.apply_gradients(grads), {}


@unread("batch['mask']", make=masked)
def mask_that_is_only_carried_through_a_scan(state, batch):
    def body(carry, _):
        state, batch = carry
        return (state.apply_gradients(gradients(state, batch)), batch), None

    return lax.scan(body, (state, batch), None, length=2)[0][0], {}


@unread("batch['mask']", make=masked)
def mask_that_is_read_in_vain(state, batch):
    batch["mask"].sum()
    return state.apply_gradients(gradients(state, batch)), {}


CAPTURED = np.arange(3, dtype=np.float32)


@unread("batch['mask']", make=masked)
def mask_that_nobody_reads_behind_captured_arrays(state, batch):
    captured = jnp.asarray(CAPTURED)
    grads = jax.tree.map(lambda g: g + captured.sum(), gradients(state, batch))
    return state.apply_gradients(grads), {}


def masked_loss(p, batch):
    errors = (predict(p, batch["x"]) - batch["y"]) ** 2
    return (errors * batch["mask"]).sum() / batch["mask"].sum()


@right(make=masked, weight=lambda batch: batch["mask"].sum())
def mask_that_weighs_the_loss(state, batch):
    loss, grads = jax.value_and_grad(masked_loss)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


@right(make=masked, weight=lambda batch: batch["mask"].sum())
def mask_that_weighs_the_loss_of_micro_batches(state, batch):
    loss, grads = jdp.value_and_grad(masked_loss, accumulate=2)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


# Gathers


def loss_of_gathered_scores(to):
    def loss(p, batch):
        scores = lax.all_gather(predict(p, batch["x"]), "data", tiled=True, to=to)
        return jnp.mean((scores - batch["y"].mean()) ** 2)

    return loss


@corpus.wrong("gather", until=(0, 11))
def gather_with_a_wrong_gradient(state, batch):
    grads = jax.grad(loss_of_gathered_scores("invarying"))(state.params, batch)
    return state.apply_gradients(grads), {}


@right(since=(0, 11))
def gather_whose_gradient_was_mended(state, batch):
    grads = jax.grad(loss_of_gathered_scores("invarying"))(state.params, batch)
    return state.apply_gradients(grads), {}


@right()
def gather_with_a_right_gradient(state, batch):
    grads = jax.grad(loss_of_gathered_scores("varying"))(state.params, batch)
    return state.apply_gradients(grads), {}
