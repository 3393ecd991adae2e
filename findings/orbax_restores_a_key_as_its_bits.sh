#!/usr/bin/env bash
# Orbax's metadata of a typed random key is that of an array; as np.ndarray it comes back as raw bits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq jax==0.10.2 jaxlib==0.10.2 orbax-checkpoint==0.12.8
cd "$folder"
"$folder/venv/bin/python" - <<'END'
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

print("orbax-checkpoint", version("orbax-checkpoint"), "jax", jax.__version__)
path = Path("state").absolute()
with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    checkpointer.save(path, {"key": jax.random.key(7)})
    described = checkpointer.metadata(path).item_metadata.tree["key"]
    as_array = ocp.RestoreArgs(restore_type=np.ndarray)
    bits = checkpointer.restore(
        path, args=ocp.args.PyTreeRestore(restore_args={"key": as_array})
    )["key"]
    itself = checkpointer.restore(path)["key"]
print("metadata:", type(described).__name__, described.shape, described.dtype)
print("restored as np.ndarray:", type(bits).__name__, bits.dtype, bits.tolist())
print("restored without arguments:", itself.dtype, jax.random.key_data(itself).tolist())
assert described.shape == (2,) and described.dtype == np.uint32, "changed"
assert bits.dtype == np.uint32 and bits.tolist() == [0, 7], "changed"
assert jax.dtypes.issubdtype(itself.dtype, jax.dtypes.prng_key), "changed"
END
