#!/usr/bin/env bash
# A traced operation knows its callers, unless it is inside of a cond, scan, while_loop, jit or checkpoint: there the
# traceback begins at the body. Two calls of a library's jitted function at two lines of a program look alike.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq jax==0.10.2 jaxlib==0.10.2
cd "$folder"
cat > names.py <<'END'
import jax
import jax.numpy as jnp
from jax import lax


def logarithm(x):
    return jnp.log(x)


def caller(transformed):
    return lambda x: transformed(x)


WAYS = {
    "plain": logarithm,
    "jit": jax.jit(logarithm),
    "checkpoint": jax.checkpoint(logarithm),
    "cond": lambda x: lax.cond(x > 1, logarithm, lambda x: x, x),
    "while_loop": lambda x: lax.while_loop(lambda x: x > 1, logarithm, x),
    "scan": lambda x: lax.scan(lambda x, _: (logarithm(x), None), x, length=2)[0],
}


def logs(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "log":
            yield eqn
        for value in eqn.params.values():
            for body in value if isinstance(value, tuple) else [value]:
                body = getattr(body, "jaxpr", body)
                if hasattr(body, "eqns"):
                    yield from logs(body)


print("jax", jax.__version__)
for name, way in WAYS.items():
    jaxpr = jax.make_jaxpr(caller(way))(jnp.float32(2)).jaxpr
    [log] = logs(jaxpr)
    frames = [f.function_name for f in log.source_info.traceback.frames if f.file_name.endswith("names.py")]
    knows = any(frame.startswith("caller") for frame in frames)
    print(f"{name}: log is called by {frames}")
    assert knows == (name == "plain"), "changed"
END
"$folder/venv/bin/python" names.py
