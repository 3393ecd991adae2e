"""The training run into which `jdp bench faults` injects faults: `faulty_run FOLDER`.

FOLDER/run.json holds a `TrainingPlan`; FOLDER/stop, written during the run, the last step.
Gradients are eighths of whole numbers, so the final state is exact: w0 minus the sum of the mean
gradients, where each row counts as often as it was read. Each process writes its steps to
FOLDER/steps.PID, and the final number of wrong elements to FOLDER/final.RANK.json.
"""

import functools
import hashlib
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdp.checkpoint.checkpointer import Checkpointer
from jdp.data.batches import batches
from jdp.data.sampler import Sampler
from jdp.distributed.mesh import init
from jdp.reduction.micro_batches import value_and_grad
from jdp.reduction.optimizer import replicated
from jdp.tools.bench.injector import LineLog, write_whole
from jdp.training.state import TrainState
from jdp.training.step import train_step
from jdp.worker.launcher_client import current

NUM_ROWS, BATCH_SIZE, WIDTH = 64, 8, 256
STOP = "stop"
MOST_STEPS = 1_000_000  # float32 holds the parameters exactly for so long
# JAX's events for tracing with lowering, and reading its cache.
_TRACING = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration")
_LOADING = ("cache_retrieval_time_sec",)


class TrainingPlan(NamedTuple):
    """The training plan; a step takes at least `step_s`."""

    state_bytes: int
    step_s: float
    commit_every: int = 10

    @property
    def shape(self) -> tuple[int, int]:
        """The float32 parameters' shape."""
        return max(1, self.state_bytes // 4 // WIDTH), WIDTH


def data() -> np.ndarray:
    """Return the rows, `[NUM_ROWS, WIDTH]`, small whole numbers."""
    rows = np.random.default_rng(0).integers(-3, 4, (NUM_ROWS, WIDTH))
    return rows.astype(np.float32)


def initial(plan: TrainingPlan, on: Any = np) -> Any:
    """Return the first parameters, whole numbers, made by NumPy or by `jax.numpy`."""
    num_rows, width = plan.shape
    first = on.arange(num_rows, dtype=on.int32) % 13 * width
    return ((first[:, None] + on.arange(width, dtype=on.int32)) % 13).astype(on.float32)


def first_state(plan: TrainingPlan) -> TrainState:
    """Return the state of step 0; a run that recovers only traces it."""
    params = {"w": jax.jit(initial, static_argnums=(0, 1))(plan, jnp)}
    return TrainState.create(params, replicated(optax.sgd(1.0)))


def final(plan: TrainingPlan, num_steps: int) -> np.ndarray:
    """Return exact parameters: a step subtracts factor_i * (mean of batch's rows) from row i."""
    x = data()
    epochs, rest = divmod(num_steps * BATCH_SIZE, NUM_ROWS)
    total = epochs * x.sum(0, dtype=np.float64)
    if rest:
        sampler = Sampler(NUM_ROWS, BATCH_SIZE)
        total += x[sampler.indices(epochs * NUM_ROWS, rest)].sum(0, dtype=np.float64)
    change = factors(plan)[:, None] * (total / BATCH_SIZE)[None, :]
    return (initial(plan) - change).astype(np.float32)


def factors(plan: TrainingPlan) -> np.ndarray:
    """Return each parameter row's factor, 1 to 3."""
    return (np.arange(plan.shape[0]) % 3 + 1).astype(np.float32)


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """The gradient is the outer product of the factors and the mean row."""
    w = params["w"]
    factor = (jnp.arange(w.shape[0]) % 3 + 1).astype(w.dtype)
    return jnp.mean(batch["x"] @ (factor @ w))


@train_step
def step(state: TrainState, batch: Any) -> Any:
    """Train on a batch."""
    loss, grads = value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


def main() -> None:
    """Train, and compare the final state."""
    folder = Path(sys.argv[1])
    plan = TrainingPlan(**json.loads((folder / "run.json").read_text()))
    rows = {"x": data()}
    spent: dict[str, float] = defaultdict(float)
    init()

    def record(event: str, duration_secs: float, **_: Any) -> None:
        spent[event.rpartition("/")[2]] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(record)
    launcher = current()
    generation = launcher.assignment.generation if launcher and launcher.assignment else 0
    log = LineLog(folder / f"steps.{os.getpid()}", rank=jax.process_index(), generation=generation)
    data_of_run = batches(rows, BATCH_SIZE, num_steps=MOST_STEPS)
    checkpoints = folder / "checkpoints"
    with Checkpointer(checkpoints, commit_every=plan.commit_every, save_every=10**9) as kept:
        state = kept.restore(functools.partial(first_state, plan), data_of_run)
        spent.clear()
        for batch in data_of_run:
            begin = time.time()
            state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
            time.sleep(max(0.0, plan.step_s - (time.time() - begin)))
            log.write(
                step=kept.steps + 1,
                begin=begin,
                end=time.time(),
                trace_s=sum(spent[name] for name in _TRACING),
                load_s=sum(spent[name] for name in _LOADING),
            )
            spent.clear()
            kept.step(state, data_of_run)
            if kept.steps == _last_step(folder):
                break
        num_steps = kept.steps
    _compare(folder, final(plan, num_steps), np.asarray(state.params["w"].addressable_data(0)))


def _last_step(folder: Path) -> int | None:
    path = folder / STOP
    return int(path.read_text()) if path.exists() else None


def _compare(folder: Path, right: np.ndarray, found: np.ndarray) -> None:
    wrong = int(np.count_nonzero(found.view(np.uint32) != right.view(np.uint32)))
    digest = hashlib.sha256(np.ascontiguousarray(found).tobytes()).hexdigest()[:16]
    rank = jax.process_index()
    told = json.dumps({"rank": rank, "wrong": wrong, "digest": digest})
    write_whole(folder / f"final.{rank}.json", told)


if __name__ == "__main__":
    main()
