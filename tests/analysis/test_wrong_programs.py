import contextlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from corpus.wrong import BENT, KINDS, RIGHT, TWICE, WRONG, corpus, deadlocks, kept, scale
from corpus.wrong.calls import CALLS
from corpus.wrong.own_loops import LOOPS
from jax import lax

import jdp
from jdp.analysis import step_refusals
from jdp.analysis.provenance import NEVER_AVERAGED

pytestmark = pytest.mark.all_sets

WRONG_HERE = [program for program in WRONG if program.exists()]
RIGHT_HERE = [program for program in RIGHT if program.exists()]


@pytest.fixture(autouse=True)
def four_ranks():
    jdp.init(devices=jax.devices()[:4])


def lower(program):
    return jdp.train_step(program.step, **program.options).lower(*program.make())


def name_of(program):
    return program.step.__name__


def blamed(message):
    """What stands in backticks at the head of every complaint."""
    heads = [re.split(r" (?:may|was|runs|is|marks)\b", line)[0] for line in message.split("\n- ")]
    return [name for head in heads[1:] for name in re.findall("`([^`]+)`", head)]


def assert_refused(program):
    with pytest.raises(ValueError) as caught:
        lower(program)
    message = str(caught.value)
    for part in KINDS[program.kind]:
        assert part in message, message
    assert program.line() in message, message
    for name in blamed(message):
        assert name.startswith(program.blames), message
    for name in program.blames:
        assert any(each.startswith(name) for each in blamed(message)), message


@pytest.mark.parametrize("program", WRONG_HERE, ids=name_of)
def test_refuses_with_the_right_path(program):
    assert_refused(program)


@pytest.mark.parametrize("program", WRONG_HERE[::16], ids=name_of)
def test_refuses_with_the_right_path_where_the_state_is_split(program, monkeypatch):
    def split(*before, **options):
        tx = optax.chain(*before, optax.sgd(0.1, momentum=0.9))
        return jdp.sharded(tx, stage=3, min_size=1, **options)

    monkeypatch.setattr(corpus, "sgd", split)
    assert_refused(program)


@pytest.mark.parametrize("kind", ["deadlock", "decision"])
def test_names_one_cause_once(kind):
    causes = {
        "deadlock": deadlocks.apply_gradients_on_ranks_with_a_finite_loss,
        "decision": kept.own_overflow_skips_the_update_and_halves_the_scale,
    }
    (program,) = (program for program in WRONG if program.step is causes[kind])
    with pytest.raises(ValueError) as caught:
        lower(program)
    assert str(caught.value).count("\n- ") == 1


@pytest.mark.parametrize("program", RIGHT_HERE, ids=name_of)
def test_accepts_the_right_twin(program):
    lower(program)


@pytest.mark.parametrize("program", TWICE, ids=name_of)
def test_warns_of_what_is_sent_twice(program):
    with pytest.warns(UserWarning, match=r"`\[") as caught:
        lower(program)
    (message,) = {str(each.message) for each in caught}
    assert program.line() in message, message
    assert set(re.findall("`([^`]+)`", message)) == set(program.blames)


@pytest.mark.parametrize("program", BENT, ids=name_of)
def test_warns_of_gradients_that_are_bent_before_their_mean(program):
    with pytest.warns(UserWarning, match="JDP131") as caught:
        lower(program)
    (message,) = {str(each.message) for each in caught}
    assert program.line() in message, message
    assert set(re.findall(r"`(grads.*?\])`", message)) == set(program.blames)


def trained_on_one_and_four(program):
    for n in (1, 4):
        jdp.init(devices=jax.devices()[:n])
        state, _ = jdp.train_step(program.step, **program.options)(*program.make())
        yield jax.tree.leaves(jax.device_get(state.params))


@pytest.mark.few_sets(6)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*JDP131")
@pytest.mark.parametrize("program", BENT, ids=name_of)
def test_what_is_bent_before_the_mean_is_wrong_in_numbers(program):
    one, four = trained_on_one_and_four(program)
    assert not all(np.allclose(a, b, rtol=1e-3) for a, b in zip(one, four, strict=True))


# These change the gradient by what belongs to a rank.
OF_A_RANK = {"at_a_point_uphill_of_this_rank", "weighed_by_the_rows_of_this_rank"}
UNBENT = [each for each in RIGHT_HERE if each.step.__module__.endswith(".bent")]


