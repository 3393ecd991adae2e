"""A mixture of experts inside data parallelism: experts split over "expert", tokens sent to them.

python examples/mixture_of_experts.py                        # 2 x 4 virtual CPU devices, 8 experts
python examples/mixture_of_experts.py --room 2               # less memory, checked in each step
python examples/mixture_of_experts.py --capacity 1           # drops tokens of crowded experts
python examples/mixture_of_experts.py --ranks 0 --expert 8   # every device of this machine

Each token goes to its two best experts (Lepikhin et al. 2020, GShard,
https://arxiv.org/abs/2006.16668), and no token is dropped (Gale et al. 2022, MegaBlocks,
https://arxiv.org/abs/2211.15841). The load is balanced by a loss of the means over all tokens of
the batch (Fedus et al. 2021, https://arxiv.org/abs/2101.03961).
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

WIDTH, HIDDEN, EXPERTS, BEST, CLASSES = 16, 32, 8, 2, 6
BALANCE = 0.01  # weight of the loss that balances the load
MAX_DIFFERENCE = 1e-5

SPECS = {"gate": P(), "up": P("expert"), "down": P("expert"), "head": P()}


def choose(gate, x):
    """Choose experts for tokens [tokens, width].

    Returns:
      chosen, weights: [tokens, best], the experts of a token, and the weights of their results.
      load: `(chosen, probability)`, [experts] each, shares of all tokens.
    """
    probabilities = jax.nn.softmax(x @ gate)
    weights, chosen = lax.top_k(probabilities, BEST)
    first = jax.nn.one_hot(chosen[:, 0], EXPERTS, dtype=x.dtype)
    weights = weights / weights.sum(-1, keepdims=True)
    return chosen, weights, (first.mean(0), probabilities.mean(0))


def dropless(params, x, chosen, room):
    """The results [tokens, best, width] of the chosen experts.

    A device has memory for `room` times its equal share of the tokens; 0: for all of them. If it
    gets more, the step fails.
    """
    num = lax.axis_size("expert")
    in_order = jnp.argsort(chosen.reshape(-1))  # by expert
    counts = jnp.bincount(chosen.reshape(-1), length=EXPERTS).reshape(num, -1)
    max_rows = int(min(room or num, num) * chosen.size)
    sent = x[in_order // BEST]
    # To the devices of the experts, where they arrive by expert, too.
    arrived, sizes, back = jdp.ragged_all_to_all(
        sent, counts, max_rows=max_rows, axis_name="expert"
    )
    hidden = jax.nn.gelu(lax.ragged_dot(arrived, params["up"], sizes.sum(1)))
    computed = lax.ragged_dot(hidden, params["down"], sizes.sum(1))
    results = jnp.zeros_like(sent).at[in_order].set(back(computed))
    return results.reshape(*chosen.shape, -1), 0.0


def with_capacity(params, x, chosen, factor):
    """The same, with 0 for dropped tokens, and their share.

    An expert has as many places for each device. Better choices come first, then earlier tokens.
    """
    capacity = max(1, int(factor * chosen.size / EXPERTS))
    is_chosen = jax.nn.one_hot(chosen, EXPERTS, dtype=int)  # [tokens, best, experts]
    in_order = is_chosen.swapaxes(0, 1).reshape(-1, EXPERTS)
    before = (jnp.cumsum(in_order, axis=0) - in_order) * in_order
    place = before.sum(-1).reshape(BEST, -1).T
    is_dropped = place >= capacity
    slots = jnp.where(is_dropped, EXPERTS * capacity, chosen * capacity + place)
    places = jnp.zeros((EXPERTS * capacity + 1, WIDTH))  # the last one is for dropped tokens
    sent = places.at[slots].set(x[:, None])[:-1].reshape(EXPERTS, capacity, WIDTH)
    # To the devices of the experts: [experts of this device, places of all devices, width].
    arrived = lax.all_to_all(sent, "expert", 0, 1, tiled=True)
    hidden = jax.nn.gelu(jnp.einsum("etw,ewh->eth", arrived, params["up"]))
    computed = jnp.einsum("eth,ehw->etw", hidden, params["down"])
    back = lax.all_to_all(computed, "expert", 1, 0, tiled=True).reshape(-1, WIDTH)
    return jnp.concatenate([back, jnp.zeros((1, WIDTH))])[slots], is_dropped.mean()


def parts_on_device(params, batch, capacity, room):
    """The loss without the balance, the load and the share of dropped tokens, of this device."""
    x = batch["x"]
    chosen, weights, load = choose(params["gate"], x)
    if capacity:
        back, dropped = with_capacity(params, x, chosen, capacity)
    else:
        back, dropped = dropless(params, x, chosen, room)
    logits = (x + jnp.einsum("tbw,tb->tw", back, weights)) @ params["head"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, load, dropped


def loss_fn(capacity, room, params, batch):
    # jdp splits the rows over "data"; this function splits them again, over "expert".
    @functools.partial(
        jax.shard_map, axis_names={"expert"}, in_specs=(SPECS, P("expert")), out_specs=P()
    )
    def parts(params, batch):
        return lax.pmean(parts_on_device(params, batch, capacity, room), "expert")

    loss, load, dropped = parts(params, batch)
    # The balance of one device is a product of two means over all ranks. The mean of each rank's
    # product is equal to it if one factor is already a mean. `chosen` has no gradient to send back.
    chosen, probability = load
    balance = balance_of(jdp.mean_over_ranks(chosen), probability)
    return loss + BALANCE * balance, {"loss": loss, "balance": balance, "dropped": dropped}


def balance_of(chosen, probability):
    return EXPERTS * jnp.sum(chosen * probability)


def new_params():
    draw = np.random.default_rng(0).normal
    return {
        "gate": draw(size=(WIDTH, EXPERTS)).astype("f") / 4,
        "up": draw(size=(EXPERTS, WIDTH, HIDDEN)).astype("f") / 4,
        "down": draw(size=(EXPERTS, HIDDEN, WIDTH)).astype("f") / 6,
        "head": draw(size=(WIDTH, CLASSES)).astype("f") / 4,
    }


def batch_of(num_rows, seed):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(num_rows, WIDTH)).astype("f")
    return {"x": x, "y": (np.abs(x[:, : CLASSES - 1]).argmax(1) + (x[:, 0] > 0)).astype("i")}


def train(args, **axes):
    mesh = jdp.init(**axes, progress=False)

    @jdp.train_step
    def step(state, batch):
        loss = functools.partial(loss_fn, args.capacity, args.room)
        (_, metrics), grads = jdp.value_and_grad(loss, has_aux=True)(state.params, batch)
        return state.apply_gradients(grads), metrics

    params = {k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in new_params().items()}
    state = jdp.TrainState.create(params, jdp.replicated(optax.sgd(0.2, momentum=0.9)))
    reported = []
    for i in range(args.steps):
        state, metrics = step(state, batch_of(args.rows, seed=i))
        reported.append(metrics)
    return mesh, state, jax.device_get(reported)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8, help="virtual CPU devices; 0: all devices")
    parser.add_argument("--expert", type=int, default=4, help="devices along the axis expert")
    parser.add_argument(
        "--capacity", type=float, default=0.0, help="of an expert, by its equal share; 0: dropless"
    )
    parser.add_argument(
        "--room", type=float, default=0.0, help="of a dropless device, by its equal share; 0: all"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=64)
    args = parser.parse_args()

    axes = {"axes": {"expert": args.expert}, "cpu_ranks": args.ranks or None}
    mesh, state, reported = train(args, **axes)
    print(f"mesh {dict(mesh.shape)}, {EXPERTS // args.expert} of {EXPERTS} experts on each device")
    for i in range(0, args.steps, max(1, args.steps // 5)):
        print(f"  step {i:3}: " + ", ".join(f"{k} {x:.4f}" for k, x in reported[i].items()))
    if any(metrics["dropped"] for metrics in reported):
        return  # which tokens find no place depends on how they are split over devices
    _, alone, _ = train(args, axes={"expert": 1}, devices=jax.devices()[:1])
    pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(alone.params), strict=True)
    largest = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
    print(f"largest difference from one device after {args.steps} steps: {largest:.1e}")
    if largest > MAX_DIFFERENCE:
        sys.exit("the parameters differ from those of one device")


if __name__ == "__main__":
    main()
