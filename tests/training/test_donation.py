"""A step donates its state: what keeps a copy, what keeps the memory, and what the errors name."""

import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.launched import Launcher
from support.training import batch, loss_fn, plain_step, ranks, state

import jdp

COPIES = {
    "jnp.array(x)": jnp.array,
    "x.copy()": lambda x: x.copy(),
    "np.array(x)": np.array,
    "x + 0": lambda x: x + 0,
}
SAME_BUFFER = {
    "x.astype(x.dtype)": lambda x: x.astype(x.dtype),
    "x[:]": lambda x: x[:],
    "x.reshape(x.shape)": lambda x: x.reshape(x.shape),
    "jnp.asarray(x)": jnp.asarray,
    "jax.lax.stop_gradient(x)": jax.lax.stop_gradient,
    "jax.device_put(x, x.sharding)": lambda x: jax.device_put(x, x.sharding),
}
VIEWS = {"np.asarray(x)": np.asarray, "jax.device_get(x)": jax.device_get}


def trained(num_ranks):
    """Return a step that has run, and the state that it returned."""
    ranks(num_ranks)
    step = jdp.train_step(plain_step)
    return step, step(state(), batch())[0]


@pytest.mark.all_sets
@pytest.mark.parametrize("keep", [*COPIES, *SAME_BUFFER])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_copy_outlives_the_next_step_and_another_name_of_the_buffer_does_not(keep, num_ranks):
    step, now = trained(num_ranks)
    before = np.array(now.params["w"])
    kept = {**COPIES, **SAME_BUFFER}[keep](now.params["w"])
    step(now, batch())
    if keep in COPIES:
        np.testing.assert_array_equal(kept, before)
    else:
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(kept)


def test_the_page_lists_what_copies_and_what_shares(pytestconfig):
    page = (pytestconfig.rootpath / "docs" / "steps.md").read_text()
    assert all(f"`{each}`" in page for each in [*COPIES, *SAME_BUFFER, *VIEWS] if each != "x + 0")


@jdp.eval_step
def measure(params, batch):
    return {"loss": loss_fn(params, batch)}


@jdp.eval_step
def measure_state(state, batch):
    return {"loss": loss_fn(state.params, batch)}


# A view of a shard of a CPU keeps that shard, and the next call would wait for the others.
@pytest.mark.all_sets
@pytest.mark.parametrize("look", VIEWS)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "use",
    [
        lambda old, step: step(old, batch()),
        lambda old, step: measure(old.params, batch()),
        lambda old, step: jdp.evaluate(measure_state, old, [batch()]),
        lambda old, step: jdp.check_replicas(old),
        lambda old, step: jdp.TrainState.create(old.params, old.tx),
    ],
    ids=["train_step", "eval_step", "evaluate", "check_replicas", "create"],
)
def test_a_donated_leaf_that_numpy_looks_at_is_named(num_ranks, look, use):
    step, now = trained(num_ranks)
    measure(now.params, batch())
    measure_state(now, batch())
    view = jax.tree.map(VIEWS[look], now)
    step(now, batch())
    if num_ranks == 1:  # the whole leaf is kept
        assert not now.params["w"].is_deleted()
        return
    with pytest.raises(ValueError, match=r"`\w+\S* was donated to an earlier step"):
        use(now, step)
    del view


def large_step(state, batch):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(state.params["w"])
    return state.apply_gradients({"w": grads}), {"loss": loss}


def large_state(**options):
    tx = jdp.replicated(optax.sgd(0.1, momentum=0.9))
    return jdp.TrainState.create({"w": jnp.ones((5, 1 << 13))}, tx, **options)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_view_that_keeps_the_memory_of_a_leaf_is_logged_once(num_ranks, caplog):
    ranks(num_ranks)
    step, now, views = jdp.train_step(large_step), large_state(), []
    with caplog.at_level(logging.WARNING, "jdp"):
        for _ in range(4):
            views.append(jax.device_get(now.params))
            now, _ = step(now, batch())
    (line,) = caplog.messages
    assert "state.params['w']" in line and "np.array" in line


def test_views_that_cost_nothing_are_not_logged(caplog):
    ranks(2)
    step, now, views = jdp.train_step(large_step), large_state(), []
    with caplog.at_level(logging.WARNING, "jdp"):
        for _ in range(4):
            views.append(np.asarray(now.step))
            np.asarray(now.params["w"])  # dropped at once
            now, _ = step(now, batch())
    assert not caplog.messages


@jdp.eval_step
def large_measure(params, batch):
    return {"loss": jnp.mean(batch["x"] @ params["w"]), "rows": jdp.rows(batch["y"])}


def kept_leaves(folder, *, steps=4):
    """Train with all that reads a state between two steps; return which leaves were not donated."""
    step, kept = jdp.train_step(large_step), []
    with jdp.Checkpointer(folder, save_every=1, commit_every=1) as checkpointer:
        now = checkpointer.restore(large_state())
        for i in range(steps):
            old = now
            now, metrics = step(now, batch())
            metrics["least"] = now.params["w"].min()
            checkpointer.step(now)
            jdp.log(metrics | {"own step": jnp.copy(now.step)}, i, file=folder / "metrics.jsonl")
            jdp.evaluate(large_measure, now.params, [batch()])
            jdp.check_replicas(now)
            leaves = jax.tree_util.tree_leaves_with_path(old)
            kept += [jax.tree_util.keystr(at) for at, leaf in leaves if not leaf.is_deleted()]
    return kept


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_jdp_holds_no_view_of_a_state_across_a_step(num_ranks, tmp_path):
    ranks(num_ranks)
    assert kept_leaves(tmp_path) == []


def with_commits(folder):
    jdp.init()
    return kept_leaves(folder)


@pytest.mark.processes
@pytest.mark.xdist_group("processes")
def test_a_commit_holds_no_view_of_a_state_across_a_step(tmp_path):
    with Launcher() as launcher:
        assert launcher.process("test_donation:with_commits", tmp_path).result() == []


# What an uncaught error prints: the hint is added behind the script's last line.
HINTS = {
    "state.params['w'] + 1": "jax.tree.map(jnp.copy, state)",
    "np.asarray(state.params['w'])": "jax.tree.map(jnp.copy, state)",
    "pickle.dumps(now)": "jdp.Checkpointer",
    "raise RuntimeError('Gloo context initialization failed: timeout')": "outside `if jax.",
    "raise RuntimeError('a value that spans non-addressable devices')": "process_allgather",
    "jax.lax.psum(1.0, 'data')": "outside a step",
    "{}['w']": None,
}
SCRIPT = """
import os, pickle, sys, jax, jax.numpy as jnp, numpy as np, optax, jdp

jdp.init(cpu_ranks=2)
state = jdp.TrainState.create({"w": jnp.ones(2)}, jdp.replicated(optax.sgd(0.1)))
step = jdp.train_step(lambda state, batch: (state.apply_gradients(state.params), {}))
now, _ = step(state, jnp.ones(2))
for source in sys.argv[1:]:
    try:
        exec(source)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
    print("END", file=sys.stderr)
copy = __import__("copy").deepcopy(now)
"""


def test_an_uncaught_error_of_a_donated_state_or_of_pickle_says_what_to_write():
    run = subprocess.run([sys.executable, "-c", SCRIPT, *HINTS], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    shown = run.stderr.split("END\n")
    for text, hint in zip(shown, HINTS.values(), strict=False):
        last = text.splitlines()[-1]
        assert last.startswith("jdp: ") and hint in last if hint else "jdp: " not in text, text
