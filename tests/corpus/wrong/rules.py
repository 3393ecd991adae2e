"""Rules of one's own, solvers and rematerialisation: right in one direction, wrong in another."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.ode import odeint

import jdp
from corpus.wrong import corpus
from corpus.wrong.corpus import local, numbers, right
from corpus.wrong.sources import rank

wrong = functools.partial(corpus.wrong, "varies", make=numbers)


@wrong("new state['a']")
def forward_right_and_backward_by_rank(state, batch):
    @jax.custom_vjp
    def square(x):
        return x**2

    square.defvjp(lambda x: (x**2, x), lambda x, ct: (2 * x * ct * rank(),))
    value, grad = jax.value_and_grad(square)(state["a"])
    return {**state, "a": state["a"] - grad, "b": value}, {}


@wrong("new state['a']")
def forward_by_rank_and_backward_right(state, batch):
    @jax.custom_vjp
    def square(x):
        return x**2

    square.defvjp(lambda x: (x**2 * rank(), x), lambda x, ct: (2 * x * ct,))
    value, grad = jax.value_and_grad(square)(state["a"])
    return {**state, "a": value, "b": grad}, {}


@wrong("new state['a']")
def value_right_and_tangent_by_rank(state, batch):
    @jax.custom_jvp
    def square(x):
        return x**2

    square.defjvp(lambda x, t: (x[0] ** 2, t[0] * rank()))
    return {**state, "a": jax.grad(square)(state["a"]), "b": square(state["b"])}, {}


@right(make=numbers)
def tangent_by_rank_that_nobody_asks_for(state, batch):
    @jax.custom_jvp
    def square(x):
        return x**2

    square.defjvp(lambda x, t: (x[0] ** 2, t[0] * rank()))
    return {**state, "a": square(state["a"]), "b": square(state["b"])}, {}


@wrong("new state['v']")
def batching_rule_by_rank(state, batch):
    @jax.custom_batching.custom_vmap
    def same(x):
        return x

    same.def_vmap(lambda size, batched, x: (x + rank(), True))
    return {**state, "v": jax.vmap(same)(state["v"])}, {}


@wrong("new state['a']")
def linear_function_of_own_rows(state, batch):
    def scaled(rows, x):
        return x * rows.mean()

    a = jax.custom_derivatives.linear_call(scaled, scaled, batch["x"], state["a"])
    return {**state, "a": a}, {}


# Forward mode through layers, where the loss is differentiated once more


def layers(p, x, late=True):
    x = x + p["b"]
    return jdp.scan_layers(lambda h, w: (jnp.tanh(h * w), None), x, p["w"], late=late)[0]


def tangents(p):
    return jax.tree.map(lambda x: 0.3 * x, p)


@functools.partial(corpus.wrong, "forward mode")()
def layers_along_tangents_that_depend_on_the_parameters(state, batch):
    def loss(p):
        out, slope = jax.jvp(lambda p: layers(p, batch["x"]), (p,), (tangents(p),))
        return (out**2 + slope).mean()

    grads = jax.grad(loss)(state.params)
    return state.apply_gradients(grads), {}


@right()
def layers_that_reduce_once_along_tangents_that_depend_on_the_parameters(state, batch):
    def loss(p):
        f = functools.partial(layers, x=batch["x"], late=False)
        out, slope = jax.jvp(f, (p,), (tangents(p),))
        return (out**2 + slope).mean()

    return state.apply_gradients(jax.grad(loss)(state.params)), {}


# Solvers


@wrong("new state['v']")
def linear_solve_with_a_matrix_of_own_rows(state, batch):
    x = local(batch)
    solution = lax.custom_linear_solve(
        lambda v: v * x, state["v"], solve=lambda matvec, v: v / x, symmetric=True
    )
    return {**state, "v": solution}, {}


@wrong("new state['v']")
def conjugate_gradients_on_own_rows(state, batch):
    curvature = 1 + jnp.abs(local(batch))
    solution, _ = jax.scipy.sparse.linalg.cg(lambda v: v * curvature, state["v"], maxiter=3)
    return {**state, "v": solution}, {}


@wrong("new state['v']")
def gradient_through_a_linear_solve(state, batch):
    def energy(scale):
        return jax.scipy.sparse.linalg.cg(lambda v: v * scale, state["v"], maxiter=3)[0].sum()

    return {**state, "v": state["v"] - jax.grad(energy)(1 + jnp.abs(local(batch)))}, {}


def root(f):
    return lax.custom_root(
        f,
        0.0,
        lambda f, x: lax.fori_loop(0, 9, lambda _, x: x - 0.1 * f(x), x),
        lambda g, y: y / g(1.0),
    )


@wrong("new state['a']")
def root_of_a_function_of_own_rows(state, batch):
    x = local(batch)
    return {**state, "a": root(lambda z: z - x)}, {}


@right(make=numbers)
def root_of_a_function_of_the_state(state, batch):
    x = state["b"]
    return {**state, "a": root(lambda z: z - x)}, {}


@wrong("new state['a']")
def gradient_of_a_root(state, batch):
    def at(theta):
        return root(lambda z: z - theta * local(batch))

    return {**state, "a": state["a"] - jax.grad(at)(state["a"])}, {}


@wrong("new state['a']")
def solution_of_a_differential_equation(state, batch):
    end = odeint(lambda y, t, k: -k * y, state["a"], jnp.linspace(0, 1, 2), local(batch))
    return {**state, "a": end[-1]}, {}


@wrong("new state['v']")
def eigenvalues_of_the_own_covariance(state, batch):
    values = jnp.linalg.eigvalsh(jnp.cov(batch["x"].T))
    return {**state, "v": state["v"].at[:3].set(values)}, {}


@wrong("new state['v']")
def spectrum_of_own_rows(state, batch):
    return {**state, "v": jnp.abs(jnp.fft.fft(batch["x"].ravel(), n=4))}, {}


# Rematerialisation


@wrong("new state['a']")
def named_for_rematerialisation(state, batch):
    return {**state, "a": checkpoint_name(local(batch), "jdp.mean")}, {}


@wrong("new state['a']")
def jitted_donated_and_rematerialised(state, batch):
    keep = jax.jit(jax.checkpoint(lambda x: jnp.sin(x)), donate_argnums=0)
    return {**state, "a": jax.value_and_grad(keep)(local(batch))[1]}, {}


@wrong("new state['a']")
def rematerialised_by_name(state, batch):
    def f(a):
        return jnp.sin(checkpoint_name(a * local(batch), "kept")) ** 2

    policy = jax.checkpoint_policies.save_any_names_but_these("kept")
    return {**state, "a": jax.grad(jax.checkpoint(f, policy=policy))(state["a"])}, {}


@wrong("new state['a']")
def held_back_by_a_barrier(state, batch):
    _, x = lax.optimization_barrier((state["a"], local(batch)))
    return {**state, "a": x}, {}


@right(make=numbers)
def held_back_beside_what_varies(state, batch):
    a, _ = lax.optimization_barrier((state["a"], local(batch)))
    return {**state, "a": a}, {}
