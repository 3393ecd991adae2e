"""The update of every optimizer of optax on slices, against the optimizer itself."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import sliced_updates as sliced
from support.optimizers import NOT_BUILT, OPTIMIZERS, exported

from jdp.analysis import jaxprs

# Those that are run on the oldest JAX, too.
CORE = (
    "contrib.muon contrib.prodigy contrib.schedule_free injected momentum multi_steps "
    "optax.adafactor optax.adamw optax.add_noise optax.apply_if_finite optax.chain optax.lamb "
    "optax.masked optax.partition"
).split()

# A line search takes another step where rounding decides: fewer steps, and looser.
CHAOTIC = {"optax.lbfgs": 3}
# What another one runs.
INSIDE = {"optax.scale_by_zoom_linesearch": "optax.lbfgs"}
# A parameter that is a scalar fails in optax itself.
NO_SCALARS = ("optax.sm3",)


def _problem(name, dtype=np.float32, num_steps=20):
    tx, params = OPTIMIZERS[name](), sliced.params(dtype)
    if name in NO_SCALARS:
        del params["scale"]
    grads = sliced.gradients(params, num_steps)
    params = jax.tree.map(jnp.asarray, params)
    if name == "lookahead":
        params = optax.LookaheadParams.init_synced(params)
    return tx, params, tx.init(params), grads


def _assert_close(got, want, tolerance):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            largest = np.abs(b, where=np.isfinite(b), out=np.zeros_like(b)).max(initial=1e-6)
            name = jax.tree_util.keystr(path)
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * largest, err_msg=name)


def _cases():
    for i, name in enumerate(sorted(OPTIMIZERS.keys() - INSIDE.keys())):
        marks = [] if name in CORE else pytest.mark.thorough
        yield pytest.param(name, (2, 3, 8)[i % 3], marks=marks)
    yield "optax.chain", 1


@pytest.mark.parametrize(("name", "num_ranks"), [*_cases()])
def test_slices_equal_one_device(make_mesh, name, num_ranks):
    tx, params, state, grads = _problem(name, num_steps=CHAOTIC.get(name, 20))
    step, _ = sliced.sliced_step(tx, make_mesh(num_ranks), grads[0], params, state, name)
    got, _ = sliced.train(step, params, state, grads)
    want, _ = sliced.train(sliced.whole_step(tx, name=name), params, state, grads)
    _assert_close(got, want, 1e-4 if name in CHAOTIC else 1e-6)


def test_every_optimizer_that_is_left_out_is_one_of_optax():
    assert {*NOT_BUILT} <= {*exported()} and len(OPTIMIZERS) > 80


ELEMENTWISE = {
    "adagrad": lambda: optax.adagrad(1e-2),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2),
    "lion": lambda: optax.lion(1e-2),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda: optax.rmsprop(1e-2, momentum=0.9),
    "schedule": lambda: optax.sgd(optax.cosine_decay_schedule(0.1, 20)),
}


def _every(transformations):
    """All of them in one program, each with parameters of its own."""
    built = {name: make() for name, make in transformations.items()}
    return optax.GradientTransformationExtraArgs(
        lambda params: {name: tx.init(params[name]) for name, tx in built.items()},
        lambda grads, state, params: tuple(
            {name: pair[i] for name, pair in pairs.items()}
            for pairs in [{n: tx.update(grads[n], state[n], params[n]) for n, tx in built.items()}]
            for i in (0, 1)
        ),
    )


# Without XLA's optimizations, for the reason that stands at `ROUNDED`.
@pytest.mark.parametrize(
    ("num_ranks", "dtype"), [(1, np.float32), (2, jnp.bfloat16), (3, np.float32), (8, np.float32)]
)
def test_elementwise_optimizers_have_the_bits_of_the_whole_update(make_mesh, num_ranks, dtype):
    mesh = make_mesh(num_ranks)
    tx, one = _every(ELEMENTWISE), sliced.params(dtype)
    params = {name: jax.tree.map(jnp.asarray, one) for name in ELEMENTWISE}
    grads = [{name: g for name in ELEMENTWISE} for g in sliced.gradients(one, 20)]
    state = tx.init(params)
    step, found = sliced.sliced_step(tx, mesh, grads[0], params, state)
    got = sliced.train(step, params, state, grads)
    want = sliced.train(sliced.whole_step(tx, mesh), params, state, grads)
    assert not found
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        assert a.tobytes() == b.tobytes(), jax.tree_util.keystr(path)


# LLVM rounds a product and a sum once (FMA), but twice where it puts the first 4 of 5 elements of
# the last dim into one vector, and whether it does depends on the other dims: of (3, 24, 5) it
# does, of slices (3, 12, 5) and (3, 3, 5) not. In units of the last place of the largest value of a
# leaf, measured after 20 steps; adam, adamw, momentum and sgd have equal bits there, too.
ROUNDED = {"adagrad": 1.0, "lion": 1.0, "rmsprop": 1.75}


def test_optimized_elementwise_updates_differ_by_the_rounding_of_a_sum(make_mesh):
    tx = _every({name: lambda name=name: getattr(optax, name)(1e-2) for name in ROUNDED})
    one = {"layers": sliced.params()["layers"]}
    params = {name: jax.tree.map(jnp.asarray, one) for name in ROUNDED}
    grads = [{name: g for name in ROUNDED} for g in sliced.gradients(one, 20)]
    state = tx.init(params)
    step, _ = sliced.sliced_step(tx, make_mesh(8), grads[0], params, state)
    got, _ = sliced.train(step, params, state, grads)
    want, _ = sliced.train(sliced.whole_step(tx), params, state, grads)
    for name, ulps in ROUNDED.items():
        a, b = got[name]["layers"].astype(np.float64), want[name]["layers"]
        assert np.abs(a - b).max() <= 2 * ulps * np.spacing(np.abs(b).max()), name


COMMON = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "clip_adamw": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "lamb": lambda: optax.lamb(1e-2),
    "lars": lambda: optax.lars(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "prodigy": lambda: optax.contrib.prodigy(1.0),
}


def _program(tx, mesh):
    params = jax.tree.map(jnp.asarray, sliced.params())
    state = tx.init(params)
    step, found = sliced.sliced_step(tx, mesh, params, params, state)
    return jax.make_jaxpr(step)(params, state, params), found


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("name", COMMON)
def test_common_optimizers_gather_no_leaf(make_mesh, name, num_ranks):
    _, found = _program(COMMON[name](), make_mesh(num_ranks))
    # Only the means of rows and columns, and constants, that their state was sliced along.
    assert all(each.num_bytes <= 3 * 5 * 4 for each in found), found


@pytest.mark.parametrize(("name", "count"), [("clip_adamw", 1), ("lamb", 2), ("lars", 2)])
def test_norms_of_all_leaves_are_one_collective(make_mesh, name, count):
    # optax takes a norm twice, so that its derivative is right at 0.
    program, _ = _program(COMMON[name](), make_mesh(3))
    equations = list(jaxprs.equations(program))
    assert sum(each.primitive.name == "psum" for each in equations) == count
    assert not any("gather" in each.primitive.name for each in equations)


def test_bfloat16_parameters_stay_close(make_mesh):
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(1e-2))
    params = jax.tree.map(jnp.asarray, sliced.params(jnp.bfloat16))
    grads, state = sliced.gradients(params, 5), tx.init(params)
    step, _ = sliced.sliced_step(tx, make_mesh(8), grads[0], params, state)
    got, _ = sliced.train(step, params, state, grads)
    want, _ = sliced.train(sliced.whole_step(tx), params, state, grads)
    _assert_close(got, want, 2**-7)
