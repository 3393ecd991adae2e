"""Parameters in float32, a loss that sees bfloat16, and gradients sent in either."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from support.mixed_precision import (
    BF16,
    DIM,
    F32,
    RATE,
    ROWS,
    WIDTH,
    assert_equal,
    batch,
    cast,
    differentiated,
    loss_fn,
    oracle,
    params,
    split,
    state_of,
    train,
    tx,
    wide,
)
from support.training import ranks

import jdp
from jdp.collectives import shards


@pytest.mark.parametrize("sent", [None, BF16], ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_trains_as_one_device_that_casts_and_averages(n, sent):
    want = oracle(n, sent=sent or F32)
    assert_equal(train(n, tx(gather_dtype=jnp.bfloat16, reduce_dtype=sent)), want)


def test_the_oracle_shows_both_casts():
    found = [
        oracle(3, sent=sent, seen=seen) for sent in (F32, BF16) for seen in (cast, lambda p: p)
    ]
    assert len({wide(p[k]).tobytes() for p in found for k in ("w", "b")}) == 2 * len(found)


@pytest.mark.parametrize("optimizer", ["replicated", 1, 2, 3], ids=str)
@pytest.mark.parametrize("n", [2, 3])
def test_reduce_dtype_alone_rounds_what_is_sent(n, optimizer):
    made = jdp.replicated(optax.sgd(RATE), reduce_dtype=BF16)
    if optimizer != "replicated":
        made = tx(stage=optimizer, reduce_dtype="bfloat16")
    want = oracle(n, sent=BF16, seen=lambda p: p)
    assert_equal(train(n, made), want)


@pytest.mark.parametrize("options", [{}, {"keep_gathered": True}], ids=str)
@pytest.mark.parametrize("n", [1, 2, 8])
def test_micro_batches_add_up_in_the_dtype_of_the_state(n, options):
    program = functools.partial(differentiated, accumulate=2)
    got = train(n, tx(gather_dtype=BF16, **options), program)
    assert_equal(got, oracle(n, parts=2))


def sent(step, state, rows):
    """The dtypes of what is gathered, and of what is scattered, in the lowered program."""
    text = step.lower(state, rows).as_text()
    found = []
    for name in ("all_gather", "reduce_scatter"):
        results = re.findall(rf"@jdp_{name}(?:_start)?\(.* -> \(tensor<1xf32>, (.*)\)", text)
        results += re.findall(rf'"stablehlo.{name}".*?\) -> (\S*)', text, re.S)
        found.append(set(re.findall(r"x([a-z]+\d+)>", " ".join(results))))
    return found


@pytest.mark.parametrize(
    "options, gathered, scattered",
    [
        ({}, "f32", "f32"),
        ({"gather_dtype": "bfloat16"}, "bf16", "f32"),
        ({"gather_dtype": jnp.float16, "reduce_dtype": jnp.bfloat16}, "f16", "bf16"),
        ({"reduce_dtype": jnp.float16}, "f32", "f16"),
        ({"gather_dtype": "bfloat16", "keep_gathered": True}, "bf16", "f32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_travels_has_the_dtype_that_was_asked_for(options, gathered, scattered, accumulate):
    given = {"w": params()["w"], "v": params()["w"]}

    def loss_fn(p, rows):
        return jnp.square(rows["x"].astype(p["w"].dtype) @ p["w"] @ p["v"].T).mean().astype(F32)

    program = functools.partial(differentiated, loss_fn=loss_fn, accumulate=accumulate)
    state = state_of(2, tx(**options), given)
    found = sent(jdp.train_step(program), state, batch(2))
    # XLA on CPUs gathers the bits of 16-bit floats.
    assert found[0] in ({gathered}, {"ui16"} if "16" in gathered else set())
    assert found[1] == {scattered}


@pytest.mark.optimized
def test_xla_gathers_the_bits_of_16_bit_floats_which_it_would_widen(monkeypatch):
    monkeypatch.setattr(shards, "is_native", lambda *_: False)
    state, step = state_of(2, tx(gather_dtype=BF16)), jdp.train_step(differentiated)
    text = step.lower(state, batch(2)).compile().as_text()
    assert set(re.findall(r"= (\w+)\[[\d,]*\][^=]* all-gather\(", text)) == {"u16"}


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("keep_gathered", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_the_loss_alone_sees_narrower_floats(n, keep_gathered, options):
    seen = []

    def of_kinds(p, rows):
        seen.append({k: p[k].dtype.name for k in p})
        return loss_fn(p, rows)

    def program(state, rows):
        loss, grads = jdp.value_and_grad(of_kinds, **options)(state.params, rows)
        new = state.apply_gradients(grads)
        for tree in (state.params, grads, new.params):
            assert {k: x.dtype for k, x in tree.items()} == masters
        norm = jdp.mean_over_ranks(sum(jnp.vdot(x, x) for x in jax.tree.leaves(state.params)))
        return new, {"norm": norm}

    masters = {k: x.dtype for k, x in params().items()}
    optimizer = tx(gather_dtype=BF16, keep_gathered=keep_gathered)
    state = state_of(n, optimizer)
    new, metrics = jdp.train_step(program)(state, batch(n))
    assert all(each == dict.fromkeys(params(), "bfloat16") for each in seen) and seen
    assert {k: x.dtype for k, x in new.params.items()} == masters
    want = sum(np.square(wide(x).astype(float)).sum() for x in params().values())
    np.testing.assert_allclose(metrics["norm"], want, rtol=1e-6)
    assert new.params["w"].addressable_shards[0].data.size * n == new.params["w"].size


def test_integers_and_what_is_narrow_already_are_not_cast():
    ranks(2)
    given = {**params(), "short": np.ones((DIM, 2), np.float16), "ids": np.arange(DIM, dtype="i")}
    state = jdp.TrainState.create(given, tx(gather_dtype=BF16))
    found = {}

    @jdp.train_step
    def step(state, rows):
        def loss_of(p, rows):
            found.update({k: x.dtype.name for k, x in p.items()})
            return loss_fn(p, rows) + jnp.square(p["short"]).mean().astype(F32)

        floats = {k: x for k, x in state.params.items() if k != "ids"}
        grads = jdp.value_and_grad(loss_of)(floats, rows)[1]
        return state.apply_gradients({**grads, "ids": state.params["ids"]}), {}

    new, _ = step(state, batch(2))
    assert found == {**dict.fromkeys(params(), "bfloat16"), "short": "float16"}
    assert {k: x.dtype for k, x in new.params.items()} == {k: x.dtype for k, x in given.items()}


@pytest.mark.parametrize("n", [1, 3])
def test_a_step_that_keeps_the_old_state_keeps_every_bit_of_it(n):
    def guarded(state, rows):
        new, metrics = differentiated(state, rows)
        return jax.tree.map(lambda a, b: jnp.where(state.step < 0, a, b), new, state), metrics

    assert_equal(train(n, tx(gather_dtype=BF16), guarded), params())


def test_weights_apply_before_what_is_sent_is_rounded():
    def program(state, rows):
        return differentiated(state, rows)

    n, count = 2, lambda rows: rows["count"].sum()
    got = {}
    for name, optimizer in (
        ("split", tx(gather_dtype=BF16)),
        ("whole", tx(gather_dtype=BF16, min_size=10**6)),
    ):
        state = state_of(n, optimizer)
        rows = {**batch(n), "count": np.repeat([3.0, 1.0], ROWS).astype("f")}
        got[name], _ = jdp.train_step(weight=count)(program)(state, rows)
    per_rank = [jax.grad(loss_fn)(cast(params()), rows) for rows in split(batch(n), n)]
    for k, x in params().items():
        mean = (3 * wide(per_rank[0][k]) + wide(per_rank[1][k])) / 4
        want = (wide(x) - RATE * mean).astype(x.dtype)
        for state in got.values():
            np.testing.assert_array_equal(wide(state.params[k]), wide(want))


LAYERS = 3


@pytest.mark.parametrize("options", [{"gather_dtype": BF16}, {"reduce_dtype": BF16}], ids=list)
def test_a_mesh_with_an_axis_of_the_compiler_on_which_xla_aborts_in_bfloat16(options):
    axes = (AxisType.Auto,) * 2
    jdp.init(jax.make_mesh((4, 2), ("data", "model"), axes, devices=jax.devices()))
    state, step = jdp.TrainState.create(params(), tx(**options)), jdp.train_step(differentiated)
    for i in range(2):
        state, _ = step(state, batch(4, i))
    narrow = "gather_dtype" in options
    want = oracle(4, sent=F32 if narrow else BF16, seen=cast if narrow else lambda p: p)
    assert_equal(jax.device_get(state.params), want)


def layered(p, x, scan=jdp.scan_layers):
    def layer(x, w):
        assert w.dtype == x.dtype
        return jnp.tanh(x @ w), None

    x = x.astype(p["layers"].dtype)
    return jnp.square(scan(layer, x, p["layers"])[0] @ p["out"]).mean().astype(F32)


def layers():
    draw = np.random.default_rng(1).normal
    return {
        "layers": draw(size=(LAYERS, DIM, DIM), scale=0.2).astype("f"),
        "out": draw(size=(DIM, 2)).astype("f"),
    }


@pytest.mark.parametrize(
    "n, sent_as, accumulate, options",
    [(2, None, 1, {}), (3, BF16, 2, {}), (8, jnp.float16, 1, {"weight": lambda _: jnp.float32(2)})],
    ids=["plain", "micro-batches", "weighed"],
)
def test_scanned_layers_are_gathered_and_scattered_in_these_dtypes(n, sent_as, accumulate, options):
    def program(state, x):
        loss, grads = jdp.value_and_grad(layered, accumulate=accumulate)(state.params, x)
        return state.apply_gradients(grads), {"loss": loss}

    x = np.random.default_rng(2).normal(size=(48, DIM)).astype("f")
    state = state_of(n, tx(gather_dtype=BF16, reduce_dtype=sent_as), layers())
    step = jdp.train_step(**options)(program)
    gathered, scattered = sent(step, state, x)
    assert set(gathered) == {"ui16"}
    assert set(scattered) == {{None: "f32", BF16: "bf16", jnp.float16: "f16"}[sent_as]}
    got = jax.device_get(step(state, x)[0].params)
    grads = jax.grad(functools.partial(layered, scan=lax.scan))(layers(), x)
    for k, master in layers().items():
        moved = (master - got[k]) / RATE
        np.testing.assert_allclose(moved, grads[k], atol=0.02 * np.abs(grads[k]).max())
        assert not (got[k] == got[k].astype(BF16)).all()


def of_one_layer(p, x):
    """Its gradient is the mean of x, whole numbers, in a bfloat16 that has 8 digits."""

    def layer(total, w):
        return total + jnp.sum(w * x.mean().astype(w.dtype)).astype(F32), None

    return jdp.scan_layers(layer, jnp.float32(0), p["layers"])[0]


def of_a_matrix(p, x):
    return jnp.sum(p["layers"] * x.mean().astype(p["layers"].dtype)).astype(F32)


@pytest.mark.parametrize("loss_fn", [of_one_layer, of_a_matrix], ids=lambda fn: fn.__name__)
def test_a_gradient_is_weighed_before_and_scaled_so_that_its_dtype_holds_it(loss_fn):
    def moved(n, x, sent_as, **options):
        optimizer = jdp.sharded(
            optax.sgd(1.0), stage=3, min_size=1, gather_dtype=BF16, reduce_dtype=sent_as
        )
        state = state_of(n, optimizer, {"layers": np.zeros((1, DIM, DIM), "f")})
        program = functools.partial(differentiated, loss_fn=loss_fn)
        new, _ = jdp.train_step(**options)(program)(state, np.asarray(x, "f"))
        (found,) = np.unique(jax.device_get(new.params["layers"]))
        return -found

    # A weight of 3 and of 1: 191.25 and 0.25 have more than 8 digits.
    shares = {"weight": lambda x: jnp.where(x[0] > 1, 3.0, 1.0)}
    assert moved(2, [255, 1], None, **shares) == (3 * 255 + 1) / 4
    assert moved(8, [16384] * 8, jnp.float16) == 16384  # of which float16 has no sum


def of_late_layers(p, x, **options):
    """The gradient of layer i is the mean of column i of the rows."""

    def layer(total, given):
        w, column = given
        return total + jnp.sum(w * column.mean()), None

    scan = functools.partial(jdp.scan_layers, late=True, **options)
    return scan(layer, jnp.float32(0), p["layers"], x.T)[0]


# One function for all tests: JAX must not hand what it traced for one dtype to the other.
late_gradients = jax.jit(jax.grad(of_late_layers), static_argnames=("reverse", "unroll"))


@pytest.mark.parametrize("sent_as", [None, BF16], ids=str)
@pytest.mark.parametrize(
    "n, stage, options",
    [(2, 0, {}), (3, 0, {"reverse": True}), (8, 1, {"unroll": 3}), (3, 2, {}), (1, 1, {})],
    ids=str,
)
def test_layers_that_are_reduced_late_are_sent_in_reduce_dtype(n, stage, options, sent_as):
    # bfloat16 holds the integers of column 0, and not those of the others, which are odd.
    x = 2 * np.random.default_rng(4).integers(128, 255, (n, 3)).astype("f") + 1
    x[:, 0] = 2.0 ** np.arange(n)
    made = jdp.replicated(optax.sgd(1.0), reduce_dtype=sent_as)
    if stage:
        made = jdp.sharded(optax.sgd(1.0), stage=stage, min_size=1, reduce_dtype=sent_as)
    state = state_of(n, made, {"layers": np.zeros((3, DIM), "f")})

    def program(state, x):
        return state.apply_gradients(late_gradients(state.params, x, **options)), {}

    new, _ = jdp.train_step(program)(state, x)
    rounded = (lambda g: g) if n == 1 or sent_as is None else lambda g: wide(g.astype(BF16))
    # XLA's sum comes back in bfloat16, and is divided then.
    want = rounded(rounded(rounded(x).sum(0)) * np.float32(1 / n))
    found = jax.device_get(new.params["layers"])
    np.testing.assert_array_equal(-found, np.broadcast_to(want[:, None], found.shape))


def test_late_layers_of_optimizers_that_send_in_several_dtypes_are_sent_in_their_own():
    x = np.asarray([[257.0], [1.0]], "f")
    made = [jdp.replicated(optax.sgd(1.0), reduce_dtype=dtype) for dtype in (None, BF16)]
    given = {"layers": np.zeros((1, DIM), "f")}
    states = [state_of(2, each, given) for each in made]

    def program(states, x):
        new = [s.apply_gradients(jax.grad(of_late_layers)(s.params, x)) for s in states]
        return new, {}

    for new in jdp.train_step(program)(states, x)[0]:
        assert (jax.device_get(new.params["layers"]) == -129).all()


def test_rows_of_a_split_table_are_seen_narrow_and_their_gradients_added_wide():
    given = {"table": np.full((DIM, 4), 1 + 2.0**-12, "f")}
    rows = np.zeros((600, 1), np.int32)  # all of them the first row: 600 has 10 digits

    def loss_of(p, ids):
        found = jdp.sharded_embedding(p["table"], ids[:, 0])
        assert found.dtype == BF16
        return (found.astype(F32) * len(ids)).mean()

    state = state_of(2, jdp.sharded(optax.sgd(1.0), stage=3, min_size=1, gather_dtype=BF16), given)
    step = jdp.train_step(functools.partial(differentiated, loss_fn=loss_of))
    new, metrics = step(state, rows)
    assert metrics["loss"] == 300
    table = jax.device_get(new.params["table"])
    np.testing.assert_array_equal(table[1:], given["table"][1:])
    np.testing.assert_allclose(table[0], 1 + 2.0**-12 - 300 / 4, rtol=1e-6)


def small_loss(p, rows):
    """Of numbers that are not exact in any dtype."""
    h = jnp.tanh(rows["x"].astype(p["w"].dtype) @ p["w"] + p["b"])
    return jnp.square(h.astype(F32) - rows["y"]).mean() + jnp.square(p["half"]).mean().astype(F32)


def small(n):
    draw = np.random.default_rng(4).normal
    return {
        "x": draw(size=(ROWS * n, DIM)).astype("f"),
        "y": draw(size=(ROWS * n, WIDTH)).astype("f"),
    }


@pytest.mark.parametrize("options", [{"gather_dtype": BF16}, {"reduce_dtype": BF16}], ids=list)
@pytest.mark.parametrize("n", [3, 8])
def test_check_step_allows_for_the_digits_that_are_left(n, options):
    step = jdp.train_step(functools.partial(differentiated, loss_fn=small_loss))
    state = state_of(n, tx(**options))
    found = jdp.check_step(step, state, small(n))
    worst = max(leaf.difference / abs(leaf.change_one) for leaf in found.leaves if leaf.change_one)
    assert 1e-4 < worst < 2**-6  # which float32 would not explain


def test_check_step_still_finds_a_loss_that_is_summed():
    def summed(p, rows):
        return len(rows["x"]) * small_loss(p, rows)

    step = jdp.train_step(functools.partial(differentiated, loss_fn=summed))
    with pytest.raises(ValueError, match=r" 2 ranks .*\de[+-]\d\d"):
        jdp.check_step(step, state_of(2, tx(gather_dtype=BF16)), small(2))


def test_a_second_step_in_a_step_sees_narrow_parameters_too():
    seen = []

    def of_kinds(p, rows):
        seen.append(p["w"].dtype)
        return loss_fn(p, rows)

    def twice(state, rows):
        for _ in range(2):
            state, metrics = differentiated(state, rows, loss_fn=of_kinds)
        return state, metrics

    got = train(2, tx(gather_dtype=BF16), twice, num_steps=1)
    assert set(seen) == {BF16}
    want = train(2, tx(gather_dtype=BF16), rows=lambda n, i: batch(n))
    assert_equal(got, want)


def test_evaluation_sees_the_dtype_of_the_state():
    ranks(2)
    state = state_of(2, tx(gather_dtype=BF16))

    @jdp.eval_step
    def measure(params, rows):
        assert params["w"].dtype == F32
        return {"loss": loss_fn(params, rows)}

    found = jdp.evaluate(measure, state.params, [batch(2)])
    np.testing.assert_allclose(found["loss"], loss_fn(params(), batch(2)), rtol=1e-5)


def placed(rows):
    """The rows of a global batch, which every process knows as a whole, on all ranks."""
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    where = jax.NamedSharding(jdp.init(devices=devices[:4]), jax.P("data"))
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, where, lambda index: x[index]), rows
    )


def on_four_ranks():
    first = placed(batch(4))
    optimizer = tx(gather_dtype=BF16, reduce_dtype=BF16)
    state, step = jdp.TrainState.create(params(), optimizer), jdp.train_step(differentiated)
    state, _ = step(state, first)
    state, _ = step(state, placed(batch(4, 1)))
    jdp.check_replicas(state)
    whole = jax.NamedSharding(state.params["w"].sharding.mesh, jax.P())
    found = jax.jit(lambda p: p, out_shardings=whole)(state.params)
    return {k: np.asarray(x) for k, x in found.items()}


def test_two_processes_get_the_bits_of_one_device_that_casts(processes):
    want = oracle(4, sent=BF16)
    for found in processes(2).run(on_four_ranks):
        assert_equal(found, want)
