"""What processes hand to a step beside the batch is compared: a difference is an error on all."""

import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import training
from support.processes import me, refusal
from support.training import loss_fn, state

import jdp
from jdp.distributed.checks import arguments, hashes
from jdp.step_spec import StepSpec

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("processes")]


def names(error, leaf, values=""):
    """Whether an error names a leaf that differs on process 1, perhaps with the values of both."""
    return re.search(f"{re.escape(leaf)} .*process 1.* process 0.*{values}", error)


def one_batch():
    return next(iter(jdp.batches(training.batch(), 24, num_steps=1)))


@jdp.train_step
def noisy(state, batch, extra):
    """A step that adds up all that is in `extra`."""
    leaves = [
        x for x in jax.tree.leaves(extra) if not jnp.issubdtype(jnp.result_type(x), jnp.integer)
    ]
    noise = sum(
        jax.random.normal(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.sum(x)
        for x in map(jnp.asarray, leaves)
    )
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(jax.tree.map(lambda g: g + 1e-3 * noise, grads)), {"loss": loss}


# name -> (value for a call and a process that is odd or not, how it is named)
KINDS = {
    "key": (lambda n, odd: jax.random.key(10 * n + odd), "`extra`"),
    "raw key": (lambda n, odd: jax.random.key_data(jax.random.key(10 * n + odd)), "`extra`"),
    "float": (lambda n, odd: 0.5 * n + odd, "`extra`"),
    "numpy": (lambda n, odd: np.full(3, n + odd, np.float32), "`extra`"),
    "in a tree": (
        lambda n, odd: {"a": 1.0, "b": [None, np.float32(n), jnp.float32(n + odd)]},
        "`extra['b'][2]`",
    ),
    "large": (
        lambda n, odd: {"w": jnp.ones(20_000), "v": jnp.full(20_000, n).at[7].add(odd)},
        "`extra['v']`",
    ),
    "large numpy": (lambda n, odd: np.full(20_000, n + odd, np.float32), "`extra`"),
    "many": (lambda n, odd: [jnp.float32(n + odd * (i == 9)) for i in range(20)], "`extra[9]`"),
    "half": (lambda n, odd: jnp.full(5, n + odd, jnp.bfloat16), "`extra`"),
    "committed": (
        lambda n, odd: jax.device_put(jax.random.key(10 * n + odd), jax.local_devices()[1]),
        "`extra`",
    ),
    "zeros": (lambda n, odd: jnp.float32(-0.0 if odd else 0.0), "`extra`"),
}


def differ_in(kinds, odd_process, wrong_call):
    """For each kind what is said if a process differs in one call, and whether a state was lost."""
    jdp.init()
    batch, found = one_batch(), {}
    for kind in kinds:
        make, _ = KINDS[kind]
        s = state()

        def train(s=s, make=make):
            for n in range(wrong_call + 2):
                s, _ = noisy(s, batch, make(n, n == wrong_call and me() == odd_process))
            jdp.check_replicas(s)

        error = refusal(train)
        found[kind] = error, any(leaf.is_deleted() for leaf in jax.tree.leaves(s))
    return found


def test_a_further_argument_that_differs_in_the_first_call_is_refused_before_it_runs(processes):
    one, other = processes(2).run(differ_in, [*KINDS], 1, 0)
    assert one.keys() == other.keys() == KINDS.keys()
    for kind, (error, is_deleted) in one.items():
        assert other[kind][0] == error
        if kind == "key":  # Later kinds may be of a program that was compared already.
            assert error.startswith("ValueError: `extra` ") and "JDP204" in error
            assert not is_deleted and not other[kind][1]
        assert names(error, KINDS[kind][1])


def test_a_further_argument_that_differs_later_is_an_error_that_names_leaf_and_process(processes):
    one, other = processes(2).run(differ_in, [*KINDS], 0, 2)
    for kind, (error, _) in one.items():
        assert other[kind][0] == error
        assert error.startswith("RuntimeError: call "), kind
        assert "of `noisy`" in error and KINDS[kind][1] in error and "JDP211" in error


def same_everywhere(kinds):
    jdp.init()
    batch, hashed = one_batch(), []
    original = hashes.folded
    hashes.folded = lambda *args: hashed.append(len(args[1])) or original(*args)
    try:
        for kind in kinds:
            s, (make, _) = state(), KINDS[kind]
            for n in range(3):
                s, _ = noisy(s, batch, make(n, False))
            jdp.check_replicas(s)
        teacher = KINDS["large"][0](0, False)
        s, _ = noisy(state(), batch, teacher)
        hashed.clear()
        for _ in range(10):
            s, _ = noisy(s, batch, teacher)
        again = [*hashed]
        s = s.replace(params={**s.params, "b": s.params["b"] * 0.5})
        s, _ = noisy(s, batch, teacher)
        return again, hashed, len(jax.tree.leaves(s))
    finally:
        hashes.folded = original


def test_equal_arguments_pass_and_are_hashed_only_when_they_change(processes):
    for again, hashed, _ in processes(2).run(same_everywhere, [*KINDS]):
        assert again == []
        assert hashed == [1]  # the leaf of the state that was changed


def change_state(how):
    jdp.init()
    batch, s = one_batch(), state()

    @jdp.train_step
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    def train(s=s):
        for n in range(4):
            if n == 2:
                factor = {"differs": 1.0 + me(), "alike": 0.5, "on one": 0.5}[how]
                if how != "on one" or me() == 1:
                    s = s.replace(params={**s.params, "b": s.params["b"] * factor + me() * 0})
            s, _ = step(s, batch)
        jdp.check_replicas(s)

    return refusal(train)


def change_states():
    return [change_state(how) for how in ("differs", "alike", "on one")]


def test_a_state_that_is_changed_between_steps_is_compared(processes):
    one, other = processes(2).run(change_states)
    assert one == other
    differs, alike, on_one = one
    assert names(differs, "`state.params['b']`")
    assert alike is None
    assert names(on_one, "`state.params['b']`")
    for text in (differs, on_one):  # advice for a state, without the one for random keys
        assert "call 3 of `step`" in text and "JDP211" in text
        assert "jdp.per_rank" in text and "key" not in text


def go_on_in_another_step():
    jdp.init()
    batch, s = one_batch(), state()
    gc.disable()  # as if nothing had made it run yet
    try:
        for phase in range(3):
            trainer = Trainer()
            jdp.check_replicas(s)
            if me() == phase % 2:
                gc.collect()  # so that the step before is gone here, and only here
            s, _ = trainer.step(s, batch)
            s, _ = trainer.step(s, batch)
    finally:
        gc.enable()
    jdp.check_replicas(s)
    return training.fetched(s.params)


class Trainer:
    """Refers to itself by way of its step, so that only the garbage collector ends it."""

    def __init__(self):
        self.step = jdp.train_step(self._step)

    def _step(self, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}


def test_a_state_goes_on_in_another_step_whenever_processes_collect_their_garbage(processes):
    one, other = processes(2).run(go_on_in_another_step)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def hang_in_a_cond():
    jdp.init()
    batch = one_batch()

    @jdp.train_step
    def step(state, batch, key):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        loss = jax.lax.cond(
            jax.random.bernoulli(key),
            jdp.mean_over_ranks,
            lambda x: 0.0 * jdp.mean_over_ranks(-x),
            loss,
        )
        loss = jax.lax.cond(jax.random.bernoulli(key), jdp.mean_over_ranks, lambda x: x, loss)
        return state.apply_gradients(grads), {"loss": loss}

    keys = list(map(jax.random.key, range(20)))
    yes, no = (
        next(k for k in keys if bool(jax.random.bernoulli(k)) is is_yes) for is_yes in (True, False)
    )
    return refusal(step, state(), batch, yes if me() else no)


def test_a_key_that_would_make_ranks_wait_for_each_other_is_refused_first(processes):
    for error in processes(2).run(hang_in_a_cond):
        assert error.startswith("ValueError: `key`") and names(error, "`key`")


def evaluate_otherwise(wrong):
    jdp.init()

    @jdp.eval_step
    def measure(params, batch, scale):
        return {"loss": loss_fn(params, batch) * scale, "rows": jdp.rows(batch["x"][:, 0])}

    @jdp.eval_step
    def rows_alone(params, batch, scale):
        return jdp.rows(batch["x"][:, 0] * scale)

    found = []
    for step in (measure, rows_alone):
        params = state().params

        def batches():
            return jdp.batches(training.batch(), 8, epochs=1, shuffle=False, tail="drop")

        jdp.evaluate(step, params, batches(), jnp.float32(1))
        scale = jnp.float32(2 + (wrong == "argument") * me())
        if wrong == "state" and me():
            params = jax.tree.map(lambda x: x + 1, params)
        elif wrong == "state":
            params = jax.tree.map(lambda x: x + 2, params)
        found.append(refusal(jdp.evaluate, step, params, batches(), scale))
    return found


def test_evaluation_compares_as_well(processes):
    for wrong, name in {"argument": "scale", "state": "params['b']"}.items():
        one, other = processes(2).run(evaluate_otherwise, wrong)
        assert one == other
        for error in one:
            assert names(error, f"`{name}`")


def with_metric(state, batch, key):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


def without_metrics(state, batch, key):
    return with_metric(state, batch, key)[0], {}


def count_collectives(mesh=None):
    """How many reductions stand in the programs of steps."""
    jdp.init(mesh)
    s, batch, counts = state(), one_batch(), []
    for program in (with_metric, without_metrics):
        text = jdp.train_step(program).lower(s, batch, jax.random.key(0)).as_text()
        counts.append(text.count("all_reduce") + text.count("custom_call @jdp_"))
    return counts


def test_the_comparison_goes_with_the_metrics_and_sends_nothing_by_itself(processes, make_mesh):
    (metric, no_metric), other = processes(2).run(count_collectives)
    assert [metric, no_metric] == other
    alone = count_collectives(make_mesh(4))
    assert metric == alone[0] > alone[1] > 0
    assert no_metric == metric


@pytest.mark.slow
def test_of_three_processes_the_odd_one_is_named(processes):
    first, *others = processes(3).run(differ_in, ["float", "large"], 1, 2)
    for kind, (error, _) in first.items():
        assert [other[kind][0] for other in others] == [error, error]
        assert names(error, KINDS[kind][1])


def test_two_kinds_of_ranks_are_seen_by_every_rank():
    for num_ranks in (2, 3, 8, 1000):
        for num_odd in (1, num_ranks // 2, num_ranks - 1):
            a, b = np.float32([1, 2, 3, 255]), np.float32([1, 2, 4, 255])
            sums = (num_ranks - num_odd) * a + num_odd * b
            assert hashes.checksums_differ(jnp.asarray(a), jnp.asarray(sums), num_ranks).all()
            assert hashes.checksums_differ(jnp.asarray(b), jnp.asarray(sums), num_ranks).all()
        assert not hashes.checksums_differ(
            jnp.asarray(a), jnp.asarray(num_ranks * a), num_ranks
        ).any()


def train_on_two_axes(layout):
    """The errors of a step on a mesh with a model axis, equal and with an odd process."""
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    devices = np.array(devices).reshape(2, 2)
    devices = devices if layout == "data between processes" else devices.T
    mesh = jdp.init(Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2))
    batch, found = one_batch(), []

    def split(value):
        where = NamedSharding(mesh, P("model"))
        return jax.make_array_from_callback(value.shape, where, lambda index: value[index])

    for wrong in ("", "float", "split"):
        s = state()

        def train(s=s, wrong=wrong):
            for n in range(3):
                odd = me() * (n == 1)
                values = np.arange(20_000, dtype=np.float32) + odd * (wrong == "split")
                extra = [split(values), 1.0 + odd * (wrong == "float")]
                s, _ = noisy_of_two(s, batch, *extra)
            jdp.check_replicas(s)

        found.append(refusal(train))
    return found


@jdp.train_step
def noisy_of_two(state, batch, teacher, scale):
    return noisy.spec.fn(state, batch, [teacher, scale])


@pytest.mark.parametrize("layout", ["data between processes", "model between processes"])
def test_arguments_on_a_mesh_with_further_axes_are_compared(processes, layout):
    one, other = processes(2).run(train_on_two_axes, layout)
    assert one[0] is None and other[0] is None
    if layout == "data between processes":
        assert one == other
        assert names(one[1], "`scale`", "2.0") and names(one[2], "`teacher`")


def fail_in_the_third_call(odd):
    jdp.init()
    batch, s = one_batch(), state()

    def fail(step):
        if step == 2:
            raise OSError("of the author")
        return np.float32(0)

    @jdp.train_step
    def step(state, batch, scale):
        kind = jax.ShapeDtypeStruct((), jnp.float32)
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        zero = jax.pure_callback(fail, kind, state.step)
        new = state.apply_gradients(jax.tree.map(lambda g: g * scale, grads))
        return new, {"loss": loss + zero}

    def train(s=s):
        for n in range(3):
            s, _ = step(s, batch, 1.0 + (n == 2) * odd * me())
        jdp.check_replicas(s)

    return refusal(train)


def test_a_call_that_fails_says_in_what_it_differed(processes):
    for error in processes(2).run(fail_in_the_third_call, 1):
        assert "call 3 of `step`" in error and "OSError: of the author" in error
        assert names(error, "`scale`", "2.0 .*1.0") and "JDP214" in error
    for error in processes(2).run(fail_in_the_third_call, 0):
        assert "call 3 of `step`" in error and "process 1" not in error


def restore_and_close(path):
    jdp.init()
    batch, hashed = one_batch(), []
    original = hashes.folded

    def train(num, extra):
        with jdp.Checkpointer(path, resume=True) as ckpt:
            s = ckpt.restore(state())
            for n in range(num):
                s, _ = noisy(s, batch, extra(n))
                ckpt.step(s)

    train(2, lambda n: 1.0)
    hashes.folded = lambda *args: hashed.append(len(args[1])) or original(*args)
    try:
        train(2, lambda n: 1.0)
    finally:
        hashes.folded = original
    error = refusal(train, 2, lambda n: 1.0 + (n == 1) * me())
    return hashed, error, sorted(each.name for each in path.iterdir() if each.name != "lock")


def test_a_restored_state_is_not_hashed_and_close_waits_for_the_last_calls(processes, tmp_path):
    for hashed, error, saved in processes(2).run(restore_and_close, tmp_path):
        assert hashed == [len(jax.tree.leaves(state()))]  # at the end, by close
        assert names(error, "`extra`", "2.0")
        assert saved == ["2-1", "4-2"]


def difference_seen_by_one():
    mesh = jdp.init()
    checks = arguments.Arguments(mesh, noisy.spec)
    given = checks.checksums((None, None, 1.0 + me()), ())
    if me() == 0:
        return checks.difference(given, timeout_s=0.5)
    return None


def test_a_process_that_explains_waits_for_no_other_for_ever(processes):
    assert processes(2).run(difference_seen_by_one) == [None, None]


def differ_after_a_call_on_one_process_alone():
    mesh, batch, s = jdp.init(), one_batch(), state()
    if me() == 1:  # as for a step that failed before it ran, here alone
        arguments.Arguments(mesh, StepSpec(loss_fn, ("data",), None, True, True)).checksums(
            (None, None, 1.0), ()
        )

    def train(s=s):
        for n in range(3):
            s, _ = noisy(s, batch, 1.0 + (n == 1) * me())
        jdp.check_replicas(s)

    return refusal(train)


def test_a_difference_is_named_after_a_call_that_one_process_made_alone(processes):
    for error in processes(2).run(differ_after_a_call_on_one_process_alone):
        assert names(error, "`extra`", "2.0 .*1.0") and "JDP211" in error


def rounded(buckets, axis_name, *, scale, mesh=None):
    """An all-reduce of the author's own, which sends bfloat16."""
    narrow = [[x.astype(jnp.bfloat16) for x in bucket] for bucket in buckets]
    sums = jdp.collectives.xla(narrow, axis_name, scale=scale, mesh=mesh)
    return [[x.astype(jnp.float32) for x in bucket] for bucket in sums]


def train_with_rounded_gradients():
    jdp.init()
    batch, s = one_batch(), state(training.sgd(all_reduce=rounded))

    @jdp.train_step
    def step(state, batch, scale):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        digits = scale + 0 * batch["x"].mean()
        return state.apply_gradients(grads), {"loss": loss, "digits": digits}

    for _ in range(3):
        s, metrics = step(s, batch, 1.2345678)
    jdp.check_replicas(s)
    return float(metrics["digits"])


def test_an_algorithm_that_rounds_gradients_rounds_neither_checksums_nor_metrics(processes):
    for digits in processes(3).run(train_with_rounded_gradients):
        assert abs(digits - 1.2345678) < 1e-6
