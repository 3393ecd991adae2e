"""Mutable arrays: what was written stays written, under whatever control flow it was."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from corpus.wrong import corpus
from corpus.wrong.corpus import holding, local, numbers, right

wrong = functools.partial(corpus.wrong, "varies", make=numbers)
decided = functools.partial(corpus.wrong, "decision", make=numbers)


@wrong("new state['a']")
def stored(state, batch):
    ref = jax.new_ref(state["a"])
    ref[...] = local(batch)
    return {**state, "a": ref[...]}, {}


@right(make=numbers)
def read_before_it_is_stored(state, batch):
    ref = jax.new_ref(state["a"])
    before = ref[...]
    ref[...] = local(batch)
    return {**state, "a": before}, {}


@wrong("new state['a']")
def created_with(state, batch):
    return {**state, "a": jax.freeze(jax.new_ref(local(batch)))}, {}


@wrong("new state['v']")
def one_element_stored(state, batch):
    ref = jax.new_ref(state["v"])
    ref[2] = local(batch)
    return {**state, "v": ref[...]}, {}


@wrong("new state['v']")
def stored_at_the_ranks_place(state, batch):
    ref = jax.new_ref(state["v"])
    ref[lax.axis_index("data")] = 0.0
    return {**state, "v": ref[...]}, {}


@wrong("new state['a']")
def read_at_the_ranks_place(state, batch):
    ref = jax.new_ref(state["v"])
    return {**state, "a": ref[lax.axis_index("data")]}, {}


@wrong("new state['a']")
def added(state, batch):
    ref = jax.new_ref(state["a"])
    jax.ref.addupdate(ref, (), local(batch))
    return {**state, "a": ref[...]}, {}


@wrong("new state['a']")
def swapped_out_again(state, batch):
    ref = jax.new_ref(local(batch))
    return {**state, "a": jax.ref.swap(ref, (), state["a"])}, {}


@wrong("new state['a']")
def frozen(state, batch):
    ref = jax.new_ref(state["a"])
    ref[...] = local(batch)
    return {**state, "a": jax.freeze(ref)}, {}


# In loops


@wrong("new state['a']")
def stored_in_a_scan(state, batch):
    ref = jax.new_ref(state["a"])

    def body(_, x):
        ref[...] += x[0]
        return None, None

    lax.scan(body, None, batch["x"])
    return {**state, "a": ref[...]}, {}


@wrong("new state['v']")
def read_in_the_round_before_it_is_stored(state, batch):
    ref = jax.new_ref(state["a"])

    def body(_, __):
        seen = ref[...]
        ref[...] = local(batch)
        return None, seen

    return {**state, "v": lax.scan(body, None, None, length=4)[1]}, {}


@wrong("new state['a']")
def passed_along_three_refs(state, batch):
    first, second, third = (jax.new_ref(state["a"]) for _ in range(3))

    def body(i, _):
        first[...] = second[...]
        second[...] = third[...]
        third[...] = local(batch)

    lax.fori_loop(0, 4, body, None)
    return {**state, "a": first[...]}, {}


@wrong("new state['a']")
def a_carry_reaches_a_ref_and_comes_back(state, batch):
    ref = jax.new_ref(state["a"])

    def body(carry, _):
        x, y = carry
        out = ref[...]
        ref[...] = x
        return (y, local(batch)), out

    _, seen = lax.scan(body, (state["a"], state["a"]), None, length=6)
    return {**state, "a": seen[-1]}, {}


@wrong("new state['a']")
def stored_in_a_while(state, batch):
    ref = jax.new_ref(state["a"])

    def body(i):
        ref[...] = local(batch)
        return i + 1

    lax.while_loop(lambda i: i < 3, body, 0)
    return {**state, "a": ref[...]}, {}


@wrong("new state['n']", make=holding(n=np.zeros(4, np.int32)))
def histogram_in_a_ref(state, batch):
    counts = jax.new_ref(state["n"])

    def body(_, y):
        place = jnp.clip(y * 4, 0, 3).astype(int)
        jax.ref.addupdate(counts, (place,), 1)
        return None, None

    lax.scan(body, None, batch["y"])
    return {"n": counts[...]}, {}


# Through calls


@wrong("new state['a']")
def stored_through_a_jit(state, batch):
    ref = jax.new_ref(state["a"])

    @jax.jit
    def store(ref, x):
        ref[...] = x

    store(ref, local(batch))
    return {**state, "a": ref[...]}, {}


@wrong("new state['a']")
def stored_through_a_jit_that_closes_over_it(state, batch):
    ref = jax.new_ref(state["a"])

    @jax.jit
    def store(x):
        ref[...] = x

    store(state["b"])
    store(local(batch))
    return {**state, "a": ref[...]}, {}


@wrong("new state['b']")
def one_jit_for_two_refs(state, batch):
    a, b = jax.new_ref(state["a"]), jax.new_ref(state["b"])

    @jax.jit
    def store(ref, x):
        ref[...] += x

    store(a, state["b"])
    store(b, local(batch))
    return {**state, "a": a[...], "b": b[...]}, {}


@wrong("new state['a']")
def stored_in_a_backward_pass(state, batch):
    ref = jax.new_ref(state["a"])

    @jax.custom_vjp
    def tapped(x):
        return x

    def backward(_, ct):
        ref[...] = ct
        return (ct,)

    tapped.defvjp(lambda x: (x, None), backward)
    jax.grad(lambda a: tapped(a) * local(batch))(state["a"])
    return {**state, "a": ref[...]}, {}


@wrong("new state['v']")
def gradients_accumulated_into_it(state, batch):
    ref = jax.new_ref(jnp.zeros(4))
    _, backward = jax.vjp(lambda v: v.sum() * local(batch), state["v"])
    backward.with_refs(ref)(1.0)
    return {**state, "v": state["v"] - ref[...]}, {}


# By some ranks


@decided("new state['a']")
def a_constant_stored_by_some_ranks(state, batch):
    ref = jax.new_ref(state["a"])

    def store():
        ref[...] = 0.0

    lax.cond(local(batch) > 0, store, lambda: None)
    return {**state, "a": ref[...]}, {}


@right(make=numbers)
def a_constant_stored_by_all_ranks(state, batch):
    ref = jax.new_ref(state["a"])

    def store():
        ref[...] = 0.0

    lax.cond(jdp.mean_over_ranks(local(batch)) > 0, store, lambda: None)
    return {**state, "a": ref[...]}, {}


@wrong("new state['a']")
def a_constant_stored_as_often_as_the_rank_has_rows(state, batch):
    ref = jax.new_ref(state["a"])

    def body(_, __):
        ref[...] *= 0.5

    lax.fori_loop(0, jnp.sum(batch["y"] > 0), body, None)
    return {**state, "a": ref[...]}, {}


@decided("new state['a']")
def a_constant_stored_in_a_jit_in_a_cond(state, batch):
    ref = jax.new_ref(state["a"])

    @jax.jit
    def store():
        ref[...] = 0.0

    lax.cond(local(batch) > 0, store, lambda: None)
    return {**state, "a": ref[...]}, {}


@decided("new state['a']")
def swapped_under_a_cond(state, batch):
    ref = jax.new_ref(state["a"])
    lax.cond(local(batch) > 0, lambda: jax.ref.swap(ref, (), 0.0), lambda: 2.0)
    return {**state, "a": ref[...]}, {}


# Given to the step


def with_a_ref():
    mesh = jdp.init(devices=jax.devices()[:4])
    ref = jax.new_ref(jax.device_put(jnp.zeros(()), NamedSharding(mesh, P())))
    return *numbers(), {"memory": ref}


@corpus.wrong("ref", "refs['memory']", make=with_a_ref)
def stored_in_a_ref_of_the_caller(state, batch, refs):
    refs["memory"][...] = local(batch)
    return state, {}


@right(make=with_a_ref)
def a_mean_stored_in_a_ref_of_the_caller(state, batch, refs):
    refs["memory"][...] = jdp.mean_over_ranks(local(batch))
    return state, {}


@wrong("new state['a']", "refs['memory']", make=with_a_ref)
def read_from_a_ref_of_the_caller(state, batch, refs):
    refs["memory"][...] = local(batch)
    return {**state, "a": refs["memory"][...]}, {}
