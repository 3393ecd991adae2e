"""Arrays in Orbax's format, written by Orbax or by several processes."""

import contextlib
import importlib
import json
import logging
import urllib.parse
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp.checkpoint.saved_leaves import ArrayForm, SavedLeaf

_BATCH_BYTES = 64 << 20
_METADATA = b"/.zarray"  # shape and dtype
# Otherwise zeros are not stored, and -0.0 is read as 0.0.
_KEEP_ALL = {"store_data_equal_to_fill_value": True}


def write_parts(state: Path, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write arrays to a new folder."""
    import tensorstore as ts

    state.mkdir()
    transaction, num_bytes = ts.Transaction(), 0
    for name, x in arrays:
        chunks = {"shape": x.shape, "chunks": x.shape, "compressor": None}
        spec = {**_spec(state, name), "metadata": chunks, **_KEEP_ALL}
        dtype = ts.dtype(x.dtype)
        store = ts.open(spec, create=True, dtype=dtype, transaction=transaction).result()
        store.write(x, can_reference_source_data_indefinitely=True).result()
        num_bytes += x.nbytes
        if num_bytes >= _BATCH_BYTES:
            transaction.commit_sync()
            transaction, num_bytes = ts.Transaction(), 0
    transaction.commit_sync()


def read_parts(state: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read arrays from a folder."""
    import tensorstore as ts

    specs = {name: {**_spec(state, name), "fill_missing_data_reads": False} for name in names}
    stores = {name: ts.open(spec, open=True, read=True) for name, spec in specs.items()}
    return {name: np.asarray(store.result().read().result()) for name, store in stores.items()}


def forms_of_parts(state: Path) -> dict[str, ArrayForm]:
    """Return the shapes and dtypes in a folder."""
    import tensorstore as ts

    store = ts.KvStore.open(_database(state)).result()
    keys = [key for key in store.list().result() if key.endswith(_METADATA)]
    reads = [store.read(key) for key in keys]
    found = {}
    for key, read in zip(keys, reads, strict=True):
        array = json.loads(read.result().value)
        name = urllib.parse.unquote(key.removesuffix(_METADATA).decode())
        found[name] = tuple(array["shape"]), jnp.dtype(array["dtype"])
    return found


def prepare_parts() -> None:
    """Import TensorStore before the first write."""
    import tensorstore  # noqa: F401


def _spec(state: Path, name: str) -> dict[str, Any]:
    path = urllib.parse.quote(name, safe="") + "/"
    return {"driver": "zarr", "kvstore": {**_database(state), "path": path}}


def _database(state: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{state}/"}}


def write(state: Path, arrays: dict[str, Any]) -> None:
    """Write nonempty arrays to a new folder."""
    ocp = _imported()
    with _orbax() as orbax:
        orbax.save(state, args=ocp.args.PyTreeSave(arrays))


def read(state: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read arrays from a folder."""
    ocp = _imported()
    wanted = ocp.args.PyTreeRestore(
        item=dict.fromkeys(names, 0),
        restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names},
        partial_restore=True,
    )
    with _orbax() as orbax:
        return orbax.restore(state, args=wanted)


def tree_leaves(tree: Path) -> list[SavedLeaf]:
    """Describe the arrays and numbers of another tool's PyTree."""
    with _orbax() as orbax:
        found, _ = jax.tree.flatten_with_path(orbax.metadata(tree).item_metadata.tree)
    return [
        SavedLeaf(jax.tree_util.keystr(path), tuple(leaf.shape), str(leaf.dtype), None)
        for path, leaf in found
        if _is_array(leaf)
    ]


def read_tree(tree: Path, numbers: Collection[int]) -> list[np.ndarray]:
    """Read some of the `tree_leaves`, in order."""
    ocp = _imported()
    with _orbax() as orbax:
        leaves, form = jax.tree.flatten(orbax.metadata(tree).item_metadata.tree)
        places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
        wanted = {places[n] for n in numbers}
        args = ocp.args.PyTreeRestore(
            item=form.unflatten(0 if i in wanted else ocp.PLACEHOLDER for i in range(len(leaves))),
            restore_args=form.unflatten([ocp.RestoreArgs(restore_type=np.ndarray)] * len(leaves)),
        )
        values = form.flatten_up_to(orbax.restore(tree, args=args))
    return [np.asarray(values[i]) for i in sorted(wanted)]


# Texts have no shape.
def _is_array(leaf: Any) -> bool:
    return getattr(leaf, "shape", None) is not None


def forms(state: Path) -> dict[str, ArrayForm]:
    """Return the shapes and dtypes in a folder."""
    with _orbax() as orbax:
        tree = orbax.metadata(state).item_metadata.tree
    return {name: (tuple(each.shape), np.dtype(each.dtype)) for name, each in tree.items()}


def _imported() -> Any:
    """Import Orbax, and keep the log lines' format."""
    # Orbax logs to absl, whose first line would set another format on the root logger.
    if not logging.root.handlers and logging.lastResort is not None:
        logging.root.addHandler(logging.lastResort)
    return importlib.import_module("orbax.checkpoint")


def prepare() -> None:
    """Import Orbax before the first write."""
    _imported()


# Only process 0 calls this, with unsharded host arrays.
@contextlib.contextmanager
def _orbax() -> Iterator[Any]:
    ocp = _imported()
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix="jdp"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as orbax:
        yield orbax
