"""A value of one rank's rows ends in the state: nobody reduced it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jdp
from corpus.wrong.corpus import (
    descend,
    gradients,
    holding,
    local,
    loss_fn,
    numbers,
    params,
    predict,
    right,
    rows,
    training,
    wrong,
)


@wrong("varies", "new state.params['w']", "new state.params['b']")
def sgd_by_hand(state, batch):
    return state.replace(params=descend(state.params, gradients(state, batch))), {}


@right()
def sgd_by_hand_with_mean_gradients(state, batch):
    grads = jdp.sync_gradients(gradients(state, batch))
    return state.replace(params=descend(state.params, grads)), {}


@wrong("varies", "new state.params['b']")
def one_leaf_forgotten(state, batch):
    grads = gradients(state, batch)
    grads["w"] = jdp.sync_gradients(grads["w"])
    return state.replace(params=descend(state.params, grads)), {}


@wrong("varies", "new state.params", "new state.opt_state")
def says_synced_though_it_is_not(state, batch):
    return state.apply_gradients(gradients(state, batch), synced=True), {}


@wrong("varies", "new state.params", "new state.opt_state")
def hands_on_the_gradients_from_before_the_reduction(state, batch):
    grads = gradients(state, batch)
    norm = optax.tree.norm(jdp.sync_gradients(grads))
    return state.apply_gradients(grads, synced=True), {"norm": norm}


@wrong("varies", "new state['momentum']", make=holding(p=params(), momentum=params()))
def parameters_averaged_but_not_the_momentum(state, batch):
    grads = jax.grad(loss_fn)(state["p"], batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    return {"p": jdp.mean_over_ranks(descend(state["p"], momentum)), "momentum": momentum}, {}


@right(make=holding(p=params(), momentum=params()))
def parameters_and_momentum_averaged(state, batch):
    grads = jax.grad(loss_fn)(state["p"], batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    return jdp.mean_over_ranks({"p": descend(state["p"], momentum), "momentum": momentum}), {}


def two_networks():
    return {"generator": training()[0], "discriminator": training()[0]}, rows()


@wrong("varies", "new state['generator'].params", make=two_networks)
def only_one_of_two_networks_is_reduced(state, batch):
    new = {name: each.apply_gradients(gradients(each, batch)) for name, each in state.items()}
    old = state["generator"]
    mine = old.replace(params=descend(old.params, gradients(old, batch)))
    return {**new, "generator": mine}, {}


@wrong("varies", "new state.params['w']", make=lambda: training(trainable={"w": False, "b": True}))
def a_frozen_parameter_moves_by_hand(state, batch):
    new = state.apply_gradients(gradients(state, batch))
    return new.replace(params={**new.params, "w": new.params["w"] + batch["x"].mean(0)}), {}


@wrong("varies", "new state.params", "new state.opt_state")
def several_local_steps_in_a_scan(state, batch):
    def body(state, _):
        return state.apply_gradients(gradients(state, batch), synced=True), None

    return lax.scan(body, state, None, length=3)[0], {}


CAPTURED = np.arange(3, dtype=np.float32)


@wrong("varies", "new state.params['b']")
def captured_arrays_do_not_shift_the_blame(state, batch):
    ahead = jnp.asarray(CAPTURED) + jax.device_put(CAPTURED)
    p = {"w": state.params["w"] + ahead, "b": state.params["b"] + local(batch)}
    return state.replace(params=p), {}


# Random numbers


@wrong("drawn", "new state.params")
def noise_of_this_ranks_key_on_the_parameters(state, batch):
    new = state.apply_gradients(gradients(state, batch))
    noise = jax.random.normal(state.key)
    return new.replace(params=jax.tree.map(lambda p: p + noise, new.params)), {}


@right()
def noise_of_the_shared_key_on_the_parameters(state, batch):
    new = state.apply_gradients(gradients(state, batch))
    noise = jax.random.normal(state.shared_key)
    return new.replace(params=jax.tree.map(lambda p: p + noise, new.params)), {}


@wrong("drawn", "new state.params", "new state.opt_state")
def noise_of_this_ranks_key_on_mean_gradients(state, batch):
    grads = jdp.sync_gradients(gradients(state, batch))
    noise = jax.random.normal(state.key)
    return state.apply_gradients(jax.tree.map(lambda g: g + noise, grads), synced=True), {}


@wrong("drawn", "new state.seed")
def seed_drawn_from_this_ranks_key(state, batch):
    return state.replace(seed=jax.random.bits(state.key)), {}


@wrong("key", "new state['key']", make=lambda: ({"key": jax.random.key(0)}, rows()))
def key_folded_with_the_rank(state, batch):
    return {"key": jax.random.fold_in(state["key"], lax.axis_index("data"))}, {}


@wrong("drawn", "new state.params['w']")
def permutation_by_this_ranks_key(state, batch):
    w = jax.random.permutation(state.key, state.params["w"])
    return state.replace(params={**state.params, "w": w}), {}


@right()
def permutation_by_the_shared_key(state, batch):
    w = jax.random.permutation(state.shared_key, state.params["w"])
    return state.replace(params={**state.params, "w": w}), {}


@wrong("drawn", "new state.params['w']")
def dropout_on_the_updated_parameters(state, batch):
    new = state.apply_gradients(gradients(state, batch))
    keep = jax.random.bernoulli(state.key, 0.5, (3,))
    return new.replace(params={**new.params, "w": jnp.where(keep, new.params["w"], 0)}), {}


# Reductions that are not over all ranks, or not of all


@wrong("varies", "new state['a']", make=numbers)
def mean_within_pairs_of_ranks(state, batch):
    pairs = [[0, 1], [2, 3]]
    return {**state, "a": lax.psum(local(batch), "data", axis_index_groups=pairs) / 2}, {}


@wrong("varies", "new state['a']", make=numbers)
def sizes_of_unequal_groups(state, batch):
    return {**state, "a": lax.psum(state["a"], "data", axis_index_groups=[[0], [1, 2, 3]])}, {}


@wrong("varies", "new state['a']", make=numbers)
def mean_over_a_vmap_of_the_same_name(state, batch):
    means = jax.vmap(lambda x: lax.pmean(x, "data"), axis_name="data")(batch["x"])
    return {**state, "a": means.mean()}, {}


@wrong("varies", "new state['a']", make=numbers)
def library_mean_over_a_vmap_of_the_same_name(state, batch):
    means = jax.vmap(jdp.mean_over_ranks, axis_name="data")(batch["x"])
    return {**state, "a": means.mean()}, {}


@wrong("varies", "new state['a']", make=numbers)
def ring_over_a_vmap_of_the_same_name(state, batch):
    def total(x):
        return jdp.collectives.ring([[x]], "data")[0][0]

    return {**state, "a": jax.vmap(total, axis_name="data")(batch["x"]).mean()}, {}


@wrong("varies", "new state['a']", make=numbers)
def ring_that_scales_by_own_rows(state, batch):
    x = local(batch)
    return {**state, "a": jdp.collectives.ring([[x]], "data", scale=x)[0][0]}, {}


@wrong("varies", "new state['a']", make=numbers)
def mean_over_no_axes(state, batch):
    return {**state, "a": lax.pmean(local(batch), ())}, {}


@wrong("varies", "new state['a']", make=numbers)
def gathered_and_indexed_by_rank(state, batch):
    gathered = lax.all_gather(local(batch), "data")
    return {**state, "a": gathered[lax.axis_index("data")]}, {}


@wrong("varies", "new state['a']", make=numbers)
def gossip_with_the_neighbour(state, batch):
    mine = state["a"] + local(batch)
    theirs = lax.ppermute(mine, "data", [(i, (i + 1) % 4) for i in range(4)])
    return {**state, "a": (mine + theirs) / 2}, {}


@wrong("varies", "new state['v']", make=numbers)
def exchanged_all_to_all(state, batch):
    mine = state["v"] * local(batch)
    return {**state, "v": lax.all_to_all(mine, "data", 0, 0, tiled=True)}, {}


@wrong("varies", "new state['v']", make=numbers)
def own_shard_of_a_scattered_sum_written_back(state, batch):
    shard = lax.psum_scatter(state["v"] * local(batch), "data", tiled=True)
    rank = lax.axis_index("data")
    return {**state, "v": lax.dynamic_update_slice(state["v"], shard, (rank,))}, {}


@right(make=numbers)
def shards_of_a_scattered_sum_gathered(state, batch):
    shard = lax.psum_scatter(state["v"] * local(batch), "data", tiled=True)
    return {**state, "v": lax.all_gather(shard, "data", tiled=True)}, {}


@wrong("varies", "new state['a']", make=numbers)
def mean_plus_a_local_remainder(state, batch):
    x = local(batch)
    return {**state, "a": lax.pmean(x, "data") + 1e-3 * x}, {}


@wrong("varies", "new state['a']", make=numbers)
def sum_over_ranks_whose_gradient_is_local(state, batch):
    def loss(a):
        return lax.psum(a * local(batch), "data") ** 2

    return {**state, "a": state["a"] - jax.grad(loss)(state["a"])}, {}


@wrong("varies", "new state.params", "new state.opt_state")
def mean_gradients_clipped_by_the_local_norm(state, batch):
    grads = gradients(state, batch)
    factor = jnp.minimum(1, 1 / optax.tree.norm(grads))
    grads = jax.tree.map(lambda g: g * factor, jdp.sync_gradients(grads))
    return state.apply_gradients(grads, synced=True), {}


@right()
def mean_gradients_clipped_by_their_norm(state, batch):
    grads = jdp.sync_gradients(gradients(state, batch))
    factor = jnp.minimum(1, 1 / optax.tree.norm(grads))
    return state.apply_gradients(jax.tree.map(lambda g: g * factor, grads), synced=True), {}


@wrong("decision", "new state.params['w']", "new state.opt_state")
def mean_gradient_with_a_local_mask(state, batch):
    grads = jdp.sync_gradients(gradients(state, batch))
    grads["w"] = jnp.where(batch["x"].mean(0) > 0, grads["w"], 0)
    return state.apply_gradients(grads, synced=True), {}


@wrong("varies", "new state.params")
def newton_step_with_the_own_curvature(state, batch):
    mean = jdp.sync_gradients(gradients(state, batch))
    _, curved = jax.jvp(lambda p: jax.grad(loss_fn)(p, batch), (state.params,), (mean,))
    return state.replace(params=descend(state.params, curved)), {}


@right()
def newton_step_with_the_mean_curvature(state, batch):
    mean = jdp.sync_gradients(gradients(state, batch))
    _, curved = jax.jvp(lambda p: jax.grad(loss_fn)(p, batch), (state.params,), (mean,))
    return state.replace(params=descend(state.params, jdp.mean_over_ranks(curved))), {}


@wrong("varies", "new state['p']['b']", make=holding(p=params()))
def pseudo_labels_kept_in_a_teacher(state, batch):
    labels = predict(state["p"], batch["x"])
    return {"p": {**state["p"], "b": state["p"]["b"] + labels.std()}}, {}


def leaves_as_it_is(buckets, axis_name, *, scale, mesh):
    return buckets


@wrong("varies", "new state.params", "new state.opt_state", make=lambda: (
    training(tx=jdp.replicated(optax.sgd(0.1, momentum=0.9), all_reduce=leaves_as_it_is))
))  # fmt: skip
def collective_of_ones_own_that_does_nothing(state, batch):
    return state.apply_gradients(gradients(state, batch)), {}
