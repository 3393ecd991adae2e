"""Losses of scanned layers, in the forms in which authors write them: `(scan, params, batch)`."""

import jax
import jax.numpy as jnp


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
