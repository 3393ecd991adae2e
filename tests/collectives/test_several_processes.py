"""Two processes of two devices each train as one process of four does."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support import training
from support.processes import ProcessError
from support.ranks_rows import count_rows as count
from support.threads import wait_until
from support.training import assert_close, loss_fn, masked_loss, plain_step, state, step_of

import jdp
from jdp.collectives.cpu import runtime as cpu_runtime

ROWS = training.batch(num_rows=26)  # 26 rows in batches of 8: the last one has 2


def run(all_reduce=jdp.collectives.xla):
    """Train two epochs with a masked tail, then evaluate: what a process ends with."""
    jdp.init(devices=sorted(jax.devices(), key=lambda d: (d.process_index, d.id))[:4])

    step = step_of(masked_loss, weight=count)

    @jdp.eval_step(weight=count)
    def measure(state, batch):
        prediction = training.predict(state.params, batch["x"])[:, 0]
        return {
            "loss": masked_loss(state.params, batch),
            "prediction": jdp.rows(prediction),
            "rows": jdp.sum_over_ranks(batch["mask"]),
        }

    s, metrics = state(training.sgd(all_reduce=all_reduce)), {}
    for batch in jdp.batches(ROWS, 8, epochs=2, seed=3):
        s, metrics = step(s, batch)
    batches = jdp.batches(ROWS, 8, epochs=1, shuffle=False)
    found = jdp.evaluate(measure, s, batches)
    assert jdp.check_replicas(s)
    return training.fetched(s.params), float(metrics["loss"]), found


def run_ring():
    return run(jdp.collectives.ring)


def run_native():
    return run(jdp.collectives.native)


@pytest.mark.parametrize("function", [run, run_ring, run_native])
def test_equal_one_process(processes, function):
    params, loss, found = function()
    for other_params, other_loss, other_found in processes(2).run(function):
        assert_close(other_params, params)
        np.testing.assert_allclose(other_loss, loss, rtol=1e-5)
        assert found["rows"].sum() == other_found["rows"].sum() == 26
        np.testing.assert_allclose(other_found["prediction"], found["prediction"], rtol=1e-4)
        np.testing.assert_allclose(other_found["loss"], found["loss"], rtol=1e-5)


# Sizes that end within a bucket, a round and a chunk, whatever these are. All numbers are small and
# whole, so that every rank's parameters must have exactly the oracle's bits.

ODD_MODELS = {
    "0.1 MB": [25_013, 7],
    "1.8 MB": [458_747],
    "5 MB": [1_000_003, 101, 250_007],
    "12 MB": [3_000_017, 2],
    "30 MB": [1_299_709, 5_000_011, 1_200_007, 13],
}
ODD_STEPS = 8


def pattern(leaf, size, xp=np):
    return ((xp.arange(size) % 1021 * 7 + 3 * leaf) % 17 - 8).astype("float32")


def train_odd_sizes(sizes):
    """Train in steps whose mean gradient is known; what is wrong, by leaf and device."""
    mesh = jdp.init()
    num_rows = 2 * mesh.size
    # Each rank has a gradient of its own; the mean of all is `i + 1` times the pattern.
    apart = np.arange(num_rows, dtype=np.float32) - (num_rows - 1) / 2

    @jdp.train_step
    def step(state, batch):
        def loss(p):
            return sum(
                jnp.mean(batch["x"]) * jnp.vdot(pattern(i, w.size, jnp), w) for i, w in enumerate(p)
            )

        return state.apply_gradients(jax.grad(loss)(state.params)), {}

    s = jdp.TrainState.create(
        [np.zeros(size, np.float32) for size in sizes], jdp.replicated(optax.sgd(1.0))
    )
    for batch in jdp.shard_batches(own_rows(apart + i + 1) for i in range(ODD_STEPS)):
        s, _ = step(s, batch)
    factor = sum(range(1, ODD_STEPS + 1))
    return [
        f"leaf {leaf} of {w.size} on {shard.device}: {np.sum(np.asarray(shard.data) != want)} wrong"
        for leaf, w in enumerate(s.params)
        for want in [-factor * pattern(leaf, w.size)]
        for shard in w.addressable_shards
        if not np.array_equal(shard.data, want)
    ]


def own_rows(x):
    return {"x": np.split(x, jax.process_count())[jax.process_index()]}


@pytest.mark.parametrize("num_processes", [2, 3])
@pytest.mark.parametrize("model", ODD_MODELS)
def test_every_rank_gets_exact_means_of_models_of_odd_sizes(processes, model, num_processes):
    found = processes(num_processes).run(train_odd_sizes, ODD_MODELS[model])
    assert found == [[]] * num_processes


def step_by_the_smallest(dtype, gradient, all_reduce):
    """A parameter after one step, on each device of this process, whose gradient is so small."""
    jdp.init(devices=sorted(jax.devices(), key=lambda d: (d.process_index, d.id))[:4])

    @jdp.train_step
    def step(state, batch):
        grads = jax.tree.map(lambda w: jnp.full_like(w, gradient) * batch["x"][0], state.params)
        return state.apply_gradients(grads), {}

    s = jdp.TrainState.create(
        np.zeros(3, dtype), jdp.replicated(optax.sgd(1.0), all_reduce=all_reduce)
    )
    [batch] = jdp.shard_batches([own_rows(np.ones(4, dtype))])
    s, _ = step(s, batch)
    return [np.asarray(shard.data).astype(float).tolist() for shard in s.params.addressable_shards]


ALGORITHMS = [jdp.collectives.xla, jdp.collectives.auto, jdp.collectives.native]
MOVED = [-float(np.float16(2e-5))] * 3


@pytest.mark.all_sets
@pytest.mark.parametrize("all_reduce", ALGORITHMS, ids=lambda function: function.__name__)
def test_float16_gradients_below_the_smallest_normal_number_move_parameters(all_reduce):
    assert step_by_the_smallest("float16", 2e-5, all_reduce) == [MOVED] * 4


@pytest.mark.parametrize("all_reduce", ALGORITHMS, ids=lambda function: function.__name__)
def test_processes_move_parameters_by_such_gradients(processes, all_reduce):
    found = processes(2).run(step_by_the_smallest, "float16", 2e-5, all_reduce)
    assert found == [[MOVED] * 2] * 2


def reduce_fail_and_begin_anew(folder):
    """Sum over ranks; process 1 comes too late for one; reset; with the same program sum again."""
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))[:4]
    mesh, me = Mesh(np.array(devices), ("data",)), jax.process_index()

    def total(factor):
        mine = (1 + jax.lax.axis_index("data")) * factor * jnp.arange(400_001) % 1009
        [[result]] = jdp.collectives.native([[mine.astype("float32")]], "data", mesh=mesh)
        return result[None]

    run = jax.jit(
        jax.shard_map(total, mesh=mesh, in_specs=P(), out_specs=P("data"), check_vma=False)
    )

    def is_exact(factor):
        want = sum((1 + rank) * factor * np.arange(400_001) % 1009 for rank in range(4))
        return [np.array_equal(x.data[0], want) for x in run(factor).addressable_shards]

    found, before = [], cpu_runtime.timeout_s()
    for failures in range(2):
        found += is_exact(2 * failures + 1)
        cpu_runtime.set_timeout_s(0.5)
        if me == 1:
            wait_until((folder / f"failed {failures}").exists)
        try:
            jax.block_until_ready(run(7))
            found.append("no error")
        except RuntimeError as error:
            found.append("DEADLINE_EXCEEDED" in str(error) and "2, 3" in str(error))
        (folder / f"failed {failures}").touch()
        cpu_runtime.set_timeout_s(before)
        if me == failures:  # both orders
            wait_until((folder / f"reset {failures}").exists)
        cpu_runtime.reset()
        (folder / f"reset {failures}").touch()
        found += is_exact(2 * failures + 2)
    return found


def test_after_a_timeout_and_a_reset_the_same_program_sums_again(processes, tmp_path):
    if cpu_runtime.why_missing():
        pytest.skip(cpu_runtime.why_missing())
    assert processes(2).run(reduce_fail_and_begin_anew, tmp_path) == [[True] * 10] * 2


def create(differs):
    jdp.init()
    p = training.params()
    if differs and jax.process_index() == 1:
        p["v"] = p["v"] + 1e-6
    state_of = jdp.TrainState.create(p, training.sgd(), broadcast=differs == "broadcast")
    return training.fetched(state_of.params)


def test_other_initial_values_are_an_error_that_names_the_leaf(processes):
    with pytest.raises(ProcessError, match=r"\.params\['v'\].*process 1 .*JDP203"):
        processes(2).run(create, "differs")


def test_broadcast_takes_the_values_of_process_0(processes):
    first, second = processes(2).run(create, "broadcast")
    assert_close(second, first, tolerance=0)
    assert_close(first, training.params(), tolerance=0)


def write_into_what_was_given():
    jdp.init()
    # JAX takes memory at multiples of 64 bytes without a copy.
    memory = np.zeros(1 << 12, np.uint8)
    given = memory[-memory.ctypes.data % 64 :][:1024].view(np.float32)
    given[:] = 1
    kept = jdp.TrainState.create({"w": given}, training.sgd(), model_state={"w": given})
    given[:] = 2
    copies = [kept.params["w"], kept.model_state["w"]]
    return [np.array(shard.data) for x in copies for shard in x.addressable_shards]


def test_what_is_written_into_given_arrays_afterwards_is_not_seen(processes):
    for copies in processes(2).run(write_into_what_was_given):
        assert copies
        for copy in copies:
            np.testing.assert_array_equal(copy, np.ones(256, np.float32))


def create_other_model(odd, kind):
    jdp.init()
    p = training.params()
    if jax.process_index() == odd:
        match kind:
            case "another leaf":
                p["extra"] = np.zeros(2, np.float32)
            case "a leaf less":
                del p["w"]
            case "shape":
                p["v"] = np.zeros((3, 2), np.float32)
            case "dtype":
                p["v"] = p["v"].astype(np.float16)
    try:
        jdp.TrainState.create(p, training.sgd())
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize(
    ("kind", "there", "usual"),
    [
        ("another leaf", "`.params['extra']` float32[2]", "`.params['v']` float32["),
        ("a leaf less", "", "`.params['w']` float32["),
        ("shape", "`.params['v']` float32[3, 2]", "`.params['v']` float32["),
        ("dtype", "`.params['v']` float16[", "`.params['v']` float32["),
    ],
)
def test_another_model_on_one_process_is_named_to_all_with_its_first_leaf(
    processes, odd, kind, there, usual
):
    first, *others = processes(3).run(create_other_model, odd, kind)
    other = 0 if odd else 1
    assert others == [first, first]
    where = [f"process {odd}, {usual}", f"process {other}. "]
    assert all(text in first for text in (there, *where)) and "JDP202" in first


def step_on_host_arrays():
    jdp.init()
    jdp.train_step(plain_step)(state(), training.batch())


def test_an_array_of_one_process_is_refused_as_a_batch(processes):
    with pytest.raises(ProcessError, match=r"jdp\.shard_batches"):
        processes(2).run(step_on_host_arrays)


def unequal_rows():
    jdp.init()
    rows = 4 if jax.process_index() else 6
    next(iter(jdp.shard_batches([training.batch(num_rows=rows)])))


def test_other_rows_on_one_process_are_an_error_and_not_a_hang(processes):
    with pytest.raises(ProcessError, match="JDP209"):
        processes(2).run(unequal_rows)


def own_loader():
    """Each process brings its own half of every batch."""
    mesh = jdp.init()
    step, s, seen = jdp.train_step(plain_step), state(), []
    mine = slice(12 * jax.process_index(), 12 * jax.process_index() + 12)
    loader = ({k: v[mine] for k, v in training.batch(i).items()} for i in range(3))
    for batch in jdp.shard_batches(loader):
        seen.append(batch["x"].shape[0])
        s, _ = step(s, batch)
    del mesh
    return training.fetched(s.params), seen


def test_a_loader_for_each_process_equals_one_loader(processes):
    want, _ = training.train(1, jdp.train_step(plain_step), num_steps=3)
    for params, seen in processes(2).run(own_loader):
        assert_close(params, want.params)
        assert seen == [24, 24, 24]


def further_arguments():
    jdp.init()

    @jdp.train_step
    def step(state, batch, key, scale):
        noise = jax.random.normal(key, ())
        grads = jax.grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads).replace(model_state=noise * scale), {}

    batches = jdp.batches(training.batch(), 8, num_steps=1)
    s, _ = step(state(model_state=np.float32(0)), next(iter(batches)), jax.random.key(7), 2.0)
    return float(s.model_state)


def test_keys_and_numbers_go_to_every_process(processes):
    want = 2 * float(jax.random.normal(jax.random.key(7), ()))
    assert processes(2).run(further_arguments) == [want, want]


def train_alone():
    """Process 0 trains on its own devices, and process 1 does nothing at all."""
    if jax.process_index():
        return None
    jdp.init(devices=jax.local_devices())
    step, s = jdp.train_step(plain_step), state()
    for i in range(2):
        s, _ = step(s.replace(step=np.int32(i)), training.batch(i))
    return training.fetched(s.params)


def test_a_process_may_train_alone_on_its_own_devices(processes):
    want, _ = training.train(1, jdp.train_step(plain_step), num_steps=2)
    alone, nothing = processes(2).run(train_alone, timeout_s=30)
    assert nothing is None
    assert_close(alone, want.params)


# Two models train side by side: nothing but the order of calls tells their reductions apart.


def train_two():
    jdp.init(devices=sorted(jax.devices(), key=lambda d: (d.process_index, d.id))[:4])
    step = jdp.train_step(plain_step)
    tx = training.sgd()
    states = [state(tx), jax.tree.map(lambda x: 2 * x, state(tx))]
    for batch in jdp.batches(ROWS, 8, num_steps=100, seed=3):
        states = [step(s, batch)[0] for s in states]
    return [training.fetched(s.params) for s in states]


def test_steps_on_two_states_in_turn_are_not_mixed_up(processes):
    want = train_two()
    for got in processes(2).run(train_two):
        for mine, expected in zip(got, want, strict=True):
            assert_close(mine, expected)


def compile_twice():
    """How often a program that was never compiled before is found the second time."""
    jdp.init()
    found = []
    jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
    for _ in range(2):
        jax.clear_caches()
        jax.jit(lambda x: x + NEVER_SEEN)(1.0)
    return found.count("/jax/compilation_cache/cache_hits")


NEVER_SEEN = time.time() % 1000  # so that float32 tells one run from the next


def test_each_process_finds_what_it_compiled_before(processes):
    assert all(count >= 1 for count in processes(2).run(compile_twice))
