"""Train a recommendation model whose user table is split over four ranks, then on one rank.

python examples/recommendation.py              # a million users, 4 virtual CPU devices
python examples/recommendation.py --ranks 0    # every device of this machine, such as its GPUs

A factorisation: a user clicks on an item by the product of their two rows. Popular users are
together at the start of the table, so most of what a batch looks up is owned by the first rank.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp

NUM_ITEMS, DIM, NUM_GROUPS = 20_000, 16, 8
BATCH_SIZE = 2048  # over all ranks
MAX_DIFFERENCE = 1e-4

optimizer = jdp.sharded(optax.adam(0.05), stage=3)


def loss_fn(params, batch):
    users = jdp.sharded_embedding(params["users"], batch["user"])  # [rows, dim]
    items = jdp.sharded_embedding(params["items"], batch["item"])
    logits = (users * items).sum(-1) + params["bias"]
    return optax.sigmoid_binary_cross_entropy(logits, batch["click"]).mean()


@jdp.train_step
def train(state, batch):
    # Not jax.value_and_grad, which would differentiate whole tables.
    loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


def clicks(num_users, num_rows):
    """Return who saw what and clicked: users of one group like the same items."""
    draw = np.random.default_rng(0)
    user = (num_users * draw.random(num_rows) ** 10).astype(np.int32)  # few users see most
    item = (NUM_ITEMS * draw.random(num_rows) ** 5).astype(np.int32)
    groups, features = draw.normal(size=(NUM_GROUPS, DIM)), draw.normal(size=(NUM_ITEMS, DIM))
    liking = (groups[user % NUM_GROUPS] * features[item]).sum(-1)
    return {"user": user, "item": item, "click": (liking > 0).astype(np.float32)}


def new_params(num_users):
    draw = np.random.default_rng(1)
    sizes = {"users": (num_users, DIM), "items": (NUM_ITEMS, DIM)}
    tables = {name: 0.3 * draw.normal(size=size) for name, size in sizes.items()}
    return {name: x.astype(np.float32) for name, x in tables.items()} | {"bias": jnp.zeros(())}


def fit(num_users, num_steps):
    """Train on the mesh of the last `jdp.init`; return the losses and a rank's bytes of state."""
    state = jdp.TrainState.create(new_params(num_users), optimizer)
    rows = clicks(num_users, num_steps * BATCH_SIZE)
    losses = []
    for batch in jdp.batches(rows, BATCH_SIZE, epochs=1, tail="drop"):
        state, metrics = train(state, batch)
        losses.append(metrics["loss"])
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    return np.array(losses), held


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="virtual CPU devices; 0: all devices")
    parser.add_argument("--users", type=int, default=1_000_000, help="rows of the user table")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    # The TensorFloat-32 of GPUs rounds differently for different batch sizes.
    jax.config.update("jax_default_matmul_precision", "float32")

    mesh = jdp.init(cpu_ranks=args.ranks or None)
    many, held_by_many = fit(args.users, args.steps)
    jdp.init(devices=jax.devices()[:1])
    one, held_by_one = fit(args.users, args.steps)

    for num_ranks, losses, held in ((mesh.size, many, held_by_many), (1, one, held_by_one)):
        last = losses[-10:].mean()
        print(f"ranks: {num_ranks}, loss: {losses[0]:.4f} -> {last:.4f}, each holds {held:,} bytes")
    difference = np.abs(many - one).max()
    print(f"largest difference of a loss: {difference:.1e}")
    if difference > MAX_DIFFERENCE:
        sys.exit(f"expected at most {MAX_DIFFERENCE:.0e}")


if __name__ == "__main__":
    main()
