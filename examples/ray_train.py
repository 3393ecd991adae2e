"""Train in processes that Ray starts and replaces: Ray Train's `JaxTrainer` around jdp's loop.

python examples/ray_train.py --storage run        # Ray starts on this machine, and ends with it
RAY_ADDRESS=auto python examples/ray_train.py --storage /shared/run --workers 8   # in a cluster

Kill a process, with `kill -9` and the number that it prints: Ray starts all of them again, and they
continue from the last checkpoint. All hosts must see the folder `--storage`.
"""

import argparse
import logging
import os
import socket
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.jax import JaxTrainer

import jdp

log = logging.getLogger("ray_train")  # Ray shows a print twice
BATCH_SIZE = 25  # over all ranks; a number that does not divide by them is padded, and masked
REPORT_EVERY = 500  # a report waits until Ray asks for it, which it does every 2 s


def new_rows():
    x = np.random.default_rng(0).normal(size=(4096, 16)).astype("float32")
    return {"x": x, "y": np.sin(x.sum(1))}


def new_params():
    normal = np.random.default_rng(1).normal
    return {"w": np.float32(normal(0, 0.2, (16, 64))), "v": np.float32(normal(0, 0.2, 64))}


def loss_fn(params, batch):
    predicted = jnp.tanh(batch["x"] @ params["w"]) @ params["v"]
    return jnp.mean((predicted - batch["y"]) ** 2, where=batch["mask"])


@jdp.train_step(weight=lambda batch: batch["mask"].sum())
def step(state, batch):
    loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


def join():
    """Connect the processes that Ray started, and return the mesh of all their devices."""
    logging.getLogger("absl").setLevel(logging.WARNING)  # Ray shows what any library logs
    context = ray.train.get_context()
    # Ray connects JAX's processes on GPUs and TPUs. On CPUs it says only how many there are.
    if not jax.distributed.is_initialized():
        with socket.socket() as free:
            free.bind(("", 0))
            own = f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"
        os.environ["JAX_COORDINATOR_ADDRESS"] = broadcast_from_rank_zero(own)
        os.environ["JAX_NUM_PROCESSES"] = str(context.get_world_size())
        os.environ["JAX_PROCESS_ID"] = str(context.get_world_rank())
    return jdp.init()


def train_loop(config):  # in each process; in new ones after a death
    mesh = join()
    state = jdp.TrainState.create(new_params(), jdp.replicated(optax.sgd(0.05)))
    batches = jdp.batches(new_rows(), BATCH_SIZE, num_steps=config["steps"], mask=True)
    # A process that Ray starts does not know whether it is the first: it always resumes.
    with jdp.Checkpointer(
        config["checkpoints"], resume=True, save_every=config["save_every"]
    ) as checkpointer:
        state = checkpointer.restore(state, batches)
        who = f"process {jax.process_index()}, pid {os.getpid()}"
        node = ray.get_runtime_context().get_node_id()
        log.info(f"{who} on node {node} begins after step {checkpointer.steps}")
        for batch in batches:
            state, metrics = step(state, batch)
            checkpointer.step(state, batches)
            if checkpointer.steps % REPORT_EVERY == 0:  # in every process: Ray waits for all
                metrics = {"loss": float(metrics["loss"]), "ranks": mesh.size}
                ray.train.report({"step": checkpointer.steps, **metrics})


# Ray would start the processes anew, and again, if it was they that found a wrong number.
def at_least_1(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def new_parser(doc):
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--storage", default="ray_train", help="folder that all hosts see")
    add("--workers", type=at_least_1, default=2, help="processes")
    add("--steps", type=at_least_1, default=3000, help="optimizer steps of the whole run")
    add("--save-every", type=at_least_1, default=100, help="steps between two checkpoints")
    add("--max-failures", type=int, default=3, help="how often Ray starts the processes again")
    add("--resume", action="store_true", help="continue the run in this folder")
    return parser


def fit(train_loop, args):
    """Call `train_loop` with the options in each process."""
    storage = Path(args.storage).resolve()
    checkpoints = storage / "checkpoints"
    if checkpoints.exists() and not args.resume:
        sys.exit(f"{checkpoints} holds a run: add --resume to continue it, or name another folder.")
    trainer = JaxTrainer(
        train_loop,
        train_loop_config={**vars(args), "checkpoints": str(checkpoints)},
        # On GPUs: use_gpu=True, which gives each process one of them.
        scaling_config=ScalingConfig(num_workers=args.workers, placement_strategy="SPREAD"),
        run_config=RunConfig(
            name="ray",
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=args.max_failures),
        ),
    )
    trainer.fit()
    print(f"{args.steps} steps are saved in {checkpoints}")


if __name__ == "__main__":
    fit(train_loop, new_parser(__doc__).parse_args())
