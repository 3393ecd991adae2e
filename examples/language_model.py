"""Train a small decoder on the sources of Python's standard library, byte by byte.

python examples/language_model.py              # 4 virtual CPU devices
python examples/language_model.py --ranks 0    # every device of this machine, such as its GPUs
python examples/language_model.py --stage 3    # with its state split over the ranks
python examples/language_model.py --resume     # continue where the last run ended
"""

import argparse
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.progress import BarColumn, Progress

import jdp

EMA_DECAY = 0.98


class Block(nnx.Module):
    def __init__(self, dim, num_heads, rngs):
        heads = (num_heads, dim // num_heads)
        self.norm1 = nnx.RMSNorm(dim, rngs=rngs)
        self.qkv = nnx.LinearGeneral(dim, (3, *heads), use_bias=False, rngs=rngs)
        self.out = nnx.LinearGeneral(heads, dim, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(dim, rngs=rngs)
        self.up = nnx.Linear(dim, 4 * dim, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, use_bias=False, rngs=rngs)

    def __call__(self, x):  # [rows, length, dim]
        query, key, value = jnp.unstack(self.qkv(self.norm1(x)), axis=2)
        x += self.out(jax.nn.dot_product_attention(query, key, value, is_causal=True))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Decoder(nnx.Module):
    def __init__(self, length, dim, depth, rngs):
        self.byte = nnx.Embed(256, dim, rngs=rngs)
        self.place = nnx.Embed(length, dim, rngs=rngs)
        self.blocks = nnx.List([Block(dim, dim // 32, rngs) for _ in range(depth)])
        self.norm = nnx.RMSNorm(dim, rngs=rngs)

    def __call__(self, text):  # [rows, length] int -> [rows, length, 256], logits of the next byte
        x = self.byte(text) + self.place(jnp.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.byte.attend(self.norm(x))


def new_steps(graphdef, accumulate):
    """Return the training step, and the step that measures bits per byte."""

    def bits(params, text):  # [rows, length + 1] uint8 -> [rows, length]
        text = text.astype(int)
        logits = nnx.merge(graphdef, params)(text[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]) / np.log(2)

    def loss_fn(params, text):
        return bits(params, text).mean()

    def counted(batch):  # without the padding of the last row and of the last batch
        return batch["counted"] & batch["mask"][:, None]

    @jdp.train_step
    def train(state, text):
        loss, grads = jdp.value_and_grad(loss_fn, accumulate=accumulate)(state.params, text)
        grads = jdp.sync_gradients(grads)  # here, not in apply_gradients, for the norm below
        state = state.apply_gradients(grads, synced=True)
        ema = optax.incremental_update(state.params, state.model_state, 1 - EMA_DECAY)
        return state.replace(model_state=ema), {"bits": loss, "norm": optax.tree.norm(grads)}

    @jdp.eval_step(weight=lambda batch: counted(batch).sum())
    def test(state, batch):
        found, where = bits(state.model_state, batch["text"]), counted(batch)
        return {"bits": found.mean(where=where), "bytes": jdp.sum_over_ranks(where.sum())}

    return train, test


def read_sources():
    """Return the training bytes, and the held-out bytes of every 20th file: [bytes] uint8 each."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [np.frombuffer(file.read_bytes(), np.uint8) for file in files]
    held_out = texts[::20]
    del texts[::20]
    return np.concatenate(texts), np.concatenate(held_out)


def windows(text, length):
    """Cut a text into rows of `length` bytes to predict, each with the byte before it."""
    num_rows = -(-len(text) // length)
    padded = np.pad(text, (1, num_rows * length - len(text)))
    return {
        "text": np.lib.stride_tricks.sliding_window_view(padded, length + 1)[::length],
        "counted": np.arange(num_rows * length).reshape(num_rows, length) < len(text),
    }


def measure(test, state, rows, batch_size):
    batches = jdp.batches(rows, batch_size, epochs=1, shuffle=False)
    return jdp.evaluate(test, state, batches)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="virtual CPU devices; 0: all devices")
    add("--steps", type=int, default=300, help="optimizer steps of the whole run")
    add("--batch-size", type=int, default=32, help="rows of one step, over all ranks")
    add("--accumulate", type=int, default=2, help="micro-batches of one step on each rank")
    add("--length", type=int, default=128, help="bytes of one row")
    add("--dim", type=int, default=128, help="width of the model, a multiple of 32")
    add("--depth", type=int, default=6, help="blocks of the model")
    add("--stage", type=int, default=0, choices=range(4), help="of jdp.sharded; 0: jdp.replicated")
    add("--every", type=int, default=100, help="steps between evaluations, and checkpoints")
    add("--checkpoints", default="language_model", help="folder")
    add("--resume", action="store_true", help="continue from the latest checkpoint")
    add("--stop-after", type=int, help="end early, after this step")
    return parser.parse_args()


def main():
    args = parse_args()
    mesh = jdp.init(cpu_ranks=args.ranks or None)
    text, held_out = read_sources()
    graphdef, params = nnx.split(Decoder(args.length, args.dim, args.depth, nnx.Rngs(0)))
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"ranks: {mesh.size}, parameters: {num_params:,}, bytes to train on: {len(text):,}")

    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, args.steps // 10, args.steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))
    tx = jdp.sharded(tx, stage=args.stage) if args.stage else jdp.replicated(tx)
    state = jdp.TrainState.create(params, tx, model_state=params)  # an average of the parameters

    train, test = new_steps(graphdef, args.accumulate)
    rows = windows(text, args.length)["text"][:-1]  # without the last, which may not be full
    batches = jdp.batches(rows, args.batch_size, num_steps=args.steps)
    test_rows = windows(held_out, args.length)
    checkpointer = jdp.Checkpointer(args.checkpoints, save_every=args.every, resume=args.resume)
    progress = Progress("step {task.completed}", BarColumn(), "{task.description}")
    with checkpointer, progress:
        state = checkpointer.restore(state, batches)
        bar = progress.add_task("", total=args.steps, completed=checkpointer.steps)
        metrics = None
        for batch in batches:
            before = metrics
            state, metrics = train(state, batch)
            checkpointer.step(state, batches)
            step = checkpointer.steps
            if before is not None:  # one step late, so that the devices do not wait
                line = "{bits:.3f} bits per byte, gradient norm {norm:.2f}".format(**before)
                progress.update(bar, completed=step, description=line)
            if step % args.every == 0 or step in (args.steps, args.stop_after):
                found = measure(test, state, test_rows, args.batch_size)
                line = "{bits:.4f} bits per byte of {bytes:,}".format(**found)
                print(f"step {step}, held out: {line}")
            if step == args.stop_after:
                break


if __name__ == "__main__":
    main()
