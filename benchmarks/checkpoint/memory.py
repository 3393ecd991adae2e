"""Peak memory of each process while a sharded state is saved and restored.

    jdp run --nproc-per-node 4 benchmarks/checkpoint/memory.py 1.0

saves a state of 1 GB that is split over 4 processes, in 16 leaves, then restores it, and prints a
row of a table. Numbers are MB above what the process had before, the largest of all processes.
Without JAX's devices on a GPU, the state itself is in memory of the host, a quarter on each
process; it was there before a save, and is counted in neither column.
"""

import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import jdp

NUM_LEAVES = 16


class Peak:
    """MB that this process took at most inside a `with` block, above those before."""

    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")
        self._before, self.mb = status("VmRSS"), 0.0
        return self

    def __exit__(self, *_):
        own = np.array([status("VmHWM") - self._before])
        self.mb = float(multihost_utils.process_allgather(own).max())


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(name))


def state_of(mesh, num_bytes, value):
    shape = 1024, num_bytes // NUM_LEAVES // 4096 // 8 * 8
    sharding = NamedSharding(mesh, PartitionSpec(None, "data"))

    def filled(index):
        return np.full((1024, len(range(*index[1].indices(shape[1])))), value, np.float32)

    names = [f"leaf{i}" for i in range(NUM_LEAVES)]
    return {name: jax.make_array_from_callback(shape, sharding, filled) for name in names}


# Also until their memory is allocated, which is twice the part of a process and counted nowhere.
def wait_for_commits(ckpt):
    assert ckpt._session is not None
    ckpt._session._commits.wait()


def main():
    gb, mesh = float(sys.argv[1]), jdp.init()
    folder = str(Path(tempfile.gettempdir()) / f"jdp-memory-{gb}")
    # Compiles the program of `Peak`, and warms up what the first save loads.
    with jdp.Checkpointer(f"{folder}-small") as ckpt, Peak():
        small = ckpt.restore(state_of(mesh, 1 << 21, 0.0))
        ckpt.step(small)
    with jdp.Checkpointer(folder) as ckpt:
        state = ckpt.restore(state_of(mesh, int(gb * 1e9), 1.0))
        wait_for_commits(ckpt)
        with Peak() as save:
            ckpt.save(state)
    with jdp.Checkpointer(folder, resume=True) as ckpt:
        state = state_of(mesh, int(gb * 1e9), 0.0)
        with Peak() as restore:
            state = ckpt.restore(state)
        assert all(
            (shard.data == 1).all() for x in state.values() for shard in x.addressable_shards
        )
        wait_for_commits(ckpt)
        with Peak() as commit:
            ckpt.step(state)
            wait_for_commits(ckpt)
    if jax.process_index() == 0:
        numbers = [gb * 1e3, gb * 1e3 / jax.process_count(), save.mb, restore.mb, commit.mb]
        print(f"| {' | '.join(f'{x:.0f}' for x in numbers)} |", flush=True)


if __name__ == "__main__":
    main()
