"""Matrices that are computed by one rank each, against the function itself on whole arrays."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support import sliced_updates as sliced
from support.per_rank import assert_equal_bits

import jdp
from jdp.analysis import jaxprs
from jdp.reduction.partition import Piece, partitioned

SHAPE = (24, 48)


def _matrices(count, shape=SHAPE):
    """Small integers, whose products are exact."""
    draw = np.random.default_rng(0).integers
    return [draw(-2, 3, size=shape).astype(np.float32) for _ in range(count)]


def _rounds(x, count=3):
    """Rounds on a matrix, as of Newton and Schulz, in integers."""
    for _ in range(count):
        x = jnp.clip(x @ x.T @ x, -2, 2)
    return x


def _each(function):
    return lambda *matrices: [function(x) for x in matrices]


def _program(mesh, function, args, dims):
    """A jitted call of `function` on slices that returns whole results, and what ranks own."""
    owned = []

    def on_rank(*local):
        pieces = [Piece(x, d) for x, d in zip(local, dims, strict=True)]
        found = partitioned(function, pieces, ("data",), lambda shapes: [None] * len(shapes))
        owned[:] = found.owned
        return [out.value[None] for out in found.pieces]

    specs = tuple(P() if d is None else P(*[None] * d, "data") for d in dims)
    mapped = jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False)
    return jax.jit(mapped), owned


def _check(mesh, function, args, dims):
    """Compare the results on all ranks with those of one device; return what ranks own."""
    run, owned = _program(mesh, function, args, dims)
    outs = jax.device_get(run(*args))
    for out, want in zip(outs, jax.device_get(jax.jit(function)(*args)), strict=True):
        assert_equal_bits(out)
        np.testing.assert_array_equal(out[0], want)
    return [(each.count, each.count_of_rank, each.shape) for each in owned]


def test_matrices_of_one_shape_are_dealt_out(mesh):
    # 5 matrices: 2 and 3 ranks compute one of them twice, 8 ranks three.
    n = mesh.size
    owned = _check(mesh, _each(_rounds), _matrices(5), [1] * 5)
    assert owned == ([] if n == 1 else [(5, math.ceil(5 / n), SHAPE)])


def test_slices_along_different_dims_and_transposed_matrices_are_dealt_out_together(make_mesh):
    def function(x, y, wide):
        return [_rounds(x), _rounds(y), _rounds(wide.T).T]

    args = [*_matrices(2), *_matrices(1, SHAPE[::-1])]
    assert _check(make_mesh(3), function, args, [1, 0, 0]) == [(3, 1, SHAPE)]


def test_stacked_matrices_are_dealt_out_one_by_one(mesh):
    # 2 stacks of 5 matrices; 10 is a multiple of 2 alone.
    n = mesh.size
    owned = _check(mesh, _each(jax.vmap(_rounds)), _matrices(2, (5, *SHAPE)), [2, 2])
    assert owned == ([] if n == 1 else [(10, math.ceil(10 / n), SHAPE)])


def test_the_matrices_of_one_stack_are_dealt_out(make_mesh):
    owned = _check(make_mesh(3), _each(jax.vmap(_rounds)), _matrices(1, (7, *SHAPE)), [2])
    assert owned == [(7, 3, SHAPE)]


def test_stacks_whose_rows_depend_on_each_other_are_dealt_out_whole(make_mesh):
    def function(x):
        for _ in range(3):
            x = jnp.clip(x @ jnp.swapaxes(x, 1, 2) @ x, -2, 2)
            x = jnp.clip(x - x.max(0), -2, 2)
        return x

    owned = _check(make_mesh(2), _each(function), _matrices(4, (3, *SHAPE)), [2] * 4)
    assert owned == [(4, 2, (3, *SHAPE))]


def _flops(program):
    dots = [each for each in jaxprs.equations(program) if each.primitive.name == "dot_general"]
    return sum(2 * dot.outvars[0].aval.size * dot.invars[0].aval.shape[-1] for dot in dots)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_a_rank_computes_its_share_and_sends_each_matrix_twice(make_mesh, num_ranks):
    args = _matrices(24)
    run, _ = _program(make_mesh(num_ranks), _each(_rounds), args, [1] * 24)
    program = jax.make_jaxpr(run)(*args)
    assert _flops(program) * num_ranks == _flops(jax.make_jaxpr(_each(_rounds))(*args))
    names = [each.primitive.name for each in jaxprs.equations(program)]
    assert names.count("all_to_all") == 2 and not names.count("psum")


def test_matrices_that_are_whole_are_dealt_out(make_mesh):
    args = [jnp.float32(1), *_matrices(5, (49, 49))]

    def function(one, *matrices):
        return [_rounds(x * one, 12) for x in matrices]

    assert _check(make_mesh(2), function, args, [None] * 6) == [(5, 3, (49, 49))]


def test_numbers_of_each_matrix_go_with_it(make_mesh):
    def scaled(x, scale):
        for _ in range(3):
            x = jnp.clip(x @ x.T @ x, -2, 2) * scale
        return x

    def function(stacked, first, second):
        return [jax.vmap(lambda x: scaled(x, first))(stacked), scaled(stacked[0], second)]

    def unrolled(x, y, first, second):
        return [scaled(x, first), scaled(y, second)]

    numbers = [np.float32(1), np.float32(-1)]
    assert _check(make_mesh(2), unrolled, _matrices(2) + numbers, [1, 1, None, None])
    _check(make_mesh(2), function, _matrices(1, (4, *SHAPE)) + numbers, [2, None, None])


def test_rounds_that_depend_on_the_matrix_end(mesh):
    def function(x):
        def goes_on(state):
            return jnp.trace(state[0] @ state[0].T) + state[1] > 900

        def round_(state):
            return jnp.clip(state[0] @ state[0].T @ state[0], -1, 1), state[1] - 100

        return lax.while_loop(goes_on, round_, (x, jnp.sum(x)))[0]

    _check(mesh, _each(function), _matrices(5), [1] * 5)


def test_what_is_in_a_loop_or_a_branch_is_dealt_out(make_mesh):
    def function(i, *matrices):
        def round_(matrices, _):
            return [_rounds(x) + 1 for x in matrices], None

        looped, _ = lax.scan(round_, list(matrices), length=2)
        return lax.cond(i > 0, lambda: looped, lambda: [_rounds(x) for x in matrices])

    for i in (0, 1):
        _check(make_mesh(3), function, [np.int32(i), *_matrices(3)], [None, 1, 1, 1])


SOMETIMES_ALIKE = {
    "a_matrix_and_a_view_of_it": (lambda x, y: [_rounds(x), _rounds(x[:, ::-1])], 2),
    "one_after_the_other": (lambda x, y: [_rounds(x), _rounds(_rounds(y))], 0),
    "other_constants": (lambda x, y: [_rounds(x), _rounds(y, 4)], 0),
    "little_to_compute": (lambda x, y: [x @ y.T, y @ x.T], 0),
    "no_matrices": (lambda x, y: [x * x.sum(), y * y.sum()], 0),
    "one_matrix": (lambda x, y: [_rounds(x), y.sum()], 0),
}


@pytest.mark.parametrize("name", SOMETIMES_ALIKE)
def test_only_what_is_alike_and_costly_is_dealt_out(make_mesh, name):
    function, count = SOMETIMES_ALIKE[name]
    owned = _check(make_mesh(8), function, _matrices(2), [1, 1])
    assert owned == ([(count, 1, SHAPE)] if count else [])


def _muon(stacked):
    numbers = optax.contrib.MuonDimensionNumbers
    return optax.contrib.muon(
        1e-2,
        muon_weight_dimension_numbers={
            name: numbers(1, 2) if stacked and "layers" in name else numbers() for name in _leaves()
        },
    )


def _leaves():
    draw = np.random.default_rng(0).normal
    shapes = {"up": (24, 48), "down": (48, 24), "q": (24, 24), "k": (24, 24), "v": (24, 24)}
    shapes["layers"] = (5, 24, 48)
    return {name: jnp.asarray(draw(size=shape), jnp.float32) for name, shape in shapes.items()}


def test_muon_equals_one_device_and_gathers_nothing(mesh):
    params, tx = _leaves(), _muon(stacked=True)
    state = tx.init(params)
    grads = [jax.tree.map(lambda x, i=i: jnp.roll(x, i) * 0.1, params) for i in range(3)]
    step, gathers = sliced.sliced_step(tx, mesh, grads[0], params, state)
    got, _ = sliced.train(step, params, state, grads)
    want, _ = sliced.train(sliced.whole_step(tx), params, state, grads)
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, rtol=0, atol=1e-6 * np.abs(x).max())
    # The coefficients, which are part of the state.
    assert all(each.num_bytes == 12 for each in gathers)


def test_check_step_lists_the_matrices_and_the_proof_accepts_them(capsys):
    jdp.init(cpu_ranks=4)
    params = {f"{i}": np.ones(SHAPE, np.float32) for i in range(5)}
    tx = optax.chain(optax.contrib.muon(1e-2), optax.sgd(0.1))
    state = jdp.TrainState.create(params, jdp.sharded(tx, stage=2, min_size=1))

    @jdp.train_step
    def step(state, batch):
        def loss_fn(p, x):
            return jnp.mean(sum(jnp.tanh(x @ w).sum(-1) for w in p.values()))

        loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    found = jdp.check_step(step, state, np.eye(24, dtype=np.float32)[:8], tolerance=1e-4)
    (line,) = found.owned
    assert line.startswith("5 x [1, 24, 48]") and line.endswith("2 on each rank")
    assert line in capsys.readouterr().out
