"""What a report reads from the text of a compiled step is of this step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp
from jdp import collectives

SCRIPT = """
@jdp.train_step
def step(state, x):
    grads = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(state.params)
    return state.apply_gradients(grads), {}
"""


def test_lines_are_of_this_script_where_the_compilation_cache_has_an_older_one():
    jdp.init(devices=jax.devices()[:2])
    tx = jdp.replicated(optax.sgd(0.1), all_reduce=collectives.xla)
    state = jdp.TrainState.create(np.ones((8, 8), np.float32), tx)
    lines = []
    for new_lines in ("", "\n\n\n"):
        names = {"jdp": jdp, "jax": jax, "jnp": jnp}
        exec(compile(new_lines + SCRIPT, "script.py", "exec"), names)
        found = jdp.explain(names["step"], state, np.ones((4, 8), np.float32))
        lines += [bucket.line for bucket in found.buckets]
    assert lines == ["script.py:5", "script.py:8"]
