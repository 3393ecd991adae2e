"""Which inputs of a shard_map matter, and which shard_maps are found.

Everything here is traced, and nothing of it runs: wrong programs would hang.
"""

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from support.analysed import (
    BOTH,
    MESH,
    MESH_2D,
    MODEL,
    UNIFORM,
    VARYING,
    W,
    X,
    closed,
    in_scan,
    mapped,
    psum,
    report,
    store,
    strange,
    table,
    with_ref,
)

from jdp.analysis import find_shard_maps, jaxprs
from jdp.analysis.dataflow import used_inputs


def test_captured_arrays_stand_in_front_of_the_arguments():
    captured = np.arange(4.0)

    def program(w, x):
        return w + jnp.asarray(captured), x

    got = report(program)
    assert [value.axes for value in got.outputs] == [UNIFORM, VARYING]
    assert got.num_inputs >= 2


def test_an_axis_of_a_pair_splits_an_input():
    specs = (P(None, ("data", "model")), P(("model",)))
    got = report(lambda a, b: (a, b), jnp.ones((2, 8)), jnp.ones(8), mesh=MESH_2D, in_specs=specs)
    assert [value.axes for value in got.outputs] == [BOTH, MODEL]


def ignores_second(a, b):
    return 2 * a


USED = {
    "read": (lambda w, x: w * x, (True, True)),
    "returned": (lambda w, x: x, (False, True)),
    "read in vain": (lambda w, x: (x.sum(), w)[1], (True, False)),
    "read by a collective in vain": (lambda w, x: (psum(x), w)[1], (True, False)),
    "read by jit, for an output in vain": (
        lambda w, x: jax.jit(lambda w, x: (w, x.sum()))(w, x)[0],
        (True, False),
    ),
    "split for a scan in vain": (
        lambda w, x: lax.scan(lambda c, y: (2 * c, None), w, x.reshape(2, 2))[0],
        (True, False),
    ),
    "carried by a scan in vain": (
        lambda w, x: in_scan(lambda c: (2 * c[0], c[0] * c[1]), (w, x))[0],
        (True, False),
    ),
    "carried by a scan, and used a round later": (
        lambda w, x: in_scan(lambda c: (c[1], c[2], c[2]), (w, w, x))[0],
        (True, True),
    ),
    "carried by a loop in vain": (
        lambda w, x: lax.while_loop(lambda c: c[0][0] < 2, lambda c: (w, c[1] * 2), (w, x))[0],
        (True, False),
    ),
    "carried by a loop, and used a round later": (
        lambda w, x: lax.while_loop(lambda c: c[0][0] < 2, lambda c: (c[1], c[2], c[2]), (w, w, x))[
            0
        ],
        (True, True),
    ),
    "carried by a loop for its predicate": (
        lambda w, x: lax.while_loop(lambda c: c[1][0] < 2, lambda c: (2 * c[0], 2 * c[1]), (w, x))[
            0
        ],
        (True, True),
    ),
    "printed": (lambda w, x: (jax.debug.print("{}", x), w)[1], (True, True)),
    "printed in a scan": (
        lambda w, x: in_scan(lambda c: (jax.debug.print("{}", x), c)[1], w),
        (True, True),
    ),
    "written": (with_ref(lambda r, w, x: store(r, x)), (False, True)),
    "ignored": (lambda w, x: 2 * w, (True, False)),
    "ignored by jit": (lambda w, x: jax.jit(ignores_second)(w, x), (True, False)),
    "ignored by jit in jit": (
        lambda w, x: jax.jit(lambda w, x: jax.jit(ignores_second)(w, x))(w, x),
        (True, False),
    ),
    "read by jit": (lambda w, x: jax.jit(ignores_second)(x, w), (False, True)),
    "handed on by jit": (lambda w, x: jax.jit(lambda w, x: x)(w, x), (False, True)),
    "ignored by remat": (lambda w, x: jax.checkpoint(ignores_second)(w, x), (True, False)),
    "ignored by a scan": (
        lambda w, x: lax.scan(lambda c, y: (2 * c, None), w, x)[0],
        (True, False),
    ),
    "read by a scan": (lambda w, x: lax.scan(lambda c, y: (y * c, None), w, x)[0], (True, True)),
    "ignored by branches": (
        lambda w, x: lax.cond(w[0] < 2, ignores_second, ignores_second, w, x),
        (True, False),
    ),
    "read by a branch": (
        lambda w, x: lax.cond(w[0] < 2, ignores_second, lambda a, b: b, w, x),
        (True, True),
    ),
    "decides": (lambda w, x: lax.cond(x[0] < 2, lambda: 1.0, lambda: 2.0), (False, True)),
    "read by a loop": (
        lambda w, x: lax.while_loop(lambda c: c[0] < 2, lambda c: c + x, w),
        (True, True),
    ),
    "read by a loop's predicate": (
        lambda w, x: lax.while_loop(lambda c: c < x[0], lambda c: c + 1, 0.0),
        (False, True),
    ),
    "read by an unknown body": (
        lambda w, x: strange(x, w, body=closed(ignores_second, x, w)),
        (True, True),
    ),
}


@table(USED)
def test_inputs_that_matter_are_known(program):
    body, used = program
    (eqn,) = find_shard_maps(jax.make_jaxpr(mapped(body))(W, X))
    assert used_inputs(jaxprs.mapped_body(eqn)) == used


def test_shard_maps_are_found_in_order_and_wherever_they_stand():
    def over(size):
        return jax.shard_map(
            lambda x: psum(x), mesh=MESH, in_specs=P("data"), out_specs=P(), check_vma=False
        )(jnp.ones(size))

    def program(x):
        first = over(4)
        second = jax.jit(lambda: jax.jit(over, static_argnums=0)(8))()
        _, third = lax.scan(lambda c, _: (c, over(12)), 0, None, length=2)
        fourth = lax.cond(x > 2, lambda: over(16), lambda: over(20)[:4])
        return first, second, third, fourth

    found = find_shard_maps(jax.make_jaxpr(program)(1.0))
    assert sorted(eqn.invars[0].aval.size for eqn in found[:3]) == [4, 8, 12]
    assert [eqn.invars[0].aval.size for eqn in found[:3]] == [4, 8, 12]
    assert {eqn.invars[0].aval.size for eqn in found[3:]} == {16, 20}
    assert find_shard_maps(jax.jit(program).trace(1.0).jaxpr) != []
