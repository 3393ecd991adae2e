"""Processes that are about to run something else than the others do not begin."""

import os
import re
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import training
from support.processes import me, refusal
from support.python_calls import python_calls
from support.training import loss_fn, plain_step, state

import jdp
from jdp.distributed import agree
from jdp.distributed.checks import startup

FACTS = {"JAX": "0.12.0", "native library": "6c0f", "mesh": "{'data': 4} over the devices [0, 1]"}


@pytest.mark.parametrize("name", FACTS)
def test_the_process_that_differs_from_most_is_named_with_what_differs(name):
    facts = {process: dict(FACTS) for process in range(3)}
    startup.require_equal_facts(facts)
    facts[1][name] = "else"
    with pytest.raises(ValueError, match=f"process 1 .* {name} .*process 0.* else.*JDP201"):
        startup.require_equal_facts(facts)


def test_a_process_without_native_library_may_start():
    startup.require_equal_facts({0: FACTS, 1: FACTS | {"native library": None}})


def start_otherwise(what):
    if what == "mesh":
        devices = jax.devices()
        return refusal(lambda: jdp.init(devices=devices[::-1] if me() else devices))
    flags = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = (
        f"--xla_dump_to=/tmp/{me()}" + " --xla_other" * (what == "flags") * me()
    )
    try:
        return refusal(jdp.init)
    finally:
        os.environ.pop("XLA_FLAGS")
        os.environ |= {} if flags is None else {"XLA_FLAGS": flags}


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("mesh", r"process 1 .* mesh .*process 0.*\{'data': 4\}.*JDP201"),
        ("flags", r"process 1 .* XLA_FLAGS .*process 0.*'--xla_other'.* ''.*JDP201"),
    ],
)
def test_init_refuses_on_every_process(processes, what, text):
    for error in processes(2).run(start_otherwise, what):
        assert re.match(f"ValueError: {text}", error)


def test_where_a_process_writes_its_dumps_is_its_own_affair(processes):
    assert processes(2).run(start_otherwise, "dumps") == [None, None]


# Functions of the loss that differ on process 1.


def array():
    values = np.arange(300, dtype=np.float32).reshape(3, 100)
    values[1, 17] += me()
    return lambda loss: loss + jnp.asarray(values).sum()


def shape():
    values = np.zeros(3 + me(), np.float32)
    return lambda loss: loss + jnp.asarray(values).sum()


def key():
    key = jax.random.key(me())
    return lambda loss: loss + jax.random.normal(key)


def number():
    scale = 1.5 + me()
    return lambda loss: loss * scale


def length():
    return lambda loss: jdp.sum_over_ranks(jnp.zeros(3 + me()).at[0].set(loss)).sum()


def longer():
    return lambda loss: jnp.sin(loss) if me() else loss


DIFFERING = {
    array: r"float32\[3, 100\].* 118\.0 .*\[1, 17\].*process 1 .* 117\.0 .*process 0",
    shape: r"float32\[4\].*process 1 .*float32\[3\].*process 0",
    key: r"uint32\[2\].* 1 at \[1\].*process 1 .* 0 .*process 0",
    number: r"(?s)dense<2\.500000e\+00> : tensor<f32>  \(test_startup\.py:.*np\.random",
    length: "tensor<4xf32>",
    longer: "(?s)stablehlo.sine.*the same code",
}


def run_differing(differing):
    jdp.init()
    of_loss = differing()

    @jdp.train_step
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": of_loss(loss)}

    s = state()
    batch = next(iter(jdp.batches(training.batch(), 8, num_steps=1)))
    error = refusal(step, s, batch)
    return error, [leaf.is_deleted() for leaf in jax.tree.leaves(s)]


@pytest.mark.parametrize("differing", DIFFERING, ids=lambda function: function.__name__)
def test_another_program_is_refused_on_every_process(processes, differing):
    for error, deleted in processes(2).run(run_differing, differing):
        assert error.startswith("ValueError: process 1 ") and "JDP205" in error
        assert re.search(DIFFERING[differing], error)
        assert not any(deleted)


def run_of_three():
    jdp.init()
    scale = 1.5 + (me() == 1)
    step = jdp.train_step(lambda state, batch: (state * scale, {}))
    return refusal(step, jnp.ones(3), next(iter(jdp.batches(np.ones(12), 6, num_steps=1))))


@pytest.mark.slow
def test_of_three_processes_the_odd_one_is_named_to_all(processes):
    errors = processes(3).run(run_of_three)
    assert len(set(errors)) == 1
    assert "process 1 " in errors[0] and "JDP205" in errors[0]
    assert "dense<2.500000e+00>" in errors[0].split("on process 1")[0]


def run_refused():
    jdp.init()

    @jdp.train_step
    def step(state, batch):
        grads = jax.grad(loss_fn)(state.params, batch)
        rows = batch["x"].sum() if me() else 0.0
        return state.apply_gradients(grads).replace(model_state=jnp.asarray(rows, jnp.float32)), {}

    s = state(model_state=np.float32(0))
    return refusal(step, s, next(iter(jdp.batches(training.batch(), 8, num_steps=1))))


