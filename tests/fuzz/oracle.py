"""The same training in plain JAX and optax, on one device, with all rows at once: no jdp here."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fuzz import model
from fuzz.program import EVERY, problem


def _divide(x, weight):
    return x / jnp.where(weight == 0, 1.0, weight)


ALONE = model.Over(
    mean=lambda x: x,
    total=lambda x: x,
    gather=lambda x: x,
    gradient=lambda x: x,
    divide=_divide,
    scan=lax.scan,
    elsewhere=lambda fn, x, ids: fn(x),
)


# Parameters begin near 1. Training that takes one this far diverges.
_WILD = 50


def train(p):
    """Return what training must end with: state, metrics of each step; in float64."""
    state, metrics = _train(problem(p), 0.0)
    if p.library != "jdp":  # Only a TrainState of jdp has a seed.
        state = {name: value for name, value in state.items() if name != "seed"}
    return state, metrics


def slack(p):
    """Return how far apart training ends from parameters that are rounded otherwise.

    Training can multiply rounding errors by any factor: this measures it, by training from
    parameters that are an eps of the program's dtype away. Where it diverges nothing is left to
    compare but ranks with each other.

    Returns:
      A tree like that of `train`, of differences.
    """
    want = _train(problem(p), 0.0)
    largest = max(np.max(np.abs(x), initial=0) for x in jax.tree.leaves(want[0]["params"]))
    if not largest < _WILD:
        return jax.tree.map(lambda x: np.full(np.shape(x), np.inf), want)
    dtype = "float32" if p.dtype == "mixed" else p.dtype
    if p.algorithm == "quantized":
        dtype = "bfloat16"  # has 8 digits, as many as a quantized gradient
    moved = _train(problem(p), float(jnp.finfo(dtype).eps))
    return jax.tree.map(
        lambda a, b: np.abs(np.asarray(a, float) - np.asarray(b, float)), want, moved
    )


def _moved(x, by):
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x * (1 + by * (-1.0) ** np.arange(x.size).reshape(x.shape))


@functools.lru_cache(maxsize=4)
def _step(p):
    tx, chosen = model.optimizer(p), _micro_batches(p)

    @jax.jit
    def step(params, opt_state, own, rows, noise, factor):
        noise = noise + own[:, None]

        def objective(floats):
            whole = jax.tree.map(lambda x, f: x if f is None else f, params, floats)
            total, weight = jnp.zeros(3), 0.0
            outs = []
            for index in chosen:
                part = {name: x[index] for name, x in rows.items()}
                loss, (mean, out) = model.loss(p, ALONE, whole, part, noise[index])
                w = model.weights(part).sum()
                total += w * jnp.stack([factor * loss, loss, mean])
                weight += w
                outs.append(out)
            means = _divide(total, weight)
            by_row = jnp.zeros(len(noise)).at[np.concatenate(chosen)].set(jnp.concatenate(outs))
            return means[0], (means[0], means[2], by_row, weight)

        grads, reported = jax.grad(objective, has_aux=True)(_floats(params))
        if p.reduce == "sum":
            scale = p.ranks if p.weight == "none" else reported[3]
            grads = jax.tree.map(lambda g: g * scale, grads)
        norm, trained = optax.tree.norm(grads), _trained(p, params)
        updates, new_state = tx.update(_trained(p, grads), opt_state, trained)
        floats = optax.apply_updates(trained, updates)
        if p.skips:
            kept = jnp.isfinite(norm)
            old, new = (trained, opt_state), (floats, new_state)
            floats, new_state = jax.tree.map(lambda x, y: jnp.where(kept, y, x), old, new)
        params = jax.tree.map(lambda x, f: x if f is None else f, params, floats)
        return params, new_state, _next(p, own, reported[2]), reported, norm

    return step


@functools.lru_cache(maxsize=4)
def _train(p, moved_by):
    params = jax.tree.map(lambda x: _moved(_widest(x), moved_by), model.params(p))
    if p.is_local:
        return _train_alone(p, params)
    opt_state = model.optimizer(p).init(_trained(p, params))
    own, step, metrics = np.zeros(p.ranks * p.rows), _step(p), []
    for i, rows in enumerate(model.batches(p)):
        arguments = (params, opt_state, own, rows, noise(p, i), _factor(p, i))
        params, opt_state, own, reported, norm = step(*arguments)
        counted = np.int64(np.sum(np.asarray(model.weights(rows)) > 0))
        metrics.append({"loss": reported[0], "mean": reported[1], "out": reported[2]})
        metrics[-1] |= {"count": counted, "norm": norm, "before": reported[0]}
    state = {"params": params, "opt_state": opt_state, **_numbers(p)}
    if p.skips:
        state["num_skipped"] = np.int32(1)
    if p.optimizer == "loss_scale":
        state["scale"] = np.float32(model.SCALE / 2)
    if p.state != "none":
        state["own"] = own if p.state == "rows" else own[:: p.rows]
    return jax.device_get((state, metrics))


def _train_alone(p, params):
    """Train each rank with its own rows, and join their parameters by the outer optimizer."""
    outer, step = model.outer_optimizer(p), _step(dataclasses.replace(p, mesh=(1,)))
    outer_state, metrics = outer.init(_trained(p, params)), []
    ranks = [(params, model.optimizer(p).init(_trained(p, params)))] * p.ranks
    for i, batch in enumerate(model.batches(p)):
        found, zeros, noises = [], np.zeros(p.rows), np.split(noise(p, i), p.ranks)
        for rank, (own, state) in enumerate(ranks):
            rows = {name: np.split(x, p.ranks)[rank] for name, x in batch.items()}
            own, state, _, reported, _ = step(own, state, zeros, rows, noises[rank], _factor(p, i))
            ranks[rank] = own, state
            found.append(reported[:3])
        losses, means, outs = zip(*found, strict=True)
        metrics.append({"loss": np.mean(losses), "mean": np.mean(means)})
        metrics[-1] |= {"out": np.concatenate(outs), "count": np.int64(p.ranks * p.rows)}
        if (i + 1) % EVERY == 0:
            old = _trained(p, params)
            moved = [jax.tree.map(jnp.subtract, old, _trained(p, own)) for own, _ in ranks]
            mean = jax.tree.map(lambda *x: sum(x) / len(x), *moved)
            updates, outer_state = outer.update(mean, outer_state, old)
            floats = optax.apply_updates(old, updates)
            params = jax.tree.map(lambda x, f: x if f is None else f, params, floats)
            ranks = [(params, state) for _, state in ranks]
    return jax.device_get(({"params": params, **_numbers(p)}, metrics))


def _factor(p, step):
    return 0.5 if p.loop in ("alternate", "two_in_jit") and step % 2 else 1.0


def _numbers(p):
    return {"step": np.int32(p.num_steps), "seed": np.uint32(p.seed)}


def _next(p, own, by_row):
    """Return the state of each row after a step; that of a rank is the same for all of its rows."""
    if p.state == "none":
        return own
    moved = jnp.sin(by_row).reshape(p.ranks, p.rows)
    if p.state == "rank":
        moved = jnp.broadcast_to(moved.mean(1, keepdims=True), moved.shape)
    return 0.5 * own + 0.1 * moved.reshape(-1)


def noise(p, step):
    """What the keys of a step add to the output of each row: `[rows of all ranks, 2]`."""
    if p.noise == "none":
        return np.zeros((p.ranks * p.rows, 2))
    key = jax.random.fold_in(jax.random.key(np.uint32(p.seed)), step)
    parts = []
    for rank in range(p.ranks):
        of_rank = jax.random.fold_in(key, 1 + rank if p.noise == "rank" else 0)
        k = len(p.splits)
        keys = jax.random.split(of_rank, k) if k > 1 else [of_rank]
        for part, size in zip(keys, p.splits, strict=True):
            parts.append(jax.random.normal(part, (size, 2), float))
    return np.concatenate(parts)


def _micro_batches(p):
    """Which rows of the global batch all ranks compute at once."""
    rows = np.arange(p.ranks * p.rows).reshape(p.ranks, p.rows)
    return [part.reshape(-1) for part in np.split(rows, np.cumsum(p.splits)[:-1], axis=1)]


def _floats(params):
    is_float = lambda x: x is not None and jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: x if is_float(x) else None, params, is_leaf=lambda x: x is None)


def _trained(p, params):
    none = jax.tree.map(lambda x: None, params)
    return {k: none[k] if model.is_frozen(p, k) else x for k, x in _floats(params).items()}


def _widest(x):
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
