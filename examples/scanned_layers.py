"""Layers under one scan, the way large models are written, trained on 4 ranks.

    python examples/scanned_layers.py

The layers are a Flax block with stacked parameters. On GPUs, `jdp.scan_layers` reduces the gradient
of each layer while the layer before it is differentiated. On CPUs, which cannot overlap the two, it
is `lax.scan`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp

NUM_LAYERS, WIDTH, NUM_ROWS, NUM_STEPS = 6, 32, 64, 60


class Block(nn.Module):
    """A pre-norm residual block."""

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


block = Block()


def loss_fn(params, batch):
    # Activations inside a layer are recomputed in the backward pass.
    layer = jax.checkpoint(lambda x, p: (block.apply({"params": p}, x), None))
    x, _ = jdp.scan_layers(layer, batch["x"], params)
    return jnp.square(x - batch["y"]).mean()


@jdp.train_step
def step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


def main():
    jdp.init(cpu_ranks=4)
    x = np.random.default_rng(0).normal(size=(NUM_ROWS, WIDTH)).astype(np.float32)
    batch = {"x": x, "y": np.roll(x, 1, axis=1)}  # to learn: every number moves by one place

    keys = jax.random.split(jax.random.key(0), NUM_LAYERS)
    params = jax.vmap(lambda key: block.init(key, x)["params"])(keys)
    state = jdp.TrainState.create(params, jdp.replicated(optax.adam(3e-3)))
    loss = np.inf
    for i in range(NUM_STEPS):
        state, metrics = step(state, batch)
        loss = metrics["loss"]
        if i % 20 == 0:
            print(f"step {i}: loss {float(loss):.3f}")
    print(f"after {NUM_STEPS} steps: loss {loss:.3f}")
    return float(loss)


if __name__ == "__main__":
    main()