def test_the_refusal_of_one_process_is_an_error_on_the_others(processes):
    waiting, refused = processes(2).run(run_refused)
    assert refused.startswith("ValueError: `step` ") and "JDP1" in refused
    assert waiting.startswith("OtherFailedError: process 1 ") and "`step`" in waiting
    assert refused in waiting and waiting.endswith("(jdp explain-error JDP208)")


def run_alone():
    jdp.init()
    s, batch = state(), next(iter(jdp.batches(training.batch(), 8, num_steps=1)))
    if me():
        time.sleep(1.5)  # hangs, for all that process 0 knows
        agree.all_gather((0, 1), None, what="the program")
        return None
    agree.set_timeout_s(0.5)
    try:
        return refusal(jdp.train_step(plain_step), s, batch)
    finally:
        agree.set_timeout_s(300.0)


def test_a_process_that_does_not_come_is_named(processes):
    error, _ = processes(2).run(run_alone)
    assert error.startswith("RuntimeError: process 1 ") and "0.5 s" in error
    assert "`plain_step`" in error and "JDP207" in error


def run_other_shapes_later():
    jdp.init()

    @jdp.train_step
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        is_odd = len(batch["x"]) == 2 and me() == 1
        return state.apply_gradients(grads), {"loss": loss * (2 if is_odd else 3)}

    errors, s = [], state()
    for num_rows in (4, 4, 8, 4):
        batch = next(iter(jdp.batches(training.batch(), num_rows, num_steps=1)))
        try:
            s, _ = step(s, batch)
            errors.append(None)
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_each_new_trace_is_compared_and_the_state_stays_usable(processes):
    for errors in processes(2).run(run_other_shapes_later):
        assert [bool(error) for error in errors] == [False, False, True, False]
        assert "dense<2.000000e+00>" in errors[2]


def run_with_other_precision():
    jdp.init()
    seen = []

    @jdp.train_step
    def step(state, batch):
        seen.append(jax.config.jax_default_matmul_precision)
        scale = 2 + (me() if seen[-1] else 0)
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss * scale}

    s, batch = state(), next(iter(jdp.batches(training.batch(), 8, num_steps=1)))
    for _ in range(3):
        s, _ = step(s, batch)
    with jax.default_matmul_precision("float32"):
        error = refusal(step, s, batch)
    s, _ = step(s, batch)
    return error


def test_a_trace_for_another_reason_than_shapes_is_compared_as_well(processes):
    for error in processes(2).run(run_with_other_precision):
        assert "dense<3.000000e+00>" in error


WORK = ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")


def count_work():
    """What JAX does for the first call, and for later ones; what Python calls in the last."""
    jdp.init()
    work = []

    def listen(event, duration, fun_name="", **_):
        name = event.rpartition("/")[2]
        if "counted" in str(fun_name) or name.startswith("backend_compile"):
            work.append(name)

    def counted(state, batch):
        return plain_step(state, batch)

    step, s = jdp.train_step(counted), state()
    batch = next(iter(jdp.batches(training.batch(), 8, num_steps=1)))
    jdp.check_replicas(s)  # which compiles what hashes a state
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        s, _ = step(s, batch)
        first = [*work]
        for _ in range(2):
            s, _ = step(s, batch)
    finally:
        jax.monitoring.clear_event_listeners()
    names, _ = python_calls(step, s, batch)
    return (
        first,
        work[len(first) :],
        sorted(names & {"cache_miss", "trace_to_jaxpr_dynamic", "all_gather", "_compare"}),
    )


def test_the_step_is_compiled_once_and_later_calls_compare_nothing(processes):
    for first, later, calls in processes(2).run(count_work):
        assert first == [f"{kind}_duration" for kind in WORK]
        assert later == []
        assert calls == []


def call_with_a_state_that_changes_its_type():
    jdp.init()
    step = jdp.train_step(lambda state, batch: (state.astype(jnp.float32) + 1, {}))
    s, batch = jnp.zeros(3, jnp.int32), next(iter(jdp.batches(np.ones(12), 4, num_steps=1)))
    for _ in range(3):
        s, _ = step(s, batch)
    names, (s, _) = python_calls(step, s, batch)
    return s.tolist(), "cache_miss" in names


def test_the_trace_for_what_comes_out_first_keeps_the_fast_path_of_jit(processes):
    for values, is_slow in processes(2).run(call_with_a_state_that_changes_its_type):
        assert values == [4.0, 4.0, 4.0]
        assert not is_slow


def lower_alone():
    jdp.init()
    s, batch = state(), next(iter(jdp.batches(training.batch(), 8, num_steps=1)))
    step = jdp.train_step(plain_step)
    text = step.lower(s, batch).as_text() if me() else ""
    s, metrics = step(s, batch)
    return bool(text), float(metrics["loss"])


def test_one_process_may_look_at_its_program_and_all_go_on(processes):
    first, second = processes(2).run(lower_alone)
    assert first == (False, second[1])
    assert second[0]


