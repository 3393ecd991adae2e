"""Pipeline parallelism inside data parallelism: layers split over "pipe", micro-batches in a scan.

python examples/pipeline.py                              # GPipe on 2 x 4 virtual CPU devices
python examples/pipeline.py --schedule interleaved       # 2 chunks of layers on each device
python examples/pipeline.py --schedule 1f1b              # fewer activations in memory
python examples/pipeline.py --ranks 0 --pipe 8           # every device of this machine
python examples/pipeline.py --picture pipelines.png      # what each device does, and when

A tick of the scan computes one chunk of layers on every device, and sends its result to the next
one. Sources: GPipe https://arxiv.org/abs/1811.06965, PipeDream-flush (1F1B)
https://arxiv.org/abs/2006.09503, interleaved stages https://arxiv.org/abs/2104.04473.
"""

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdp

WIDTH, HIDDEN, CLASSES, LAYERS = 16, 32, 10, 8
MAX_DIFFERENCE = 1e-5


def layer(x, p):
    return x + jnp.tanh(x @ p["up"]) @ p["down"], None


def chunk(weights, x):
    """Some consecutive layers, [layers, ...] each, of one micro-batch [rows, width]."""
    return lax.scan(layer, x, weights)[0]


def loss_of(head, x, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x @ head, labels).mean()


def gpipe(weights, micro_batches):
    """Return the results [micro-batches, rows, width] of all layers, on every device.

    Args:
      weights: of this device's chunks, [1, chunks, layers, ...]. Chunk c of device i has the
        layers after those of device i - 1 in chunk c. With one chunk this is GPipe.
      micro_batches: [micro-batches, rows, width], at least as many as devices.
    """
    weights = jax.tree.map(lambda x: x[0], weights)
    num_micro, num_chunks = len(micro_batches), len(weights["up"])
    num, i = lax.axis_size("pipe"), lax.axis_index("pipe")
    ring = [(k, (k + 1) % num) for k in range(num)]

    @jax.checkpoint  # the backward pass keeps the inputs of chunks alone
    def computed(weights, c, x):
        return chunk(jax.tree.map(lambda x: x[c], weights), x)

    def tick(carry, t):
        arrived, waiting = carry
        # From the last device: to be kept until the next chunk of the first one begins.
        waiting = lax.dynamic_update_index_in_dim(waiting, arrived, (t - num) % num_micro, 0)
        unit = jnp.clip(t - i, 0, num_chunks * num_micro - 1)
        c, m = unit // num_micro, unit % num_micro
        x = jnp.where(i > 0, arrived, jnp.where(c > 0, waiting[m], micro_batches[m]))
        y = computed(weights, c, x)
        return (lax.ppermute(y, "pipe", ring), waiting), y

    first = jnp.zeros_like(micro_batches[0]), jnp.zeros_like(micro_batches)
    first = jax.tree.map(lambda x: lax.pcast(x, "pipe", to="varying"), first)
    num_ticks = num_chunks * num_micro + num - 1
    _, results = lax.scan(tick, first, jnp.arange(num_ticks))
    results = results[-num_micro:]  # of the last chunk, if this is the last device
    return lax.psum(jnp.where(i == num - 1, results, 0), "pipe")


def loss_by_gpipe(params, batch, num_micro):
    specs = P("pipe"), P()
    piped = jax.shard_map(gpipe, axis_names={"pipe"}, in_specs=specs, out_specs=P())
    micro_batches = batch["x"].reshape(num_micro, -1, WIDTH)
    x = piped(params["layers"], micro_batches).reshape(-1, WIDTH)
    return loss_of(params["head"], x, batch["y"])