@pytest.mark.few_sets(6)
@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [each for each in UNBENT if name_of(each) not in OF_A_RANK], ids=name_of
)
def test_its_right_twin_has_the_numbers_of_one_rank(program):
    one, four = trained_on_one_and_four(program)
    for a, b in zip(one, four, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-5)


SCALED = [
    program for program in WRONG_HERE if program.step.__module__.endswith((".scaled", ".changed"))
]


def trained_without_a_proof(program, num_ranks, monkeypatch):
    def accept(jaxpr, traced):
        own = [out for out in traced.outputs if out.kind == "own"]
        return step_refusals.Proved(None, (False,) * len(own))

    monkeypatch.setattr(step_refusals, "check", accept)
    jdp.init(devices=jax.devices()[:num_ranks])
    state, _ = jdp.train_step(program.step, **program.options)(*program.make())
    return jax.tree.leaves(jax.device_get(state))


@pytest.mark.few_sets(12)
@pytest.mark.slow
@pytest.mark.parametrize("program", SCALED, ids=name_of)
def test_what_is_refused_for_its_scale_is_wrong_in_numbers(program, monkeypatch):
    one, four = (trained_without_a_proof(program, n, monkeypatch) for n in (1, 4))
    assert not all(np.allclose(a, b, rtol=1e-3) for a, b in zip(one, four, strict=True))


@pytest.mark.parametrize("refused", CALLS, ids=lambda each: each.call.__name__)
def test_refuses_the_call(refused):
    with pytest.raises(refused.error, match=refused.message):
        refused.call()


def test_is_a_corpus():
    names = [name_of(program) for program in WRONG + TWICE + BENT + RIGHT]
    assert len(set(names)) == len(names)
    assert len(WRONG_HERE) >= 200 and len(RIGHT_HERE) >= 50


# In JAX's coming rematerialization checkpoint_name is a primitive that hides what is named.
@pytest.mark.parametrize(
    "program",
    [each for each in WRONG_HERE if re.search("remat|checkpoint|micro_batches", name_of(each))],
    ids=name_of,
)
def test_refuses_under_remat3(program):
    jax.config.update("jax_remat3", True)
    try:
        assert_refused(program)
    finally:
        jax.config.update("jax_remat3", False)


# When it is refused


def forgotten(state, batch):
    loss, grads = jax.value_and_grad(corpus.loss_fn)(state.params, batch)
    return state.replace(params=corpus.descend(state.params, grads)), {"loss": loss}


@contextlib.contextmanager
def refusal(path=r"new state\.params\['b'\]"):
    with pytest.raises(ValueError, match=path):
        yield


def test_refuses_every_call_and_not_only_the_first():
    step, (state, batch) = jdp.train_step(forgotten), corpus.training()
    for _ in range(3):
        with refusal():
            step(state, batch)
        with refusal():
            step.lower(state, batch)
    assert not state.params["w"].is_deleted()


def test_refuses_the_shape_that_takes_the_wrong_branch():
    @jdp.train_step
    def step(state, batch):
        if batch["y"].shape[0] == 1:
            return forgotten(state, batch)
        return state.apply_gradients(corpus.gradients(state, batch)), {}

    state, batch = corpus.training()
    state, _ = step(state, batch)
    half = jax.tree.map(lambda x: x[:4], batch)
    for _ in range(2):
        with refusal():
            step(state, half)
    step(state, batch)


def test_refuses_the_argument_that_takes_the_wrong_branch():
    @jdp.train_step
    def step(state, batch, noise=None):
        if noise is None:
            return state.apply_gradients(corpus.gradients(state, batch)), {}
        return forgotten(state, batch)

    state, batch = corpus.training()
    state, _ = step(state, batch)
    with refusal():
        step(state, batch, jnp.zeros(3))


