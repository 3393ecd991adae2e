"""Native calls in branches, loops, derivatives and vmaps give the bits of XLA's collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.training import ranks

import jdp
from jdp.collectives import shards
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.reduction import step_context

pytestmark = pytest.mark.skipif(
    cpu_runtime.why_missing() is not None, reason=f"{cpu_runtime.why_missing()}"
)


def gathered(*leaves):
    mesh = step_context.innermost().mesh
    wholes = shards.all_gather([leaves], [[0] * len(leaves)], "data", mesh=mesh)[0]
    return wholes if len(leaves) > 1 else wholes[0]


def scattered(x):
    return shards.reduce_scatter([[x]], [[0]], "data", mesh=step_context.innermost().mesh)[0][0]


def exchanged(x):
    mesh = step_context.innermost().mesh
    return shards.all_to_all([[x]], [[(0, 0)]], "data", mesh=mesh)[0][0]


def looped(turn, x, length=3):
    return lax.scan(turn, x[0], jnp.arange(length, dtype=x.dtype))


def one_leaf_is_read_in_one_branch(x, step):
    first, second, _ = gathered(x, 2 * x, 3 * x)
    return lax.cond(step > 0, lambda: second.sum(0), lambda: first.max(0))


def one_branch_gathers(x, step):
    found = lax.cond(step > 0, lambda x: gathered(x).sum(0), lambda x: x.sum(0), x)
    return found + gathered(x).max(0)


def results_of_a_turn_are_not_read(x, step):
    def turn(carry, i):
        first, second = gathered(x + carry, i * x)
        scattered(first)
        return carry + second[0], None

    return looped(turn, x)[0]


def the_next_turn_reads_what_a_turn_gathers(x, step):
    def turn(carry, i):
        total, before = carry
        return (total + before[0], gathered(x + i)), None

    return lax.scan(turn, (x[0], gathered(x)), jnp.arange(4, dtype=x.dtype))[0][0]


def a_while_in_a_scan(x, step):
    def turn(carry, i):
        def body(j, carry):
            return (carry + gathered(x + carry)[1]) % 5

        return lax.fori_loop(0, 2, body, carry), gathered(i * x)[-1]

    carry, ys = looped(turn, x)
    return carry + ys.sum(0)


def a_derivative_of_a_rematerialised_loop(x, step):
    turn = jax.checkpoint(lambda carry, i: (carry * gathered(x)[0] + i, None))
    return jax.grad(lambda carry: lax.scan(turn, carry, x[:3, 0])[0].sum())(x[0])


def a_derivative_of_a_loop(x, step):
    def turn(carry, i):
        return carry + scattered(i * gathered(carry * x))[0], None

    return jax.grad(lambda carry: lax.scan(turn, carry, x[:2, 0])[0].sum())(x[0])


def what_the_backward_pass_does_not_read(x, step):
    same = jax.custom_vjp(lambda x: x.sum())
    same.defvjp(lambda x: (x.sum(), gathered(x)), lambda whole, ct: (ct * scattered(gathered(x)),))
    return jax.grad(same)(x).sum(0)


def branches_of_a_vmap(x, step):
    def row(k):
        return lax.cond(k > 0, lambda: gathered(k * x).sum(0), lambda: x.sum(0))

    return jax.vmap(row)(jnp.arange(3, dtype=x.dtype)).sum(0)


def exchanges_in_branches_of_a_vmap(x, step):
    def row(k):
        return lax.cond(k > 0, lambda x: exchanged(k * x), lambda x: x, x)

    return jax.vmap(row)(jnp.arange(3, dtype=x.dtype)).sum((0, 1))


def exchanges_in_a_loop(x, step):
    def turn(carry, i):
        return exchanged(carry + i) % 19, carry[0]

    return lax.scan(turn, x, jnp.arange(3, dtype=x.dtype))[1].sum(0)


def calls_that_nobody_reads(x, step):
    gathered(x), gathered(2 * x), scattered(x), exchanged(x)
    return gathered(3 * x).sum(0)


PROGRAMS = [
    one_leaf_is_read_in_one_branch,
    one_branch_gathers,
    results_of_a_turn_are_not_read,
    the_next_turn_reads_what_a_turn_gathers,
    a_while_in_a_scan,
    a_derivative_of_a_rematerialised_loop,
    a_derivative_of_a_loop,
    what_the_backward_pass_does_not_read,
    branches_of_a_vmap,
    exchanges_in_branches_of_a_vmap,
    exchanges_in_a_loop,
    calls_that_nobody_reads,
]


def trained(program):
    @jdp.train_step
    def step(state, x):
        own = program(x, state["step"]) * (1 + lax.axis_index("data"))
        return {"step": state["step"] + 1, "sum": lax.psum(own, "data")}, {}

    state = {"step": np.float32(0), "sum": np.zeros(7, np.float32)}
    x = np.random.default_rng(0).integers(0, 4, (27, 7)).astype(np.float32)
    sums = []
    for _ in range(2):
        state, _ = step(state, x)
        sums.append(np.asarray(state["sum"]))
    return sums


@pytest.mark.all_sets
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_native_calls_give_the_bits_of_xlas(program, monkeypatch):
    ranks(3)
    found = trained(program)
    monkeypatch.setattr(shards, "is_native", lambda *_: False)
    np.testing.assert_array_equal(found, trained(program))
