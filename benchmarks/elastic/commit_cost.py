"""Measures the cost of commits per step, and the time to restore a commit.

    python -m benchmarks.elastic.commit_cost           in ten minutes on 2 cores
    python -m benchmarks.elastic.commit_cost --quick   tiny rounds, to see that it works

On a GPU set XLA_FLAGS=--xla_gpu_deterministic_ops=true, since the bits of two runs are compared.
Prints its tables and writes them to benchmarks/results/, those of a quick run to out/benchmarks/.
"""

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jdp
from benchmarks.harness import exact, models, report, timing
from benchmarks.harness.models import Problem
from benchmarks.harness.report import Section
from jdp.worker import launcher_client, messages
from jdp.worker.progress_board import Board

COMMIT_EVERY = 10
GOAL = 1.02
MIB = 1 << 20
_kept_open: list[socket.socket] = []


MODELS = {
    "cpu": (
        functools.partial(models.mlp, width=512, num_layers=4, num_rows=512),
        functools.partial(models.transformer, dim=128, num_layers=4, num_rows=32, length=32),
        functools.partial(models.mlp, width=1024, num_layers=6, num_rows=1024),
    ),
    "gpu": (
        functools.partial(models.mlp, width=2048, num_layers=4, num_rows=16384),
        functools.partial(models.transformer, dim=1024, num_layers=4, num_rows=16, length=512),
    ),
}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--model", type=int, help="measure only this model, in this process")
    parser.add_argument("--budget-s", type=float, default=15.0, help="seconds for each measurement")
    parser.add_argument(
        "--min-rounds",
        type=int,
        default=5,
        help="minimum number of rounds, even if they exceed the budget",
    )
    args = parser.parse_args()
    # Several processes use the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    launched()
    jax.config.update("jax_num_cpu_devices", 4)
    mesh = jdp.init(devices=jax.devices())
    if args.model is not None:
        print(json.dumps(measure(args.model, budget_s=args.budget_s, min_rounds=args.min_rounds)))
        return
    sections = [
        step_cost(num_processes=1, budget_s=1.0, min_rounds=1)
        if args.quick
        else step_cost(num_processes=5, budget_s=args.budget_s, min_rounds=args.min_rounds),
        restore_time(mesh, rounds=2 if args.quick else 11),
    ]
    report.publish("commit_cost", sections, quick=args.quick)


def launched() -> None:
    """Make this process one that `jdp run` started, with a commit memory of its own."""
    ours, theirs = socket.socketpair()
    fds = {"socket": theirs.detach(), "board": Board.create(1).fd, "commit": memory_file()}
    os.environ |= launcher_client.invitation(**fds, slot=0)
    assignment = launcher_client.Assignment(0, 0, 1, 0, 1, "127.0.0.1:1", False, None, "benchmark")
    ours.sendall(messages.encode("go", assignment._asdict()))
    launcher_client.current.cache_clear()  # the cache says that no launcher started this process
    _kept_open.append(ours)


def memory_file() -> int:
    """Create a commit memory, as the launcher does."""
    return os.memfd_create("commits")


def step_cost(*, num_processes: int, budget_s: float, min_rounds: int) -> Section:
    """Time steps with commits against the same steps without.

    Args:
      num_processes: number of processes that measure each model, one after the other.
      budget_s: seconds for each model in each process.
      min_rounds: minimum number of rounds of each, even if they exceed the budget.
    """
    rows = []
    for number in range(len(MODELS[jax.default_backend()])):
        command = [sys.executable, "-m", "benchmarks.elastic.commit_cost", f"--model={number}"]
        command += [f"--budget-s={budget_s}", f"--min-rounds={min_rounds}"]
        found = [
            json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            for _ in range(num_processes)
        ]
        num_bytes, ratios = found[0]["num_bytes"], [each["ratio"] for each in found]
        ratio = float(np.median(ratios))
        step_s = float(np.median([each["second_s"] for each in found])) / COMMIT_EVERY
        rows.append(
            {
                "section": "commits",
                "model": found[0]["model"],
                "state_mib": num_bytes / MIB,
                "step_ms": step_s * 1e3,
                "ratio": ratio,
                "low": min(ratios),
                "high": max(ratios),
                "ratios": ratios,
                "rounds": sum(each["rounds"] for each in found),
                "moved_mib": 2 * num_bytes / MIB,
                "floor": 1 + _copy_s(num_bytes) / (step_s * COMMIT_EVERY),
                "goal": GOAL,
                "met": "yes" if ratio <= GOAL else "no",
            }
        )
    return Section(
        "Cost of commits",
        f"{COMMIT_EVERY} steps with one commit over {COMMIT_EVERY} without, on "
        f"{jax.device_count()} ranks of one process, Adam, all in one training run. The commit "
        "starts in the middle and is complete before the clock stops. Rounds of two runs each, in "
        "alternating order, and their median; "
        f"of {num_processes} such processes the median, the least and the most. A commit moves "
        "twice the state's bytes: the device reads them, and writes them into the memory of "
        "commits. The floor is the time of this copy alone, if it does not overlap with the steps. "
        "After the last round, training continues from the last commit to the same bits on every "
        "rank.",
        rows,
        {
            "model": "{model}",
            "state, MiB": "{state_mib:.1f}",
            "step, ms": "{step_ms:.1f}",
            "with / without": "{ratio:.3f}",
            "least to most": "{low:.3f} to {high:.3f}",
            "rounds": "{rounds}",
            "moved, MiB": "{moved_mib:.0f}",
            "floor": "{floor:.3f}",
            "goal": "{goal:.2f}",
            "met": "{met}",
        },
    )


