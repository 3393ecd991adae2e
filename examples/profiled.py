"""Where does the time of a step go? Two processes, of which one reads its rows slowly.

    jdp run --nproc-per-node 2 examples/profiled.py
    jdp timeline profile

Each process computes on 2 ranks. The second one waits 100 ms for each batch, as a process does
whose disk is busy, and `jdp timeline` names it: its ranks wait for data, and all others for them.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp

RANKS_PER_PROCESS, ROWS, WIDTH = 2, 256, 512


def loss_fn(params, batch):
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2)


@jdp.train_step
def train(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


def rows_of_this_process(num_steps, wait_s):
    """Batches of this process's rows, for `jdp.shard_batches`."""
    draw = np.random.default_rng(jax.process_index()).normal
    x = draw(size=(ROWS // jax.process_count(), WIDTH)).astype(np.float32)
    for _ in range(num_steps):
        if jax.process_index() == 1:
            time.sleep(wait_s)
        yield {"x": x, "y": np.tanh(x)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="profile")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--first", type=int, default=10, help="step of the profile")
    parser.add_argument("--wait-ms", type=float, default=100.0, help="of the second process")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", RANKS_PER_PROCESS)
    jdp.init()
    draw = np.random.default_rng(0).normal
    params = [draw(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5 for _ in range(4)]
    tx = jdp.replicated(optax.adam(1e-3), bucket_bytes=2 * 4 * WIDTH**2)
    state = jdp.TrainState.create(params, tx)
    batches = jdp.shard_batches(rows_of_this_process(options.steps, options.wait_ms / 1000))
    last = min(options.first + 10, options.steps)
    loss = None
    with jdp.profile(options.folder, steps=range(options.first, last)):
        for batch in batches:
            state, metrics = train(state, batch)
            loss = metrics["loss"]
    if jax.process_index() == 0:
        print(f"loss {loss:.3f}. Now: jdp timeline {options.folder}")


if __name__ == "__main__":
    main()
