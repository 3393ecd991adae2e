"""XLA's collectives beside native calls: found in a program, and never a wait for ever."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.training import assert_close, batch, fetched, loss_fn, plain_step, ranks, state

import jdp
from jdp.collectives import native, native_shards, shards, xla_shards
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.collectives.hazards import loses_order, runs_beside, why_not_beside

pytestmark = pytest.mark.skipif(
    cpu_runtime.why_missing() is not None, reason=f"{cpu_runtime.why_missing()}"
)
ROOT = Path(__file__).parents[2]
STARTED = f"{cpu_runtime.TARGET}_start"


def total(x):
    return native([[x]], "data")[0][0]


def cut(x):
    return native_shards.reduce_scatter([[x]], [[0]], "data")[0][0]


def sent(x):
    return native_shards.all_to_all([[x]], [[(0, 0)]], "data")[0][0]


def joined(x):
    return native_shards.all_gather([[x]], [[0]], "data")[0][0]


def largest(x):
    return lax.pmax(x, "data")


# In a loop of one turn, the loop may be gone when the program runs.
PAIRS = {
    "side by side": lambda x: (total(x), largest(x)),
    "of one value": lambda x: total(x) + largest(x),
    "in functions of their own": lambda x: (jax.jit(total)(x), jax.jit(largest)(x)),
    "in one function": lambda x: jax.jit(lambda x: (total(x), largest(x)))(x),
    "an output that needs neither": lambda x: (
        lambda pair: (pair[0], largest(pair[1]))
    )(jax.jit(lambda x: (total(x), x + 1))(x)),
    "in a turn of a loop, though each needs the turn before": lambda x: lax.scan(
        lambda c, _: (total(c) + largest(c), None), x, length=3
    )[0],
    "in one branch": lambda x: lax.cond(
        lax.axis_size("data") > 1, lambda x: total(x) + largest(x), lambda x: x, x
    ),
    "after a loop that may have no turn": lambda x: largest(
        lax.while_loop(lambda c: c.sum() < 0, total, x)
    ),
    "a slice": lambda x: (cut(x), lax.psum(x, "data")),
    "what was sent": lambda x: (sent(x), largest(x)),
    "a whole": lambda x: (joined(x), xla_shards.all_gather([[x]], [[0]], "data")[0][0]),
}  # fmt: skip
NO_PAIRS = {
    "no collective of XLA": lambda x: (total(x), total(x + 1)),
    "no native call": lambda x: (largest(x), lax.psum(x, "data")),
    "one after the other": lambda x: largest(total(x)),
    "the other after the one": lambda x: total(largest(x)),
    "through functions": lambda x: jax.jit(largest)(jax.jit(total)(x) + 1),
    "in a loop": lambda x: lax.scan(lambda c, _: (largest(total(c)), None), x, length=3)[0],
    "after a loop": lambda x: largest(lax.scan(lambda c, _: (total(c), None), x, length=3)[0]),
    "number of a rank": lambda x: (total(x), lax.axis_index("data")),
    "a collective whose result nobody reads": lambda x: (largest(x), total(x))[1],
    "a loop whose collective nobody reads": lambda x: lax.scan(
        lambda c, _: (total(c), largest(c)), x, length=3
    )[0],
    "cut, measured and joined": lambda x: (
        lambda part: joined(part / lax.psum(part @ part, "data"))
    )(cut(x)),
}  # fmt: skip


def turns(body):
    return lambda x: lax.scan(lambda c, _: (body(c), None), x, length=3)[0]


def both(x):
    return largest(total(x))


# XLA may start what stands beside a loop before the loop has run.
UNORDERED = {
    "beside a loop": lambda x: (turns(both)(x), largest(x)),
    "beside a loop in a loop": lambda x: (turns(turns(both))(x), largest(x)),
    "in a loop, beside a loop within": turns(lambda x: turns(both)(x) + largest(x)),
    "beside a branch": lambda x: (
        lax.cond(lax.axis_index("data") >= 0, both, lambda x: x, x), largest(x)
    ),
    "in two loops": lambda x: (turns(both)(x), turns(largest)(x)),
    "in a loop of two that need each other's last turn": lambda x: lax.while_loop(
        lambda c: largest(c[1]).sum() > 0, lambda c: (turns(both)(c[0]), c[1] - 1), (x, x)
    ),
}  # fmt: skip
ORDERED = {
    "before a loop": lambda x: turns(both)(largest(x)),
    "after a loop": lambda x: largest(turns(both)(x)),
    "in the loop": turns(lambda x: total(x) + largest(x)),
    "beside a loop without collectives of XLA": lambda x: (turns(total)(x), largest(x)),
    "beside a function that is called": lambda x: (jax.jit(both)(x), largest(x)),
    "in the other branch": lambda x: lax.cond(lax.axis_index("data") >= 0, both, largest, x),
}  # fmt: skip


def traced(make_mesh, fn):
    mapped = jax.shard_map(fn, mesh=make_mesh(2), in_specs=P(), out_specs=P(), check_vma=False)
    return jax.make_jaxpr(mapped)(np.ones(4, np.float32))


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_that_does_not_depend_on_each_other_is_found(make_mesh, name):
    assert runs_beside(traced(make_mesh, PAIRS[name]))


@pytest.mark.parametrize("name", NO_PAIRS)
def test_what_depends_on_each_other_is_no_pair(make_mesh, name):
    assert not runs_beside(traced(make_mesh, NO_PAIRS[name]))


@pytest.mark.parametrize("name", UNORDERED)
def test_native_calls_are_refused_in_a_loop_that_xla_does_not_wait_for(make_mesh, name):
    assert why_not_beside(traced(make_mesh, UNORDERED[name]))


@pytest.mark.parametrize("name", ORDERED)
def test_native_calls_may_run_in_a_loop_that_xla_waits_for(make_mesh, name):
    assert why_not_beside(traced(make_mesh, ORDERED[name])) is None


def with_xla_alone(monkeypatch, fn):
    monkeypatch.setitem(globals(), "total", lambda x: lax.psum(x, "data"))
    return fn


@pytest.mark.parametrize("name", UNORDERED)
def test_a_sum_beside_a_loop_of_sums_loses_its_place_in_a_cached_program(
    make_mesh, monkeypatch, name
):
    assert loses_order(traced(make_mesh, with_xla_alone(monkeypatch, UNORDERED[name])))


@pytest.mark.parametrize("name", [n for n in ORDERED if "without" not in n])
def test_a_sum_before_or_after_a_loop_of_sums_keeps_its_place(make_mesh, monkeypatch, name):
    assert not loses_order(traced(make_mesh, with_xla_alone(monkeypatch, ORDERED[name])))


def mixed(s, batch):
    def turn(c, i):
        return largest(total(c + i)), None

    c, _ = lax.scan(turn, batch["x"].sum(), jnp.arange(3.0))
    grads = jax.grad(loss_fn)(s.params, batch)
    return s.apply_gradients(grads), {"c": c, "beside": largest(batch["x"].max())}


def test_a_step_that_asks_for_native_calls_in_such_a_loop_is_refused(make_mesh):
    reason = why_not_beside(traced(make_mesh, next(iter(UNORDERED.values()))))
    with pytest.raises(ValueError, match=re.escape(str(reason))):
        lowered(mixed)


def lowered(step_fn, tx=None, **options):
    ranks(2)
    return jdp.train_step(step_fn, **options).lower(state(tx), batch()).as_text()


def with_largest(s, batch):
    grads = jax.grad(loss_fn)(s.params, batch)
    return s.apply_gradients(grads), {"largest": largest(jnp.abs(batch["x"]).max())}


def clipped(s, batch):
    grads = jdp.sync_gradients(jax.grad(loss_fn)(s.params, batch))
    longest = lax.pmax(jnp.abs(grads["w"]).max(), "data")
    grads = jax.tree.map(lambda g: g / longest, grads)
    return s.apply_gradients(grads, synced=True), {"longest": longest}


def test_a_step_without_a_pair_has_the_calls_of_before():
    text = lowered(plain_step)
    assert text.count(f"@{cpu_runtime.TARGET}(") == 2 and STARTED not in text
    assert STARTED not in lowered(clipped)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_sharded_step_whose_gathered_state_nobody_reads_has_no_pair(stage):
    text = lowered(plain_step, jdp.sharded(optax.adam(0.1), stage=stage, min_size=1))
    assert f"@{cpu_runtime.REDUCE_SCATTER}(" in text and "_start(" not in text


def test_the_native_calls_of_a_step_with_a_pair_wait_on_threads_of_their_own():
    text = lowered(with_largest)
    assert f"@{STARTED}(" in text and f"@{cpu_runtime.TARGET}(" not in text


def test_slices_and_wholes_are_native_in_a_step_and_in_the_chain_of_its_calls():
    def step(s, batch):
        grads = jax.grad(loss_fn)(s.params, batch)
        x = batch["x"][:2].ravel()
        exchanged = shards.all_to_all([[x]], [[(0, 0)]], "data")
        parts = shards.reduce_scatter(exchanged, [[0]], "data")
        wholes = shards.all_gather(parts, [[0]], "data")
        return s.apply_gradients(grads), {"x": wholes[0][0].sum()}

    text = lowered(step)
    for name in cpu_runtime.TARGETS:
        assert f"@{name}(" in text
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        assert f"stablehlo.{name}" not in text


def test_outside_of_a_step_slices_and_wholes_are_left_to_xla(make_mesh):
    def fn(x):
        exchanged = shards.all_to_all([[x]], [[(0, 0)]], "data")
        return shards.all_gather(shards.reduce_scatter(exchanged, [[0]], "data"), [[0]], "data")

    mapped = jax.shard_map(fn, mesh=make_mesh(2), in_specs=P(), out_specs=P(), check_vma=False)
    text = jax.jit(mapped).lower(np.ones(4, np.float32)).as_text()
    assert "jdp_" not in text
    assert all(name in text for name in ("reduce_scatter", "all_gather", "all_to_all"))


def test_a_function_that_cuts_and_is_called_twice_is_left_to_xla():
    part = jax.jit(lambda x: shards.reduce_scatter([[x]], [[0]], "data")[0][0])

    def step(s, batch):
        x = batch["x"][:2].ravel()
        both = shards.all_gather([[part(x), part(x + 1)]], [[0, 0]], "data")
        grads = jax.grad(loss_fn)(s.params, batch)
        return s.apply_gradients(grads), {"x": both[0][0].sum() + both[0][1].sum()}

    assert "jdp_" not in lowered(step)


# Products large enough for several threads, so that some rank needs one of the pool's.
MANY_WAITS = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax import lax

jax.config.update("jax_num_cpu_devices", 8)
import jdp
from jdp.collectives import shards

SIZE, NUM_LAYERS = 256, 6
jdp.init()
rows = np.random.default_rng(0).normal(size=(8 * SIZE, SIZE)).astype("float32")


def loss(params, x):
    outputs = []
    for w in params:
        x = jnp.tanh(x @ w)
        outputs.append(x)
    return (x**2).mean(), outputs


def trained(all_reduce):
    params = [jnp.eye(SIZE) * 0.5 + i * 1e-3 for i in range(NUM_LAYERS)]
    tx = jdp.replicated(optax.sgd(0.01), all_reduce=all_reduce, bucket_bytes=4 * SIZE * SIZE)

    @jdp.train_step
    def step(state, x):
        (value, outputs), grads = jax.value_and_grad(loss, has_aux=True)(state.params, x)
        found = [jnp.abs(w @ w.T).max() for w in outputs + grads]
        metrics = {str(i): lax.pmax(x, "data") for i, x in enumerate(found)}
        parts = shards.reduce_scatter([[x @ x.T]], [[1]], "data")
        metrics["whole"] = jnp.abs(shards.all_gather(parts, [[1]], "data")[0][0]).max()
        return state.apply_gradients(grads), {"loss": value, **metrics}

    state = jdp.TrainState.create(params, tx)
    for _ in range(3):
        state, metrics = step(state, rows)
    return jax.device_get((state.params, metrics))


for got, want in zip(*map(jax.tree.leaves, map(trained, ALGORITHMS)), strict=True):
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-6)
"""


