"""Tensor parallelism inside data parallelism: a transformer whose heads, hidden units and
vocabulary are split over "model", as in Megatron-LM (https://arxiv.org/abs/1909.08053).

python examples/tensor_parallel.py                 # 2 x 4 virtual CPU devices
python examples/tensor_parallel.py --stage 3       # the parameters are also split over "data"
python examples/tensor_parallel.py --ranks 0 --model 4    # every device of this machine
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdp

VOCABULARY, WIDTH, HEADS, HIDDEN, LAYERS, LENGTH = 96, 32, 4, 64, 2, 24
MAX_DIFFERENCE = 1e-5

# A layer's columns are split, then its rows, so that each half of a layer needs one sum.
LAYER = {
    "qkv": P(None, None, "model"),  # [width, 3, heads, width / heads], by heads
    "out": P("model"),  # [heads, width / heads, width]
    "up": P(None, "model"),
    "down": P("model"),
}
SPECS = {"table": P("model"), "layers": [LAYER] * LAYERS}  # the table also makes the logits


def new_params():
    draw = np.random.default_rng(0).normal

    def weight(*shape, fan_in):
        return (draw(size=shape) / np.sqrt(fan_in)).astype("f")

    layers = [
        {
            "qkv": weight(WIDTH, 3, HEADS, WIDTH // HEADS, fan_in=WIDTH),
            "out": weight(HEADS, WIDTH // HEADS, WIDTH, fan_in=WIDTH),
            "up": weight(WIDTH, HIDDEN, fan_in=WIDTH),
            "down": weight(HIDDEN, WIDTH, fan_in=HIDDEN),
        }
        for _ in range(LAYERS)
    ]
    return {"table": weight(VOCABULARY, WIDTH, fan_in=WIDTH), "layers": layers}


def norm(x):
    return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def own_rows(table, ids):
    """Return this device's row of each id, and whether it has one."""
    row = ids - lax.axis_index("model") * len(table)
    is_own = (row >= 0) & (row < len(table))
    return jnp.where(is_own, row, 0), is_own


def attention(p, x):
    q, k, v = jnp.einsum("btw,wshd->sbhtd", x, p["qkv"])  # of this device's heads
    scores = q @ k.mT / np.sqrt(q.shape[-1])
    is_past = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(is_past, scores, -jnp.inf))
    return jnp.einsum("bhtd,hdw->btw", weights @ v, p["out"])


def loss_on_device(params, tokens):
    """The mean loss of tokens [rows, length + 1], from this device's part of each weight."""
    table, ids = params["table"], tokens[:, :-1]
    row, is_own = own_rows(table, ids)
    x = lax.psum(jnp.where(is_own[..., None], table[row], 0), "model")
    for p in params["layers"]:
        x = x + lax.psum(attention(p, norm(x)), "model")
        x = x + lax.psum(jax.nn.gelu(norm(x) @ p["up"]) @ p["down"], "model")
    logits = norm(x) @ table.T  # of this device's part of the vocabulary, never gathered
    largest = lax.pmax(lax.stop_gradient(logits.max(-1, keepdims=True)), "model")
    total = lax.psum(jnp.exp(logits - largest).sum(-1), "model")
    row, is_own = own_rows(table, tokens[:, 1:])
    found = jnp.take_along_axis(logits, row[..., None], axis=-1)[..., 0]
    target = lax.psum(jnp.where(is_own, found, 0), "model")
    return jnp.mean(jnp.log(total) + largest[..., 0] - target)


def loss_fn(params, tokens):
    # jdp splits the rows over "data"; this function alone sees the axis "model".
    mapped = jax.shard_map(
        loss_on_device, axis_names={"model"}, in_specs=(SPECS, P()), out_specs=P()
    )
    return mapped(params, tokens)


@jdp.train_step
def step(state, tokens):
    loss, grads = jdp.value_and_grad(loss_fn)(state.params, tokens)
    return state.apply_gradients(grads), {"loss": loss}


def new_state(mesh, tx):
    def put(spec, value):
        return jax.device_put(value, NamedSharding(mesh, spec))

    return jdp.TrainState.create(jax.tree.map(put, SPECS, new_params()), tx)


def text(num_rows, seed):
    """Tokens that count upwards by a step of each row's own."""
    draw = np.random.default_rng(seed)
    start, by = draw.integers(0, VOCABULARY, (2, num_rows, 1))
    return ((start + by % 7 * np.arange(LENGTH + 1)) % VOCABULARY).astype("i")


def train(args, stage, **axes):
    mesh = jdp.init(**axes, progress=False)
    tx = optax.sgd(0.3, momentum=0.9)
    tx = jdp.sharded(tx, stage=stage, min_size=1) if stage else jdp.replicated(tx)
    state, losses = new_state(mesh, tx), []
    for i in range(args.steps):
        state, metrics = step(state, text(args.rows, seed=i))
        losses.append(float(metrics["loss"]))
    return mesh, state, losses


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8, help="virtual CPU devices; 0: all devices")
    parser.add_argument("--model", type=int, default=4, help="devices along the axis model")
    parser.add_argument("--stage", type=int, default=0, choices=range(4), help="of jdp.sharded")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, default=32)
    args = parser.parse_args()

    axes = {"axes": {"model": args.model}, "cpu_ranks": args.ranks or None}
    mesh, state, losses = train(args, args.stage, **axes)
    print(f"mesh {dict(mesh.shape)}, stage {args.stage}")
    for i in range(0, args.steps, max(1, args.steps // 5)):
        print(f"  step {i:3}: loss {losses[i]:.4f}")
    up = state.params["layers"][0]["up"]
    print(f"  'up' {up.shape} is {up.sharding.spec}, {up.addressable_shards[0].data.shape} on each")

    _, alone, _ = train(args, 0, axes={"model": 1}, devices=jax.devices()[:1])
    pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(alone.params), strict=True)
    largest = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
    print(f"largest difference from one device after {args.steps} steps: {largest:.1e}")
    if largest > MAX_DIFFERENCE:
        sys.exit("the parameters differ from those of one device")


if __name__ == "__main__":
    main()
