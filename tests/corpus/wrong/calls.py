"""Calls that are refused before or while the step is traced, each by an error of its own."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax.training.train_state import TrainState as FlaxTrainState
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from corpus.wrong.corpus import (
    gradients,
    local,
    loss_fn,
    masked_rows,
    params,
    predict,
    rows,
    sgd,
    training,
)


class Call(NamedTuple):
    """Something to call on 4 ranks, and the error that it must raise."""

    call: Callable[[], object]
    error: type[Exception]
    message: str  # a regular expression


CALLS: list[Call] = []


def refused(error, message):
    def note(call):
        CALLS.append(Call(call, error, message))
        return call

    return note


def lower(step, state, batch, *rest, **options):
    return jdp.train_step(step, **options).lower(state, batch, *rest)


def applied(state, batch):
    return state.apply_gradients(gradients(state, batch)), {}


# The optimizer


@refused(TypeError, r"the optimizer \(made by '\w+'\) is not wrapped")
def bare_optimizer():
    training(tx=optax.sgd(0.1))


@refused(TypeError, r"made by 'chain'\) is not wrapped")
def clipping_around_the_reduction():
    training(tx=optax.chain(optax.clip_by_global_norm(1.0), sgd()))


def with_flax(tx):
    lower(
        lambda s, b: (s.apply_gradients(grads=gradients(s, b)), {}),
        FlaxTrainState.create(apply_fn=predict, params=params(), tx=tx),
        rows(),
    )


@refused(ValueError, "inside another optax transformation")
def clipping_around_the_reduction_in_flax():
    with_flax(optax.chain(optax.clip_by_global_norm(1.0), sgd()))


@refused(ValueError, "inside another optax transformation")
def multi_steps_around_the_reduction():
    with_flax(optax.MultiSteps(sgd(), every_k_schedule=2))


@refused(ValueError, "inside another optax transformation")
def apply_if_finite_around_the_reduction():
    with_flax(optax.apply_if_finite(sgd(), max_consecutive_errors=3))


@refused(ValueError, "inside another optax transformation")
def a_mask_around_the_reduction():
    with_flax(optax.masked(sgd(), {"w": True, "b": False}))


@refused(ValueError, "inside another optax transformation")
def a_partition_around_the_reduction():
    with_flax(optax.partition({"all": sgd()}, {"w": "all", "b": "all"}))


@refused(ValueError, r"gradient of `\['b'\]` is \[2\], but the parameter is \[\]")
def gradients_of_single_rows():
    def step(state, batch):
        grads = jax.vmap(jax.grad(lambda p, x, y: (predict(p, x) - y) ** 2), (None, 0, 0))
        return state.apply_gradients(grads(state.params, batch["x"], batch["y"])), {}

    lower(step, *training())


@refused(ValueError, "Differentiate with respect to state.params as a whole")
def gradients_of_the_trainable_part_alone():
    def step(state, batch):
        grad = jax.grad(lambda b: loss_fn({**state.params, "b": b}, batch))(state.params["b"])
        return state.apply_gradients({"b": grad}), {}

    lower(step, *training(trainable={"w": False, "b": True}))


@refused(ValueError, "params has 2 leaves, and 0 of them train")
def nothing_trains():
    training(trainable=False)


# Gradients


@refused(TypeError, r"`grads\['n'\]` is int32\[\]")
def integer_gradient():
    lower(lambda s, b: (jdp.sync_gradients({"n": jnp.int32(1)}), {}), {"n": np.int32(0)}, rows())


@refused(TypeError, r"`grads\['n'\]` is float0\[\]")
def gradient_of_an_integer():
    def step(state, batch):
        grads = jax.grad(lambda p: p["n"] * 1.0, allow_int=True)(state)
        return jdp.sync_gradients(grads), {}

    lower(step, {"n": np.int32(0)}, rows())


@refused(TypeError, r"mean_over_ranks of int32\[\].*sum_over_ranks")
def mean_of_a_count():
    lower(lambda s, b: (s, {"n": jdp.mean_over_ranks(jnp.sum(b["y"] > 0))}), *training())


# Weights, rows and micro-batches


@refused(ValueError, r"bool\[2\].*JDP126")
def weight_of_every_row():
    lower(applied, *training(batch=masked_rows()), weight=lambda batch: batch["mask"])


@refused(ValueError, r"bool\[2\].*JDP126")
def gradients_by_a_weight_of_every_row():
    def step(state, batch):
        grads = jdp.sync_gradients(gradients(state, batch), weight=batch["mask"])
        return state.apply_gradients(grads, synced=True), {}

    lower(step, *training(batch=masked_rows()))


@refused(ValueError, r"bool\[2\].*JDP126")
def mean_by_a_weight_of_every_row():
    def step(state, batch):
        return state, {"loss": jdp.mean_over_ranks(local(batch), weight=batch["mask"])}

    lower(step, *training(batch=masked_rows()))


@refused(ValueError, r"jdp.rows\(x\) got float32\[3\].*2 here")
def rows_that_are_features():
    lower(lambda s, b: (s, {"mean": jdp.rows(b["x"].mean(0))}), *training())


@refused(ValueError, r"jdp.rows\(x\) got float32\[\]")
def rows_of_a_number():
    lower(lambda s, b: (s, {"mean": jdp.rows(local(b))}), *training())


@refused(ValueError, r"an array of 1 dim\(s\), and a scan or vmap stacked it to float32\[3, 2\]")
def rows_stacked_by_a_scan():
    def step(state, batch):
        return lax.scan(lambda s, _: (s, {"y": jdp.rows(batch["y"])}), state, None, length=3)

    lower(step, *training())


@refused(ValueError, r"an array of 1 dim\(s\), and a scan or vmap stacked it to float32\[2, 2\]")
def rows_stacked_by_a_vmap_of_as_many():
    def step(state, batch):
        return state, jax.vmap(lambda k: {"y": jdp.rows(k * batch["y"])})(jnp.arange(2.0))

    lower(step, *training())


@refused(ValueError, r"accumulate=4, but `batch\['x'\]` has 2 rows on each rank")
def more_micro_batches_than_rows():
    def step(state, batch):
        _, grads = jdp.value_and_grad(loss_fn, accumulate=4)(state.params, batch)
        return state.apply_gradients(grads), {}

    lower(step, *training())


@refused(TypeError, r"aux\['n'\] is int32\[\], but aux is averaged")
def count_of_micro_batches():
    def loss(p, batch):
        return loss_fn(p, batch), {"n": jnp.sum(batch["y"] > 0)}

    def step(state, batch):
        fn = jdp.value_and_grad(loss, accumulate=2, has_aux=True)
        (_, aux), grads = fn(state.params, batch)
        return state.apply_gradients(grads), aux

    lower(step, *training())


# Batches and states


@refused(ValueError, r"`batch\['y'\]` has 4 rows and `batch\['x'\]` has 8")
def leaves_of_different_lengths():
    lower(applied, training()[0], {**rows(), "y": np.zeros(4)})


@refused(ValueError, "6 rows, which is not divisible by 4 ranks")
def rows_that_do_not_divide():
    lower(applied, training()[0], jax.tree.map(lambda x: x[:6], rows()))


@refused(ValueError, r"`batch\['t'\]` is a scalar")
def number_in_a_batch():
    lower(applied, training()[0], {**rows(), "t": np.float32(1)})


@refused(TypeError, r"returned a TrainState.*`\(state, metrics\)`")
def step_without_metrics():
    lower(lambda s, b: applied(s, b)[0], *training())


@refused(ValueError, r"`state\.params\['b'\]` was donated to an earlier step|`state\.step` was don")
def state_that_was_donated():
    step = jdp.train_step(applied)
    state, batch = training()
    step(state, batch)
    step(state, batch)


@refused(ValueError, "is split over")
def state_that_is_split_over_the_data_axis():
    mesh = jdp.init(devices=jax.devices()[:4])
    split = jax.device_put(np.zeros(4), NamedSharding(mesh, P("data")))
    lower(lambda s, b: (s, {}), {"w": split}, rows())


@refused(ValueError, "mesh of 3 devices")
def parameters_on_another_mesh():
    other = jdp.init(devices=jax.devices()[:3])
    away = jax.device_put(params(), NamedSharding(other, P()))
    jdp.init(devices=jax.devices()[:4])
    state, batch = training()
    lower(applied, state.replace(params=away), batch)


@refused(ValueError, "4 devices.*has a dim for the devices.*jax_utils.unreplicate")
def state_of_a_pmap():
    jdp.init(devices=jax.devices()[:4])
    state, batch = training()
    lower(applied, jax_utils.replicate(state, jax.devices()[:4]), batch)


# Axes


@refused(ValueError, "axis 'data' is not bound here, but 'batch' is")
def optimizer_over_another_axis_than_the_steps():
    tx = sgd()

    def step(state, batch):
        p, opt_state = state
        updates, opt_state = tx.update(jax.grad(loss_fn)(p, batch), opt_state, p)
        return (optax.apply_updates(p, updates), opt_state), {}

    jdp.init(axis_name="batch", devices=jax.devices()[:4])
    lower(step, (params(), tx.init(params())), rows(), axis_name="batch")


@refused(ValueError, "axis 'data' is not bound here, but 'batch' is")
def optimizer_in_a_pmap_over_another_axis():
    tx = sgd()
    opt_state = tx.init(params())

    def step(batch):
        return tx.update(jax.grad(loss_fn)(params(), batch), opt_state, params())

    batch = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), rows())
    jax.pmap(step, axis_name="batch", devices=jax.devices()[:4])(batch)


@refused(ValueError, r"but not 'rows'")
def step_over_an_axis_that_the_mesh_has_not():
    lower(applied, *training(), axis_name="rows")


@refused(TypeError, "axis_name must be a name or a tuple of different names")
def the_same_axis_twice():
    jdp.train_step(applied, axis_name=("data", "data"))


def in_a_typed_shard_map(step, **options):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    jax.eval_shape(mapped, params(), rows())


@refused(ValueError, r"`grads\['b'\]` float32\[\] was already summed over 'data' by JAX")
def gradients_that_a_typed_shard_map_has_summed():
    in_a_typed_shard_map(lambda p, batch: jdp.sync_gradients(jax.grad(loss_fn)(p, batch)))


@refused(ValueError, "collectives.ring cannot run in a shard_map with check_vma=True")
def ring_in_a_typed_shard_map():
    def step(p, batch):
        _, grads = jdp.value_and_grad(loss_fn)(p, batch)
        return jdp.sync_gradients(grads, all_reduce=jdp.collectives.ring)

    in_a_typed_shard_map(step)
