"""A small training run that has accidents on demand: `victim.py FOLDER NUM_STEPS` under `jdp run`.

FOLDER/orders.json says how far the run may go, {"leash": 40, "faults": [...]}, and which faults
happen on the way, each a `Fault` as a list. At the end of its leash a process waits for new orders,
though it always makes one step: the launcher counts on that.
Each process writes to FOLDER/rows.PID which rows it is about to train on, and leaves its copy of
the final state in FOLDER/final.RANK.npz.
"""

import ctypes
import json
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import jdp
from jdp.checkpoint.snapshot import CopyOut
from jdp.tools.bench.injector import LineLog

# 10 rows do not divide by 3 ranks, and not into 64: batches are padded, and epochs end inside them.
NUM_ROWS = 64
BATCH_SIZE = 10
COMMIT_EVERY = 4
SAVE_EVERY = 20
TX = jdp.replicated(optax.sgd(0.05, momentum=0.9))

LAUNCH = "JDP_TEST_LAUNCH"  # which of the launchers that the test started one after the other


class Fault(NamedTuple):
    """Something that happens to one process, once.

    Attributes:
      number: of what happens at once, perhaps to several processes; other numbers before and after.
      kind: a name in FAULTS.
      rank: whose it is.
      step: before which it happens; None: as soon as the process has joined a generation.
    """

    number: int
    kind: str
    rank: int
    step: int | None


def main() -> None:
    folder, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, 8)).astype(np.float32)
    rows = {"x": x, "y": np.sin(x.sum(1)), "row": np.arange(NUM_ROWS, dtype=np.int32)}
    params = {
        "w": rng.normal(size=(8, 32), scale=0.3).astype(np.float32),
        "v": rng.normal(size=32, scale=0.3).astype(np.float32),
    }
    jdp.init()
    orders = Orders(folder)
    orders.carry_out(None)
    log = LineLog(
        folder / f"rows.{os.getpid()}",
        launch=int(os.environ.get(LAUNCH, "0")),
        generation=int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        rank=jax.process_index(),
    )
    batches = jdp.batches(rows, BATCH_SIZE, num_steps=num_steps, mask=True)
    checkpoints = folder / "checkpoints"
    with jdp.Checkpointer(checkpoints, commit_every=COMMIT_EVERY, save_every=SAVE_EVERY) as ckpt:
        state = ckpt.restore(lambda: jdp.TrainState.create(params, TX), batches)
        log.write(restored=ckpt.steps)
        orders.least = ckpt.steps + 1
        for batch in batches:
            step = ckpt.steps + 1
            orders.carry_out(step)
            log.write(step=step, rows=rows_of(batch))
            state, _ = train(state, batch)
            ckpt.step(state, batches)
    leave(folder, state)


@jdp.train_step(weight=lambda batch: batch["mask"].sum())
def train(state, batch):
    def loss_fn(params, batch):
        outputs = jnp.tanh(batch["x"] @ params["w"]) @ params["v"]
        return ((outputs - batch["y"]) ** 2).mean(where=batch["mask"])

    loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


def leave(folder: Path, state: jdp.TrainState) -> None:
    """Write this process's own copy of each leaf, under its path."""
    own = {
        jax.tree_util.keystr(path): np.asarray(leaf.addressable_data(0))
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    # Under another name first: a file that exists is complete.
    part = folder / f"part.{jax.process_index()}.npz"
    np.savez(part, **own)
    os.rename(part, folder / f"final.{jax.process_index()}.npz")


# Those that count, of this process.
def rows_of(batch: dict[str, jax.Array]) -> list[int]:
    row, mask = (
        np.concatenate([shard.data for shard in batch[name].addressable_shards])
        for name in ("row", "mask")
    )
    return row[mask].tolist()


class Orders:
    """What the test wants.

    Attributes:
      least: a step that is made whatever the leash is.
    """

    def __init__(self, folder: Path) -> None:
        self.least = 0
        self._folder = folder
        self._rank = jax.process_index()
        self._read()

    def carry_out(self, step: int | None) -> None:
        """Have what is to happen before this step."""
        if step is not None and step > max(self._leash, self.least):
            while step > self._leash:
                # Again and again: one that is stopped here is missed.
                with jdp.phase("waiting for orders", timeout_s=2.0):
                    time.sleep(0.005)
                self._read()
        for fault in self._faults:
            if (fault.step, fault.rank) == (step, self._rank) and self._is_due(fault):
                FAULTS[fault.kind](self._folder)

    def _read(self) -> None:
        orders = json.loads((self._folder / "orders.json").read_text())
        self._leash = math.inf if orders["leash"] is None else orders["leash"]
        self._faults = [Fault(*fault) for fault in orders["faults"]]

    # Not in a later generation, which makes that step again. A link is made with its text.
    def _is_due(self, fault: Fault) -> bool:
        happened_in = self._folder / happened(fault.number)
        generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
        try:
            happened_in.symlink_to(generation)
        except FileExistsError:
            return os.readlink(happened_in) == generation
        return True


def happened(number: int) -> str:
    """Name the file that tells in which generation a fault has happened."""
    return f"fault {number} happened in"


def kill(_: Any = None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(_: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def be_preempted(_: Path) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail(_: Path) -> None:
    raise KeyError("a bug of the author")


def run_out_of_memory(_: Path) -> None:
    np.zeros(1 << 60, np.uint8)


def exit_at_once(_: Path) -> None:
    os._exit(0)


def exit_early(_: Path) -> None:
    sys.exit(0)


def hang(_: Path) -> None:
    while True:
        time.sleep(1.0)


# A mutex that this very thread holds. Not a sleep, which a signal would end.
def hang_with_gil(_: Path) -> None:
    mutex = ctypes.create_string_buffer(64)
    for _ in (1, 2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


# One that the others do not take part in.
def hang_in_collective(_: Path) -> None:
    multihost_utils.sync_global_devices("alone")


def be_slow(_: Path) -> None:
    time.sleep(0.9)


# When Orbax has begun to write.
def kill_in_checkpoint(folder: Path) -> None:
    def wait_and_kill() -> None:
        while not any(folder.glob("checkpoints/*.jdp-part/*")):
            time.sleep(0.0005)
        kill()

    threading.Thread(target=wait_and_kill, daemon=True).start()


# In the middle of the record that is struck out, of the values, or of the new record.
def kill_in_commit(n: int) -> None:
    write, calls = os.pwrite, []

    def half(file: int, data: bytes, start: int) -> int:
        calls.append(start)
        if len(calls) == n:
            write(file, data[: len(data) // 2], start)
            kill()
        return write(file, data, start)

    def half_of_values(route: CopyOut, arrays: Any, target: np.ndarray) -> None:
        target[: len(target) // 2] = 0
        kill()

    if n == 2:
        CopyOut.begin_copy = half_of_values
    else:
        os.pwrite = half


FAULTS = {
    "kill": kill,
    "stop": stop,
    "preempt": be_preempted,
    "fail": fail,
    "out of memory": run_out_of_memory,
    "exit at once": exit_at_once,
    "exit early": exit_early,
    "hang": hang,
    "hang with the GIL": hang_with_gil,
    "hang in a collective": hang_in_collective,
    "slow": be_slow,
    "kill in a checkpoint": kill_in_checkpoint,
    "kill in a commit 1": lambda _: kill_in_commit(1),
    "kill in a commit 2": lambda _: kill_in_commit(2),
    "kill in a commit 3": lambda _: kill_in_commit(3),
}


if __name__ == "__main__":
    main()
