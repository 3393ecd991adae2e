"""A model in which casts to bfloat16 show and all else is exact, and its training by one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp
from support.training import ranks

BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
DIM, WIDTH, RATE = 24, 8, 0.25  # 1, 2, 3 and 8 ranks divide DIM
ROWS = 8  # of each rank


def params():
    """Numbers that bfloat16 rounds, to ones in which everything below is exact."""
    draw = np.random.default_rng(0).integers
    return {
        "w": (draw(-2, 3, (DIM, WIDTH)) + 2.0**-12).astype("f"),
        "b": (draw(-2, 3, WIDTH) + 2.0**-12).astype("f"),  # stays whole, as `min_size` is larger
        "half": draw(-2, 3, (DIM, 2)).astype(BF16),
    }


def batch(n, seed=0):
    draw = np.random.default_rng(seed)
    x = np.zeros((ROWS * n, DIM), "f")
    x[np.arange(ROWS * n), draw.integers(0, DIM, ROWS * n)] = 1
    return {"x": x, "y": draw.integers(-8, 9, (ROWS * n, WIDTH)).astype("f")}


def loss_fn(p, rows):
    x = rows["x"].astype(p["w"].dtype)
    h = x @ p["w"] + p["b"] - rows["y"].astype(p["w"].dtype)
    return (jnp.square(h).sum() * 16 + jnp.square(x @ p["half"]).sum()).astype(F32) / len(x)


def cast(p):
    return jax.tree.map(lambda x: x.astype(BF16) if x.dtype == F32 else x, p)


def oracle(n, num_steps=2, parts=1, sent=F32, seen=cast):
    """SGD on one device: the gradients of each rank's rows, averaged in a dtype."""
    p = jax.tree.map(jnp.asarray, params())
    for step in range(num_steps):
        per_rank = []
        for rows in split(batch(n, step), n):
            grads = [jax.grad(loss_fn)(seen(p), part) for part in split(rows, parts)]
            per_rank.append({k: np.mean([wide(g[k]) for g in grads], 0) for k in p})
        for k in p:
            # One rank sends nothing, and rounds nothing.
            rounded = (lambda x: x) if n == 1 else (lambda x: wide(x.astype(sent)))
            mean = rounded(np.sum([rounded(g[k]) for g in per_rank], 0) * np.float32(1 / n))
            p[k] = jnp.asarray(p[k] - RATE * mean.astype(p[k].dtype)).astype(p[k].dtype)
    return jax.tree.map(np.asarray, p)


def wide(x):
    return np.asarray(x).astype("f")


def split(rows, k):
    return [{name: np.split(x, k)[i] for name, x in rows.items()} for i in range(k)]


def tx(**options):
    return jdp.sharded(optax.sgd(RATE), **{"stage": 3, "min_size": 40, **options})


def differentiated(state, rows, loss_fn=loss_fn, **options):
    loss, grads = jdp.value_and_grad(loss_fn, **options)(state.params, rows)
    return state.apply_gradients(grads), {"loss": loss}


def state_of(n, optimizer, given=None):
    ranks(n)
    return jdp.TrainState.create(params() if given is None else given, optimizer)


def train(n, optimizer, program=differentiated, num_steps=2, rows=batch):
    state, step = state_of(n, optimizer), jdp.train_step(program)
    for i in range(num_steps):
        state, _ = step(state, rows(n, i))
    jdp.check_replicas(state)
    return jax.device_get(state.params)


def assert_equal(got, want):
    for k in want:
        assert got[k].dtype == want[k].dtype
        np.testing.assert_array_equal(wide(got[k]), wide(want[k]), err_msg=k)
