"""Sequences split over "seq" inside data parallelism: attention whose keys and values travel
around a ring of devices, causal, over packed documents (https://arxiv.org/abs/2310.01889).

python examples/ring_attention.py                       # 2 x 4 virtual CPU devices
python examples/ring_attention.py --ranks 0 --seq 8     # every device of this machine
"""

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import jdp

VOCABULARY, WIDTH, HEADS, LENGTH = 64, 32, 4, 64
MAX_DIFFERENCE = 1e-5


def full_attention(q, k, v, documents, position):
    """Attention of one device with the whole sequence; queries [rows, heads, length, d]."""
    is_seen = position[:, None] >= position
    is_seen = is_seen & (documents[:, :, None] == documents[:, None, :])
    scores = jnp.where(is_seen[:, None], q @ k.mT / np.sqrt(q.shape[-1]), -jnp.inf)
    return jax.nn.softmax(scores) @ v


def scores_of(q, k, seen_by, seen):
    """Scores [rows, heads, queries, keys], and which of them count: causal, in one document."""
    (documents, position), (their_documents, their_position) = seen_by, seen
    is_seen = position[:, None] >= their_position
    is_seen = is_seen & (documents[:, :, None] == their_documents[:, None, :])
    return q @ k.mT / np.sqrt(q.shape[-1]), is_seen[:, None]


def around(attend, block, sums):
    """Call `(block, sums) -> (block, sums)` with the block of each device; blocks come home."""
    num = lax.axis_size("seq")
    ring = [(i, (i + 1) % num) for i in range(num)]

    def round_(carry, _):
        block, sums = attend(*carry)
        return (jax.tree.map(lambda x: lax.ppermute(x, "seq", ring), block), sums), None

    sums = jax.tree.map(lambda x: lax.pcast(x, "seq", to="varying"), sums)
    return lax.scan(round_, (block, sums), length=num)[0]


@jax.custom_vjp
def ring_attention(q, k, v, documents, position):
    """The same of this device's part of the sequence, in rounds with the keys of one device each.

    Softmax is summed up as in FlashAttention: by the largest score so far. The backward pass sends
    the keys and values around once more, with their gradients, and computes the scores again. So
    the memory of a device does not grow with the number of devices.
    """
    return attention_and_sums(q, k, v, documents, position)[0]


def attention_and_sums(q, k, v, documents, position):
    """Return the results, and the logarithms of the sums of exp(score)."""

    def attend(block, sums):
        (k, v, *seen), (largest, total, weighed) = block, sums
        scores, is_seen = scores_of(q, k, (documents, position), seen)
        new = jnp.maximum(largest, jnp.where(is_seen, scores, -1e30).max(-1, keepdims=True))
        weights = jnp.where(is_seen, jnp.exp(scores - new), 0)
        shrink = jnp.exp(largest - new)
        total = total * shrink + weights.sum(-1, keepdims=True)
        return block, (new, total, weighed * shrink + weights @ v)

    empty = jnp.full((*q.shape[:-1], 1), -1e30), jnp.zeros((*q.shape[:-1], 1)), jnp.zeros(q.shape)
    _, (largest, total, weighed) = around(attend, (k, v, documents, position), empty)
    return weighed / total, largest + jnp.log(total)


def ring_forward(*operands):
    results, log_sums = attention_and_sums(*operands)
    return results, (*operands, results, log_sums)


def ring_backward(kept, slope):
    q, k, v, documents, position, results, log_sums = kept
    inner = jnp.sum(slope * results, axis=-1, keepdims=True)

    def attend(block, by_q):
        k, v, *seen, by_k, by_v = block
        scores, is_seen = scores_of(q, k, (documents, position), seen)
        weights = jnp.where(is_seen, jnp.exp(scores - log_sums), 0)
        by_scores = weights * (slope @ v.mT - inner) / np.sqrt(q.shape[-1])
        by_v = by_v + weights.mT @ slope
        by_k = by_k + by_scores.mT @ q
        return (k, v, *seen, by_k, by_v), by_q + by_scores @ k

    zeros = jax.tree.map(jnp.zeros_like, (k, v))
    block, by_q = around(attend, (k, v, documents, position, *zeros), jnp.zeros(q.shape))
    return by_q, *block[-2:], None, None


