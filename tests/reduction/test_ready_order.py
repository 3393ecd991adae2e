"""The order of gradients is that in which the backward pass has them, whatever they are called."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jdp
from jdp.analysis import jaxprs
from jdp.reduction.bucket_order import order_of_gradients

pytestmark = pytest.mark.optimized

WIDTH = 4


def order(make_mesh, loss_fn, params, change=lambda grads: grads):
    """Paths of the gradients from first to last, those of one operation together."""

    def on_rank(params, x):
        return jdp.sync_gradients(change(jax.grad(loss_fn)(params, x)))

    mapped = jax.shard_map(
        on_rank, mesh=make_mesh(2), in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    ready = order_of_gradients(jax.make_jaxpr(mapped)(params, np.ones((4, WIDTH), np.float32)))
    times = sorted(set(ready.values()))
    return [{path for path in ready if ready[path] == time} for time in times]


def square():
    return np.ones((WIDTH, WIDTH), np.float32)


def dense(x, p):
    return jnp.tanh(x @ p)


# Names that sort in no order of use.
CHAIN = {"m": square(), "a": square(), "z": square()}


def chain(params, x):
    for name in ("m", "a", "z"):
        x = dense(x, params[name])
    return x.sum()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_layers_are_ready_from_last_to_first(wrap, make_mesh):
    assert order(make_mesh, wrap(chain), CHAIN) == [{"['z']"}, {"['a']"}, {"['m']"}]


def test_what_scales_the_input_of_a_layer_is_ready_after_it(make_mesh):
    def loss_fn(params, x):
        return dense(dense(x, params["first"]) * params["scale"], params["last"]).sum()

    params = {"first": square(), "last": square(), "scale": np.ones(WIDTH, np.float32)}
    found = order(make_mesh, loss_fn, params)
    assert found[0] == {"['last']"} and found[-1] == {"['first']"}


def test_all_of_a_loop_is_ready_at_its_end(make_mesh):
    def loss_fn(params, x):
        x, _ = lax.scan(lambda x, w: (dense(x, w), None), x, params["layers"])
        return dense(x, params["head"]).sum()

    params = {"layers": np.stack([square()] * 3), "head": square()}
    assert order(make_mesh, loss_fn, params) == [{"['head']"}, {"['layers']"}]


def test_a_parameter_that_is_used_twice_is_ready_with_its_first_use(make_mesh):
    def loss_fn(params, x):
        return (dense(dense(x, params["tied"]), params["other"]) @ params["tied"]).sum()

    found = order(make_mesh, loss_fn, {"tied": square(), "other": square()})
    assert found == [{"['other']"}, {"['tied']"}]


def doubled(f):
    return jax.jit(lambda x, p: f(f(x, p), p))


def nested(depth, f=dense):
    """A layer 2^depth times, in functions that call each other twice each."""
    f = jax.jit(f)
    for _ in range(depth):
        f = doubled(f)
    return f


def in_turn(depth):
    """The same without functions."""

    def f(x, p):
        for _ in range(2**depth):
            x = dense(x, p)
        return x

    return f


def in_a_cond(f):
    return lambda x, p: lax.cond(x[0, 0] < 1, lambda: f(x, p), lambda: x)


def on_the_way(f):
    """Gradients that go through a function; to differentiate it would cost JAX 2^depth."""

    def change(grads):
        first = f(grads["z"], grads["a"])
        second = f(grads["m"], first * 2)
        return {"a": second + 1, "m": first, "z": grads["z"].T}

    return change


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_what_nested_functions_call_is_ready_as_if_it_stood_there(make_mesh, depth):
    def around(f):
        def loss_fn(params, x):
            x = f(dense(x, params["z"]), params["a"]) * params["scale"]
            return f(dense(x, params["m"]), params["z"]).sum()

        return loss_fn

    params = {**CHAIN, "scale": np.ones(WIDTH, np.float32)}
    want = order(make_mesh, around(in_turn(depth)), params)
    assert order(make_mesh, around(nested(depth)), params) == want
    want = order(make_mesh, chain, CHAIN, on_the_way(in_turn(depth)))
    assert order(make_mesh, chain, CHAIN, on_the_way(nested(depth))) == want
    assert want == [{"['z']"}, {"['m']"}, {"['a']"}]


@pytest.mark.parametrize(
    "wrap, f", [(lambda f: f, dense), (in_a_cond, jnp.add)], ids=["called", "in a cond"]
)
def test_nested_calls_cost_no_more_than_their_depth(wrap, f, make_mesh, monkeypatch):
    looked_into = itertools.count()
    find = jaxprs._jaxprs_in

    def counting(values):
        assert next(looked_into) < 10_000
        return find(values)

    monkeypatch.setattr(jaxprs, "_jaxprs_in", counting)
    found = order(make_mesh, chain, CHAIN, on_the_way(wrap(nested(40, f))))
    assert found == order(make_mesh, chain, CHAIN, on_the_way(wrap(nested(2, f))))
