"""Why a step failed stands in the line that says that it failed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.training import ranks

import jdp
from jdp.distributed import in_flight

TRACEBACK = """INTERNAL: CpuCallback error calling callback: Traceback (most recent call last):
  File "/lib/jax/_src/callback.py", line 829, in _wrapped_callback
  File "/home/train.py", line 13, in <lambda>
ZeroDivisionError: division by zero"""


def no_cpu(opcode):
    return (
        f"UNIMPLEMENTED: HLO opcode `{opcode}` is not supported by XLA:CPU ThunkEmitter. "
        "Standalone elemental and reduction operations must be wrapped into fusions."
    )


@pytest.mark.parametrize(
    "text, expected",
    [
        ("INTERNAL: jdp: bucket 0, call 3: rank 0 waited.", "bucket 0, call 3: rank 0 waited"),
        ("RESOURCE_EXHAUSTED: Out of memory.\n\nbuffer 1\nbuffer 2", "Out of memory"),
        (TRACEBACK, "a callback raised ZeroDivisionError: division by zero at /home/train.py:13"),
        ("", "RuntimeError"),
    ],
)
def test_the_reason_has_no_status_stack_or_full_stop(text, expected):
    assert in_flight.why_failed(RuntimeError(text)) == expected


@pytest.mark.parametrize(
    "opcode, name",
    [
        ("ragged-all-to-all", "jax.lax.ragged_all_to_all"),
        ("reduce-scatter", "jax.lax.psum_scatter"),
        ("collective-broadcast", "jax.lax.pbroadcast"),
        ("new-thing", "new-thing"),
    ],
)
def test_what_cpus_cannot_run_is_named_as_it_is_written(opcode, name):
    reason = in_flight.why_failed(RuntimeError(no_cpu(opcode)))
    assert name in reason and "Thunk" not in reason


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("donate", [True, False])
def test_a_collective_that_cpus_cannot_run_is_named_before_anything_is_donated(num_ranks, donate):
    ranks(num_ranks)
    here = np.arange(num_ranks, dtype=np.int32)

    @jdp.train_step(donate=donate)
    def step(state, x):
        ones = jnp.ones_like(here)
        place = jnp.full_like(here, lax.axis_index("data"))
        sent = lax.ragged_all_to_all(
            x, jnp.zeros_like(x), here, ones, place, ones, axis_name="data"
        )
        return state + jdp.mean_over_ranks(sent.sum()), {}

    state = jnp.float32(3)
    with pytest.raises(RuntimeError) as raised:
        jax.block_until_ready(step(state, jnp.ones(num_ranks * num_ranks)))
    text = str(raised.value)
    assert text.startswith("call 1 of `step` ") and "jax.lax.ragged_all_to_all" in text
    assert "write jdp.ragged_all_to_all" in text and "JDP214" in text and "donated" in text
    assert float(state) == 3