def run_part_of_another():
    jdp.init()

    @jdp.train_step
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss * (1 + me())}

    @jax.jit
    def twice(state, batch):
        state, _ = step(state, batch)
        return step(state, batch)

    _, metrics = twice(state(), next(iter(jdp.batches(training.batch(), 8, num_steps=1))))
    return float(metrics["loss"])


def test_a_step_in_a_program_of_the_authors_is_neither_compared_nor_waited_for(processes):
    one, other = processes(2).run(run_part_of_another)
    assert one == pytest.approx(other)  # the mean of both


def run_with_callbacks():
    jdp.init()
    key = jax.random.key(3)

    @jdp.train_step
    def step(state, batch):
        jax.debug.callback(lambda x: None, batch["x"])
        kind = jax.ShapeDtypeStruct((), jnp.float32)
        double = jax.pure_callback(lambda x: np.float32(2 * x), kind, jax.random.normal(key))
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss + double}

    _, metrics = step(state(), next(iter(jdp.batches(training.batch(), 8, num_steps=1))))
    return float(metrics["loss"])


def test_callbacks_and_keys_are_the_same_program_on_each_process(processes):
    one, other = processes(2).run(run_with_callbacks)
    assert one == other


SCHEDULE = """
HloModule jit_step, is_scheduled=true
%body.1 (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %ag.1 = f32[8]{0} all-gather(%p.1), channel_id=3, replica_groups={{0,1}}, dimensions={0}
}
ENTRY %main {
  %x.2 = f32[8]{0} parameter(0)
  %s.2 = f32[8]{0} all-reduce-start(%x.2), channel_id=1, replica_groups={{0,1}}, to_apply=%add.2
  %m.2 = f32[8]{0} fusion(%x.2), kind=kLoop, calls=%fused
  %d.2 = f32[8]{0} all-reduce-done(%s.2), metadata={op_name="jit(step)/psum"}
  %r.2 = f32[1]{0} custom-call(%x.2), custom_call_target="jdp_ring_start", backend_config={b = 1}
}
"""


def swapped(text, first, second):
    lines = text.splitlines()
    i, j = (next(k for k, line in enumerate(lines) if word in line) for word in (first, second))
    lines[i], lines[j] = lines[j], lines[i]
    return "\n".join(lines)


def test_names_and_computing_are_no_part_of_the_schedule_of_collectives():
    renamed = SCHEDULE.replace(".2", ".37").replace("%add", "%region_0")
    moved = swapped(renamed, "fusion(", "parameter(0)")
    want = startup.schedule_of(SCHEDULE)
    assert want == [
        "all-gather f32[8]{0} replica_groups={{0,1}}",
        "all-reduce-start f32[8]{0} replica_groups={{0,1}}",
        "all-reduce-done f32[8]{0}",
        "jdp_ring_start f32[1]{0} {b = 1}",
    ]
    assert startup.schedule_of(moved) == want


@pytest.mark.parametrize(
    "other",
    [
        swapped(SCHEDULE, "all-reduce-done(", "custom-call("),
        SCHEDULE.replace("{{0,1}}, to_apply", "mesh['data'=2] {'data'}, to_apply"),
        SCHEDULE.replace("b = 1", "b = 2"),
        SCHEDULE.replace("all-reduce-start(", "all-reduce("),
    ],
    ids=["order", "groups", "bucket", "asynchronous"],
)
def test_another_order_or_kind_of_collectives_is_another_schedule(other):
    assert startup.schedule_of(other) != startup.schedule_of(SCHEDULE)


def compare_schedules(mine, other):
    text = other if me() else mine
    group = agree.peers(jdp.init())
    return refusal(startup.require_schedule, group, "step", text)


def test_another_schedule_is_refused_on_every_process(processes):
    other = swapped(SCHEDULE, "all-reduce-done(", "custom-call(")
    for error in processes(2).run(compare_schedules, SCHEDULE, other):
        assert "process 1" in error and "process 0" in error and "JDP206" in error
        assert error.index("jdp_ring_start") < error.index("all-reduce-done")
    assert processes(2).run(compare_schedules, SCHEDULE, SCHEDULE) == [None, None]


def wait_for_one_that_saves():
    jdp.init(timeout_s=0.5)
    if me():
        with jdp.phase("saving"):
            time.sleep(1.0)
    try:
        return agree.all_gather((0, 1), me(), what="whether it is saved")
    finally:
        jdp.init()


def test_a_process_that_saves_is_waited_for(processes):
    assert processes(2).run(wait_for_one_that_saves) == [{0: 0, 1: 1}] * 2


def test_under_a_launcher_only_the_watch_ends_a_comparison(before_init, monkeypatch):
    waits = []

    def get(key, *, timeout_s):
        waits.append(timeout_s)
        return '{"value": 7, "what": "values"}' if len(waits) > 3 else None

    mesh = jdp.init()
    monkeypatch.setattr(startup.launcher_client, "current", lambda: "a launcher")
    startup.require_start(mesh, 0.5)
    monkeypatch.setattr(agree, "kv_store", SimpleNamespace(put=lambda *_: None, get=get))
    assert agree.all_gather((0, 99), 7, what="values") == {0: 7, 99: 7}
    assert waits == [60.0] * 5
