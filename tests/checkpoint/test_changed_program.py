"""A program that changes between two lives of a run is reported, and nothing else is."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp.distributed.checks import startup

# The first life commits 3 steps, writes another setting, and dies.
SCRIPT = """
import os, sys
from pathlib import Path
import jax.numpy as jnp
import optax
import jdp

setting = Path(__file__).parent / "rate"
mesh = jdp.init()
rate = float(setting.read_text())

@jdp.train_step
def step(state, batch):
    return state.apply_gradients({"n": batch.mean()}), {}

with jdp.Checkpointer(Path(__file__).parent / "run", commit_every=1) as ckpt:
    state = jdp.TrainState.create({"n": jnp.zeros(())}, jdp.replicated(optax.sgd(rate)))
    state = ckpt.restore(state)
    first = ckpt.steps
    while ckpt.steps < 5:
        state, _ = step(state, jnp.ones(4))
        ckpt.step(state)
        if ckpt.steps == 3 and not first:
            ckpt._session._commits.wait()
            setting.write_text("0.5")
            os._exit(7)
print("result", float(state.params["n"]), "after", first)
"""


@pytest.mark.processes
@pytest.mark.xdist_group("processes")
def test_a_recovery_with_another_flag_is_reported_with_the_line(jdp_run, tmp_path):
    (tmp_path / "rate").write_text("0.25")
    one = jdp_run("--standbys=0", "--max-restarts=1", script=SCRIPT)
    one.deadline_s = 240.0
    assert one.wait() == 0, one.output
    assert "result -1.75 after 3" in one.output
    assert "`step` is another program than at step 3" in one.output
    assert "`mul -0.5 float32[]" in one.output


# Makes a step, as a script does that reads its settings anew in each life.
def new_step(name="step", *, scale=1.0, layers=1, names=(), table=None, power=1, asks=False):
    tables = {name: jnp.arange(ord(name) % 7 + 1.0) for name in names}

    def loss_fn(params, batch):
        x = batch @ params["w"]
        for _ in range(layers):
            x = jnp.tanh(x)
        loss = scale * jnp.mean(x) ** power
        for name in names:
            loss += jnp.sum(jnp.arange(ord(name) % 7 + 1.0) @ tables[name]) * params["w"][0]
        return loss if table is None else loss + table.sum()

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        if asks:
            jax.debug.print("{}", loss)
            loss = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), loss.dtype), loss)
        return state.apply_gradients(grads), {"loss": loss}

    step.__name__ = name
    return jdp.train_step(step)


def new_state(rate=0.25):
    return jdp.TrainState.create({"w": jnp.ones(4)}, jdp.replicated(optax.sgd(rate)))


class Run:
    """The lives of a run: each trains 4 steps as a process that has traced nothing yet."""

    def __init__(self, path, monkeypatch, caplog, make_mesh):
        self._path, self._patch, self._log, self._make_mesh = path, monkeypatch, caplog, make_mesh
        self._is_begun = False

    def live(self, advance, rate=0.25, *, rows=8, ranks=2):
        """Return the warnings. `advance(number, states, batch)` makes a step of each state."""
        self._patch.setattr(startup, "traced", startup.TracedPrograms())
        self._log.clear()
        mesh = self._make_mesh(ranks)
        where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        states = jax.device_put([new_state(rate), new_state(0.125)], where)
        with jdp.Checkpointer(self._path, resume=self._is_begun) as ckpt:
            self._is_begun = True
            states = ckpt.restore(states)
            first = ckpt.steps
            while ckpt.steps < first + 4:
                states = advance(ckpt.steps, states, jnp.ones((rows, 4)))
                ckpt.step(states)
        found = [each.getMessage() for each in self._log.records]
        return [text for text in found if "another program" in text]


@pytest.fixture
def lives(tmp_path, monkeypatch, caplog, make_mesh):
    caplog.set_level(logging.WARNING, "jdp")
    return Run(tmp_path, monkeypatch, caplog, make_mesh)


# Trains the first state by a step, and leaves the other one.
def by(step):
    def advance(number, states, batch):
        state, _ = step(states[0], batch)
        return [state, states[1]]

    return advance


def test_the_same_program_is_not_reported(lives):
    for _ in range(3):
        assert lives.live(by(new_step(table=jnp.arange(7.0), asks=True))) == []


def test_names_in_the_random_order_of_a_set_are_not_reported(lives):
    for names in ("abcdef", "fedcba", "cafebd"):
        assert lives.live(by(new_step(names=names))) == []


def test_what_was_computed_to_the_last_bits_but_one_is_not_reported(lives):
    table = np.linspace(1.0, 2.0, 7, dtype=np.float32)
    for rounded in (table, np.nextafter(table, np.float32(3))):
        assert lives.live(by(new_step(table=jnp.asarray(rounded)))) == []


def test_other_ranks_or_shapes_are_not_reported(lives):
    assert lives.live(by(new_step(layers=1))) == []
    assert lives.live(by(new_step(layers=2)), ranks=1) == []
    assert lives.live(by(new_step(layers=3)), rows=16) == []


def test_a_constant_whose_memory_was_given_back_is_described_by_its_type(lives):
    for _ in range(2):
        table = jnp.arange(7.0)
        step = new_step(table=table)

        def advance(number, states, batch, step=step, table=table):
            if table.is_deleted():  # before the lines of the program are computed
                return states
            state, _ = step(states[0], batch)
            jax.block_until_ready(state)
            table.delete()
            return [state, states[1]]

        assert lives.live(advance) == []


@pytest.mark.parametrize("name", ["other", "step"])
def test_two_steps_in_turn_are_not_reported(lives, name):
    for _ in range(3):
        one, other = new_step("step"), new_step(name, scale=2.0)

        def advance(number, states, batch, one=one, other=other):
            return [one(states[0], batch)[0], other(states[1], batch)[0]]

        assert lives.live(advance) == []


def test_a_step_that_another_one_replaces_after_a_warmup_is_not_reported(lives):
    for _ in range(3):
        one, other = new_step(), new_step(scale=2.0)
        measure = jdp.eval_step(lambda state, batch: {"n": batch.sum()})

        def advance(number, states, batch, one=one, other=other, measure=measure):
            step = one if number < 6 else other
            state, _ = step(states[0], batch)
            measure(state, batch)
            return [state, states[1]]

        assert lives.live(advance) == []


def test_another_evaluation_is_not_reported(lives):
    for scale in (1.0, 2.0):
        step = new_step()
        measure = jdp.eval_step(lambda state, batch, scale=scale: {"n": batch.sum() * scale})

        def advance(number, states, batch, step=step, measure=measure):
            measure(states[0], batch)
            return [step(states[0], batch)[0], states[1]]

        assert lives.live(advance) == []


def test_a_step_that_is_traced_again_in_one_process_is_not_reported(lives):
    step = new_step()

    def advance(number, states, batch):
        jax.clear_caches()
        return [step(states[0], batch)[0], states[1]]

    assert lives.live(advance) == []
    assert lives.live(advance) == []


@pytest.mark.parametrize(
    "before, after, line",
    [
        ({}, {"rate": 0.5}, "`mul -0.5 float32[4] -> float32[4]`"),
        ({}, {"scale": 0.3}, "`mul 0.3 float32[] -> float32[]` (test_changed_program.py:"),
        ({}, {"layers": 2}, "`tanh float32[4] -> float32[4]` (test_changed_program.py:"),
        ({"layers": 3}, {}, "it has "),
        (
            {"table": np.arange(7.0, dtype=np.float32)},
            {"table": np.arange(7.0, dtype=np.float32)[::-1].copy()},
            "`constant float32[7]",
        ),
        ({"table": np.arange(7)}, {"table": np.arange(7) % 6}, "`constant int32[7]"),
    ],
    ids=["learning rate", "number", "layer more", "layer less", "data", "integers"],
)
def test_a_program_that_differs_is_reported_once_with_its_first_line(lives, before, after, line):
    def advance(options):
        options = {key: jnp.asarray(x) if key == "table" else x for key, x in options.items()}
        return by(new_step(**{key: x for key, x in options.items() if key != "rate"}))

    assert lives.live(advance(before), before.get("rate", 0.25)) == []
    (text,) = lives.live(advance(after), after.get("rate", 0.25))
    assert "`step` is another program than at step 4" in text and line in text
    assert lives.live(advance(after), after.get("rate", 0.25)) == []


def test_a_rightful_change_where_a_run_goes_on_cannot_be_told_from_another_flag(lives):
    """Why a difference is only a warning: this run is right, and would have been refused."""

    def advance(number, states, batch):
        if number % 4 == 0:  # a phase begins, for which the script makes its step anew
            steps.append(new_step(scale=1.0 + number))
        return [steps[-1](states[0], batch)[0], states[1]]

    steps = []
    assert lives.live(advance) == []
    assert len(lives.live(advance)) == 1