def test_8_ranks_that_may_all_wait_twice_at_once_finish_their_steps():
    program = MANY_WAITS.replace("ALGORITHMS", "(jdp.collectives.auto, jdp.collectives.xla)")
    child = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert child.returncode == 0, child.stderr[-2000:]


# The sum of the loss and of all rows does not depend on the sums of the loop, nor they on it.
CACHED = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax import lax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
import jdp

jdp.init()
rows = np.arange(48 * 24, dtype="f").reshape(48, 24) % 7


def whole(state, batch):
    loss = jdp.value_and_grad(lambda p, b: (b @ p).mean(), accumulate=2)
    value, grads = loss(state.params, batch)
    return state.apply_gradients(grads), {"value": value}


def in_parts(state, batch):
    return whole(state, batch)


def alone(state, batch):
    grads = jax.grad(lambda p: (batch @ p).mean())(state.params)
    return state.apply_gradients(grads), {}


def trained(fn, tx, **options):
    step = jdp.train_step(fn, **options)
    state = jdp.TrainState.create(np.ones((24, 48), "f"), tx)
    step.findings(state, rows)  # a trace that JAX uses again
    for _ in range(20):
        state, _ = step(state, rows)
    return jax.device_get(state.params)


def weight(batch):
    return batch.sum() + 1.0


