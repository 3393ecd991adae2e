"""The arrays of a checkpoint that one process writes alone, by Orbax."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jdp.checkpoint.saved_leaves import ArrayForm


def write(state: Path, arrays: dict[str, Any]) -> None:
    """Write nonempty arrays to a new folder."""
    import orbax.checkpoint as ocp

    with _orbax() as orbax:
        orbax.save(state, args=ocp.args.PyTreeSave(arrays))


def read(state: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read the arrays with these names from a folder."""
    import orbax.checkpoint as ocp

    wanted = ocp.args.PyTreeRestore(
        item=dict.fromkeys(names, 0),
        restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names},
        partial_restore=True,
    )
    with _orbax() as orbax:
        return orbax.restore(state, args=wanted)


def forms(state: Path) -> dict[str, ArrayForm]:
    """Return the shapes and dtypes of the arrays in a folder."""
    with _orbax() as orbax:
        tree = orbax.metadata(state).item_metadata.tree
    return {name: (tuple(each.shape), np.dtype(each.dtype)) for name, each in tree.items()}


def prepare() -> None:
    """Import Orbax ahead of the first write."""
    import orbax.checkpoint  # noqa: F401


# Configures Orbax for a single process, regardless of the number of processes: only process 0 calls
# this, with unsharded host arrays.
@contextlib.contextmanager
def _orbax() -> Iterator[Any]:
    import jax
    import orbax.checkpoint as ocp

    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix="jdp"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as orbax:
        yield orbax
