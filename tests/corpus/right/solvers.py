"""Losses with a solver inside: linear systems, roots, flows, inner problems."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.ode import odeint
from jax.scipy import linalg, optimize, special
from jax.scipy.sparse.linalg import bicgstab, cg, gmres

from corpus.right.corpus import add_loss, loss, predict


def with_krylov(method, **kwargs):
    def loss_fn(p, batch):
        matrix = p["w"].T @ p["w"] + jnp.diag(jnp.exp(p["b"]))
        rhs = batch["targets"] - predict(p, batch["rows"])
        solution, _ = method(lambda x: x @ matrix, rhs, maxiter=4)
        return jnp.mean(solution**2)

    add_loss(method.__name__, loss_fn, **kwargs)


with_krylov(cg, runs=True)
with_krylov(gmres)
with_krylov(bicgstab)


def solution(solve):
    """Record the training with what `solve(matrix, rhs)` gives for this rank's normal equations."""

    def loss_fn(p, batch):
        features = predict(p, batch["rows"])
        matrix, rhs = features.T @ features + jnp.eye(3), features.T @ batch["targets"][:, 0]
        return jnp.mean((solve(matrix, rhs) - 1) ** 2)

    add_loss(solve.__name__.replace("_", " "), loss_fn)
    return solve


@solution
def by_elimination(matrix, rhs):
    return jnp.linalg.solve(matrix, rhs)


@solution
def by_assumed_positive(matrix, rhs):
    return linalg.solve(matrix, rhs, assume_a="pos")


@solution
def by_least_squares(matrix, rhs):
    return jnp.linalg.lstsq(matrix, rhs)[0]


@solution
def by_cholesky(matrix, rhs):
    return linalg.cho_solve(linalg.cho_factor(matrix), rhs)


@solution
def by_lu(matrix, rhs):
    return linalg.lu_solve(linalg.lu_factor(matrix), rhs)


@solution
def by_qr(matrix, rhs):
    q, r = jnp.linalg.qr(matrix)
    return linalg.solve_triangular(r, q.T @ rhs)


@solution
def by_eigenvectors(matrix, rhs):
    values, vectors = jnp.linalg.eigh(matrix)
    return vectors @ ((vectors.T @ rhs) / values)


@solution
def by_singular_values(matrix, rhs):
    u, s, vt = jnp.linalg.svd(matrix)
    return vt.T @ ((u.T @ rhs) / s)


@solution
def by_pseudo_inverse(matrix, rhs):
    return jnp.linalg.pinv(matrix) @ rhs


@solution
def by_newton_schulz(matrix, rhs):
    inverse = matrix.T / jnp.sum(matrix**2)
    for _ in range(3):
        inverse = inverse @ (2 * jnp.eye(3) - matrix @ inverse)
    return inverse @ rhs


@solution
def by_custom_linear_solve(matrix, rhs):
    def solve(matvec, b):
        return jnp.linalg.solve(matrix, b)

    return lax.custom_linear_solve(lambda x: matrix @ x, rhs, solve, solve, symmetric=True)


@solution
def matrix_exponential(matrix, rhs):
    return linalg.expm(-0.1 * matrix) @ rhs


@solution
def log_determinant(matrix, rhs):
    return jnp.linalg.slogdet(matrix)[1] + rhs


@loss()
def ode(p, batch):
    """Carry every row through a flow whose field is the network."""

    def field(y, t, p):
        return jnp.tanh(y @ p["w"] + p["b"]) @ p["w"].T

    ends = odeint(field, batch["rows"], jnp.array([0.0, 0.1]), p, mxstep=4)
    return jnp.mean((ends[-1] - 1) ** 2)


@loss(runs=True)
def root(p, batch):
    """An equilibrium for each row, found by Newton's method and differentiated implicitly."""

    def newton(f, x):
        return lax.fori_loop(0, 3, lambda _, x: x - f(x) / jax.grad(f)(x), x)

    def equilibrium(target):
        def residual(x):
            return x + 0.1 * jnp.tanh(x) - target

        return lax.custom_root(residual, 0.0, newton, lambda g, y: y / g(1.0))

    found = jax.vmap(equilibrium)(predict(p, batch["rows"]).mean(1))
    return jnp.mean((found - 1) ** 2)


@loss()
def fixed_point(p, batch):
    """Deep equilibrium: iterate without a gradient, then one step with it."""

    def step(z):
        return 0.5 * jnp.tanh(z + predict(p, batch["rows"]))

    def unsettled(carry):
        i, old, new = carry
        return (i < 5) & (jnp.max(jnp.abs(new - old)) > 1e-3)

    # Each rank leaves the loop when its own rows have settled.
    start = lax.stop_gradient(predict(p, batch["rows"]))
    _, _, z = lax.while_loop(
        unsettled, lambda c: (c[0] + 1, c[2], lax.stop_gradient(step(c[2]))), (0, start + 1, start)
    )
    return jnp.mean((step(z) - batch["targets"]) ** 2)


@loss(runs=True)
def bisection(p, batch):
    """The level below which half of all ranks' rows lie, searched in step by all ranks."""
    rows = lax.stop_gradient(predict(p, batch["rows"])[:, 0])

    def body(carry):
        low, high = carry
        middle = (low + high) / 2
        below = lax.pmean(jnp.mean(rows < middle), "data") < 0.5
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    low, high = lax.while_loop(lambda c: c[1] - c[0] > 0.3, body, (-1.0, 1.0))
    return jnp.mean((predict(p, batch["rows"]) - (low + high) / 2) ** 2)


@loss()
def minimised(p, batch):
    """BFGS on a rank's own problem; its result only weighs the loss."""
    target = lax.stop_gradient(batch["targets"].mean(0))
    found = optimize.minimize(
        lambda x: jnp.sum((x - target) ** 2), jnp.zeros(3), method="BFGS", options={"maxiter": 2}
    )
    return jnp.mean((predict(p, batch["rows"]) - found.x) ** 2)


@loss()
def gradient_descent_inside(p, batch):
    """An unrolled inner problem of this rank's rows."""

    def inner(z):
        return jnp.mean((predict(p, batch["rows"]) * z - batch["targets"]) ** 2)

    z = lax.fori_loop(0, 3, lambda _, z: z - 0.1 * jax.grad(inner)(z), jnp.ones(3))
    return inner(z) + jnp.sum(z**2)


@loss()
def sinkhorn(p, batch):
    """Optimal transport between predictions and targets, in logarithms."""
    cost = jnp.sum((predict(p, batch["rows"])[:, None] - batch["targets"][None]) ** 2, -1)

    def sweep(carry, _):
        f, g = carry
        f = -special.logsumexp(g - cost, axis=1)
        return (f, -special.logsumexp(f[:, None] - cost, axis=0)), None

    n = cost.shape[0]
    (f, g), _ = lax.scan(sweep, (jnp.zeros(n), jnp.zeros(n)), None, length=3)
    return jnp.sum(jnp.exp(f[:, None] + g - cost) * cost) / n


@loss()
def kalman(p, batch):
    """A filter over time, with a matrix for its state."""

    def update(carry, x):
        mean, covariance = carry
        gain = jnp.linalg.solve(covariance + jnp.eye(3), covariance)
        mean = mean + (predict(p, x) - mean) @ gain
        return (mean, covariance - gain @ covariance + 0.1 * jnp.eye(3)), mean

    start = jnp.zeros((batch["rows"].shape[0], 3)), jnp.eye(3)
    _, means = lax.scan(update, start, batch["sequence"].swapaxes(0, 1))
    return jnp.mean((means[-1] - batch["targets"]) ** 2)