def one_forward_one_backward(weights, head, micro_batches, labels):
    """Return the loss and its gradients in `weights` and `head`.

    Device i computes micro-batch m forward in tick m + i, and backward in tick m + 2 (n - 1) - i.
    So it holds the inputs of at most 2 n - 1 micro-batches, where GPipe holds all of them. (With a
    tick for each direction, as in the paper, it would hold n.) In the first and last ticks no
    device has two things to do, so they take less time.
    """
    weights = jax.tree.map(lambda x: x[0, 0], weights)
    num_micro = len(micro_batches)
    num, i = lax.axis_size("pipe"), lax.axis_index("pipe")
    forward = [(k, k + 1) for k in range(num - 1)]
    backward = [(k + 1, k) for k in range(num - 1)]
    num_kept = 2 * num - 1

    def tick(carry, t):
        arrived, slope, inputs, loss, grads, head_grad = carry
        m, back = t - i, t - 2 * (num - 1) + i
        x = jnp.where(i > 0, arrived, micro_batches[jnp.clip(m, 0, num_micro - 1)])
        inputs = lax.dynamic_update_index_in_dim(inputs, x, m % num_kept, 0)
        runs = (m >= 0) & (m < num_micro)
        y = lax.cond(runs & (i < num - 1), lambda: chunk(weights, x), lambda: x)

        def from_loss():  # the last device goes back at once
            def result(weights, head, x):
                return loss_of(head, chunk(weights, x), labels[jnp.clip(m, 0, num_micro - 1)])

            value, found = jax.value_and_grad(result, (0, 1, 2))(weights, head, x)
            return value, *found

        def from_next():
            x = inputs[back % num_kept]
            by_weights, by_x = jax.vjp(chunk, weights, x)[1](slope)
            return jnp.float32(0), by_weights, jnp.zeros_like(head), by_x

        def idle():
            return jnp.float32(0), jax.tree.map(jnp.zeros_like, weights), jnp.zeros_like(head), x

        returns = (back >= 0) & (back < num_micro)
        value, *found, by_x = lax.cond(
            returns, lambda: lax.cond(i == num - 1, from_loss, from_next), idle
        )
        grads, head_grad = jax.tree.map(jnp.add, (grads, head_grad), tuple(found))
        arrived = lax.ppermute(y, "pipe", forward)
        slope = lax.ppermute(by_x, "pipe", backward)
        return (arrived, slope, inputs, loss + value, grads, head_grad), None

    x = jnp.zeros_like(micro_batches[0])
    first = x, x, jnp.zeros((num_kept, *x.shape)), jnp.float32(0)
    first = *first, jax.tree.map(jnp.zeros_like, weights), jnp.zeros_like(head)
    last, _ = lax.scan(tick, first, jnp.arange(num_micro + 2 * (num - 1)))
    _, _, _, loss, grads, head_grad = jax.tree.map(lambda x: x / num_micro, last)
    grads = jax.tree.map(lambda x: x[None, None], grads)
    return lax.psum(loss, "pipe"), grads, lax.psum(head_grad, "pipe")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def loss_by_1f1b(params, batch, num_micro):
    return _loss_and_gradient(params, batch, num_micro)[0]


def _loss_and_gradient(params, batch, num_micro):
    # check_vma=False: the gradients are written by hand, and JAX differentiates no collective.
    piped = jax.shard_map(
        one_forward_one_backward,
        axis_names={"pipe"},
        in_specs=(P("pipe"), P(), P(), P()),
        out_specs=(P(), P("pipe"), P()),
        check_vma=False,
    )
    x, y = (batch[name].reshape(num_micro, -1, *batch[name].shape[1:]) for name in ("x", "y"))
    loss, layers, head = piped(params["layers"], params["head"], x, y)
    return loss, {"layers": layers, "head": head}


def _backward(num_micro, grads, slope):
    return jax.tree.map(lambda x: slope * x, grads), None


loss_by_1f1b.defvjp(_loss_and_gradient, _backward)


def new_params(num_pipe, num_chunks):
    """`layers` are [devices, chunks, layers of a chunk, ...], in the order of the schedule."""
    draw = np.random.default_rng(0).normal

    def stacked(*shape):
        x = (draw(size=(LAYERS, *shape)) / np.sqrt(shape[0])).astype("f")
        return x.reshape(num_chunks, num_pipe, -1, *shape).swapaxes(0, 1)

    layers = {"up": stacked(WIDTH, HIDDEN), "down": stacked(HIDDEN, WIDTH)}
    return {"layers": layers, "head": draw(size=(WIDTH, CLASSES)).astype("f") / 4}


def batch_of(num_rows, seed):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(num_rows, WIDTH)).astype("f")
    return {"x": x, "y": np.argmax(x[:, :CLASSES], axis=1)}


def worked(schedule, num_ticks, num_pipe, num_units):
    """What devices do in each tick, [ticks, devices]: 1 for forward, 2 more for backward.

    Without 1F1B the backward pass is another scan, of the same ticks in the opposite order.
    """
    tick, device = np.ogrid[:num_ticks, :num_pipe]
    forward = tick - device
    found = ((forward >= 0) & (forward < num_units)).astype(int)
    if schedule == "1f1b":
        backward = tick - 2 * (num_pipe - 1) + device
        found += 2 * ((backward >= 0) & (backward < num_units))
    return found


def bubble_of(work):
    """The share of time in which devices wait, since a tick ends with its last device."""
    return 1 - work.sum() / (work.shape[1] * work.max(1).sum())