ring_attention.defvjp(ring_forward, ring_backward)


def norm(x):
    return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def losses(attention, params, rows, position):
    """The loss of each token, [rows, length]; everything but attention is local to a token."""
    x = params["table"][rows["tokens"]] + params["positions"][position]
    for p in params["layers"]:
        q, k, v = jnp.einsum("btw,wshd->sbhtd", norm(x), p["qkv"])
        seen = attention(q, k, v, rows["documents"], position)
        x = x + jnp.einsum("bhtd,hdw->btw", seen, p["out"])
        x = x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]
    logits = norm(x) @ params["table"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows["targets"])


def loss_on_device(params, rows):
    size = rows["tokens"].shape[1]
    position = lax.axis_index("seq") * size + jnp.arange(size)
    return lax.pmean(losses(ring_attention, params, rows, position).mean(), "seq")


def loss_fn(params, rows):
    # jdp splits the rows over "data"; this function alone sees the axis "seq".
    specs = P(), P(None, "seq")
    return jax.shard_map(loss_on_device, axis_names={"seq"}, in_specs=specs, out_specs=P())(
        params, rows
    )


@jdp.train_step
def step(state, rows):
    loss, grads = jdp.value_and_grad(loss_fn)(state.params, rows)
    return state.apply_gradients(grads), {"loss": loss}


def new_params():
    draw = np.random.default_rng(0).normal

    def weight(*shape):
        return (draw(size=shape) / np.sqrt(WIDTH)).astype("f")

    layer = {"qkv": (WIDTH, 3, HEADS, WIDTH // HEADS), "out": (HEADS, WIDTH // HEADS, WIDTH)}
    layer |= {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    layers = [{name: weight(*shape) for name, shape in layer.items()} for _ in range(2)]
    return {
        "table": weight(VOCABULARY, WIDTH),
        "positions": weight(LENGTH, WIDTH),
        "layers": layers,
    }


def packed(num_rows, seed):
    """Rows of two documents each, which count upwards from anywhere."""
    draw = np.random.default_rng(seed)
    ends = draw.integers(8, LENGTH - 8, (num_rows, 1))
    documents = (np.arange(LENGTH + 1) >= ends).astype("i")
    start = np.where(documents, *draw.integers(0, VOCABULARY, (2, num_rows, 1)))
    tokens = ((start + np.arange(LENGTH + 1)) % VOCABULARY).astype("i")
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "documents": documents[:, :-1]}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8, help="virtual CPU devices; 0: all devices")
    parser.add_argument("--seq", type=int, default=4, help="devices along the axis seq")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=8)
    args = parser.parse_args()

    mesh = jdp.init(axes={"seq": args.seq}, cpu_ranks=args.ranks or None, progress=False)
    print(f"mesh {dict(mesh.shape)}, {LENGTH // args.seq} of {LENGTH} tokens on each device")
    tx = optax.sgd(0.3, momentum=0.9)
    state = jdp.TrainState.create(new_params(), jdp.replicated(tx))
    params, kept = new_params(), tx.init(new_params())
    full = functools.partial(losses, full_attention, position=np.arange(LENGTH))

    @jax.jit
    def step_alone(params, kept, rows):
        grads = jax.grad(lambda params: full(params, rows).mean())(params)
        updates, kept = tx.update(grads, kept)
        return optax.apply_updates(params, updates), kept

    for i in range(args.steps):
        rows = packed(args.rows, seed=i)
        state, metrics = step(state, rows)
        params, kept = step_alone(params, kept, rows)
        if i % max(1, args.steps // 5) == 0:
            print(f"  step {i:3}: loss {metrics['loss']:.4f}")

    pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True)
    largest = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
    print(f"largest difference from full attention on one device: {largest:.1e}")
    if largest > MAX_DIFFERENCE:
        sys.exit("the parameters differ from those of one device")


if __name__ == "__main__":
    main()
