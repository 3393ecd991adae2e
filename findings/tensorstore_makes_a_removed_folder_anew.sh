#!/usr/bin/env bash
# A TensorStore write into a folder that was removed makes the folder anew, with a part of the data.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq tensorstore==0.1.86 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import os
import shutil
from importlib.metadata import version

import numpy as np
import tensorstore as ts

spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": os.path.abspath("state") + "/"}}
spec |= {"metadata": {"shape": [4], "chunks": [4], "dtype": "<f4"}}
store = ts.open(spec, create=True).result()
shutil.rmtree("state")  # such as the clean-up of another process
store.write(np.ones(4, np.float32)).result()
print("tensorstore", version("tensorstore"))
print("the folder exists again, with:", sorted(os.listdir("state")))
assert os.listdir("state") == ["0"]  # the chunk without its metadata
END