def measure(number: int, *, budget_s: float, min_rounds: int) -> dict[str, Any]:
    """Measure a model in this process."""
    problem = MODELS[jax.default_backend()][number]()
    training = _Training(problem)
    found = timing.compare(
        training.with_commit, training.without, budget_s=budget_s, min_rounds=min_rounds
    )
    training.check()
    return {
        "model": problem.name,
        "num_bytes": training.num_bytes,
        "ratio": found.ratio,
        "second_s": found.second_s,
        "rounds": found.num_rounds,
    }


# One training for both contestants: two states would lie at different addresses, which changes the
# time of a step by more than the cost of a commit.
class _Training:
    def __init__(self, problem: Problem):
        @jdp.train_step
        def step(state, batch):
            loss, grads = jax.value_and_grad(problem.loss_fn)(state.params, batch)
            return state.apply_gradients(grads), {"loss": loss}

        spread = NamedSharding(jdp.distributed.mesh.current_mesh(), PartitionSpec("data"))
        self._step, self._batch = step, jax.device_put(problem.batch, spread)
        self._folder = tempfile.mkdtemp()
        self._ckpt = jdp.Checkpointer(self._folder, commit_every=COMMIT_EVERY, save_every=1 << 40)
        state = jdp.TrainState.create(problem.params, jdp.replicated(optax.adam(1e-3)))
        self._state = self._ckpt.restore(state)
        self.num_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
        for _ in range(COMMIT_EVERY // 2):  # so that a commit falls into the middle
            self._advance(self._ckpt)

    def with_commit(self) -> float:
        return self._steps(self._ckpt)

    def without(self) -> float:
        return self._steps(None)

    def _steps(self, ckpt: jdp.Checkpointer | None) -> float:
        start = time.perf_counter()
        for _ in range(COMMIT_EVERY):
            self._advance(ckpt)
        jax.block_until_ready(self._state)
        if ckpt is not None and ckpt._session is not None:
            ckpt._session._commits.wait()
        return time.perf_counter() - start

    def _advance(self, ckpt: jdp.Checkpointer | None) -> None:
        self._state, _ = self._step(self._state, self._batch)
        if ckpt is not None:
            ckpt.step(self._state)

    # Training that continues from the commit must reach the same bits.
    def check(self) -> None:
        self.with_commit()
        _without_saving(self._ckpt)
        _require_equal(self._state, jax.device_get(self._state), "the state after the last round")
        live, ckpt = self._state, jdp.Checkpointer(self._folder, resume=True)
        self._state = ckpt.restore(live)
        _without_saving(ckpt)
        for _ in range(COMMIT_EVERY // 2):
            self._advance(None)
        _require_equal(self._state, jax.device_get(live), "the commit, and half a round of steps")


# Copies into memory that is already mapped, like a commit.
def _copy_s(num_bytes: int) -> float:
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def restore_time(mesh: jax.sharding.Mesh, *, rounds: int) -> Section:
    """Time `Checkpointer.restore` of a commit.

    Args:
      mesh: mesh of the ranks.
      rounds: number of restores of each model.
    """
    rows = [
        {
            "section": "restore",
            "state_mib": mib,
            "leaves": leaves,
            **_restored(mesh, mib, leaves, rounds),
        }
        for mib, leaves in ((1, 20), (100, 100))
    ]
    return Section(
        "Time to restore a commit",
        f"`restore` on 4 ranks of one process: median and longest of {rounds}, each with a new "
        "Checkpointer; and the time of reading the bytes alone. Each restored state is compared "
        "on every rank.",
        rows,
        {
            "state, MiB": "{state_mib}",
            "leaves": "{leaves}",
            "restore, ms": "{median_ms:.1f}",
            "longest, ms": "{longest_ms:.1f}",
            "reading alone, ms": "{read_ms:.1f}",
        },
    )


def _restored(mesh: Any, mib: int, num_leaves: int, rounds: int) -> dict[str, float]:
    everywhere = NamedSharding(mesh, PartitionSpec())
    size = mib * MIB // 4 // num_leaves
    state = {
        f"w{i}": jax.device_put(np.full(size, i, np.float32), everywhere) for i in range(num_leaves)
    }
    launcher = launcher_client.current()
    assert launcher is not None
    os.ftruncate(launcher.commit_file, 0)
    folder, times, read = tempfile.mkdtemp(), [], []
    ckpt = jdp.Checkpointer(folder)
    ckpt.restore(state)
    ckpt.step(state)
    _without_saving(ckpt)
    for _ in range(rounds):
        ckpt = jdp.Checkpointer(folder, resume=True)
        zeros = jax.block_until_ready(jax.tree.map(jnp.zeros_like, state))
        start = time.perf_counter()
        restored = jax.block_until_ready(ckpt.restore(zeros))
        times.append(time.perf_counter() - start)
        _require_equal(restored, jax.device_get(state), "the restored commit")
        _without_saving(ckpt)
        start = time.perf_counter()
        os.preadv(launcher.commit_file, [np.empty(mib * MIB, np.uint8)], 0)
        read.append(time.perf_counter() - start)
    return {
        "median_ms": float(np.median(times)) * 1e3,
        "longest_ms": max(times) * 1e3,
        "read_ms": float(np.median(read)) * 1e3,
    }


def _require_equal(found: Any, expected: Any, what: str) -> None:
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        for rank, shard in enumerate(leaf.addressable_shards):
            exact.require(
                shard.data, wanted, contestant="jdp", rank=rank, round_number=1, what=what
            )


# As after an exception: no checkpoint is written.
def _without_saving(ckpt: jdp.Checkpointer) -> None:
    ckpt.__exit__(KeyboardInterrupt)


if __name__ == "__main__":
    main()
