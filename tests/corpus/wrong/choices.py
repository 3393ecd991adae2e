"""Uniform values that a rank-dependent decision chooses between, sorts or indexes."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

import jdp
from corpus.wrong import corpus
from corpus.wrong.corpus import local, loss_fn, numbers, right, training

wrong = functools.partial(corpus.wrong, "varies", make=numbers)
decided = functools.partial(corpus.wrong, "decision", make=numbers)


@decided("new state.params", "new state.opt_state", "new state.step", make=training)
def skips_the_update_when_the_own_loss_is_high(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    new = state.apply_gradients(grads)
    return lax.cond(loss < 2, lambda: new, lambda: state), {"loss": loss}


@right()
def skips_the_update_when_the_mean_loss_is_high(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    new = state.apply_gradients(grads)
    loss = jdp.mean_over_ranks(loss)
    return lax.cond(loss < 2, lambda: new, lambda: state), {"loss": loss}


@decided("new state", make=training)
def selects_the_update_when_the_own_loss_is_low(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    new = state.apply_gradients(grads)
    return jax.tree.map(lambda a, b: jnp.where(loss < 2, a, b), new, state), {}


@decided("new state['a']")
def branches_of_constants(state, batch):
    return {**state, "a": lax.cond(local(batch) > 0, lambda: 1.0, lambda: 2.0)}, {}


@decided("new state['a']")
def only_one_leaf_differs_between_branches(state, batch):
    a, b = lax.cond(
        local(batch) > 0, lambda a, b: (a + 1, b), lambda a, b: (a, b), *(state["a"], state["b"])
    )
    return {**state, "a": a, "b": b}, {}


@right(make=numbers)
def both_branches_return_the_same_operand(state, batch):
    a, b, _ = lax.cond(
        local(batch) > 0, lambda a, b: (a, b, 1), lambda a, b: (a, b, 2), *(state["a"], state["b"])
    )
    return {**state, "a": a, "b": b}, {}


@decided("new state['a']", "new state['b']")
def branches_swap_two_operands(state, batch):
    a, b = lax.cond(
        local(batch) > 0, lambda a, b: (a, b), lambda a, b: (b, a), state["a"], state["b"]
    )
    return {**state, "a": a, "b": b}, {}


@wrong("new state['v']")
def switch_by_rank(state, batch):
    branches = [lambda v: v, lambda v: v + 1, jnp.flip, jnp.sort]
    return {**state, "v": lax.switch(lax.axis_index("data"), branches, state["v"])}, {}


@decided("new state['a']")
def cond_in_a_cond(state, batch):
    def inner(a):
        return lax.cond(local(batch) > 0, lambda: a, lambda: a + 1)

    return {**state, "a": lax.cond(state["b"] > 0, inner, lambda a: a, state["a"])}, {}


@wrong("new state['a']")
def cond_in_a_scan(state, batch):
    def body(a, x):
        return lax.cond(x[0] > 0, lambda: a * 0.5, lambda: a), None

    return {**state, "a": lax.scan(body, state["a"], batch["x"])[0]}, {}


@wrong("new state['a']")
def cond_that_is_differentiated_through(state, batch):
    def f(a):
        return lax.cond(local(batch) > 0, lambda: a**2, lambda: a**3)

    return {**state, "a": state["a"] - jax.grad(f)(state["a"])}, {}


@wrong("new state['a']")
def vmapped_cond_over_own_rows(state, batch):
    each = jax.vmap(lambda y: lax.cond(y > 0, lambda: state["a"], lambda: state["b"]))
    return {**state, "a": each(batch["y"]).mean()}, {}


# Places and orders


@wrong("new state['a']")
def indexed_by_rank(state, batch):
    return {**state, "a": state["v"][lax.axis_index("data")]}, {}


@wrong("new state['v']")
def written_at_the_ranks_place(state, batch):
    return {**state, "v": state["v"].at[lax.axis_index("data")].set(0)}, {}


@wrong("new state['v']")
def rolled_by_rank(state, batch):
    return {**state, "v": jnp.roll(state["v"], lax.axis_index("data"))}, {}


@wrong("new state['v']")
def ordered_by_own_losses(state, batch):
    order = jnp.argsort(jnp.tile(batch["y"], 2))
    return {**state, "v": state["v"][order]}, {}


@wrong("new state['v']")
def payload_of_a_sort_by_own_keys(state, batch):
    keys = jnp.tile(batch["y"], 2)
    return {**state, "v": lax.sort((keys, state["v"]), num_keys=1)[1]}, {}


@right(make=numbers)
def keys_of_a_sort_with_own_payload(state, batch):
    payload = jnp.tile(batch["y"], 2)
    return {**state, "v": lax.sort((state["v"], payload), num_keys=1)[0]}, {}


@wrong("new state['v']")
def own_second_key_breaks_ties_of_the_first(state, batch):
    ties = jnp.tile(batch["y"], 2)
    return {**state, "v": lax.sort((jnp.zeros(4), ties, state["v"]), num_keys=2)[2]}, {}


@decided("new state['v']")
def expert_chosen_by_own_rows(state, batch):
    expert = jnp.argmax(batch["x"].sum(0))
    return {**state, "v": jnp.where(jnp.arange(4) == expert, state["v"] + 1, state["v"])}, {}


@wrong("new state['v']")
def clamped_between_own_extremes(state, batch):
    return {**state, "v": jnp.clip(state["v"], batch["y"].min(), batch["y"].max())}, {}


@wrong("new state['a']")
def counts_the_parameters_below_an_own_threshold(state, batch):
    place = jnp.searchsorted(state["v"], local(batch))
    return {**state, "a": place.astype(jnp.float32)}, {}


@wrong("new state['v']")
def places_of_own_rows_that_fit(state, batch):
    (places,) = jnp.nonzero(batch["y"] > 0, size=4, fill_value=0)
    return {**state, "v": state["v"][places]}, {}


@wrong("new state['v']")
def sampled_by_own_probabilities(state, batch):
    odds = jax.nn.softmax(jnp.tile(batch["y"], 2))
    key = jax.random.key(0)  # the same on every rank: the probabilities are not
    return {**state, "v": jax.random.choice(key, state["v"], (4,), p=odds)}, {}
