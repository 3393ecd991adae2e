"""Solvers of Lineax, Optimistix and Diffrax, and layers of Equinox that compare types, in steps.

Where the mesh is in the types of values, these libraries refuse what they have made outside of it.
"""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import numpy as np
import optax
import optimistix
import pytest
from support.training import ranks, step_of

import jdp

PARAMS = {"w": np.array([1.0, 2.0, 3.0], np.float32), "b": np.full(6, 0.5, np.float32)}
ROWS = np.random.default_rng(0).uniform(0.2, 1, (6, 3)).astype(np.float32)


def linear_system(p, x):
    matrix = jnp.diag(p["w"]) + jnp.outer(x, x)
    return lineax.linear_solve(lineax.MatrixLinearOperator(matrix), x).value.sum()


def conjugate_gradients(p, x):
    matrix = jnp.diag(2 + p["w"] ** 2)
    operator = lineax.MatrixLinearOperator(matrix, lineax.positive_semidefinite_tag)
    return lineax.linear_solve(operator, x, lineax.CG(1e-6, 1e-6)).value.sum()


def root(p, x):
    solver = optimistix.Newton(1e-6, 1e-6)
    residual = lambda y, _: y**3 + p["w"].sum() * y - x.sum()  # noqa: E731
    return optimistix.root_find(residual, solver, jnp.float32(1)).value


def least_squares(p, x):
    solver = optimistix.LevenbergMarquardt(1e-6, 1e-6)
    return optimistix.least_squares(lambda y, _: y - p["w"] * x, solver, jnp.ones(3)).value.sum()


def checkpointed_loop(p, x):
    def times(carry):
        return carry[0] + 1, carry[1] * p["w"]

    loop = eqx.internal.while_loop
    return loop(lambda c: c[0] < 3, times, (0, x), kind="checkpointed", max_steps=8)[1].sum()


def ordinary_differential_equation(p, x):
    term = diffrax.ODETerm(lambda t, y, _: -p["w"] * y)
    adaptive = diffrax.PIDController(1e-4, 1e-4)
    solver = diffrax.Tsit5()
    return diffrax.diffeqsolve(term, solver, 0, 1, 0.1, x, stepsize_controller=adaptive).ys.sum()


SOLVERS = [
    linear_system,
    conjugate_gradients,
    root,
    least_squares,
    checkpointed_loop,
    ordinary_differential_equation,
]


def loss_of(solve):
    def loss_fn(p, rows):
        return jax.vmap(lambda x: solve(p, x))(rows).mean() + p["b"].sum()

    return loss_fn


thorough = pytest.mark.thorough


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=thorough), 2, 3])
@pytest.mark.parametrize("solve", [*SOLVERS[:-1], pytest.param(SOLVERS[-1], marks=thorough)])
def test_a_solver_trains_as_on_one_device(solve, stage):
    sgd = optax.sgd(0.1)
    tx = jdp.sharded(sgd, stage=stage, min_size=1) if stage else jdp.replicated(sgd)
    loss_fn = loss_of(solve)

    ranks(3)
    state, metrics = step_of(loss_fn)(jdp.TrainState.create(PARAMS, tx), ROWS)
    loss, grads = jax.value_and_grad(loss_fn)(PARAMS, ROWS)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    for name, grad in grads.items():
        np.testing.assert_allclose(state.params[name], PARAMS[name] - 0.1 * grad, rtol=1e-5)


@pytest.mark.parametrize("solve", [pytest.param(SOLVERS[0], marks=thorough), *SOLVERS[1:]])
def test_a_solver_runs_in_an_evaluation_and_in_layers(solve):
    loss_fn = loss_of(solve)
    layers = {"w": jnp.stack([PARAMS["w"], PARAMS["w"] / 2])}

    def total(layers, rows):
        def layer(carry, p):
            return carry + jax.vmap(lambda x: solve(p, x))(rows).mean(), None

        return jdp.scan_layers(layer, jnp.float32(0), layers)[0]

    @jdp.eval_step
    def evaluate(p, rows):
        return {"loss": loss_fn(p, rows)}

    @jdp.train_step
    def step(state, rows):
        grads = jdp.value_and_grad(total)(state.params, rows)[1]
        return state.apply_gradients(grads), {}

    ranks(2)
    np.testing.assert_allclose(evaluate(PARAMS, ROWS)["loss"], loss_fn(PARAMS, ROWS), rtol=1e-5)
    state, _ = step(jdp.TrainState.create(layers, jdp.sharded(optax.sgd(0.1), min_size=1)), ROWS)
    want = layers["w"] - 0.1 * jax.grad(total)(layers, ROWS)["w"]
    np.testing.assert_allclose(state.params["w"], want, rtol=1e-5)


def test_batch_norm_of_equinox_that_averages_by_exponents_trains_as_on_one_device():
    norm, stats = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, ("row", "data"), mode="ema")
    params, static = eqx.partition(norm, eqx.is_array)

    def train(num_ranks):
        ranks(num_ranks)

        @jdp.train_step
        def step(state, rows):
            def loss_fn(p):
                norm = eqx.combine(p, static)
                over = {"in_axes": (0, None), "out_axes": (0, None), "axis_name": "row"}
                y, new = jax.vmap(norm, **over)(rows, state.model_state)
                return jnp.mean(y**3), new

            (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
            return state.apply_gradients(grads, model_state=new), {"loss": loss}

        state = jdp.TrainState.create(params, jdp.replicated(optax.sgd(0.1)), model_state=stats)
        for _ in range(3):
            state, _ = step(state, ROWS)
        return jax.tree.leaves((state.params, state.model_state))

    for got, want in zip(train(3), train(1), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
