"""Average gradients in your own loop: with `jax.shard_map`, typed or not, or `jax.pmap`.

python examples/own_loop.py              # 4 virtual CPU devices
python examples/own_loop.py --ranks 0    # every device of this machine, such as its GPUs
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jdp

NUM_ROWS = 2520  # divides by any number of ranks up to 10
MAX_DIFFERENCE = 1e-5

optimizer = optax.sgd(0.1, momentum=0.9)


def loss_fn(params, batch):
    predicted = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return ((predicted - batch["y"]) ** 2).mean()


def step(state, batch):  # runs on one rank, with its rows; the state is the same on every rank
    params, opt_state = state
    # jax.value_and_grad also works, except in a typed shard_map, where JAX sums its gradients.
    loss, grads = jdp.value_and_grad(loss_fn)(params, batch)
    grads = jdp.sync_gradients(grads)  # from the gradients of this rank's rows to those of all rows
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), jdp.mean_over_ranks(loss)


def shard_mapped(mesh, check_vma):
    specs = dict(in_specs=(P(), P("data")), out_specs=P())
    return jax.jit(jax.shard_map(step, mesh=mesh, check_vma=check_vma, **specs))


def pmapped(mesh):
    mapped = jax.pmap(step, axis_name="data", in_axes=(None, 0), out_axes=None)

    def split(x):  # [rows, ...] -> [ranks, rows of one, ...]
        return x.reshape(mesh.size, -1, *x.shape[1:])

    return lambda state, batch: mapped(state, jax.tree.map(split, batch))


def new_state():
    params = {"w": jnp.zeros((8, 1)), "b": jnp.zeros(1)}
    return params, optimizer.init(params)


def fit(step, batch, num_steps):
    state, loss = new_state(), jnp.inf
    for i in range(num_steps):
        state, loss = step(state, batch)
        if i % 16 == 0:  # JAX before 0.11 hangs with more than some 30 steps ahead of CPU devices
            jax.block_until_ready(loss)
    return jax.device_get(state[0]), float(loss)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="virtual CPU devices; 0: all devices")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "float32")  # not the TensorFloat-32 of GPUs
    mesh = jdp.init(cpu_ranks=args.ranks or None)

    random = np.random.default_rng(0)
    x, w = random.normal(size=(NUM_ROWS, 8)), random.normal(size=(8, 1))
    batch = jax.tree.map(jnp.float32, {"x": x, "y": np.tanh(x @ w + 0.5)})
    expected, loss = fit(jax.jit(step), batch, args.steps)  # no axis is bound: this is one rank
    print(f"{'ranks: 1':36} loss {loss:.6f}")
    for name, parallel in {
        "shard_map": shard_mapped(mesh, check_vma=True),
        "shard_map(check_vma=False)": shard_mapped(mesh, check_vma=False),
        "pmap": pmapped(mesh),
    }.items():
        jdp.uniformity(parallel, new_state(), batch)  # refuses a step in which ranks diverge
        params, loss = fit(parallel, batch, args.steps)
        difference = np.max([np.abs(params[key] - expected[key]).max() for key in params])
        name = f"ranks: {mesh.size}, {name}"
        print(f"{name:36} loss {loss:.6f}, largest difference of a parameter: {difference:.1e}")
        if not difference <= MAX_DIFFERENCE:
            sys.exit(f"expected at most {MAX_DIFFERENCE:.0e}")


if __name__ == "__main__":
    main()
