"""A global mean and all its derivatives are those of one rank with all rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support import training
from support.per_rank import assert_equal_bits, per_rank
from support.ranks_rows import batch, count_rows, masked_loss, whole
from support.training import assert_close, loss_fn

import jdp
from jdp.reduction import step_context

both_types = pytest.mark.parametrize("check_vma", [True, False])


def test_value_and_gradient_of_a_global_mean_are_means(mesh):
    rows = batch(mesh.size)
    want = jax.value_and_grad(loss_fn)(training.params(), whole(rows))

    def fn(rows, p):
        mean = jdp.global_mean(loss_fn)
        return mean(p, rows), jax.value_and_grad(mean)(p, rows)

    value, got = per_rank(mesh, fn, rows, replicated=(training.params(),))
    assert_equal_bits((value, got))
    assert_close((value[0], jax.tree.map(lambda x: x[0], got)), (want[0], want))


def test_value_and_gradient_of_a_global_mean_are_weighed(make_mesh):
    rows = batch(3, masked=True)
    rows["mask"][1] = False  # this rank's loss is 0 / 0

    def fn(rows, p):
        with step_context.entered("data", rows, count_rows):
            return jax.value_and_grad(jdp.global_mean(masked_loss))(p, rows)

    got = per_rank(make_mesh(3), fn, rows, replicated=(training.params(),))
    assert_equal_bits(got)
    want = jax.value_and_grad(masked_loss)(training.params(), whole(rows))
    assert_close(jax.tree.map(lambda x: x[0], got), want)


def test_a_global_mean_may_be_part_of_a_larger_expression(make_mesh):
    x = np.array([1, 2, 6], np.float32)

    def fn(x):
        mean = jdp.global_mean(lambda w, x: w * x)
        return jax.grad(lambda w: 2 * mean(w, x) ** 2 + w)(jnp.float32(5))

    np.testing.assert_array_equal(per_rank(make_mesh(3), fn, x), [2 * 2 * 15 * 3 + 1] * 3)


def test_where_nothing_is_bound_a_global_mean_is_the_loss():
    got = jax.value_and_grad(jdp.global_mean(loss_fn))(training.params(), batch())
    assert_close(got, jax.value_and_grad(loss_fn)(training.params(), batch()))


def test_a_global_mean_is_typed_like_its_parameters(make_mesh):
    def fn(w, x):
        # Of a loss that is a mean already, to make it worse.
        grad = jax.grad(jdp.global_mean(lambda w, x: lax.pmean(jnp.mean(w * x), "data")))
        return grad(w, x), grad(lax.pcast(w, "data", to="varying"), x)

    mapped = jax.shard_map(
        fn, mesh=make_mesh(2), in_specs=(P(), P("data")), out_specs=(P(), P("data"))
    )
    same, own = jax.jit(mapped)(np.ones(1, np.float32), np.arange(4, dtype=np.float32))
    assert (same.tolist(), own.tolist()) == ([1.5], [1.5, 1.5])


def test_a_population_of_parameters_has_a_global_mean_each(make_mesh):
    x = np.array([1, 2, 6], np.float32)
    population = np.arange(4, dtype=np.float32)

    def fn(x, population):
        return jax.vmap(jax.value_and_grad(jdp.global_mean(lambda w, x: w * x)), (0, None))(
            population, x
        )

    values, grads = per_rank(make_mesh(3), fn, x, replicated=(population,))
    np.testing.assert_array_equal(values, [3 * population] * 3)
    np.testing.assert_array_equal(grads, np.full((3, 4), 3))


def test_a_global_mean_keeps_the_dtype_of_its_parameters(make_mesh):
    def fn(x, p):
        return jax.grad(jdp.global_mean(lambda p, x: (p["h"] * p["f"] * x).astype(jnp.float32)))(
            p, x
        )

    p = {"h": jnp.bfloat16(1), "f": jnp.float32(2)}
    got = per_rank(make_mesh(2), fn, np.array([1, 3], np.float32), replicated=(p,))
    assert got["h"].dtype == jnp.bfloat16
    assert (got["h"].tolist(), got["f"].tolist()) == ([4, 4], [2, 2])


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_line_search_on_a_global_mean_goes_where_one_rank_goes(make_mesh, num_ranks):
    def search(p, rows, loss_fn):
        tx = optax.lbfgs(memory_size=3)

        def value_fn(p):
            return loss_fn(p, rows)

        def update(carry, _):
            p, opt_state = carry
            value, grads = jax.value_and_grad(value_fn)(p)
            updates, opt_state = tx.update(
                grads, opt_state, p, value=value, grad=grads, value_fn=value_fn
            )
            return (optax.apply_updates(p, updates), opt_state), value

        (p, _), values = lax.scan(update, (p, tx.init(p)), length=4)
        return p, values

    rows, p = batch(num_ranks, rows=12), training.params()
    got = per_rank(
        make_mesh(num_ranks),
        lambda rows, p: search(p, rows, jdp.global_mean(loss_fn)),
        rows,
        replicated=(p,),
    )
    assert_equal_bits(got)
    want = jax.jit(lambda: search(p, whole(rows), loss_fn))()
    assert want[1][-1] < want[1][0] / 2
    assert_close(jax.tree.map(lambda x: x[0], got), want, tolerance=1e-3)


# Derivatives of other kinds and orders


def derivatives(fn, p, rows):
    """Each kind of derivative that a library takes, of a function of `(p, rows)`."""
    value, grad = (lambda p: fn(p, rows)), jax.grad(lambda p: fn(p, rows))
    v = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), p)

    def along(tree):
        return sum(jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (tree, v)), strict=True))

    return {
        "forward": jax.jvp(value, (p,), (v,)),
        "forward over reverse": jax.jvp(grad, (p,), (v,)),
        "reverse over reverse": jax.grad(lambda p: along(grad(p)))(p),
        "reverse over forward": jax.grad(lambda p: jax.jvp(value, (p,), (v,))[1])(p),
        "of the norm of the gradient": jax.grad(lambda p: optax.tree.norm(grad(p)))(p),
        "third": jax.grad(lambda p: jax.jvp(lambda p: along(grad(p)), (p,), (v,))[1])(p),
        "hessian": jax.hessian(lambda b: value({**p, "b": b}))(p["b"]),
        "all of one row": jax.jacrev(jax.jacfwd(lambda b: value({**p, "b": b})))(p["b"]),
    }


def smooth(p, x):
    return jnp.tanh(x @ p["w"] + p["b"])[:, 0]


def smooth_loss(p, rows):
    return jnp.mean((smooth(p, rows["x"]) - rows["y"][:, 0]) ** 2)


def masked_smooth_loss(p, rows):
    """Not finite where no row counts."""
    errors = (smooth(p, rows["x"]) - rows["y"][:, 0]) ** 2
    return jnp.sum(jnp.where(rows["mask"], errors, 0)) / jnp.sum(rows["mask"])


def smooth_params():
    draw = np.random.default_rng(5).normal
    num_in, num_out = batch()["x"].shape[1], batch()["y"].shape[1]
    return {
        "w": draw(size=(num_in, num_out)).astype(np.float32) / 2,
        "b": draw(size=num_out).astype(np.float32),
    }


def test_every_derivative_of_a_global_mean_is_that_of_one_rank(mesh):
    rows, p = batch(mesh.size), smooth_params()
    got = per_rank(
        mesh,
        lambda rows, p: derivatives(jdp.global_mean(smooth_loss), p, rows),
        rows,
        replicated=(p,),
    )
    assert_equal_bits(got)
    want = jax.jit(lambda: derivatives(smooth_loss, p, whole(rows)))()
    assert_close(jax.tree.map(lambda x: x[0], got), want)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_derivative_of_a_global_mean_is_weighed(make_mesh, num_ranks):
    rows, p = batch(num_ranks, masked=True), smooth_params()
    rows["mask"][1] = False  # this rank's loss is 0 / 0

    def fn(rows, p):
        with step_context.entered("data", rows, count_rows):
            return derivatives(jdp.global_mean(masked_smooth_loss), p, rows)

    got = per_rank(make_mesh(num_ranks), fn, rows, replicated=(p,))
    assert_equal_bits(got)
    want = jax.jit(lambda: derivatives(masked_smooth_loss, p, whole(rows)))()
    assert_close(jax.tree.map(lambda x: x[0], got), want)


def test_every_derivative_goes_through_a_mean_inside_of_the_loss(make_mesh):
    rows, p = batch(3), smooth_params()

    def loss(mean):
        def loss_fn(p, rows):
            y = smooth(p, rows["x"])
            return jnp.mean((y - mean(y.mean()) + rows["y"][:, 0]) ** 2)

        return loss_fn

    fn = jdp.global_mean(loss(jdp.mean_over_ranks))
    got = per_rank(make_mesh(3), lambda rows, p: derivatives(fn, p, rows), rows, replicated=(p,))
    want = jax.jit(lambda: derivatives(loss(lambda x: x), p, whole(rows)))()
    assert_close(jax.tree.map(lambda x: x[0], got), want)


def hutchinson(fn, p, grads):
    """The diagonal of the Hessian by one draw, as Sophia has it: v * (H v)."""
    v = jax.tree.map(lambda g: jnp.sign(g) + (g == 0), grads)
    _, product = jax.jvp(jax.grad(fn), (p,), (v,))
    return jax.tree.map(jnp.multiply, v, product)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("weighed", [False, True], ids=["equal", "weighed"])
def test_a_step_of_second_order_trains_as_one_rank_does(accumulate, weighed):
    loss_fn = masked_smooth_loss if weighed else smooth_loss
    options = {"weight": count_rows} if weighed else {}
    drawn = batch(masked=weighed)

    def train(num_ranks):
        jdp.init(devices=jax.devices()[:num_ranks])

        @jdp.train_step(**options)
        def step(state, rows):
            fn = jdp.global_mean(loss_fn)
            loss, grads = jdp.value_and_grad(loss_fn, accumulate=accumulate)(state.params, rows)
            mean = jdp.sync_gradients(grads)
            curvature = hutchinson(lambda p: fn(p, rows), state.params, mean)
            grads = jax.tree.map(lambda g, h: g / jnp.maximum(h, 0.1), mean, curvature)
            return state.apply_gradients(grads, synced=True), {"loss": loss}

        state = jdp.TrainState.create(smooth_params(), jdp.replicated(optax.sgd(0.1)))
        for _ in range(2):
            state, metrics = step(state, drawn)
        return jax.device_get((state.params, metrics))

    assert_close(train(4), train(1))


def test_the_gradient_of_a_global_mean_in_a_micro_batch_is_differentiated(make_mesh):
    rows, p, k = batch(2), smooth_params(), 4

    def penalised(mean):
        def loss_fn(p, rows):
            fn = mean(smooth_loss)
            return smooth_loss(p, rows) + optax.tree.norm(jax.grad(fn)(p, rows))

        return loss_fn

    # The gradient of the norm is the same on every rank: a mean of ranks takes it as it is.
    value_and_grad = jdp.value_and_grad(penalised(jdp.global_mean), accumulate=k)
    got = per_rank(
        make_mesh(2),
        lambda rows, p: jdp.mean_over_ranks(value_and_grad(p, rows)),
        rows,
        replicated=(p,),
    )
    # Micro-batch i of all ranks together.
    parts = jax.tree.map(lambda x: np.concatenate(x.reshape(2, k, -1, *x.shape[2:]), axis=1), rows)
    fn = jax.value_and_grad(penalised(lambda fn: fn))
    each = [fn(p, jax.tree.map(lambda x, i=i: x[i], parts)) for i in range(k)]
    want = jax.tree.map(lambda *x: sum(x) / k, *each)
    assert_close(jax.tree.map(lambda x: x[0], got), want)