# JAX cannot trace these for other shapes than those of 8 rows on 4 ranks; the last one has the mask
# that jdp.batches made, which is known by its identity.
FOR_FOUR_RANKS = {
    "payload_of_a_sort_by_own_keys",
    "own_second_key_breaks_ties_of_the_first",
    "sampled_by_own_probabilities",
    "all_to_all_on_some_ranks",
    "psum_scatter_on_some_ranks",
    "exchanged_all_to_all",
    "own_shard_of_a_scattered_sum_written_back",
    "the_last_rows_kept_for_the_next_step",
    "sum_of_as_many_micro_batches_as_there_are_ranks",
    "last_of_a_tuple_that_nobody_reads",
    # On one rank the factor is 1, as 1 / n is in a right program.
    "sum_of_gradients_that_are_divided_and_multiplied_again",
}


@pytest.mark.few_sets(72)
@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [each for each in WRONG_HERE if name_of(each) not in FOR_FOUR_RANKS], ids=name_of
)
def test_refuses_on_any_number_of_ranks(program):
    for num_ranks in (1, 2, 3):
        jdp.init(devices=jax.devices()[:num_ranks])
        state, batch, *rest = program.make()
        batch = jax.tree.map(lambda x: np.resize(x, (12, *x.shape[1:])), batch)
        with pytest.raises(ValueError, match=r"JDP1\d\d"):
            jdp.train_step(program.step, **program.options).lower(state, batch, *rest)


def test_refuses_on_one_rank_too():
    jdp.init(devices=jax.devices()[:1])
    with refusal():
        jdp.train_step(forgotten).lower(*corpus.training())


CALLERS = {
    "jit": lambda step: jax.jit(step),
    "scan": lambda step: (
        lambda state, batch: lax.scan(lambda s, _: step(s, batch), state, None, length=2)
    ),
    "cond": lambda step: (
        lambda state, batch: lax.cond(
            batch["y"][0] > 0, lambda: step(state, batch)[0], lambda: state
        )
    ),
    "eval_shape": lambda step: lambda *args: jax.eval_shape(step, *args),
    "make_jaxpr": lambda step: lambda *args: jax.make_jaxpr(step)(*args),
    "vmapped": lambda step: (
        lambda state, batch: jax.vmap(lambda _: step(state, batch))(jnp.arange(2))
    ),
}


@pytest.mark.parametrize("caller", CALLERS)
def test_refuses_whoever_traces_it(caller):
    with refusal():
        CALLERS[caller](jdp.train_step(forgotten))(*corpus.training())


def test_refuses_wrong_metrics_of_an_eval_step():
    @jdp.eval_step
    def measure(state, batch):
        return {"correct": jnp.sum(batch["y"] > 0)}

    @jdp.eval_step
    def wait(state, batch):
        return lax.cond(batch["y"][0] > 0, jdp.mean_over_ranks, lambda x: x, batch["y"][0])

    state, batch = corpus.training()
    with pytest.raises(ValueError, match=r"`metrics\['correct'\]` int32\[\].*JDP102"):
        measure(state, batch)
    with pytest.raises(ValueError, match=r"`psum` at test_wrong_programs.py:\d+ .*JDP103"):
        jdp.evaluate(wait, state, [batch])


def test_tells_of_a_collective_once_though_it_has_many_parts():
    def step(state, batch):
        def total(x):
            return jdp.collectives.ring([[x]], "data")[0][0]

        return {"a": lax.cond(batch["y"][0] > 0, total, lambda x: x, state["a"])}, {}

    with pytest.raises(ValueError) as caught:
        jdp.train_step(step).lower({"a": jnp.zeros(())}, corpus.rows())
    assert str(caught.value).count("`ppermute`") == 1


def test_tells_a_line_once_and_counts_the_leaves_that_it_leaves_out():
    def step(state, batch):
        return jax.tree.map(lambda x: x + corpus.local(batch), state), {}

    with pytest.raises(ValueError) as caught:
        jdp.train_step(step).lower({f"p{i}": jnp.zeros(()) for i in range(9)}, corpus.rows())
    (_, told) = str(caught.value).split("\n- ")
    assert re.match(r".*`new state\['p4'\]` and 4 more .*test_wrong_programs\.py:\d", told)


# Unused parameters


