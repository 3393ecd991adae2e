"""A language model on three axes: data x pipe x model, checkpointed and continued on data alone.

python examples/three_axes.py                           # 2 x 2 x 2 virtual CPU devices
python examples/three_axes.py --ranks 0 --pipe 2 --model 4    # every device of this machine

`tensor_parallel.py` and `pipeline.py` show one axis each. Here a stage of the pipeline has layers
whose heads and hidden units are split, and `jdp.sharded` splits all of them over the ranks.
"""

import argparse
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdp

VOCABULARY, WIDTH, HEADS, HIDDEN, LAYERS, LENGTH, MICRO_BATCHES = 64, 32, 4, 64, 4, 16, 4
MAX_DIFFERENCE = 1e-5

LAYER = {
    "qkv": P("pipe", None, None, "model"),  # [layers, width, 3, heads, width / heads]
    "out": P("pipe", "model"),
    "up": P("pipe", None, "model"),
    "down": P("pipe", "model"),
}


def norm(x):
    return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def layer(x, p):
    """A layer on this device's heads and hidden units."""
    q, k, v = jnp.einsum("btw,wshd->sbhtd", norm(x), p["qkv"])
    scores = q @ k.mT / np.sqrt(q.shape[-1])
    is_past = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    seen = jax.nn.softmax(jnp.where(is_past, scores, -jnp.inf)) @ v
    x = x + lax.psum(jnp.einsum("bhtd,hdw->btw", seen, p["out"]), "model")
    return x + lax.psum(jax.nn.gelu(norm(x) @ p["up"]) @ p["down"], "model"), None


def pipelined(layers, micro_batches):
    """Return the results of all layers, [micro-batches, rows, length, width]: GPipe."""
    num, i = lax.axis_size("pipe"), lax.axis_index("pipe")

    @jax.checkpoint
    def stage(x):
        return lax.scan(layer, x, layers)[0]

    def tick(arrived, t):
        x = jnp.where(i > 0, arrived, micro_batches[jnp.minimum(t, len(micro_batches) - 1)])
        y = stage(x)
        return lax.ppermute(y, "pipe", [(k, k + 1) for k in range(num - 1)]), y

    first = lax.pcast(jnp.zeros_like(micro_batches[0]), "pipe", to="varying")
    _, results = lax.scan(tick, first, jnp.arange(len(micro_batches) + num - 1))
    results = results[-len(micro_batches) :]
    return lax.psum(jnp.where(i == num - 1, results, 0), "pipe")


def loss_fn(params, tokens):
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    x = params["table"][ids].reshape(MICRO_BATCHES, -1, LENGTH, WIDTH)
    x = jax.shard_map(
        pipelined, axis_names={"pipe", "model"}, in_specs=(LAYER, P()), out_specs=P()
    )(params["layers"], x)
    logits = norm(x).reshape(-1, LENGTH, WIDTH) @ params["table"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


@jdp.train_step
def step(state, tokens):
    loss, grads = jdp.value_and_grad(loss_fn)(state.params, tokens)
    return state.apply_gradients(grads), {"loss": loss}


def new_state(mesh, stage):
    draw = np.random.default_rng(0).normal

    def weight(spec, *shape):
        value = (draw(size=shape) / np.sqrt(WIDTH)).astype("f")
        return jax.device_put(value, NamedSharding(mesh, spec))

    shapes = {"qkv": (WIDTH, 3, HEADS, WIDTH // HEADS), "out": (HEADS, WIDTH // HEADS, WIDTH)}
    shapes |= {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    params = {
        "table": weight(P(), VOCABULARY, WIDTH),
        "layers": {k: weight(LAYER[k], LAYERS, *shape) for k, shape in shapes.items()},
    }
    tx = optax.sgd(0.3, momentum=0.9)
    return jdp.TrainState.create(params, jdp.sharded(tx, stage=stage, min_size=1))


def text(num_rows):
    start, by = np.random.default_rng(1).integers(0, VOCABULARY, (2, num_rows, 1))
    return ((start + by % 5 * np.arange(LENGTH + 1)) % VOCABULARY).astype("i")


def train(folder, num_steps, *, stage, resume, **mesh):
    """Train up to `num_steps`, from what the folder has, on a mesh."""
    mesh = jdp.init(**mesh, progress=False)
    batches = jdp.batches(text(256), 32, num_steps=num_steps, seed=0)
    with jdp.Checkpointer(folder, resume=resume) as checkpointer:
        state = checkpointer.restore(new_state(mesh, stage), batches)
        print(f"mesh {dict(mesh.shape)}, from step {checkpointer.steps}")
        for batch in batches:
            state, metrics = step(state, batch)
            checkpointer.step(state, batches)
    up = state.params["layers"]["up"]
    print(f"  step {num_steps}: loss {metrics['loss']:.4f}, 'up' is {up.sharding.spec}")
    return state


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8, help="virtual CPU devices; 0: all devices")
    parser.add_argument("--pipe", type=int, default=2)
    parser.add_argument("--model", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3), help="of jdp.sharded")
    parser.add_argument("--steps", type=int, default=10, help="on each mesh")
    args = parser.parse_args()

    three = {"axes": {"pipe": args.pipe, "model": args.model}, "cpu_ranks": args.ranks or None}
    alone = {"axes": {"pipe": 1, "model": 1}}
    with tempfile.TemporaryDirectory() as folder:
        # There, to data parallelism alone, and back.
        train(folder, args.steps, stage=args.stage, resume=False, **three)
        train(folder, 2 * args.steps, stage=args.stage, resume=True, **alone)
        state = train(folder, 3 * args.steps, stage=args.stage, resume=True, **three)
    with tempfile.TemporaryDirectory() as folder:
        mesh = {"devices": jax.devices()[:1], **alone}
        single = train(folder, 3 * args.steps, stage=1, resume=False, **mesh)
    pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(single.params), strict=True)
    largest = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
    print(f"largest difference from one device after {3 * args.steps} steps: {largest:.1e}")
    if largest > MAX_DIFFERENCE:
        sys.exit("the parameters differ from those of one device")


if __name__ == "__main__":
    main()
