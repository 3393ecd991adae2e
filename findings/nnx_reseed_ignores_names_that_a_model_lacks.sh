#!/usr/bin/env bash
# `nnx.reseed(model, default=key)` changes nothing in a
# model whose generators are `nnx.Rngs(params=0, dropout=1)`, and raises no error: `default` is the name
# of a stream there, not the seed of streams without one, as it is in `nnx.Rngs(0)`. So dropout keeps
# its masks after a call that looks as if it had set them, for example to those of a rank.
# Seen: the same mask after reseed(default=...), another one after reseed(dropout=...).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install flax==0.12.0 jax==0.8.1 jaxlib==0.8.1
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import flax
import jax
import jax.numpy as jnp
from flax import nnx

print("flax", flax.__version__, "jax", jax.__version__)


def mask(rngs, **streams):
    layer = nnx.Dropout(0.5, rngs=rngs)
    nnx.reseed(layer, **streams)
    return (layer(jnp.ones(64)) == 0).tolist()


def named():
    return nnx.Rngs(params=0, dropout=1)


key = jax.random.key(7)
untouched = mask(named())
print("default= of named streams changes the mask:", mask(named(), default=key) != untouched)
print("dropout= of named streams changes the mask:", mask(named(), dropout=key) != untouched)
print("default= of Rngs(0) changes the mask:", mask(nnx.Rngs(0), default=key) != mask(nnx.Rngs(0)))
assert mask(named(), default=key) == untouched
assert mask(named(), dropout=key) != untouched
assert mask(nnx.Rngs(0), default=key) != mask(nnx.Rngs(0))
PYTHON