def test_warns_of_unused_parameters_once_and_trains_them_as_one_device_does():
    p = {**corpus.params(), "unused": np.ones(2, np.float32)}
    tx = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1))

    @jdp.train_step(donate=False)
    def step(state, batch):
        return state.apply_gradients(corpus.gradients(state, batch)), {}

    state = jdp.TrainState.create(p, jdp.replicated(tx))
    with pytest.warns(UserWarning, match=r" `\['unused'\]`,") as caught:
        state, _ = step(state, corpus.rows())
    assert len(caught) == 1
    with warnings.catch_warnings(action="error"):
        step(state, corpus.rows())
    grads = jax.grad(corpus.loss_fn)(p, corpus.rows())
    updates, _ = tx.update(grads, tx.init(p), p)
    np.testing.assert_allclose(state.params["unused"], p["unused"] + updates["unused"], rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], p["w"] + updates["w"], rtol=1e-5)


def gradients_of(state, batch, *used):
    def loss(p):
        return sum(jnp.vdot(p[name], p[name]) for name in used) * batch["x"].mean()

    return jax.grad(loss)(state.params)


def one_loss_after_the_other(state, batch):
    return state.apply_gradients(gradients_of(state, batch, "w")).apply_gradients(
        gradients_of(state, batch, "b")
    )


def one_branch_for_each(state, batch):
    first, second = (
        lambda s, k=k: s.apply_gradients(gradients_of(s, batch, k)) for k in ("w", "b")
    )
    return jax.lax.cond(state.step % 2 == 0, first, second, state)


def sum_of_means(state, batch):
    both = [jdp.sync_gradients(gradients_of(state, batch, k)) for k in ("w", "b")]
    return state.apply_gradients(jax.tree.map(jnp.add, *both), synced=True)


SEVERAL_LOSSES = (one_loss_after_the_other, one_branch_for_each, sum_of_means)


@pytest.mark.parametrize("update", SEVERAL_LOSSES, ids=lambda f: f.__name__)
def test_what_one_of_several_losses_depends_on_is_used(update):
    state, batch = corpus.training()
    jdp.train_step(lambda state, batch: (update(state, batch), {})).lower(state, batch)
    p = {**corpus.params(), "unused": np.ones(2, np.float32)}
    state = jdp.TrainState.create(p, corpus.sgd())
    with pytest.warns(UserWarning, match=r" `\['unused'\]`,") as caught:
        jdp.train_step(lambda state, batch: (update(state, batch), {})).lower(state, batch)
    assert len(caught) == 1


def test_what_does_not_train_is_not_called_unused():
    p = {**corpus.params(), "frozen": np.ones(2, np.float32)}
    trainable = {name: name != "frozen" for name in p}
    state = jdp.TrainState.create(p, corpus.sgd(), trainable=trainable)
    jdp.train_step(lambda s, b: (s.apply_gradients(corpus.gradients(s, b)), {})).lower(
        state, corpus.rows()
    )


