"""Wrong steps in mixed precision, and options without a meaning, are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from support.mixed_precision import (
    BF16,
    F32,
    RATE,
    batch,
    cast,
    differentiated,
    loss_fn,
    params,
    state_of,
    tx,
)
from support.training import ranks

import jdp


def unsynced(state, rows):
    grads = jdp.value_and_grad(loss_fn)(state.params, rows)[1]  # this rank's own
    return state.apply_gradients(grads, synced=True), {}


def local_beside(state, rows):
    new = state.apply_gradients(jdp.value_and_grad(loss_fn)(state.params, rows)[1])
    local = jax.grad(loss_fn)(state.params, rows)  # means are those of jdp.value_and_grad
    return new.replace(params={**new.params, "b": new.params["b"] - local["b"]}), {}


def of_the_loss(state, rows):
    """What the loss computed from its narrow parameters and this rank's rows."""

    def with_aux(p, rows):
        return loss_fn(p, rows), p["w"] * rows["x"].mean().astype(BF16)

    (_, seen), grads = jdp.value_and_grad(with_aux, has_aux=True)(state.params, rows)
    new = state.apply_gradients(grads)
    return new.replace(params={**new.params, "w": seen.astype(F32)}), {}


def local_scale(state, rows):
    scale = rows["y"].mean()
    new = state.replace(params=jax.tree.map(lambda p: p * scale.astype(p.dtype), state.params))
    return new.apply_gradients(jdp.value_and_grad(loss_fn)(state.params, rows)[1]), {}


def counted_twice(state, rows):
    grads = jdp.value_and_grad(loss_fn)(state.params, rows)[1]
    return state.apply_gradients({**grads, "b": lax.psum(grads["b"], "data")}), {}


def decided_by_rank(state, rows):
    loss, grads = jdp.value_and_grad(loss_fn)(state.params, rows)
    return lax.cond(loss > 1, lambda: state.apply_gradients(grads), lambda: state), {}


WRONG = {
    local_beside: "JDP101",
    of_the_loss: "JDP101",
    local_scale: "JDP101",
    counted_twice: "JDP122",  # a mean already
    decided_by_rank: "JDP103",
}


@pytest.mark.parametrize("options", [{}, {"keep_gathered": True}], ids=len)
@pytest.mark.parametrize("program", WRONG, ids=lambda program: program.__name__)
def test_the_proof_still_refuses_wrong_steps(program, options):
    state = state_of(2, tx(gather_dtype=BF16, reduce_dtype=BF16, **options))
    with pytest.raises(ValueError, match=WRONG[program]):
        jdp.train_step(program)(state, batch(2))


@pytest.mark.parametrize("optimizer", ["sharded", "replicated"])
@pytest.mark.parametrize("program, code", [(unsynced, "JDP101"), (counted_twice, "JDP121")])
def test_the_proof_still_refuses_wrong_steps_of_a_narrow_reduction(program, code, optimizer):
    made = jdp.replicated(optax.sgd(RATE), reduce_dtype=BF16)
    state = state_of(2, made if optimizer == "replicated" else tx(stage=1, reduce_dtype=BF16))
    with pytest.raises(ValueError, match=code):
        jdp.train_step(program)(state, batch(2))


def by_jax(state, rows):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, rows)
    return state.apply_gradients(grads), {"loss": loss}


def of_a_copy(state, rows):
    copy = jax.tree.map(lambda p: 1 * p, state.params)
    return state.apply_gradients(jdp.value_and_grad(loss_fn)(copy, rows)[1]), {}


def in_a_jit(state, rows):
    return jax.jit(differentiated)(state, rows)


def beside_another(state, rows, value_and_grad=jax.value_and_grad):
    """The sum of the gradients of two losses, of which one sees float32."""
    loss, grads = jdp.value_and_grad(loss_fn)(state.params, rows)
    more = value_and_grad(loss_fn)(state.params, rows)[1]
    return state.apply_gradients(jax.tree.map(jnp.add, grads, more)), {"loss": loss}


def beside_one_in_a_jit(state, rows):
    return beside_another(state, rows, lambda fn: jax.jit(jax.value_and_grad(fn)))


def beside_rows_of_their_own(state, rows):
    def add(total, row):
        row = jax.tree.map(lambda x: x[None], row)
        return jax.tree.map(jnp.add, total, jax.grad(loss_fn)(state.params, row)), None

    grads = jdp.value_and_grad(loss_fn)(state.params, rows)[1]
    return state.apply_gradients(lax.scan(add, grads, rows)[0]), {}


def beside_a_linear_one(state, rows):
    """A gradient that does not depend on the parameters."""
    grads = jdp.value_and_grad(loss_fn)(state.params, rows)[1]
    more = jax.grad(lambda p: (rows["x"] @ p["w"]).mean())(state.params)
    return state.apply_gradients(jax.tree.map(jnp.add, grads, more)), {}


