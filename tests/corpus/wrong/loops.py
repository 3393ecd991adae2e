"""Loops that ranks leave at different times, and values that vary only after several rounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jdp
from corpus.wrong import corpus
from corpus.wrong.corpus import gradients, holding, local, loss_fn, numbers, right, training

wrong = functools.partial(corpus.wrong, "varies", make=numbers)


@wrong("new state['a']")
def loop_as_often_as_the_own_rows_say(state, batch):
    times = jnp.sum(batch["y"] > 0)
    return {**state, "a": lax.fori_loop(0, times, lambda _, a: a * 0.9, state["a"])}, {}


@right(make=numbers)
def loop_as_often_as_all_rows_say(state, batch):
    times = jdp.sum_over_ranks(jnp.sum(batch["y"] > 0))
    return {**state, "a": lax.fori_loop(0, times, lambda _, a: a * 0.9, state["a"])}, {}


@wrong("new state['a']")
def loop_that_starts_at_the_rank(state, batch):
    start = lax.axis_index("data")
    return {**state, "a": lax.fori_loop(start, 10, lambda _, a: a * 0.9, state["a"])}, {}


@wrong("new state['a']")
def halves_until_small_enough_for_own_rows(state, batch):
    limit = jnp.abs(local(batch))
    return {**state, "a": lax.while_loop(lambda a: a > limit, lambda a: a / 2, state["a"])}, {}


@wrong("new state['n']", make=holding(n=np.int32(0)))
def number_of_rounds_until_convergence(state, batch):
    def body(carry):
        n, x = carry
        return n + 1, x / 2

    n, _ = lax.while_loop(lambda c: c[1] > 0.1, body, (state["n"], jnp.abs(local(batch))))
    return {"n": n}, {}


@wrong("new state.params", make=training)
def weights_that_shrink_while_the_own_loss_is_high(state, batch):
    new = state.apply_gradients(gradients(state, batch))
    p = lax.while_loop(
        lambda p: loss_fn(p, batch) > 1, lambda p: jax.tree.map(lambda x: 0.9 * x, p), new.params
    )
    return new.replace(params=p), {}


@wrong("new state['a']", "new state['b']")
def while_with_swapped_carries(state, batch):
    def body(carry):
        i, a, b = carry
        return i + 1, b, a

    times = jnp.sum(batch["y"] > 0)
    _, a, b = lax.while_loop(lambda c: c[0] < times, body, (0, state["a"], state["b"]))
    return {**state, "a": a, "b": b}, {}


@right(make=numbers)
def while_with_carries_in_place(state, batch):
    def body(carry):
        i, a, b = carry
        return i + 1, a, b

    times = jnp.sum(batch["y"] > 0)
    _, a, b = lax.while_loop(lambda c: c[0] < times, body, (0, state["a"], state["b"]))
    return {**state, "a": a, "b": b}, {}


@wrong("new state['a']")
def while_whose_predicate_varies_only_after_rounds(state, batch):
    def body(carry):
        a, p, q, r = carry
        return a / 2, q, r, local(batch)

    start = (state["a"], state["b"], state["b"], state["b"])
    a, *_ = lax.while_loop(lambda c: (c[1] > 0) & (c[0] > 1e-3), body, start)
    return {**state, "a": a}, {}


@wrong("new state['a']")
def scan_whose_varying_value_needs_four_rounds(state, batch):
    def body(carry, _):
        a, b, c, d = carry
        return (b, c, d, local(batch)), None

    zero = jnp.zeros(())
    (a, *_), _ = lax.scan(body, (state["a"], zero, zero, zero), None, length=5)
    return {**state, "a": a}, {}


@wrong("new state['a']", "new state['b']")
def scan_in_a_scan(state, batch):
    def inner(carry, _):
        a, b = carry
        return (b, a), None

    def outer(carry, x):
        (a, b), _ = lax.scan(inner, carry, None, length=3)
        return (a + x[0], b), None

    (a, b), _ = lax.scan(outer, (state["a"], state["b"]), batch["x"])
    return {**state, "a": a, "b": b}, {}


@wrong("new state['v']")
def stacked_outputs_of_a_scan(state, batch):
    def body(carry, x):
        return carry, carry * x

    return {**state, "v": lax.scan(body, local(batch), state["v"])[1]}, {}


@wrong("new state['a']", "new state['v']")
def reversed_scan_over_parameters(state, batch):
    def body(carry, v):
        return carry + v, carry

    a, v = lax.scan(body, local(batch), state["v"], reverse=True)
    return {**state, "a": a, "v": v}, {}


@wrong("new state['v']")
def map_that_closes_over_own_rows(state, batch):
    return {**state, "v": lax.map(lambda v: v + local(batch), state["v"])}, {}


@wrong("new state['v']")
def associative_scan_from_an_own_start(state, batch):
    first = state["v"].at[0].set(local(batch))
    return {**state, "v": lax.associative_scan(jnp.maximum, first)}, {}
