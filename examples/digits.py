"""Train on handwritten digits on four ranks, then on one: the same loss, the same parameters.

python examples/digits.py              # 4 virtual CPU devices
python examples/digits.py --ranks 0    # every device of this machine, such as its GPUs
"""

import argparse
import math
import sys

import flax.linen as nn
import jax
import numpy as np
import optax
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.progress import BarColumn, Progress
from sklearn.datasets import load_digits

import jdp

BATCH_SIZE = 56  # over all ranks, or the next multiple of their number
NUM_TEST = 397  # a prime, which no batch size divides
MIN_ACCURACY = 0.97
MAX_DIFFERENCE = 1e-5

# Smooth: rounding could switch a ReLU on or off, and two runs would diverge.
model = nn.Sequential([nn.Dense(256), nn.gelu, nn.Dense(10)])
optimizer = jdp.replicated(optax.sgd(0.1, momentum=0.9))


@jdp.train_step
def train(state, batch):  # runs on every rank, on this rank's rows
    def loss_fn(params):
        logits = model.apply(params, batch["image"])
        labels = optax.smooth_labels(jax.nn.one_hot(batch["label"], 10), 0.1)
        return optax.softmax_cross_entropy(logits, labels).mean(), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    accuracy = (logits.argmax(-1) == batch["label"]).mean()
    return state.apply_gradients(grads), {"loss": loss, "accuracy": accuracy}


@jdp.eval_step(weight=lambda batch: batch["mask"].sum())
def test(state, batch):
    hits = model.apply(state.params, batch["image"]).argmax(-1) == batch["label"]
    return {"accuracy": hits.mean(where=batch["mask"])}  # without the rows that pad the last batch


def fit(rows, batch_size, num_epochs):
    """Train on the mesh of the last `jdp.init`; return the state, and the loss of each epoch."""
    state = jdp.TrainState.create(model.init(jax.random.key(0), rows["image"][:1]), optimizer)
    num_steps = math.ceil(num_epochs * len(rows["label"]) / batch_size)
    batches = jdp.batches(rows, batch_size, num_steps=num_steps)
    losses, reported = [], []
    with Progress("{task.description}", BarColumn(), transient=True) as progress:
        bar = progress.add_task("", total=num_steps * batch_size)
        for batch in batches:
            state, metrics = train(state, batch)
            reported.append([metrics["loss"], metrics["accuracy"]])
            progress.advance(bar, batch_size)
            if batches.epoch > len(losses):  # not in each step: reading a metric waits for it
                loss, accuracy = np.mean(reported, axis=0)
                losses.append(loss)
                reported.clear()
                line = f"epoch {batches.epoch:3}  loss {loss:.4f}  accuracy {accuracy:7.2%}"
                line += f"  {progress.tasks[bar].speed:7,.0f} rows/s"
                progress.update(bar, description=line)
                print(line)
    return state, losses


def digits():
    """Return the training rows and the test rows: the 8x8 images of scikit-learn, shuffled."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = np.split(order, [NUM_TEST])
    rows = {"image": np.asarray(images, np.float32) / 16, "label": labels}
    return [{name: column[chosen] for name, column in rows.items()} for chosen in (train, test)]


def draw(path, curves):
    figure = Figure(layout="constrained")
    axes = figure.add_subplot(xlabel="epoch", ylabel="loss")
    for (label, losses), style in zip(curves, ("-", "--"), strict=True):
        axes.plot(range(1, len(losses) + 1), losses, style, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="virtual CPU devices; 0: all devices")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--png", default="digits.png", help="where to draw the loss curves")
    args = parser.parse_args()
    # The TensorFloat-32 of GPUs rounds differently for different batch sizes.
    jax.config.update("jax_default_matmul_precision", "float32")

    mesh = jdp.init(cpu_ranks=args.ranks or None)
    train_rows, test_rows = digits()
    batch_size = math.ceil(BATCH_SIZE / mesh.size) * mesh.size
    many, losses = fit(train_rows, batch_size, args.epochs)
    test_batches = jdp.batches(test_rows, batch_size, epochs=1, shuffle=False)
    accuracy = jdp.evaluate(test, many, test_batches)["accuracy"]
    print(f"ranks: {mesh.size}, test accuracy: {accuracy:.2%} of {NUM_TEST} rows\n")

    jdp.init(devices=jax.devices()[:1])
    one, losses_of_one = fit(train_rows, batch_size, args.epochs)
    pairs = zip(*(jax.tree.leaves(jax.device_get(s.params)) for s in (many, one)), strict=True)
    difference = np.max([np.abs(a - b).max() for a, b in pairs])
    print(f"ranks: 1, largest difference of a parameter: {difference:.1e}\n")

    draw(args.png, [(f"ranks: {mesh.size}", losses), ("ranks: 1", losses_of_one)])
    print(f"loss curves: {args.png}")
    if not (accuracy >= MIN_ACCURACY and difference <= MAX_DIFFERENCE):
        sys.exit(f"expected at least {MIN_ACCURACY:.0%}, and at most {MAX_DIFFERENCE:.0e}")


if __name__ == "__main__":
    main()
