"""The order of gradients is that in which the backward pass has them, whatever they are called."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jdp
from jdp.readiness import order_of_gradients

WIDTH = 4


def order(make_mesh, loss_fn, params):
    """Paths of the gradients from first to last, those of one operation together."""

    def on_rank(params, x):
        return jdp.sync_gradients(jax.grad(loss_fn)(params, x))

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
