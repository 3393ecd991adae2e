"""Train a CNN of Flax on handwritten digits: pmap_before.py by `jax.pmap`, pmap_after.py by jdp.

python examples/pmap_before.py    # 4 virtual CPU devices
python examples/pmap_after.py     # the same, and nearly the same numbers
"""

import functools
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from flax import jax_utils, serialization
from flax.training import common_utils, train_state
from jax import lax
from sklearn.datasets import load_digits

BATCH_SIZE, EPOCHS, NUM_TEST = 64, 4, 397


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x, is_training):
        x = nn.Conv(16, (3, 3))(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not is_training, momentum=0.9)(x))
        x = nn.avg_pool(x, (2, 2), (2, 2)).reshape(len(x), -1)
        x = nn.Dropout(0.3, deterministic=not is_training)(x)
        return nn.Dense(10)(x)


class TrainState(train_state.TrainState):
    batch_stats: Any


@functools.partial(jax.pmap, axis_name="batch", donate_argnums=0)
def train(state, batch, rng):
    key = jax.random.fold_in(jax.random.fold_in(rng, state.step), lax.axis_index("batch"))

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(
            variables, batch["image"], True, rngs={"dropout": key}, mutable=["batch_stats"]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), (new["batch_stats"], logits)

    (loss, (stats, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    metrics = {"loss": loss, "accuracy": (logits.argmax(-1) == batch["label"]).mean()}
    grads = lax.pmean(grads, "batch")
    stats = lax.pmean(stats, "batch")
    metrics = lax.pmean(metrics, "batch")
    return state.apply_gradients(grads=grads, batch_stats=stats), metrics


@functools.partial(jax.pmap, axis_name="batch")
def test(state, batch):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    hits = state.apply_fn(variables, batch["image"], False).argmax(-1) == batch["label"]
    return lax.pmean({"accuracy": hits.mean()}, "batch")


def batches_of(rows, order):
    """Yield batches in this order, and drop the rows that fill no batch."""
    for begin in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
        yield {name: column[order[begin : begin + BATCH_SIZE]] for name, column in rows.items()}


def digits():
    """Return the rows to train on and to test."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    rows = {"image": (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32), "label": labels}
    chosen = order[NUM_TEST:], order[:NUM_TEST]
    return [{name: column[each] for name, column in rows.items()} for each in chosen]


def main():
    jax.config.update("jax_num_cpu_devices", 4)
    rows, test_rows = digits()
    model = CNN()
    variables = model.init(jax.random.key(0), rows["image"][:1], False)
    tx = optax.sgd(0.1, momentum=0.9)
    state = TrainState.create(apply_fn=model.apply, tx=tx, **variables)
    state = jax_utils.replicate(state)
    rng = jax_utils.replicate(jax.random.key(1))
    for epoch in range(EPOCHS):
        losses = []
        order = np.random.default_rng(epoch).permutation(len(rows["label"]))
        for batch in batches_of(rows, order):
            state, metrics = train(state, common_utils.shard(batch), rng)
            losses.append(metrics["loss"])
        test_batches = batches_of(test_rows, np.arange(NUM_TEST))
        found = [test(state, common_utils.shard(batch))["accuracy"] for batch in test_batches]
        accuracy, counted = np.mean(jax.device_get(found)), len(found) * BATCH_SIZE
        print(f"epoch {epoch}  loss {np.mean(losses):.4f}  accuracy {accuracy:.2%} of {counted}")
        saved = serialization.to_bytes(jax_utils.unreplicate(state))
        Path(Path(__file__).stem + ".msgpack").write_bytes(saved)


if __name__ == "__main__":
    main()
