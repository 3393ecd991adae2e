"""Train a CNN of Flax NNX with BatchNorm and dropout, stop early, and keep the best state.

python examples/cnn.py              # 4 virtual CPU devices
python examples/cnn.py --ranks 0    # every device of this machine, such as its GPUs
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jdp

BATCH_SIZE = 64  # over all ranks
PARTS = 300, 300  # rows for the choice of the best state, and for the test
MIN_ACCURACY = 0.97


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        # Over the rows of all ranks: each has only a few.
        self.norm = nnx.BatchNorm(16, axis_name="data", rngs=rngs)
        self.second = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.dropout = nnx.Dropout(0.3)
        self.last = nnx.Linear(2 * 2 * 32, 10, rngs=rngs)

    def __call__(self, images, rngs=None):
        x = nnx.relu(self.norm(self.first(images)))
        x = nnx.avg_pool(x, (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.second(x)), (2, 2), (2, 2))
        return self.last(self.dropout(x.reshape(len(x), -1), rngs=rngs))


def steps_of(graph):
    """Return a step that trains the model of a graph, and one that tests it."""

    @jdp.train_step
    def train(state, batch):
        def loss_fn(params):
            model = nnx.merge(graph, params, state.model_state, copy=True)
            model.train()
            # Another key on each rank: rows of two ranks do not lose the same features.
            logits = model(batch["image"], rngs=nnx.Rngs(dropout=state.key))
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), nnx.state(model, nnx.BatchStat)

        (loss, stats), grads = jdp.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads, model_state=stats), {"loss": loss}

    @jdp.eval_step(weight=lambda batch: batch["mask"].sum())
    def test(state, batch):
        model = nnx.merge(graph, state.params, state.model_state, copy=True)
        model.eval()
        logits, counts = model(batch["image"]), batch["mask"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        hits = logits.argmax(-1) == batch["label"]
        return {"loss": losses.mean(where=counts), "accuracy": hits.mean(where=counts)}

    return train, test


def tested(test, state, rows):
    """Return the metrics over all rows, each once, though no batch size divides them."""
    return jdp.evaluate(test, state, jdp.batches(rows, BATCH_SIZE, epochs=1, shuffle=False))


def fit(steps, state, rows, held_out, *, max_epochs, patience):
    """Train until the loss of the rows held out has not fallen for some epochs.

    Return the state with the lowest one.
    """
    train, test = steps
    batches = jdp.batches(rows, BATCH_SIZE, num_steps=max_epochs * len(rows["label"]) // BATCH_SIZE)
    best, best_epoch, lowest = state, 0, float("inf")
    epoch = 0
    for batch in batches:
        state, _ = train(state, batch)
        if batches.epoch == epoch:
            continue
        epoch = batches.epoch
        found = tested(test, state, held_out)
        print(f"epoch {epoch:2}  loss {found['loss']:.4f}  accuracy {found['accuracy']:.2%}")
        if found["loss"] < lowest:
            # A copy: the next step donates the state.
            best, best_epoch, lowest = jax.tree.map(jnp.copy, state), epoch, found["loss"]
        elif epoch - best_epoch >= patience:
            break
    print(f"best: epoch {best_epoch} of {epoch}")
    return best


def digits():
    """Return the rows to train on, to choose by and to test: the 8x8 images of scikit-learn."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    image = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    chosen, last, trained = np.split(order, np.cumsum(PARTS))
    return [{"image": image[each], "label": labels[each]} for each in (trained, chosen, last)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="virtual CPU devices; 0: all devices")
    parser.add_argument("--max-epochs", type=int, default=40)
    parser.add_argument("--patience", type=int, default=4, help="epochs without a lower loss")
    args = parser.parse_args()
    mesh = jdp.init(cpu_ranks=args.ranks or None)
    trained, chosen, last = digits()
    # Parameters are trained, statistics are carried along: two parts of the state.
    graph, params, stats = nnx.split(CNN(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)
    train, test = steps_of(graph)
    tx = jdp.replicated(optax.adamw(1e-2))
    state = jdp.TrainState.create(params, tx, model_state=stats, seed=0)
    limits = {"max_epochs": args.max_epochs, "patience": args.patience}
    best = fit((train, test), state, trained, chosen, **limits)
    accuracy = tested(test, best, last)["accuracy"]
    print(f"ranks: {mesh.size}, test accuracy: {accuracy:.2%} of {len(last['label'])} rows")
    if accuracy < MIN_ACCURACY:
        sys.exit(f"expected at least {MIN_ACCURACY:.0%}")


if __name__ == "__main__":
    main()
