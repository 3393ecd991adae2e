"""Updates that are no plain gradients: clusters, search, curvature."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.sparse.linalg import cg

import jdp
from corpus.right.corpus import loss_fn, params, predict, right, state


def table():
    return np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


@right(table, runs=True)
def k_means(centres, batch):
    distances = jnp.sum((batch["targets"][:, None] - centres) ** 2, axis=-1)
    chosen = jax.nn.one_hot(distances.argmin(1), 4)
    sums, counts = jdp.sum_over_ranks((chosen.T @ batch["targets"], chosen.sum(0)))
    new = jnp.where(counts[:, None] > 0, sums / jnp.maximum(counts, 1)[:, None], centres)
    return new, {"inertia": distances.min(1).mean()}


@right(table)
def mixture_by_expectation_and_maximisation(means, batch):
    distances = jnp.sum((batch["targets"][:, None] - means) ** 2, axis=-1)
    shares = jax.nn.softmax(-distances / 2, axis=-1)
    sums, weights = jdp.sum_over_ranks((shares.T @ batch["targets"], shares.sum(0)))
    return sums / weights[:, None], {"likelihood": jax.nn.logsumexp(-distances / 2, axis=-1).mean()}


@right(lambda: (params(), np.int32(0)))
def evolution_strategy(state, batch):
    """Each rank tries a direction of its own; all hear of all scores and directions."""
    p, step = state
    flat, unravel = jax.flatten_util.ravel_pytree(p)
    key = jax.random.fold_in(jax.random.key(0), step)
    mine = jax.random.normal(jax.random.fold_in(key, lax.axis_index("data")), flat.shape)
    score = -loss_fn(unravel(flat + 0.1 * mine), batch)
    scores, directions = lax.all_gather((score, mine), "data")
    flat = flat + 0.1 * jnp.mean((scores - scores.mean())[:, None] * directions, axis=0)
    return (unravel(flat), step + 1), {"score": score}


@right(params)
def the_best_of_all_ranks(p, batch):
    """Random search: the rank with the lowest loss gives everyone its parameters."""
    key = jax.random.fold_in(jax.random.key(0), lax.axis_index("data"))
    mine = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(key, x.shape), p)
    loss = loss_fn(mine, batch)
    everyones = lax.all_gather((loss, mine), "data")
    best = jnp.argmin(everyones[0])
    return jax.tree.map(lambda x: x[best], everyones[1]), {"loss": loss}


@right(params)
def broadcast_from_the_first_rank(p, batch):
    grads = jax.grad(loss_fn)(p, batch)
    first = lax.axis_index("data") == 0
    grads = lax.psum(jax.tree.map(lambda g: jnp.where(first, g, 0), grads), "data")
    return jax.tree.map(lambda x, g: x - 0.1 * g, p, grads), {}


@right(params)
def local_steps_then_the_mean(p, batch):
    """Local SGD: ranks go apart for three steps, and meet in the middle."""

    def body(_, p):
        grads = jax.grad(loss_fn)(p, batch)
        return jax.tree.map(lambda x, g: x - 0.1 * g, p, grads)

    return jdp.mean_over_ranks(lax.fori_loop(0, 3, body, p)), {}


@right()
def gauss_newton(state, batch):
    """Solves for the step with products of a curvature that is the mean over ranks."""

    def residuals(p):
        return predict(p, batch["rows"]) - batch["targets"]

    def curvature(v):
        _, tangent = jax.jvp(residuals, (state.params,), (v,))
        _, pullback = jax.vjp(residuals, state.params)
        (product,) = pullback(tangent / tangent.size)
        return jax.tree.map(lambda h, x: h + 0.1 * x, lax.pmean(product, "data"), v)

    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    grads = jdp.sync_gradients(grads)
    direction, _ = cg(curvature, grads, maxiter=3)
    return state.apply_gradients(direction, synced=True), {"loss": loss}


@right(params)
def newton_with_the_whole_matrix(p, batch):
    flat, unravel = jax.flatten_util.ravel_pytree(p)

    def of_flat(flat):
        return loss_fn(unravel(flat), batch)

    grad, hessian = jdp.mean_over_ranks((jax.grad(of_flat)(flat), jax.hessian(of_flat)(flat)))
    return unravel(flat - jnp.linalg.solve(hessian + jnp.eye(15), grad)), {}


@right(lambda: state(model_state=np.eye(4, dtype=np.float32)))
def preconditioned_by_kronecker_factors(state, batch):
    factor = 0.9 * state.model_state + 0.1 * jdp.mean_over_ranks(batch["rows"].T @ batch["rows"])
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    grads = jdp.sync_gradients(grads)
    values, vectors = jnp.linalg.eigh(factor)
    grads["w"] = vectors @ ((vectors.T @ grads["w"]) / (values[:, None] + 0.1))
    return state.apply_gradients(grads, synced=True).replace(model_state=factor), {"loss": loss}


@right(params)
def backtracking_on_the_mean_loss(p, batch):
    """A line search by hand: all ranks try the same step lengths, and stop together."""
    mean_loss = jdp.global_mean(lambda p: loss_fn(p, batch))
    loss, grads = jax.value_and_grad(mean_loss)(p)

    def stepped(length):
        return jax.tree.map(lambda x, g: x - length * g, p, grads)

    def too_long(length):
        return (mean_loss(stepped(length)) > loss) & (length > 1e-3)

    length = lax.while_loop(too_long, lambda length: length / 2, jnp.float32(1))
    return stepped(length), {"loss": loss, "length": length}


@right(lambda: state(model_state=np.float32(0.1)))
def learning_rate_by_its_own_gradient(state, batch):
    """Hypergradient descent on the learning rate, with mean gradients."""

    def after(rate, p, grads):
        return loss_fn(jax.tree.map(lambda x, g: x - rate * g, p, grads), batch)

    grads = jdp.sync_gradients(jax.grad(loss_fn)(state.params, batch))
    slope = jdp.mean_over_ranks(jax.grad(after)(state.model_state, state.params, grads))
    rate = state.model_state - 0.01 * slope
    grads = jax.tree.map(lambda g: 10 * rate * g, grads)
    return state.apply_gradients(grads, synced=True).replace(model_state=rate), {"rate": rate}
