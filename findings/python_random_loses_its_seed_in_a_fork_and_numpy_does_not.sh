#!/usr/bin/env bash
# `random.seed(0)` before a fork does not hold in the children: Python seeds `random` anew in each of them
# (CPython 3.12, Lib/random.py, os.register_at_fork). `numpy.random.seed(0)` does hold, so that all
# children draw the same numbers. A loader that forks and draws from both has one kind of each.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq numpy==2.4.6
"$folder/venv/bin/python" - <<'END'
import multiprocessing
import random
import sys

import numpy as np

random.seed(0)
np.random.seed(0)


def draw(_):
    return random.random(), np.random.random()


def in_forks():
    context = multiprocessing.get_context("fork")
    drawn = []
    for _ in range(3):
        with context.Pool(1) as pool:
            drawn += pool.map(draw, [None])
    return zip(*drawn)


by_python, by_numpy = map(set, in_forks())
here = draw(None)
print("python", sys.version.split()[0], "numpy", np.__version__)
print("random.random() in three forks:", len(by_python), "numbers; that of the parent:", here[0] in by_python)
print("np.random.random() in three forks:", len(by_numpy), "number; that of the parent:", here[1] in by_numpy)
assert len(by_python) == 3 and here[0] not in by_python, "changed"
assert by_numpy == {here[1]}, "changed"
END