sgd = optax.sgd(0.5)
want = trained(whole, jdp.replicated(sgd), weight=weight)
got = trained(in_parts, jdp.sharded(sgd, stage=2, min_size=1), weight=weight)
np.testing.assert_allclose(got, want, rtol=1e-5)
trained(alone, jdp.replicated(sgd))

step = jdp.train_step(in_parts, weight=weight, donate=False)


@jax.jit
def outer(state, rows):
    return step(state, rows)[0]


state = jdp.TrainState.create(np.ones((24, 48), "f"), jdp.sharded(sgd, stage=2, min_size=1))
for _ in range(20):
    state = outer(state, rows)
np.testing.assert_allclose(jax.device_get(state.params), want, rtol=1e-5)
"""


def test_a_step_whose_order_a_cache_would_lose_is_not_cached_and_others_are(tmp_path):
    for _ in range(3):
        child = subprocess.run(
            [sys.executable, "-c", CACHED],
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert child.returncode == 0, child.stderr[-2000:]
    steps = {path.name.split("-")[0] for path in tmp_path.glob("*-cache")}
    assert "jit_alone" in steps and not {"jit_in_parts", "jit_outer"} & steps


def train_with_a_pair():
    """Return the parameters after three steps in which XLA may reduce beside native calls."""
    jdp.init(devices=sorted(jax.devices(), key=lambda d: (d.process_index, d.id))[:4])
    step, s, metrics = jdp.train_step(with_largest), state(), {}
    me, num_processes = jax.process_index(), jax.process_count()
    rows = [jax.tree.map(lambda x: np.split(x, num_processes)[me], batch(i)) for i in range(3)]
    metrics = {}
    for own in jdp.shard_batches(rows):
        s, metrics = step(s, own)
    return fetched(s.params), float(metrics["largest"])


def test_two_processes_train_as_one_with_a_pair(processes):
    params, found = train_with_a_pair()
    for other_params, other_found in processes(2).run(train_with_a_pair):
        assert_close(other_params, params)
        assert other_found == found
