"""Derivatives of derivatives, along directions, and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jdp
from corpus.right.corpus import loss, loss_fn, params, predict, right


def direction():
    return jax.tree.map(lambda x: np.full_like(x, 0.1), params())


@right()
def hessian_vector_product_forward_over_reverse(state, batch):
    grad_fn = jax.grad(lambda p: loss_fn(p, batch))
    grads, product = jax.jvp(grad_fn, (state.params,), (direction(),))
    return state.apply_gradients(jax.tree.map(lambda g, h: g - 0.1 * h, grads, product)), {}


@loss()
def hessian_vector_product_reverse_over_reverse(p, batch):
    grads = jax.grad(loss_fn)(p, batch)
    return loss_fn(p, batch) + 0.1 * optax.tree.vdot(grads, direction())


@loss(runs=True)
def gradient_penalty(p, batch):
    """WGAN-GP: the norm of the gradient in each input row."""
    slope = jax.vmap(jax.grad(lambda x: jnp.sum(predict(p, x))))(batch["rows"])
    return loss_fn(p, batch) + jnp.mean((jnp.linalg.norm(slope, axis=-1) - 1) ** 2)


@loss()
def jacobian_penalty(p, batch):
    jacobians = jax.vmap(jax.jacfwd(lambda x: predict(p, x)))(batch["rows"])
    backwards = jax.vmap(jax.jacrev(lambda x: predict(p, x)))(batch["rows"])
    return loss_fn(p, batch) + jnp.mean(jacobians * backwards)


@loss()
def score_matching(p, batch):
    """The trace of the Hessian in each row's input."""

    def energy(x):
        return jnp.sum(predict(p, x) ** 2)

    traces = jax.vmap(lambda x: jnp.trace(jax.hessian(energy)(x)))(batch["rows"])
    scores = jax.vmap(jax.grad(energy))(batch["rows"])
    return jnp.mean(traces + 0.5 * jnp.sum(scores**2, axis=-1))


@loss()
def physics_informed(p, batch):
    """The residual of a differential equation, by nested derivatives in the input."""

    def u(x):
        return jnp.sum(predict(p, batch["rows"][0].at[0].set(x)))

    residual = jax.vmap(lambda x: jax.grad(jax.grad(u))(x) + u(x))(batch["counts"])
    return jnp.mean(residual**2)


@loss(runs=True)
def model_agnostic_meta_learning(p, batch):
    """Each row is a task: one step on it, then the loss of another target."""

    def of_task(x, y):
        adapted = jax.tree.map(
            lambda q, g: q - 0.1 * g, p, jax.grad(loss_fn)(p, {"rows": x[None], "targets": y[None]})
        )
        return loss_fn(adapted, {"rows": x[None], "targets": -y[None]})

    return jnp.mean(jax.vmap(of_task)(batch["rows"], batch["targets"]))


@loss(lambda: {**params(), "log_decay": np.float32(-2)})
def hypergradient_through_an_unrolled_optimizer(p, batch):
    tx = optax.sgd(0.1, momentum=0.9)

    def inner(q):
        return loss_fn(q, batch) + jnp.exp(p["log_decay"]) * optax.tree.norm(q, squared=True)

    def body(carry, _):
        q, opt_state = carry
        updates, opt_state = tx.update(jax.grad(inner)(q), opt_state, q)
        return (optax.apply_updates(q, updates), opt_state), None

    start = {key: p[key] for key in ("w", "b")}
    (q, _), _ = lax.scan(body, (start, tx.init(start)), None, length=2)
    return loss_fn(q, {**batch, "targets": -batch["targets"]})


@loss()
def implicit_differentiation_by_hand(p, batch):
    """Ridge regression inside, with the derivative of its solution from the normal equations."""

    @jax.custom_vjp
    def ridge(features):
        return jnp.linalg.solve(features.T @ features + jnp.eye(3), features.T @ batch["targets"])

    def forward(features):
        return ridge(features), (features, ridge(features))

    def backward(kept, g):
        features, solution = kept
        u = jnp.linalg.solve(features.T @ features + jnp.eye(3), g)
        return (batch["targets"] @ u.T - features @ (u @ solution.T + solution @ u.T),)

    ridge.defvjp(forward, backward)
    features = predict(p, batch["rows"])
    return jnp.mean((features @ ridge(features) - batch["targets"]) ** 2)


@right()
def forward_gradient(state, batch):
    """One directional derivative along a direction that all ranks share."""
    keys = dict(zip(state.params, jax.random.split(state.shared_key, 2), strict=True))
    along = {k: jax.random.normal(keys[k], x.shape) for k, x in state.params.items()}
    loss, slope = jax.jvp(lambda p: loss_fn(p, batch), (state.params,), (along,))
    return state.apply_gradients(jax.tree.map(lambda v: slope * v, along)), {"loss": loss}


@right()
def linearized_and_transposed(state, batch):
    loss, linear = jax.linearize(lambda p: loss_fn(p, batch), state.params)
    (grads,) = jax.linear_transpose(linear, state.params)(jnp.float32(1))
    return state.apply_gradients(grads), {"loss": loss}


@right()
def pulled_back(state, batch):
    predictions, pullback = jax.vjp(lambda p: predict(p, batch["rows"]), state.params)
    error = predictions - batch["targets"]
    (grads,) = pullback(2 * error / error.size)
    return state.apply_gradients(grads), {"loss": jnp.mean(error**2)}


@loss(runs=True)
def adapted_by_three_steps_along_the_mean_gradient(p, batch):
    def step(p, _):
        grads = jdp.sync_gradients(jax.grad(loss_fn)(p, batch))
        return jax.tree.map(lambda x, g: x - 0.1 * g, p, grads), None

    return loss_fn(lax.scan(step, p, None, length=3)[0], batch)


@loss(runs=True)
def adapted_by_those_of_several_rates_that_are_not_zero(p, batch):
    def adapted(rate):
        def step(p):
            grads = jdp.sync_gradients(jax.grad(loss_fn)(p, batch))
            return jax.tree.map(lambda x, g: x - rate * g, p, grads)

        return loss_fn(lax.cond(rate > 0, step, lambda p: p, p), batch)

    return jax.vmap(adapted)(jnp.array([0.0, 0.1, 0.2])).mean()
