"""A checkpoint that an earlier jdp wrote is restored to the same bits."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

import jdp

# Step 3 of `state_of` on 3 ranks with `position` 36, written by jdp 0.1.0 on JAX 0.12.0.1 with
# Orbax 0.12.8. Never write it again: a change that cannot read it breaks users' checkpoints.
WRITTEN = Path(__file__).parent / "written_by_0_1_0"


def state_of(step):
    return {
        "w": jnp.array([[1.5, -0.0, np.nan]] * 2, jnp.float32) * step,
        "h": jnp.full(5, step, jnp.bfloat16),
        "nibbles": jnp.array([0, 1, 15], jnp.uint4),
        "nothing": jnp.zeros((0, 3)),
        "key": jax.random.key(step),
        "raw": jax.random.PRNGKey(step),
        "n": step,
        "rate": np.float32(step / 4),
        "own": jdp.per_rank(jnp.arange(3) * step),
    }


def bits(leaf):
    is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
    values = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    return values.dtype, values.shape, values.tobytes()


def test_a_checkpoint_of_0_1_0_is_restored_to_the_same_bits(make_mesh, tmp_path):
    shutil.copytree(WRITTEN, tmp_path, dirs_exist_ok=True)
    jdp.init(make_mesh(3))
    rows = SimpleNamespace(position=0)
    with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
        state = ckpt.restore(state_of(0), rows)
        assert (ckpt.steps, rows.position) == (3, 36)
        ckpt.step(state, rows)
    found, right = jax.tree.flatten(state), jax.tree.flatten(state_of(3))
    assert found[1] == right[1] and [*map(bits, found[0])] == [*map(bits, right[0])]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3-1", "4-2", "lock"]
