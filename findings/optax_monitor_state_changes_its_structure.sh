#!/usr/bin/env bash
# optax.monitor: the state after the first update has another tree structure than that of init.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq optax==0.2.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'END'
import jax
import jax.numpy as jnp
import optax

print("optax", optax.__version__, "jax", jax.__version__)
params, counts = {"w": jnp.ones(3)}, {}
for name, tx in (
    ("monitor", optax.monitor({"norm": optax.tree.norm})),
    ("snapshot", optax.snapshot("norm", optax.tree.norm)),
):
    traces = []

    @jax.jit
    def update(state):
        traces.append(name)
        return tx.update(params, state)[1]

    state = tx.init(params)
    same = jax.tree.structure(state) == jax.tree.structure(update(state))
    for _ in range(3):
        state = update(state)
    try:
        jax.lax.scan(lambda state, _: (tx.update(params, state)[1], None), tx.init(params), length=2)
        scan = "runs"
    except TypeError as error:
        scan = "TypeError: " + str(error).split(",")[0]
    print(f"{name}: same structure after an update: {same}; traces of 4 calls: {len(traces)}; lax.scan {scan}")
    counts[name] = same, len(traces), scan == "runs"
assert counts == {"monitor": (False, 2, False), "snapshot": (True, 1, True)}, "changed"
END
