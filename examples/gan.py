"""Train a GAN on a ring of eight Gaussians: two networks and two optimizers in one step.

python examples/gan.py              # 4 virtual CPU devices
python examples/gan.py --ranks 0    # every device of this machine, such as its GPUs

Every rank draws its own noise, from `state.key`. So a run on another number of ranks is just as
good, but has different parameters.
"""

import argparse
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import track

import jdp

BATCH_SIZE = 240  # over all ranks
NUM_SAMPLES = 2520  # divides by any number of ranks up to 10
NOISE_DIM = 8
STD = 0.1  # of each Gaussian
ANGLES = np.arange(8) * 2 * np.pi / 8
CENTRES = 2 * np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1)  # [modes, 2]


def mlp(dim):
    return nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(64), nn.relu, nn.Dense(dim)])


generator = mlp(2)  # noise to a point
discriminator = mlp(1)  # a point to the logit of its being real


def logits(params, points):  # [rows, 2] -> [rows]
    return discriminator.apply(params, points).squeeze(-1)


@jdp.train_step
def train(states, real):
    g, d = states
    noise = jax.random.normal(g.key, (len(real), NOISE_DIM))  # this rank's own

    def d_loss_fn(params):
        fake = generator.apply(g.params, noise)
        losses = nn.softplus(-logits(params, real)) + nn.softplus(logits(params, fake))
        # Flat at the data, or both networks would oscillate forever (Mescheder et al. 2018, R1).
        slopes = jax.grad(lambda points: logits(params, points).sum())(real)
        return (losses + 0.05 * (slopes**2).sum(-1)).mean()

    def g_loss_fn(params):
        return nn.softplus(-logits(d.params, generator.apply(params, noise))).mean()

    d_loss, grads = jax.value_and_grad(d_loss_fn)(d.params)
    d = d.apply_gradients(grads)
    g_loss, grads = jax.value_and_grad(g_loss_fn)(g.params)
    g = g.apply_gradients(grads)
    return (g, d), {"generator": g_loss, "discriminator": d_loss}


@jdp.eval_step
def sample(params, noise):
    return jdp.rows(generator.apply(params, noise))


def ring(num_points, seed=0):
    random = np.random.default_rng(seed)
    points = random.choice(CENTRES, num_points) + STD * random.normal(size=(num_points, 2))
    return points.astype(np.float32)


def near_modes(points):
    """Return the share of the points within 3 STD of each centre: [modes]."""
    distances = np.linalg.norm(points[:, None] - CENTRES, axis=-1)
    return (distances < 3 * STD).mean(axis=0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="virtual CPU devices; 0: all devices")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    mesh = jdp.init(cpu_ranks=args.ranks or None)
    tx = jdp.replicated(optax.adam(2e-3, b1=0.5))
    keys = jax.random.split(jax.random.key(args.seed), 3)
    g = jdp.TrainState.create(generator.init(keys[0], jnp.zeros(NOISE_DIM)), tx, seed=args.seed)
    d = jdp.TrainState.create(discriminator.init(keys[1], jnp.zeros(2)), tx)
    states, losses = (g, d), {}
    batches = jdp.batches(ring(20_000), BATCH_SIZE, num_steps=args.steps, seed=args.seed)
    for batch in track(batches, description=f"ranks: {mesh.size}"):
        states, losses = train(states, batch)
    print(", ".join(f"{name} loss {loss:.3f}" for name, loss in losses.items()))

    noise = jax.random.normal(keys[2], (NUM_SAMPLES, NOISE_DIM))
    shares = near_modes(sample(states[0].params, noise))
    covered = (shares > 1 / 4 / len(CENTRES)).sum()
    print("share of the samples at each mode:", *(f"{share:.1%}" for share in shares))
    print(f"modes covered: {covered} of {len(CENTRES)}, samples at a mode: {shares.sum():.1%}")
    if covered < len(CENTRES):
        sys.exit("expected at least a quarter of the fair share at each mode")


if __name__ == "__main__":
    main()
