"""One chain of tokens orders the native calls of loops, functions and what is around them."""

import jax
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.training import batch, loss_fn, ranks, state

import jdp
from jdp.collectives import call_order, native
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.collectives.hazards import why_unordered
from jdp.reduction import wait_order

pytestmark = pytest.mark.skipif(
    cpu_runtime.why_missing() is not None, reason=f"{cpu_runtime.why_missing()}"
)


def total(x):
    return native([[x]], "data")[0][0]


def loop(body, x, length=3):
    """A loop whose turns hand the token on."""

    def turn(carry, _):
        return call_order.threaded(body)(*carry), None

    (token, x), _ = lax.scan(turn, (call_order.first_token(), x), length=length)
    call_order.passed(token)
    return x


def without_token(body, x):
    return lax.scan(lambda c, _: (body(c), None), x, length=3)[0]


def of_a_token_from_outside(x):
    """Each turn follows the same call before the loop, and not the turn before."""
    x, token = total(x), call_order.first_token()
    return lax.scan(lambda c, _: (call_order.threaded(total)(token, c)[1], None), x, length=3)[0]


def of_two_loops_beside_each_other(x):
    token = call_order.first_token()

    def turn(carry, _):
        return call_order.threaded(total)(*carry), None

    return sum(lax.scan(turn, (token, x + i), length=2)[0][1] for i in range(2))


def differentiated(x):
    """The way forward keeps the token of each turn for the way back."""
    return jax.grad(lambda x: without_token(total, x).sum())(x)


def waiting(x):
    """The next call waits for a value, and so does another value for the token of the last one."""
    (later,) = wait_order.after([x], [call_order.first_token()])
    wait_order.next_call_after([x])
    return total(later)


def of_a_token_and_its_copy(x):
    x, token = total(x), call_order.first_token()
    (copy,) = wait_order.after([token], [x])
    both = [call_order.threaded(total)(each, x)[1] for each in (token, copy)]
    return both[0] + both[1]


ONE_CHAIN = {
    "a loop": lambda x: loop(total, x),
    "calls, a loop, calls": lambda x: total(loop(total, total(x))),
    "several calls in each turn": lambda x: loop(lambda x: total(total(x) + 1), x),
    "two loops": lambda x: loop(total, loop(total, x) + 1),
    "a loop in a loop": lambda x: loop(lambda x: loop(total, x), x),
    "a call that waits": lambda x: total(waiting(total(x))),
    "a call that waits, in a loop": lambda x: loop(waiting, total(x)),
    "a function in a loop": lambda x: loop(
        lambda x: handed_on_by_jit(total)(x), total(x)
    ),
}  # fmt: skip
MORE = {
    "a token and its copy": of_a_token_and_its_copy,
    "a call behind a loop without a token": lambda x: total(without_token(total, x)),
    "turns that follow the same call": of_a_token_from_outside,
    "loops that follow the same call": of_two_loops_beside_each_other,
    "a loop in a derivative": differentiated,
}


def handed_on_by_jit(fn):
    def with_token(x):
        token, result = jax.jit(call_order.threaded(fn))(call_order.first_token(), x)
        call_order.passed(token)
        return result

    return with_token


def mapped(make_mesh, fn, num_ranks):
    def in_order(x):
        with call_order.entered():
            return fn(x)

    return jax.jit(
        jax.shard_map(
            in_order, mesh=make_mesh(num_ranks), in_specs=P("data"), out_specs=P("data"),
            check_vma=False,
        )
    )  # fmt: skip


@pytest.mark.parametrize("name", ONE_CHAIN)
def test_tokens_go_through_loops_and_functions(make_mesh, name):
    fn = mapped(make_mesh, ONE_CHAIN[name], 2)
    assert why_unordered(fn.trace(np.ones(4, np.float32)).jaxpr) is None


@pytest.mark.parametrize("name", MORE)
def test_calls_that_may_run_beside_each_other_are_found(make_mesh, name):
    fn = mapped(make_mesh, MORE[name], 2)
    assert why_unordered(fn.trace(np.ones(4, np.float32)).jaxpr) is not None


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "name",
    ["calls, a loop, calls", "a loop in a loop", "two loops", "a call that waits, in a loop"],
)
def test_sums_in_such_loops_are_exact(make_mesh, name, num_ranks):
    x = np.arange(num_ranks * 5, dtype=np.float32).reshape(num_ranks, 5)
    found = mapped(make_mesh, ONE_CHAIN[name], num_ranks)(x.reshape(-1))
    once, more = x.sum(0), num_ranks**2
    expected = {
        "calls, a loop, calls": once * more * more,
        "a loop in a loop": once * num_ranks**8,
        "two loops": (once * more + 1) * num_ranks**3,
        "a call that waits, in a loop": once * num_ranks**3,
    }[name]
    np.testing.assert_array_equal(found, np.tile(expected, num_ranks))


@pytest.mark.parametrize("stage", [2, 3])
def test_micro_batches_scatter_natively(stage):
    def step(state, rows):
        loss, grads = jdp.value_and_grad(loss_fn, accumulate=2)(state.params, rows)
        return state.apply_gradients(grads), {"loss": loss}

    ranks(2)
    tx = jdp.sharded(optax.sgd(0.1), stage=stage, min_size=1)
    text = jdp.train_step(step).lower(state(tx), batch()).as_text()
    assert f"@{cpu_runtime.REDUCE_SCATTER}(" in text and "stablehlo.reduce_scatter" not in text
