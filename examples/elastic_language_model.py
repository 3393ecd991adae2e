"""Train a small decoder on the sources of Python's library, in processes that may be killed.

jdp run --nproc-per-node 2 examples/elastic_language_model.py

Kill a process, with `kill -9` and the number that it prints, and see the run continue a moment
later from its last commit. Kill all, including the launcher: `jdp run --resume ...` continues from
the last checkpoint.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jdp

HEADS = 4


def read_rows(length):
    """Return the sources in rows of bytes, each with the first byte of the next row."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    return np.lib.stride_tricks.sliding_window_view(text, length + 1)[::length]


def new_params(length, dim, depth):
    rng = np.random.default_rng(0)

    def matrix(*shape):
        return (rng.normal(size=shape) / shape[-2] ** 0.5).astype(np.float32)

    block = {"qkv": (dim, 3 * dim), "out": (dim, dim), "up": (dim, 4 * dim), "down": (4 * dim, dim)}
    return {
        "bytes": matrix(256, dim),
        "places": matrix(length, dim),
        "blocks": {name: matrix(depth, *shape) for name, shape in block.items()},
    }


def norm(x):
    return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def block(x, p):  # x: [rows, length, dim]
    parts = (norm(x) @ p["qkv"]).reshape(*x.shape[:2], 3 * HEADS, -1)
    query, key, value = jnp.split(parts, 3, axis=2)
    scores = jnp.einsum("rihd,rjhd->rhij", query, key) / query.shape[-1] ** 0.5
    places = np.arange(x.shape[1])
    weights = jax.nn.softmax(jnp.where(places[:, None] >= places, scores, -jnp.inf))
    attended = jnp.einsum("rhij,rjhd->rihd", weights, value)
    x += attended.reshape(x.shape) @ p["out"]
    return x + jax.nn.relu(norm(x) @ p["up"]) @ p["down"], None


def bits(params, text):  # [rows, length + 1] -> [rows], bits for each byte
    text = text.astype(int)
    x = params["bytes"][text[:, :-1]] + params["places"]
    x, _ = lax.scan(block, x, params["blocks"])
    scores = jax.nn.log_softmax(norm(x) @ params["bytes"].T) / np.log(2)
    return -jnp.take_along_axis(scores, text[:, 1:, None], axis=-1).mean((1, 2))


# If the number of ranks does not divide the batch, some rows are padding.
@jdp.train_step(weight=lambda batch: batch["mask"].sum())
def train(state, batch):
    def loss_fn(params, batch):
        return bits(params, batch["text"]).mean(where=batch["mask"])

    loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads), {"bits": loss}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=2000, help="optimizer steps of the whole run")
    add("--batch-size", type=int, default=12, help="rows of one step, over all ranks")
    add("--length", type=int, default=64, help="bytes of one row")
    add("--dim", type=int, default=64, help="width of the model")
    add("--depth", type=int, default=4, help="blocks of the model")
    add("--checkpoints", default="elastic_language_model", help="folder")
    return parser.parse_args()


def main():
    args = parse_args()
    # The processes of a host and the standbys share what is made before init().
    rows = {"text": read_rows(args.length)}
    params = new_params(args.length, args.dim, args.depth)

    mesh = jdp.init()
    tx = jdp.replicated(optax.adam(1e-3))
    batches = jdp.batches(rows, args.batch_size, num_steps=args.steps, mask=True)
    with jdp.Checkpointer(args.checkpoints, commit_every=5, save_every=100) as checkpointer:
        state = checkpointer.restore(lambda: jdp.TrainState.create(params, tx), batches)
        step = checkpointer.steps
        print(f"pid {os.getpid()}, one of {mesh.size} ranks, begins after step {step}")
        for batch in batches:
            state, metrics = train(state, batch)
            checkpointer.step(state, batches)
            step = checkpointer.steps
            if step % 20 == 0:
                print(f"step {step}: {metrics['bits']:.3f} bits for each byte")


if __name__ == "__main__":
    main()
