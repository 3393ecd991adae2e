"""Train on whole numbers, where each sum is exact: `whole_numbers.py VARIANT FOLDER [STEPS]`.

Each process compares its part of the final parameters with the exact ones, and writes to
FOLDER/PID.json how many elements differ. FOLDER/pause makes process 1 wait in the middle. If there
is a FOLDER/profile, it gets a profile of two steps.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp

# 0.1 to 29 MB: several buckets, most with odd sizes, and dims that two ranks can divide.
SHAPES = {"a": (25_013,), "b": (1_009, 520), "c": (7_340_034,), "d": (), "e": (8, 104_729)}
NUM_ROWS, COMMIT_EVERY = 8, 2


def weight(shape, xp):
    """Return by what the mean of a batch is multiplied to give the gradient of a leaf."""
    return (xp.arange(np.prod(shape, dtype=int)) % 7 - 3).reshape(shape).astype("float32")


def rows(num_steps):
    """Return the rows of all steps: the mean of the 8 rows of a step is a whole number."""
    drawn = np.random.default_rng(3).integers(-4, 5, (num_steps, NUM_ROWS))
    drawn[:, 0] -= drawn.sum(1) % NUM_ROWS
    return drawn.reshape(-1).astype(np.float32)


def expected(num_steps):
    """Return the exact parameters: each step subtracts the mean of its rows times the weights."""
    total = rows(num_steps).sum() / NUM_ROWS
    return {name: -total * weight(shape, np) for name, shape in SHAPES.items()}


def optimizer(variant):
    """Return the optimizer of a variant: the stage, or the algorithm of all-reduces."""
    if variant.startswith("stage"):
        return jdp.sharded(optax.sgd(1.0), stage=int(variant[-1]), min_size=1000)
    return jdp.replicated(optax.sgd(1.0), all_reduce=getattr(jdp.collectives, variant))


def num_wrong(params, num_steps):
    """Return how many elements of this process's parts of the parameters are not exact."""
    want, found = expected(num_steps), 0
    for name, leaf in params.items():
        for shard in leaf.addressable_shards:
            found += int(np.sum(np.asarray(shard.data) != want[name][shard.index]))
    return found


def main(variant, folder, num_steps=12):
    def loss_fn(params, batch):
        products = [jnp.vdot(leaf, weight(leaf.shape, jnp)) for leaf in params.values()]
        return jnp.mean(batch["x"]) * sum(products)

    @jdp.train_step
    def step(state, batch):
        loss, grads = jdp.value_and_grad(loss_fn, micro_batch_rows=2)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    jdp.init()
    zeros = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    state = jdp.TrainState.create(zeros, optimizer(variant))
    data = {"x": rows(num_steps)}
    batches = jdp.batches(data, NUM_ROWS, num_steps=num_steps, shuffle=False)
    me, profile = jax.process_index(), contextlib.nullcontext()
    if (folder / "profile").exists():
        profile = jdp.profile(folder / "profile", steps=range(4, 6))
    keeper = jdp.Checkpointer(folder / "checkpoints", commit_every=COMMIT_EVERY)
    with keeper as checkpointer, profile:
        state = checkpointer.restore(state, batches)
        restored = checkpointer.steps
        for batch in batches:
            state, _ = step(state, batch)
            checkpointer.step(state, batches)
            if me == 1 and checkpointer.steps == num_steps // 2:
                while (folder / "pause").exists():
                    time.sleep(0.01)
    report = {
        "wrong": num_wrong(state.params, num_steps),
        "restored": restored,
        "platform": jax.local_devices()[0].platform,
        "processes": jax.process_count(),
        "memory_bytes": (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"),
    }
    (folder / f"{os.getpid()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:4]))