def test_a_step_warns_once_for_all_shapes_and_ranks():
    @jdp.train_step
    def step(state, batch):
        return state.apply_gradients(gradients_of(state, batch, "w")), {}

    state, batch = corpus.training()
    with pytest.warns(UserWarning, match=r"trainable=") as caught:
        step.lower(state, batch)
    assert len(caught) == 1
    step.lower(state, jax.tree.map(lambda x: x[: len(x) // 2], batch))
    jdp.check_step(step, state, batch)


# What the analysis cannot see


@pytest.mark.filterwarnings("ignore:.*JDP131")
@pytest.mark.parametrize("program", scale.PROGRAMS, ids=lambda program: program.__name__)
def test_a_wrong_scale_is_left_to_check_step(program):
    state, batch = corpus.training()
    step = jdp.train_step(program)
    step.lower(state, batch)
    with pytest.raises(ValueError, match=r" 4 ranks .*`.*` .*\de[+-]\d\d"):
        jdp.check_step(step, state, batch)


# Loops of the author's own


def loops(is_right):
    chosen = [each for each in LOOPS if each.is_right == is_right]
    return pytest.mark.parametrize("loop", chosen, ids=lambda loop: loop.name)


@loops(is_right=True)
def test_uniformity_gives_the_classes_of_a_right_loop(loop):
    found = jdp.uniformity(loop.f, *loop.arguments(), axis_name=loop.axis_name)
    assert found == loop.outcome


@loops(is_right=False)
def test_uniformity_refuses_a_wrong_loop(loop):
    with pytest.raises(ValueError, match=loop.outcome):
        jdp.uniformity(loop.f, *loop.arguments(), axis_name=loop.axis_name)


# What is said


def message_of(program):
    with pytest.raises(ValueError) as caught:
        lower(program)
    return str(caught.value)


# Where something that differs comes from, as its author would say it.
NAMED = re.compile(
    r"`(batch|rows)\b[^`]*`|`state\.key`|`(axis_index|io_callback|rng_uniform|jnp\.empty|ppermute|"
    r"pshuffle|all_to_all|reduce_scatter|psum|all_gather|ragged_all_to_all|empty_ref)`|"
    r"a foreign call|split by a shard_map|(sums|averages) (it |equal values )?over (the )?ranks|"
    r"all_gather\(to=|"
    r"jdp\.scan_layers at|may differ after [^:]*:\d+: it depends on"
)
INTERNAL = re.compile(
    r"jdp_\w+|\brest\[|\b(program|sync|verify|native|grad|state)\.py|hidden value"
)


KEPT_ROWS = ("the_last_rows_kept_for_the_next_step", "rows_of_a_batch_in_the_state")


@pytest.mark.parametrize("program", WRONG_HERE, ids=name_of)
def test_says_where_it_comes_in_and_nothing_of_the_inside(program):
    for line in message_of(program).split("\n- ")[1:]:
        assert NAMED.search(line), line
        assert not INTERNAL.search(line), line
        # A row of the batch that is kept as it is comes from no line.
        if program.kind not in ("mask", "gather") and name_of(program) not in KEPT_ROWS:
            assert re.search(r"\b\w+\.py:\d+", line), line


def test_says_which_line_multiplies_the_mean_gradient():
    @jdp.train_step
    def step(state, batch):
        grads = jdp.sync_gradients(corpus.gradients(state, batch))
        grads = {**grads, "w": grads["w"] * batch["x"].mean()}
        return state.apply_gradients(grads, synced=True), {}

    state, batch = corpus.training()
    with pytest.raises(ValueError) as caught:
        step.lower(state, batch)
    first = step.__wrapped__.__code__.co_firstlineno
    named = rf"test_wrong_programs\.py:{first + 3} .*`batch\['x'\]`"
    assert re.search(named, str(caught.value)) and NEVER_AVERAGED not in str(caught.value)


def test_tells_of_the_parameters_and_not_of_what_follows_from_them():
    @jdp.train_step
    def step(state, batch):
        w = state["w"] - 0.1 * batch["x"].mean()
        ema = 0.9 * state["ema"] + 0.1 * w
        return {"w": w, "ema": ema, "norm": jnp.abs(ema)}, {"w": jnp.stack([w, ema])}

    with pytest.raises(ValueError) as caught:
        step.lower({"w": 1.0, "ema": 1.0, "norm": 1.0}, corpus.rows())
    (_, told) = str(caught.value).split("\n- ")
    assert "`new state['w']`" in told and "ema" not in told and "norm" not in told


def test_tells_of_two_causes():
    @jdp.train_step
    def step(state, batch):
        w = state["w"] - 0.1 * batch["x"].mean()
        return {"w": w, "ema": 0.9 * state["ema"] + w + batch["y"].mean()}, {}

    with pytest.raises(ValueError) as caught:
        step.lower({"w": 1.0, "ema": 1.0}, corpus.rows())
    (_, first, second) = str(caught.value).split("\n- ")
    assert ("ema" in first) != ("ema" in second)


def test_says_never_averaged_only_where_nothing_was():
    def told(f):
        def step(state, batch):
            return {"a": f(batch["x"].mean())}, {}

        with pytest.raises(ValueError) as caught:
            jdp.train_step(step).lower({"a": 1.0}, corpus.rows())
        return NEVER_AVERAGED in str(caught.value)

    assert told(lambda x: x)
    assert not told(lambda x: jdp.mean_over_ranks(x) + x)
    assert not told(lambda x: lax.psum(x, "data") * x)


def test_names_rows_and_not_what_is_handed_on_beside_them():
    @jdp.train_step
    def step(state, batch):
        mixed = jax.jit(lambda x, y: (x + 1, y + 1))
        x, y = mixed(*mixed(batch["x"].mean(), batch["y"].mean()))
        return {"a": x}, {}

    with pytest.raises(ValueError) as caught:
        step.lower({"a": 1.0}, corpus.rows())
    assert set(re.findall(r"`(batch.*?)`", str(caught.value))) == {"batch['x']"}


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("plateau_of_the_own_loss", "jdp.mean_over_ranks(loss)"),
        ("best_loss_so_far", "jdp.mean_over_ranks(loss)"),
        ("lbfgs_of_the_own_loss", "jdp.global_mean(value_fn)"),
        ("lbfgs_of_pmean_of_the_loss", "jdp.global_mean(value_fn)"),
    ],
)
def test_gives_the_advice_that_the_right_twin_follows(name, advice):
    (program,) = [each for each in WRONG_HERE if name_of(each) == name]
    assert advice in message_of(program)


def test_names_rows_in_time_where_calls_nest():
    def doubled(f):
        return jax.jit(lambda *args: f(*args[:-1], f(*args)))

    f = jax.jit(lambda w, x: jnp.where(x > w, x * w, w))
    for _ in range(20):
        f = doubled(f)

    with pytest.raises(ValueError, match="JDP101"):
        jdp.train_step(lambda state, batch: ({"a": f(state["a"], batch["x"].mean())}, {})).lower(
            {"a": 1.0}, corpus.rows()
        )


@pytest.mark.parametrize(
    "name", ["sum_handed_on_as_the_mean", "sum_of_the_mean_gradient", "sum_of_one_flat_vector"]
)
def test_says_on_one_rank_what_would_be_wrong_on_n(name):
    jdp.init(devices=jax.devices()[:1])
    (program,) = [each for each in WRONG_HERE if name_of(each) == name]
    message = message_of(program)
    assert "n times (on n ranks)" in message and "1 times" not in message


def test_says_first_what_to_write_where_the_rows_of_all_ranks_divide():
    @jdp.train_step
    def step(state, batch):
        def share(p):
            errors = (corpus.predict(p, batch["x"]) - batch["y"]) ** 2
            return errors.sum() / 8  # the rows of the global batch

        grads = lax.psum(jax.grad(share)(state.params), "data")
        return state.apply_gradients(grads, synced=True), {}

    for num_ranks in (1, 2, 4):  # on one rank it is the mean over its rows
        jdp.init(devices=jax.devices()[:num_ranks])
        with pytest.raises(ValueError) as caught:
            step.lower(*corpus.training())
        message = str(caught.value)
        first = message.index("jdp.sync_gradients(grads, mean=False)")
        assert first < message.index("jdp.sync_gradients(grads)")


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_reads_the_number_of_ranks_from_a_captured_array_and_from_no_argument(num_ranks):
    jdp.init(devices=jax.devices()[:num_ranks])
    n, nth, scale = jnp.float32(num_ranks), 1 / jnp.float32(num_ranks), jnp.float32(1024)
    state, batch = corpus.training()

    def step_with(divide):
        @jdp.train_step
        def step(state, batch, *rest):
            grads = lax.psum(corpus.gradients(state, batch), "data")
            grads = jax.tree.map(lambda g: divide(g, *rest), grads)
            return state.apply_gradients(grads, synced=True), {}

        return step

    step_with(lambda g: g / n).lower(state, batch)
    step_with(lambda g: g * nth).lower(state, batch)
    for step, rest in [
        (step_with(lambda g, n: g / n), (n,)),
        (step_with(lambda g: g / scale), ()),  # which may be that of the loss
    ]:
        with pytest.raises(ValueError, match="JDP121"):
            step.lower(state, batch, *rest)


@pytest.mark.parametrize("kind", ["sum", "mean", "nothing"])
def test_calls_a_gradient_that_is_one_array_by_a_name(kind):
    @jdp.train_step
    def step(state, batch):
        grads = jax.grad(lambda w: jnp.mean(batch["x"] @ w))(state.params)
        reduced = {"sum": lax.psum, "mean": lax.pmean, "nothing": lambda g, _: 0 * g}[kind]
        return state.apply_gradients(reduced(grads, "data")), {}

    state = jdp.TrainState.create(np.ones(3, np.float32), corpus.sgd())
    expected = pytest.raises(ValueError) if kind == "sum" else pytest.warns(UserWarning)
    with expected as caught:
        step.lower(state, corpus.rows())
    message = str(caught.value) if kind == "sum" else str(caught[0].message)
    assert "`grads`" in message and "``" not in message