def draw(path, num_pipe, num_micro):
    """Draw what devices do over time in the three schedules."""
    from matplotlib import pyplot as plt

    figure, rows = plt.subplots(3, figsize=(9, 5), sharex=True, layout="constrained")
    shades = {1: "tab:blue", 2: "tab:orange", 3: "tab:green"}
    for axes, schedule in zip(rows, ("gpipe", "interleaved", "1f1b"), strict=True):
        num_chunks = 2 if schedule == "interleaved" else 1
        num_units = num_chunks * num_micro
        num_ticks = num_units + (num_pipe - 1) * (2 if schedule == "1f1b" else 1)
        work = worked(schedule, num_ticks, num_pipe, num_units)
        if schedule != "1f1b":
            work = np.concatenate([work, 2 * work[::-1]])
        begins = (np.cumsum(work.max(1)) - work.max(1)) / num_chunks
        for (tick, device), kind in np.ndenumerate(work):
            if kind:
                bar = [(begins[tick], kind / num_chunks)], (device - 0.4, 0.8)
                axes.broken_barh(*bar, color=shades[kind], edgecolor="white")
        axes.set(title=f"{schedule}: {bubble_of(work):.0%} bubble", ylabel="device")
        axes.set(yticks=range(num_pipe), xlim=(0, None))
        axes.invert_yaxis()
    bars = [plt.Rectangle((0, 0), 1, 1, color=shade) for shade in shades.values()]
    figure.legend(bars, ["forward", "backward", "both"], loc="outside lower center", ncols=3)
    axes.set_xlabel("time, in forward passes of a device's layers")
    figure.savefig(path, dpi=80)


def print_bubble(step, state, batch, args, num_units):
    """Print how long devices wait for others, from the ticks of the compiled program."""
    buckets = jdp.explain(step, state, batch).buckets
    (num_ticks,) = {x.runs for x in buckets if x.kind == "collective-permute"}
    work = worked(args.schedule, num_ticks, args.pipe, num_units)
    formula = (args.pipe - 1) / (num_units + args.pipe - 1)
    print(
        f"{args.schedule}: {num_ticks} ticks in the compiled program, {bubble_of(work):.1%} bubble"
    )
    print(f"  by the formula {formula:.1%}")


def alone(params, args, tx):
    """Train on one device, layer after layer."""
    kept = tx.init(params)

    @jax.jit
    def step(params, kept, batch):
        def loss(params):
            in_order = jax.tree.map(
                lambda x: x.swapaxes(0, 1).reshape(LAYERS, *x.shape[3:]), params["layers"]
            )
            return loss_of(params["head"], chunk(in_order, batch["x"]), batch["y"])

        updates, kept_ = tx.update(jax.grad(loss)(params), kept)
        return optax.apply_updates(params, updates), kept_

    for i in range(args.steps):
        params, kept = step(params, kept, batch_of(args.rows, seed=i))
    return params


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8, help="virtual CPU devices; 0: all devices")
    parser.add_argument("--pipe", type=int, default=4, help="devices along the axis pipe")
    parser.add_argument("--schedule", choices=["gpipe", "interleaved", "1f1b"], default="gpipe")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--picture", metavar="PNG", help="draw the schedules, and end")
    args = parser.parse_args()

    if args.picture:
        return draw(args.picture, args.pipe, args.micro_batches)
    if args.micro_batches < args.pipe:
        sys.exit("write at least as many --micro-batches as devices along --pipe")
    mesh = jdp.init(axes={"pipe": args.pipe}, cpu_ranks=args.ranks or None, progress=False)
    num_chunks = 2 if args.schedule == "interleaved" else 1
    by_schedule = loss_by_1f1b if args.schedule == "1f1b" else loss_by_gpipe

    @jdp.train_step
    def step(state, batch):
        def loss_fn(params, batch):
            return by_schedule(params, batch, args.micro_batches)

        loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    params, tx = new_params(args.pipe, num_chunks), optax.sgd(0.1, momentum=0.9)
    put = functools.partial(jax.device_put, device=NamedSharding(mesh, P("pipe")))
    placed = {"layers": jax.tree.map(put, params["layers"]), "head": params["head"]}
    state = jdp.TrainState.create(placed, jdp.replicated(tx))
    print(f"mesh {dict(mesh.shape)}")
    if args.pipe > 1:
        print_bubble(step, state, batch_of(args.rows, 0), args, num_chunks * args.micro_batches)
    for i in range(args.steps):
        state, metrics = step(state, batch_of(args.rows, seed=i))
        if i % max(1, args.steps // 5) == 0:
            print(f"  step {i:3}: loss {metrics['loss']:.4f}")

    pairs = zip(*map(jax.tree.leaves, (state.params, alone(params, args, tx))), strict=True)
    largest = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
    print(f"largest difference from one device after {args.steps} steps: {largest:.1e}")
    if largest > MAX_DIFFERENCE:
        sys.exit("the parameters differ from those of one device")


if __name__ == "__main__":
    main()
