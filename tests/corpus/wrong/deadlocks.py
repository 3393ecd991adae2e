"""Collectives that only some ranks reach: the others would wait for ever."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

import jdp
from corpus.wrong import corpus
from corpus.wrong.corpus import gradients, local, loss_fn, numbers, right, training
from jdp.collectives.cpu import runtime as cpu_runtime

# What a step of jdp's reduces gradients with here.
REDUCTION = "psum" if cpu_runtime.why_missing() else "all_reduce"
NEXT = [(i, (i + 1) % 4) for i in range(4)]

wrong = functools.partial(corpus.wrong, "deadlock", make=numbers)


def only_if(predicate, collective, x):
    return lax.cond(predicate, collective, lambda x: x, x)


# One program for each collective


@wrong("psum")
def psum_on_some_ranks(state, batch):
    def total(x):
        return lax.psum(x, "data")  # <- here

    return {**state, "a": only_if(local(batch) > 0, total, state["a"])}, {}


@wrong("psum")
def psum_where_two_layers_alike_say_so(state, batch):
    def total(x):
        return lax.psum(x, "data")  # <- here

    score = jax.nn.relu(jax.nn.relu(local(batch)) + 1)
    return {**state, "a": only_if(score > 1.1, total, state["a"])}, {}


@wrong("psum")
def pmean_on_some_ranks(state, batch):
    def mean(x):
        return lax.pmean(x, "data")  # <- here

    return {**state, "a": only_if(local(batch) > 0, mean, state["a"])}, {}


@wrong("pmax")
def pmax_on_some_ranks(state, batch):
    def largest(x):
        return lax.pmax(x, "data")  # <- here

    return {**state, "a": only_if(local(batch) > 0, largest, state["a"])}, {}


@wrong("all_gather")
def all_gather_on_some_ranks(state, batch):
    def gathered(x):
        return lax.all_gather(x, "data").sum()  # <- here

    return {**state, "a": only_if(local(batch) > 0, gathered, state["a"])}, {}


@wrong("ppermute", "new state['a']")
def ppermute_on_some_ranks(state, batch):
    def shifted(x):
        return lax.ppermute(x, "data", NEXT)  # <- here

    return {**state, "a": only_if(local(batch) > 0, shifted, state["a"])}, {}


@wrong("pbroadcast")
def pbroadcast_on_some_ranks(state, batch):
    def first(x):
        return lax.pbroadcast(x, ("data",), 0)  # <- here

    return {**state, "a": only_if(local(batch) > 0, first, state["a"])}, {}


@wrong("all_to_all", "new state['v']")
def all_to_all_on_some_ranks(state, batch):
    def exchanged(v):
        return lax.all_to_all(v, "data", 0, 0, tiled=True)  # <- here

    return {**state, "v": only_if(local(batch) > 0, exchanged, state["v"])}, {}


@wrong("reduce_scatter", "new state['v']")
def psum_scatter_on_some_ranks(state, batch):
    def scattered(v):
        return jnp.tile(lax.psum_scatter(v, "data", tiled=True), 4)  # <- here

    return {**state, "v": only_if(local(batch) > 0, scattered, state["v"])}, {}


@wrong(REDUCTION)
def sync_gradients_on_some_ranks(state, batch):
    def synced(v):
        return jdp.sync_gradients(v)  # <- here

    return {**state, "v": only_if(local(batch) > 0, synced, state["v"])}, {}


@wrong("ppermute", "all_reduce")
def ring_on_some_ranks(state, batch):
    def synced(v):
        return jdp.sync_gradients(v, all_reduce=jdp.collectives.ring)  # <- here

    return {**state, "v": only_if(local(batch) > 0, synced, state["v"])}, {}


@wrong("psum")
def mean_over_ranks_on_some_ranks(state, batch):
    def mean(x):
        return jdp.mean_over_ranks(x)  # <- here

    return {**state, "a": only_if(local(batch) > 0, mean, state["a"])}, {}


@wrong("psum")
def sum_over_ranks_on_some_ranks(state, batch):
    def total(x):
        return jdp.sum_over_ranks(x)  # <- here

    return {**state, "a": only_if(local(batch) > 0, total, state["a"])}, {}


@wrong(REDUCTION, make=training)
def apply_gradients_on_ranks_with_a_finite_loss(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)

    def update(state):
        return state.apply_gradients(grads)  # <- here

    return only_if(jnp.isfinite(loss), update, state), {"loss": loss}


@right()
def apply_gradients_on_all_ranks_if_the_mean_loss_is_finite(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)

    def update(state):
        return state.apply_gradients(grads)

    return only_if(jnp.isfinite(jdp.mean_over_ranks(loss)), update, state), {"loss": loss}


@right(make=numbers)
def rows_on_some_ranks(state, batch):
    # Marking rows is no communication.
    def marked(x):
        return jdp.rows(x)

    return state, {"rows": lax.cond(local(batch) > 0, marked, lambda x: jdp.rows(-x), batch["y"])}


# What keeps some ranks away


@wrong("psum")
def the_result_is_thrown_away(state, batch):
    def total(x):
        lax.psum(x, "data")  # <- here
        return x

    only_if(local(batch) > 0, total, state["a"])
    return state, {}


@wrong("psum")
def both_branches_reduce_something(state, batch):
    a = lax.cond(
        local(batch) > 0,
        lambda x: lax.psum(x, "data"),  # <- here
        lambda x: lax.psum(2 * x, "data"),
        state["a"],
    )
    return state, {"a": a}


@wrong("psum")
def another_collective_for_each_rank(state, batch):
    branches = [functools.partial(lax.psum, axis_name="data"), lambda x: x]
    return {**state, "a": lax.switch(lax.axis_index("data") % 2, branches, state["a"])}, {}


@wrong("psum")
def by_a_coin_that_was_tossed_here(state, batch):
    coin = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), lax.axis_index("data")))
    return {**state, "a": only_if(coin, jdp.mean_over_ranks, state["a"])}, {}


@wrong("psum")
def by_the_answer_of_a_callback(state, batch):
    answer = jax.pure_callback(lambda x: x > 0, jax.ShapeDtypeStruct((), bool), local(batch))
    return {**state, "a": only_if(answer, jdp.mean_over_ranks, state["a"])}, {}


@wrong("psum")
def by_what_a_ref_remembers(state, batch):
    memory = jax.new_ref(state["b"])
    memory[...] = local(batch)
    return {**state, "a": only_if(memory[...] > 0, jdp.mean_over_ranks, state["a"])}, {}


@wrong("psum")
def as_often_as_the_rank_has_rows(state, batch):
    def body(_, a):
        return a + lax.psum(local(batch), "data")  # <- here

    return {**state, "a": lax.fori_loop(0, jnp.sum(batch["y"] > 0), body, state["a"])}, {}


@right(make=numbers)
def as_often_as_some_rank_has_rows(state, batch):
    def body(_, a):
        return a + lax.psum(local(batch), "data")

    most = lax.pmax(jnp.sum(batch["y"] > 0), "data")
    return {**state, "a": lax.fori_loop(0, most, body, state["a"])}, {}


@wrong("psum")
def until_the_own_loss_is_small(state, batch):
    def predicate(a):
        return jnp.abs(a * local(batch)) > 0.1

    def body(a):
        return a - 0.1 * jdp.mean_over_ranks(a * local(batch))  # <- here

    return {**state, "a": lax.while_loop(predicate, body, state["a"])}, {}


@right(make=numbers)
def until_the_mean_loss_is_small(state, batch):
    def predicate(a):
        return jdp.mean_over_ranks(jnp.abs(a * local(batch))) > 0.1

    def body(a):
        return a - 0.1 * jdp.mean_over_ranks(a * local(batch))

    return {**state, "a": lax.while_loop(predicate, body, state["a"])}, {}


@wrong(REDUCTION, make=training)
def until_the_own_gradient_is_small(state, batch):
    def predicate(state):
        return jnp.abs(gradients(state, batch)["b"]) > 0.1

    def body(state):
        return state.apply_gradients(gradients(state, batch))  # <- here

    return lax.while_loop(predicate, body, state), {}


@wrong("psum")
def the_predicate_reduces_and_then_looks_at_own_rows(state, batch):
    def predicate(a):
        return (lax.psum(a, "data") > 1) | (a > local(batch))  # <- here

    return {**state, "a": lax.while_loop(predicate, lambda a: a / 2, state["a"])}, {}


@wrong("psum")
def the_predicate_varies_only_after_rounds(state, batch):
    def body(carry):
        a, p, q = carry
        return lax.pmean(a / 2, "data"), q, local(batch)  # <- here

    a, *_ = lax.while_loop(lambda c: c[1] > 0, body, (state["a"], state["b"], state["b"]))
    return {**state, "a": a}, {}


@right(make=numbers)
def a_batched_cond_runs_both_branches(state, batch):
    # vmap over the predicate makes a select of it, and every rank reduces.
    each = jax.vmap(lambda y: lax.cond(y > 0, lambda: lax.pmean(y, "data"), lambda: 0.0))
    total = jdp.sum_over_ranks(each(batch["y"]).sum())
    return {**state, "a": state["a"] + total}, {}


# Where the collective stands


@wrong("psum")
def in_a_scan_in_a_cond(state, batch):
    def total(a):
        def body(a, x):
            return a + lax.psum(x, "data"), None  # <- here

        return lax.scan(body, a, state["v"])[0]

    return {**state, "a": only_if(local(batch) > 0, total, state["a"])}, {}


@wrong("psum")
def in_a_jit_in_a_remat_in_a_cond(state, batch):
    @jax.checkpoint
    @jax.jit
    def total(a):
        return lax.psum(a, "data")  # <- here

    return {**state, "a": only_if(local(batch) > 0, total, state["a"])}, {}


@wrong("psum")
def in_a_function_that_was_harmless_elsewhere(state, batch):
    @jax.jit
    def total(a):
        return lax.psum(a, "data")  # <- here

    a = total(state["a"])
    return {**state, "a": only_if(local(batch) > 0, total, a)}, {}


@wrong("psum")
def in_a_uniform_cond_in_one_that_is_not(state, batch):
    def outer(a):
        return lax.cond(state["b"] > 0, lambda: lax.pmean(a, "data"), lambda: a)  # <- here

    return {**state, "a": only_if(local(batch) > 0, outer, state["a"])}, {}


@wrong("psum")
def only_in_the_backward_pass(state, batch):
    @jax.custom_vjp
    def hook(x):
        return x

    hook.defvjp(lambda x: (x, None), lambda _, ct: (lax.pmean(ct, "data"),))

    def loss(a):
        return lax.cond(local(batch) > 0, lambda: hook(a) ** 2, lambda: a)  # <- here

    return {**state, "a": state["a"] - jax.grad(loss)(state["a"])}, {}


@wrong("psum")
def only_in_the_tangent(state, batch):
    @jax.custom_jvp
    def f(x):
        return x**2

    f.defjvp(lambda x, t: (f(*x), 2 * x[0] * lax.pmean(t[0], "data")))

    def loss(a):
        return lax.cond(local(batch) > 0, f, lambda a: a, a)

    return {**state, "a": jax.jvp(loss, (state["a"],), (state["b"],))[1]}, {}


@wrong("psum", "new state['v']")
def in_conjugate_gradients_to_an_own_tolerance(state, batch):
    def matvec(v):
        return v + lax.pmean(jnp.outer(v, v) @ v, "data")  # <- here

    own = state["v"] * local(batch)
    return {**state, "v": jax.scipy.sparse.linalg.cg(matvec, own, maxiter=3)[0]}, {}


@right(make=numbers)
def in_conjugate_gradients_to_a_common_tolerance(state, batch):
    def matvec(v):
        return v + lax.pmean(local(batch) ** 2 * v, "data")

    return {**state, "v": jax.scipy.sparse.linalg.cg(matvec, state["v"], maxiter=3)[0]}, {}


@wrong("psum")
def in_the_matrix_of_a_linear_solve(state, batch):
    def solve(v):
        return lax.custom_linear_solve(
            lambda u: lax.pmean(u, "data"),  # <- here
            v,
            solve=lambda matvec, u: u,
            symmetric=True,
        )

    only_if(local(batch) > 0, solve, state["v"])
    return state, {}
