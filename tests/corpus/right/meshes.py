"""Meshes with other axes than one called "data", and reductions over parts of a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import jdp
from corpus.right.corpus import add, loss_fn, params, plain, predict, right, state

HOSTS = {"replica": 2, "fsdp": 2}
BOTH = ("replica", "fsdp")


def over(axis_name):
    return lambda: state(tx=jdp.replicated(optax.sgd(0.1), axis_name=axis_name))


add("an axis of another name", plain, over("batch"), axes={"batch": 4}, axis_name="batch")
add("two axes", plain, over(BOTH), axes=HOSTS, axis_name=BOTH, runs=True)


@right(over(BOTH), axes=HOSTS, axis_name=BOTH)
def reduced_axis_by_axis(state, batch):
    """Hierarchical: inside of a host first, then between hosts."""
    grads = jax.grad(loss_fn)(state.params, batch)
    grads = lax.pmean(lax.pmean(grads, "fsdp"), "replica")
    return state.apply_gradients(grads, synced=True), {}


@right(over(BOTH), axes=HOSTS, axis_name=BOTH)
def scattered_inside_and_summed_between_hosts(state, batch):
    flat, unravel = jax.flatten_util.ravel_pytree(jax.grad(loss_fn)(state.params, batch))
    mine = lax.psum_scatter(jnp.pad(flat, (0, 1)), "fsdp", tiled=True)
    whole = lax.all_gather(lax.psum(mine, "replica"), "fsdp", tiled=True) / 4
    return state.apply_gradients(unravel(whole[:-1]), synced=True), {}


@right(over(BOTH), axes=HOSTS, axis_name=BOTH)
def statistics_inside_of_a_host(state, batch):
    """The loss centres its rows over some of the ranks only; what leaves is the mean of all."""

    def loss_fn(p):
        y = predict(p, batch["rows"])
        return jnp.mean((y - lax.pmean(y.mean(0), "fsdp") - batch["targets"]) ** 2) + jnp.sum(
            p["b"] ** 2
        )

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": loss}


@right()
def statistics_of_pairs_of_ranks(state, batch):
    def loss_fn(p):
        y = predict(p, batch["rows"])
        centre = lax.psum(y.mean(0), "data", axis_index_groups=[[0, 1], [2, 3]]) / 2
        return jnp.mean((y - centre - batch["targets"]) ** 2) + jnp.sum(p["b"] ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": loss}


# The model is split over an axis that the compiler takes care of.

TENSOR = {"data": 2, "model": 2}


def wide():
    draw = np.random.default_rng(0)
    return {
        "up": draw.normal(0, 0.5, (4, 8)).astype(np.float32),
        "down": draw.normal(0, 0.5, (8, 3)).astype(np.float32),
    }


def split_over_the_model_axis():
    mesh = jdp.distributed.mesh.current_mesh()
    where = {"up": P(None, "model"), "down": P("model", None)}
    placed = {
        name: jax.device_put(x, jax.sharding.NamedSharding(mesh, where[name]))
        for name, x in wide().items()
    }
    return state(placed)


@right(split_over_the_model_axis, axes=TENSOR, runs=True)
def weights_split_over_a_model_axis(state, batch):
    def loss_fn(p):
        hidden = lax.with_sharding_constraint(jnp.tanh(batch["rows"] @ p["up"]), P(None, "model"))
        return jnp.mean((hidden @ p["down"] - batch["targets"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": loss}


@right(split_over_the_model_axis, axes=TENSOR)
def own_shard_map_over_the_model_axis(state, batch):
    """Tensor parallelism by hand inside of the step: the other axis becomes manual there."""

    def block(up, down, x):
        return lax.psum(jnp.tanh(x @ up) @ down, "model")

    mapped = jax.shard_map(
        block,
        in_specs=(P(None, "model"), P("model", None), P()),
        out_specs=P(),
        axis_names={"model"},
        check_vma=False,
    )

    def loss_fn(p):
        return jnp.mean((mapped(p["up"], p["down"], batch["rows"]) - batch["targets"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": loss}


@right(axes={"data": 4, "unused": 1})
def an_axis_of_one_device(state, batch):
    return plain(state, batch)


@right(lambda: state(model_state=params()), axes={"data": 2, "model": 2})
def average_on_a_mesh_with_a_model_axis(state, batch):
    new, metrics = plain(state, batch)
    average = optax.incremental_update(new.params, state.model_state, 0.1)
    return new.replace(model_state=average), metrics
