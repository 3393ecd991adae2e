"""The arrays that one process writes of a split state: as Orbax stores them, without Orbax.

They are zarr arrays in an OCDBT database, which TensorStore writes. Orbax itself writes NumPy
arrays on process 0 alone, and shards of a `jax.Array` only if all processes meet in its barriers.
"""

import json
import urllib.parse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdp.checkpoint.saved_leaves import ArrayForm

# TensorStore may keep this many bytes in memory until they are written.
_BATCH_BYTES = 64 << 20
_METADATA = b"/.zarray"  # the key of the shape and dtype of an array
# Else an array of zeros would not be stored, and one of -0.0 would be read as 0.0.
_KEEP_ALL = {"store_data_equal_to_fill_value": True}


def write(state: Path, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write arrays to a new folder, under their names."""
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


def read(state: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read the arrays with these names from a folder."""
    import tensorstore as ts

    specs = {name: {**_spec(state, name), "fill_missing_data_reads": False} for name in names}
    stores = {name: ts.open(spec, open=True, read=True) for name, spec in specs.items()}
    return {name: np.asarray(store.result().read().result()) for name, store in stores.items()}


def forms(state: Path) -> dict[str, ArrayForm]:
    """Return the shapes and dtypes of the arrays in a folder."""
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


def prepare() -> None:
    """Import TensorStore ahead of the first write."""
    import tensorstore  # noqa: F401


def _spec(state: Path, name: str) -> dict[str, Any]:
    path = urllib.parse.quote(name, safe="") + "/"
    return {"driver": "zarr", "kvstore": {**_database(state), "path": path}}


def _database(state: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{state}/"}}
