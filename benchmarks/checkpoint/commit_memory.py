"""Largest memory of a host while its processes train and commit.

    jdp run --nproc-per-node 2 benchmarks/checkpoint/commit_memory.py 0.8

trains a replicated state of 0.8 GB, one copy on each process, that each step donates, with a commit
every second step, and prints a row of a table: processes; MB of the state, of the process that has
most, of all processes, of the commits, which the host has once, and of all together; and how many
times the state that is. Processes are at their peak, above what they had before the state.
"""

import os
import sys
import tempfile
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import jdp
from jdp.worker import launcher_client

NUM_LEAVES = 16
NUM_STEPS = 12


class Peak:
    """MB of memory that only this process uses, at most inside a `with` block."""

    def __enter__(self):
        self._is_over = threading.Event()
        self._before = self._most = own_mb()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()
        self.mb = self._most - self._before

    def _watch(self):
        while not self._is_over.wait(0.002):
            self._most = max(self._most, own_mb())


def own_mb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("RssAnon"))


def state_of(mesh, num_bytes):
    everywhere = NamedSharding(mesh, PartitionSpec())
    zeros = jax.jit(lambda: jnp.zeros(num_bytes // NUM_LEAVES // 4), out_shardings=everywhere)
    return {f"leaf{i}": zeros() for i in range(NUM_LEAVES)}


def main():
    gb, mesh = float(sys.argv[1]), jdp.init()
    launcher, folder = launcher_client.current(), tempfile.mkdtemp()
    assert launcher is not None, "start it with jdp run"
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    jax.block_until_ready(step(state_of(mesh, 1 << 20)))
    with Peak() as peak:
        ckpt = jdp.Checkpointer(folder, commit_every=2)
        state = ckpt.restore(state_of(mesh, int(gb * 1e9)))
        for _ in range(NUM_STEPS):
            state = step(state)
            ckpt.step(state)
        jax.block_until_ready(state)
        assert ckpt._session is not None
        ckpt._session._commits.wait()
    assert all((x.addressable_data(0) == NUM_STEPS).all() for x in state.values())
    own = multihost_utils.process_allgather(np.array(peak.mb)).reshape(-1)
    commits = os.fstat(launcher.commit_file).st_blocks * 512 / 1e6
    ckpt.__exit__(KeyboardInterrupt)  # no checkpoint
    if jax.process_index() == 0:
        numbers = [gb * 1e3, own.max(), own.sum(), commits, own.sum() + commits]
        row = [jax.process_count(), *(f"{x:.0f}" for x in numbers)]
        print(f"| {' | '.join(map(str, row))} | {numbers[-1] / numbers[0]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
