"""Losses of scanned layers, in the forms in which authors write them: `(scan, params, batch)`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from support import training


def parameters(num_layers, width, scale=0.2, out_scale=0.2):
    draw = np.random.default_rng(0).normal
    return {
        "layers": {
            "w": draw(size=(num_layers, width, width), scale=scale).astype(np.float32),
            "b": draw(size=(num_layers, width), scale=0.1).astype(np.float32),
        },
        "out": draw(size=width, scale=out_scale).astype(np.float32),
    }


def rows(num_rows, width):
    random = np.random.default_rng(1)
    return {
        "x": random.normal(size=(num_rows, width)).astype(np.float32),
        "count": random.integers(0, 3, num_rows).astype(np.float32),
    }


def plainly(rate, loss_fn, params, batch, num_steps=2):
    """SGD on one device, over the whole batch, with lax.scan."""
    gradient = jax.jit(jax.grad(functools.partial(loss_fn, lax.scan)))
    for _ in range(num_steps):
        params = jax.tree.map(lambda p, g: p - rate * g, params, gradient(params, batch))
    return params


def step_of(loss_fn, scan, **options):
    return training.step_of(functools.partial(loss_fn, scan), **options)


def assert_close(got, want, tolerance=1e-6):
    """Compare the shards of all ranks with whole arrays."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for mine, expected in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        for shard in mine.addressable_shards:
            whole = expected[shard.index]
            np.testing.assert_allclose(shard.data, whole, rtol=tolerance, atol=tolerance)


def assert_dtypes_are_kept(trained, plainly, params, batch):
    params["layers"]["b"] = params["layers"]["b"].astype(jnp.bfloat16)
    want, got = plainly(mean_loss, params, batch), trained(mean_loss, params, batch)
    assert got["layers"]["b"].dtype == jnp.bfloat16
    as_float32 = lambda tree: jax.tree.map(lambda x: x.astype(np.float32), tree)  # noqa: E731
    assert_close(as_float32(got["layers"]), as_float32(want["layers"]), 9e-3)


def layer(x, w):
    return jnp.tanh(x @ w["w"] + w["b"]), None


def squares(scan, params, x, f=layer, **options):
    x, _ = scan(f, x, params["layers"], **options)
    return jnp.square(x @ params["out"] - 1)


def mean_loss(scan, params, batch):
    return squares(scan, params, batch["x"]).mean()


def rematerialised(scan, params, batch):
    return squares(scan, params, batch["x"], f=jax.checkpoint(layer)).mean()


def backwards(scan, params, batch):
    return squares(scan, params, batch["x"], reverse=True).mean()


def unrolled(scan, params, batch):
    return squares(scan, params, batch["x"], unroll=3).mean()


def closed_over(scan, params, batch):
    # Over a parameter, and over what is computed from one and from this rank's rows.
    moved = batch["x"].mean(axis=1, keepdims=True) * params["out"]

    def f(x, w):
        return layer(x + moved, w)[0] * params["out"], None

    return squares(scan, params, batch["x"], f=f).mean()


def any_carry(scan, params, batch):
    def f(carry, w):
        count, x, key = carry["count"], carry["x"], carry["key"]
        noise = jax.random.normal(jax.random.fold_in(key, count), x.shape[-1:])
        x, _ = layer(x + noise, w)
        return {"count": count + 1, "x": x, "key": key}, (count, x.mean())

    carry = {"count": 0, "x": batch["x"], "key": jax.random.key(3)}
    carry, (counts, means) = scan(f, carry, params["layers"])
    return jnp.square(carry["x"] @ params["out"]).mean() + (counts * means).sum()


def keys_and_whole_numbers(scan, params, batch):
    def f(x, layer_and_more):
        w, key, number = layer_and_more
        noise = jax.random.normal(jax.random.fold_in(key, number), x.shape[-1:])
        return layer(x + noise, w)[0], number

    num_layers = len(params["layers"]["w"])
    keys = jax.random.split(jax.random.key(5), num_layers)
    x, numbers = scan(f, batch["x"], (params["layers"], keys, jnp.arange(num_layers)))
    return jnp.square(x @ params["out"] - 1).mean() + numbers.sum()


def further_xs(scan, params, batch):
    numbers = jnp.arange(len(params["layers"]["w"]))
    scales = numbers[:, None, None] / 4 * params["out"]
    xs = {"scale": scales, "row": scales * batch["x"], "number": numbers}

    def f(x, both):
        w, given = both
        return layer(x * given["scale"] + given["row"] + given["number"] / 8, w)

    if scan is lax.scan:
        x, _ = scan(f, batch["x"], (params["layers"], xs))
    else:
        x, _ = scan(f, batch["x"], params["layers"], xs)
    return jnp.square(x @ params["out"] - 1).mean()


def mapped(scan, params, batch):
    return jax.vmap(lambda x: squares(scan, params, x))(batch["x"]).mean()


def gradient_penalty(scan, params, batch):
    def output(x):
        return squares(scan, params, x).sum()

    return output(batch["x"]) / len(batch["x"]) + jnp.square(jax.grad(output)(batch["x"])).mean()


def counted(scan, params, batch):
    total = (squares(scan, params, batch["x"]) * batch["count"]).sum()
    return total / jnp.maximum(batch["count"].sum(), 1)


def count_of(batch):
    return batch["count"].sum()


def along_the_parameters(scan, params, batch):
    value, slope = jax.jvp(functools.partial(mean_loss, scan, batch=batch), (params,), (params,))
    return value + slope


FORMS = [
    mean_loss,
    rematerialised,
    backwards,
    unrolled,
    closed_over,
    any_carry,
    keys_and_whole_numbers,
    further_xs,
    gradient_penalty,
    mapped,
]
