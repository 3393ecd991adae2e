"""Sums over the ranks that are right though nothing divides them by the number of ranks."""

import jax
import jax.numpy as jnp
from jax import lax

from corpus.right.corpus import loss_fn, predict, right, state


def psum(tree):
    return lax.psum(tree, "data")


def gradients(state, batch):
    return jax.grad(loss_fn)(state.params, batch)


def counted_loss(p, batch):
    errors = jnp.mean((predict(p, batch["rows"]) - batch["targets"]) ** 2, axis=-1)
    return jnp.sum(errors * batch["counts"])


def clipped(grads):
    return jax.tree.map(lambda g: jnp.clip(g, -9, 9), grads)


@right(runs=True)
def clipped_sum_over_what_all_rows_count(state, batch):
    total = psum(batch["counts"].sum())
    inverse = jnp.where(total > 0, 1 / total, 0)
    grads = clipped(psum(jax.grad(counted_loss)(state.params, batch)))
    return state.apply_gradients(jax.tree.map(lambda g: g * inverse, grads), synced=True), {}


@right(runs=True)
def clipped_sum_of_shares(state, batch):
    def share(p):
        return counted_loss(p, batch) / jnp.maximum(psum(batch["counts"].sum()), 1)

    grads = clipped(psum(jax.grad(share)(state.params)))
    return state.apply_gradients(grads, synced=True), {}


@right(runs=True)
def sums_of_gathered_gradients_over_a_gathered_count(state, batch):
    grads = jax.grad(counted_loss)(state.params, batch)
    grads, counts = lax.all_gather((grads, batch["counts"].sum()), "data")
    grads = jax.tree.map(lambda g: clipped(g.sum(0)) / counts.sum(), grads)
    return state.apply_gradients(grads, synced=True), {}


@right(runs=True)
def as_long_as_the_parameters(state, batch):
    """LARS: only the direction of the sum counts."""

    def scaled(p, g):
        return 0.1 * g * jnp.linalg.norm(p) / jnp.linalg.norm(g)

    grads = jax.tree.map(scaled, state.params, psum(gradients(state, batch)))
    return state.apply_gradients(grads, synced=True), {}


@right(runs=True)
def orthogonalised_by_a_polynomial(state, batch):
    """Muon: a polynomial of the sum of length one."""
    grads = psum(gradients(state, batch))
    w = grads["w"] / jnp.linalg.norm(grads["w"])
    for _ in range(2):
        w = 1.5 * w - 0.5 * w @ w.T @ w
    b = lax.pmean(gradients(state, batch)["b"], "data")
    return state.apply_gradients({"w": w, "b": b}, synced=True), {}


@right()
def gradient_of_rank_one(state, batch):
    """PowerSGD: the base of the first sum has no length."""
    grads = gradients(state, batch)
    base, _ = jnp.linalg.qr(psum(grads["w"] @ jnp.ones((3, 1))))
    w = base @ lax.pmean(grads["w"].T @ base, "data").T
    return state.apply_gradients({"w": w, "b": lax.pmean(grads["b"], "data")}, synced=True), {}


@right()
def solved_by_conjugate_gradients(state, batch):
    """Newton: the sum of the slopes over that of the curvatures."""
    w = state.params["w"]

    def slope(w):
        return jax.grad(lambda w: jnp.sum((batch["rows"] @ w - batch["targets"]) ** 2))(w)

    def curvature(v):
        return psum(jax.jvp(slope, (w,), (v,))[1]) + 1e-3 * v

    step, _ = jax.scipy.sparse.linalg.cg(curvature, psum(slope(w)), maxiter=3)
    b = lax.pmean(gradients(state, batch)["b"], "data")
    return state.apply_gradients({"w": step, "b": b}, synced=True), {}


@right(runs=True)
def scattered_divided_and_gathered(state, batch):
    """ZeRO: each rank divides and clips its part."""
    grads = gradients(state, batch)
    part = lax.psum_scatter(grads["w"].reshape(-1)[:8], "data", tiled=True)
    part = clipped(part) / lax.axis_size("data")
    part = part * jnp.minimum(1, 9 / jnp.sqrt(psum(jnp.sum(part**2))))
    w = jnp.pad(lax.all_gather(part, "data", tiled=True), (0, 4)).reshape(4, 3)
    return state.apply_gradients({"w": w, "b": lax.pmean(grads["b"], "data")}, synced=True), {}


def with_noise_scale():
    return state(model_state=jnp.zeros(()))


@right(with_noise_scale)
def noise_scale_that_is_kept(state, batch):
    local = gradients(state, batch)
    mean = lax.pmean(local, "data")
    small = psum(jnp.sum(local["w"] ** 2)) / lax.axis_size("data")
    kept = 0.9 * state.model_state + 0.1 * (small - jnp.sum(mean["w"] ** 2))
    return state.apply_gradients(mean, synced=True).replace(model_state=kept), {}