WIDE = [
    by_jax,
    of_a_copy,
    in_a_jit,
    beside_another,
    beside_one_in_a_jit,
    beside_rows_of_their_own,
    beside_a_linear_one,
]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("program", WIDE, ids=lambda fn: fn.__name__)
def test_a_step_whose_loss_does_not_see_narrow_parameters_is_refused(program, n):
    state = state_of(n, tx(gather_dtype=BF16))
    with pytest.raises(ValueError, match="gather_dtype=bfloat16 .*jdp.value_and_grad"):
        jdp.train_step(program)(state, batch(n))
    jdp.train_step(program)(state_of(n, tx()), batch(n))


def cast_by_hand(state, rows):
    """A second loss that casts, twice: JAX adds up the gradients of both casts."""

    def second(p, rows):
        return loss_fn(cast(p), rows) + loss_fn(cast(p), rows)

    grads = jdp.value_and_grad(loss_fn)(state.params, rows)[1]
    more = jax.grad(second)(state.params, rows)
    return state.apply_gradients(jax.tree.map(jnp.add, grads, more)), {}


def by_hand(state, rows):
    """What reads float32 parameters, and is not the gradient of a loss of rows."""
    grads = jdp.value_and_grad(loss_fn, accumulate=2)(state.params, rows)[1]
    decay = jax.grad(lambda p: jnp.square(p["w"]).sum() * 0.5)(state.params)
    count = (jdp.sum_over_ranks(rows["y"] * 0 + 1) / rows["y"].size).mean()
    grads = {k: jnp.clip(g, -4, 4) + 0.5 * state.params[k] for k, g in grads.items()}
    grads["w"] = grads["w"] * count + decay["w"] + state.params["w"] * count
    mean = jax.tree.map(lambda p: p / 2 + p / 2, state.params)
    new = state.apply_gradients(grads)
    before = loss_fn(state.params, rows)
    return new.replace(model_state=mean), {"before": before, "after": loss_fn(new.params, rows)}


def of_what_it_adds(state, rows):
    """Rows that were changed by the gradient of another loss."""
    more = jax.grad(lambda x: loss_fn(state.params, {**rows, "x": x}))(rows["x"])
    rows = {**rows, "x": rows["x"] + jnp.sign(more)}
    return differentiated(state, rows)


@pytest.mark.filterwarnings("ignore:.*JDP131")  # one of them clips by hand
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("program", [cast_by_hand, by_hand, of_what_it_adds])
def test_a_step_that_reads_float32_parameters_without_such_a_gradient_is_accepted(program, n):
    state = state_of(n, tx(gather_dtype=BF16)).replace(model_state=params())
    jdp.train_step(program).lower(state, batch(n))


@pytest.mark.parametrize(
    "options, text",
    [
        ({"gather_dtype": jnp.int8}, "gather_dtype=int8"),
        ({"gather_dtype": bool}, "gather_dtype=bool"),
        ({"gather_dtype": jnp.float8_e4m3fn}, "gather_dtype=float8_e4m3fn,.* 8 "),
        ({"gather_dtype": "complex64"}, "gather_dtype=complex64"),
        ({"gather_dtype": "float64"}, "jax_enable_x64"),
        ({"reduce_dtype": jnp.float8_e5m2}, "reduce_dtype=float8_e5m2"),
        ({"reduce_dtype": np.int32}, "reduce_dtype=int32"),
        ({"gather_dtype": "bf16"}, "gather_dtype='bf16' .*jnp.bfloat16 or .*\"bfloat16\""),
        ({"reduce_dtype": "bf16"}, "reduce_dtype='bf16' .*jnp.bfloat16 or .*\"bfloat16\""),
        ({"reduce_dtype": 16}, "reduce_dtype=16 "),
        ({"gather_dtype": np.ones(2, "f")}, r"gather_dtype=array\(\[1., 1.\], "),
        ({"gather_dtype": BF16, "stage": 1}, "got stage=1"),
        ({"gather_dtype": BF16, "stage": 2}, "got stage=2"),
    ],
    ids=str,
)
def test_dtypes_without_a_meaning_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        tx(**options)
    if "reduce_dtype" in options:
        with pytest.raises(ValueError, match=text):
            jdp.replicated(optax.sgd(0.1), **options)
        with pytest.raises(ValueError, match=text):
            jdp.sync_gradients(params(), **options)


def test_parameters_with_fewer_bits_than_the_gather_are_refused_by_path():
    ranks(2)
    with pytest.raises(ValueError, match=r"params\['half'\]` is bfloat16\[24, 2\].* 16 .* 32"):
        jdp.TrainState.create(params(), tx(gather_dtype=F32))
