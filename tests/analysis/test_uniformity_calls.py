"""Functions that are called from many places: walked once for all calls that are alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.analysed import (
    UNIFORM,
    VARYING,
    W,
    X,
    in_scan,
    local,
    mapped,
    pmean,
    psum,
    rank,
    report,
)

import jdp
from jdp.analysis import interpreter, jaxprs
from jdp.analysis.interpreter import Interpreter
from jdp.distributed.checks import startup

DEPTH = 20


def doubled(f):
    return jax.jit(lambda *args: f(*args[:-1], f(*args)))


def nested(f, depth=DEPTH):
    """`f` of the last argument, 2^depth times."""
    f = jax.jit(f)
    for _ in range(depth):
        f = doubled(f)
    return f


@pytest.fixture
def num_visited(monkeypatch):
    """How many equations the analysis has gone through."""
    visited = [0]
    walk_through = Interpreter._equations

    def counting(self, eqns, env):
        visited[0] += len(eqns)
        assert visited[0] < 10_000
        walk_through(self, eqns, env)

    monkeypatch.setattr(Interpreter, "_equations", counting)
    return visited


def twice(f, w, x):
    return f(w) + f(x)


def in_cond(x, f):
    return lax.cond(x.sum() > 0, f, lambda x: x, x)


def in_while(x, f):
    return lax.while_loop(lambda x: x.sum() < 9, f, x)


def through_a_ref(f):
    ref = jax.new_ref(jnp.zeros(4))

    def add(x):
        ref[...] += x
        return x

    nested(jax.jit(add))(f)
    return ref[...]


PROGRAMS = {
    "of the same": (lambda w, x: nested(jnp.sin)(w), UNIFORM),
    "of rows": (lambda w, x: nested(jnp.sin)(x), VARYING),
    "of both": (lambda w, x: nested(jnp.sin)(w) + nested(jnp.cos)(x), VARYING),
    "of the same, then of rows": (lambda w, x: twice(nested(jnp.sin), w, x), VARYING),
    "reduced at the bottom": (lambda w, x: nested(lambda x: pmean(jnp.sin(x)))(x), UNIFORM),
    "the rank at the bottom": (lambda w, x: nested(lambda w: w + rank())(w), VARYING),
    "in a loop": (lambda w, x: in_scan(nested(lambda w: w + 1), w), UNIFORM),
    "in a loop, of rows": (lambda w, x: in_scan(lambda c: nested(lambda c: c + x)(c), w), VARYING),
    "in a cond": (lambda w, x: in_cond(w, nested(jnp.sin)), UNIFORM),
    "in a cond that ranks decide": (lambda w, x: in_cond(x, nested(jnp.sin)), VARYING),
    "in a while": (lambda w, x: in_while(w, nested(jnp.sin)), UNIFORM),
    "into a ref": (lambda w, x: through_a_ref(w), UNIFORM),
    "rows into a ref": (lambda w, x: through_a_ref(x), VARYING),
}  # fmt: skip


@pytest.mark.parametrize(("program", "axes"), PROGRAMS.values(), ids=PROGRAMS)
def test_nested_calls_cost_no_more_than_their_depth(program, axes, num_visited):
    (got,) = report(program).outputs
    assert got.axes == axes
    assert 0 < num_visited[0] < 1000


def test_has_the_verdict_of_the_same_program_written_out(num_visited):
    def small(call, x, w):
        f = nested(lambda y: jnp.where(y > x, psum(y), w), depth=3)
        return call(f)(x)

    called = report(lambda w, x: small(lambda f: f, x, w)).outputs
    with jax.disable_jit():
        assert report(lambda w, x: small(lambda f: f, x, w)).outputs == called


def test_tells_of_the_marks_of_each_call(num_visited):
    noted = nested(lambda x: local(jnp.sin(x)))

    def program(w, x):
        return noted(w) + noted(x)

    (found,) = report(program).marks
    assert found.path == "['w']" and found.value.axes == VARYING


def test_keeps_the_marks_of_the_first_and_the_last_round(num_visited):
    inner = jax.jit(local)

    def program(w, x):
        def body(carry, _):
            # In the first round what is marked is a sum, in the second it has met another value.
            inner(carry)
            return carry + jnp.sin(w), None

        first, _ = lax.scan(body, psum(x), None, length=3)
        return first

    (found,) = report(program).marks
    assert found.value.reduced == found.value.total == VARYING and found.value.axes == UNIFORM


def test_tells_of_a_deadlock_at_the_bottom(num_visited):
    reduced = nested(pmean)
    (found,) = report(lambda w, x: in_cond(x, reduced)).deadlocks
    assert found.control == "cond" and found.source.startswith("analysed.py:")


def test_tells_of_no_deadlock_where_the_same_function_is_called_by_all(num_visited):
    reduced = nested(pmean)
    assert not report(lambda w, x: reduced(x) + in_cond(w, reduced)).deadlocks
    assert report(lambda w, x: reduced(x) + in_cond(x, reduced)).deadlocks


def test_two_refs_are_not_taken_for_one(num_visited):
    @jax.jit
    def write(a, b, x):
        a[...] = x
        b[...] += 1.0

    def program(w, x):
        a, b, c = (jax.new_ref(jnp.zeros(4)) for _ in range(3))
        write(a, b, w)
        write(a, c, x)
        return a[...], b[...], c[...]

    axes = [each.axes for each in report(program).outputs]
    assert axes == [VARYING, UNIFORM, UNIFORM]


def test_a_whole_step_is_proved(num_visited):
    jdp.init(devices=jax.devices()[:2])
    deep = nested(jnp.sin)

    @jdp.train_step
    def step(state, batch):
        return {"w": state["w"] + jdp.mean_over_ranks(deep(batch).mean())}, {}

    jax.eval_shape(step, {"w": jnp.zeros(())}, jnp.ones(2))


@pytest.fixture
def num_opened(monkeypatch):
    """How many equations were looked into by whatever reads a traced program."""
    opened = [0]
    bodies = jaxprs.bodies

    def counting(eqn):
        opened[0] += 1
        assert opened[0] < 10_000
        return bodies(eqn)

    monkeypatch.setattr(jaxprs, "bodies", counting)
    return opened


def test_a_step_with_a_weight_is_proved(num_opened):
    jdp.init(devices=jax.devices()[:2])
    deep = nested(jnp.sin)

    @jdp.eval_step(weight=lambda batch: batch.sum())
    def measure(state, batch):
        return {"mean": deep(batch).mean()}

    jax.eval_shape(measure, {}, jnp.ones(2))
    assert num_opened[0]


def test_a_step_with_gradients_of_their_own_weight_is_proved(num_opened):
    jdp.init(devices=jax.devices()[:2])
    deep = nested(jnp.sin)

    @jdp.train_step
    def step(state, batch):
        grads = {"w": in_scan(lambda c: in_scan(deep, c), batch.sum())}
        grads = jdp.sync_gradients(grads, weight=batch.sum())
        return {"w": state["w"] + grads["w"]}, {}

    jax.eval_shape(step, {"w": jnp.zeros(())}, jnp.ones(2))
    assert num_opened[0]


def test_a_branch_is_searched_for_shifts_once(num_opened):
    jaxpr = jax.make_jaxpr(nested(jnp.sin))(X)
    assert interpreter.first_shift(jaxpr.jaxpr, None, 1) is None
    assert 0 < num_opened[0] < 1000


def test_what_nested_calls_capture_is_compared_once():
    table = np.arange(16.0)
    traced = jax.jit(nested(lambda x: jnp.sin(x) + table)).trace(X)
    program = startup.ProgramText.of_trace("step", traced, traced.lower())
    assert len(program.constants) == 1


def test_a_function_with_a_deep_one_around_its_shard_map(num_visited):
    deep = nested(jnp.sin)
    assert jdp.uniformity(lambda x: deep(mapped_mean(deep(x))), X) == "uniform"


def mapped_mean(x):
    return mapped(lambda w, x: pmean(x))(W, x)


def test_a_function_reads_what_a_ref_holds_by_then(num_visited):
    @jax.jit
    def read(ref):
        return ref[...] + 0.0

    def program(w, x):
        ref = jax.new_ref(w)
        before = read(ref)
        ref[...] = x
        return before, read(ref)

    assert [each.axes for each in report(program).outputs] == [UNIFORM, VARYING]
