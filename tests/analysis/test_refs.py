"""What a `jax.Ref` is known to hold.

Everything here is traced, and nothing of it runs: wrong programs would hang.
"""

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from support.analysed import (
    MESH,
    UNIFORM,
    VARYING,
    X,
    add,
    doubling_kernel,
    in_scan,
    kernel,
    pair_table,
    psum,
    rank_kernel,
    report,
    store,
    with_ref,
)

from jdp.analysis import analyse, find_shard_maps


def loop_of_two_refs(ref, w, x):
    # What x puts into `other` comes to `ref` one round later.
    other = jax.new_ref(jnp.ones(4))

    def body(_, c):
        ref[...] = other[...]
        other[...] = x
        return c

    lax.fori_loop(0, 3, body, 0)


def loop_of_two_uniform_refs(ref, w, x):
    other = jax.new_ref(jnp.ones(4))

    def body(_, c):
        ref[...] = other[...]
        other[...] = psum(x)
        return c

    lax.fori_loop(0, 3, body, 0)


def while_of_two_refs(value):
    def body(ref, w, x):
        other = jax.new_ref(jnp.ones(4))

        def step(i):
            ref[...] = other[...]
            other[...] = value(w, x)
            return i + 1

        lax.while_loop(lambda i: i < w[0], step, 1.0)  # a carry of nonzero constants all along

    return body


def while_with_a_ref_that_decides(value):
    def body(ref, w, x):
        end = jax.new_ref(w[0])

        def step(i):
            ref[...] = 2 * w
            end[...] = value(w, x)[0]
            return i + 1

        lax.while_loop(lambda i: i < end[...], step, 0.0)

    return body


REFS = {
    "store": (lambda r, w, x: store(r, w), lambda r, w, x: store(r, x)),
    "store of a part": (
        lambda r, w, x: r.__setitem__(0, w[0]),
        lambda r, w, x: r.__setitem__(0, x[0]),
    ),
    "index": (
        lambda r, w, x: r.__setitem__(w[0].astype(int), 2.0),
        lambda r, w, x: r.__setitem__(x[0].astype(int), 2.0),
    ),
    "addupdate": (lambda r, w, x: add(r, psum(x)), lambda r, w, x: add(r, x)),
    "swap": (lambda r, w, x: jax.ref.swap(r, ..., w), lambda r, w, x: jax.ref.swap(r, ..., x)),
    "through jit": (lambda r, w, x: jax.jit(store)(r, w), lambda r, w, x: jax.jit(store)(r, x)),
    "in a scan": (
        lambda r, w, x: in_scan(lambda c: (add(r, w), c)[1], w),
        lambda r, w, x: in_scan(lambda c: (add(r, c), c * x)[1], w),
    ),
    "in a loop, one round late": (loop_of_two_uniform_refs, loop_of_two_refs),
    "in a while loop, one round late": (
        while_of_two_refs(lambda w, x: w),
        while_of_two_refs(lambda w, x: x),
    ),
    "in a while loop that ends when another Ref says so": (
        while_with_a_ref_that_decides(lambda w, x: w),
        while_with_a_ref_that_decides(lambda w, x: x),
    ),
    "in a while loop": (
        lambda r, w, x: lax.while_loop(lambda i: i < w[0], lambda i: (store(r, w), i + 1)[1], 0.0),
        lambda r, w, x: lax.while_loop(lambda i: i < x[0], lambda i: (store(r, w), i + 1)[1], 0.0),
    ),
    "a uniform write under varying control flow": (
        lambda r, w, x: lax.cond(w[0] < 2, lambda: store(r, w), lambda: None),
        lambda r, w, x: lax.cond(x[0] < 2, lambda: store(r, w), lambda: None),
    ),
    "a uniform term under varying control flow": (
        lambda r, w, x: lax.cond(w[0] < 2, lambda: add(r, w), lambda: None),
        lambda r, w, x: lax.cond(x[0] < 2, lambda: add(r, w), lambda: None),
    ),
    "a uniform term at an index": (
        lambda r, w, x: jax.ref.addupdate(r, w[0].astype(int), 1.0),
        lambda r, w, x: jax.ref.addupdate(r, x[0].astype(int), 1.0),
    ),
    "a uniform write in a kernel of rank": (
        lambda r, w, x: store(r, kernel(doubling_kernel)(w)),
        lambda r, w, x: store(r, kernel(rank_kernel)(w)),
    ),
}


@pair_table(REFS)
def test_a_ref_holds_the_join_of_what_is_written(right, wrong):
    assert [value.axes for value in report(with_ref(right)).outputs] == [UNIFORM]
    assert [value.axes for value in report(with_ref(wrong)).outputs] == [VARYING]


def test_what_is_read_before_a_write_is_what_was_there():
    def program(w, x):
        ref = jax.new_ref(w)
        before = ref[...]
        swapped = jax.ref.swap(ref, ..., x)
        return before, swapped, ref[...], jax.freeze(ref)

    got = report(program).outputs
    assert [value.axes for value in got] == [UNIFORM, UNIFORM, VARYING, VARYING]


def test_an_index_that_varies_makes_what_is_read_vary():
    def program(w, x):
        ref = jax.new_ref(w)
        return ref[0], ref[x[0].astype(int)]

    assert [value.axes for value in report(program).outputs] == [UNIFORM, VARYING]


def test_a_ref_among_the_inputs_is_reported_with_what_it_holds_in_the_end():
    def body(kept, stored, x):
        kept[...] = psum(x)
        stored[...] = x
        return x

    def program(x):
        args = jax.new_ref(jnp.zeros(4)), jax.new_ref(jnp.zeros(4)), x
        specs = (P(), P(), P("data"))
        return jax.shard_map(body, mesh=MESH, in_specs=specs, out_specs=P("data"), check_vma=False)(
            *args
        )

    (eqn,) = find_shard_maps(jax.make_jaxpr(program)(X))
    (first, kept), (second, stored) = analyse(eqn).refs
    assert (first, kept.axes, second, stored.axes) == (0, UNIFORM, 1, VARYING)
