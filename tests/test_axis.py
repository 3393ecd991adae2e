"""Which axis is bound is known, or the program is refused: never one rank by mistake."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jdp import axis


def grid_mesh(names=("replica", "fsdp")):
    return jax.make_mesh((2, 3), names, (AxisType.Auto,) * 2, devices=jax.devices()[:6])


def seen(mesh, fn, *, check_vma=False, **kwargs):
    """What `fn()` gives while it is traced on `mesh`."""
    found = []

    def body(x):
        found.append(fn())
        return x

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=check_vma, **kwargs
    )
    jax.eval_shape(mapped, np.float32(0))
    return found[-1]


# Names


@pytest.mark.parametrize("axis_name", ["data", ("data",), ["data"]])
def test_one_name_may_stand_alone_or_in_a_sequence(axis_name):
    assert axis.names(axis_name) == ("data",)


@pytest.mark.parametrize("wrong", [None, 0, (), ("data", 0), ("data", "data"), {"data"}])
def test_what_is_not_some_different_names_is_refused(wrong):
    with pytest.raises(TypeError, match=f"axis_name.* {re.escape(repr(wrong))}"):
        axis.names(wrong)


# Bound or not


def test_where_nothing_is_bound_there_is_one_rank():
    assert not axis.is_bound("data")
    assert (axis.size("data"), int(axis.rank("data"))) == (1, 0)
    assert jax.jit(lambda: axis.size(("replica", "fsdp")))() == 1


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_binds_the_axes_of_its_mesh(make_mesh, check_vma):
    def found():
        return axis.is_bound("data"), axis.size("data")

    assert seen(make_mesh(3), found, check_vma=check_vma) == (True, 3)


def test_several_names_count_together_in_their_order():
    mesh, both = grid_mesh(), ("replica", "fsdp")
    assert seen(mesh, lambda: (axis.size(both), axis.size("fsdp"))) == (6, 3)
    ranks = jax.shard_map(
        lambda: axis.rank(both)[None], mesh=mesh, in_specs=(), out_specs=P(both), check_vma=False
    )
    np.testing.assert_array_equal(jax.jit(ranks)(), np.arange(6))


def test_pmap_and_vmap_bind_their_axis():
    def fn(x):
        return axis.rank("data"), jnp.int32(axis.size("data"))

    devices = jax.devices()[:2]
    for mapped in (jax.pmap(fn, axis_name="data", devices=devices), jax.vmap(fn, axis_name="data")):
        rank, size = mapped(np.zeros(2))
        assert (rank.tolist(), size.tolist()) == ([0, 1], [2, 2])


def test_an_axis_left_to_the_compiler_is_not_bound():
    mesh = grid_mesh(("data", "model"))
    assert seen(mesh, lambda: axis.size("data"), axis_names={"data"}) == 2
    with pytest.raises(ValueError, match="axis 'data' .* 'model' .*axis_name='model'"):
        seen(mesh, lambda: axis.size("data"), axis_names={"model"})


@pytest.mark.parametrize("ask", [axis.is_bound, axis.size, axis.rank, axis.is_typed])
def test_another_axis_of_the_mesh_is_refused(ask):
    mesh = jax.make_mesh((2,), ("batch",), (AxisType.Auto,), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="'data' .* axis_name='batch'"):
        seen(mesh, lambda: ask("data"))


def test_pmap_over_another_axis_is_refused():
    mapped = jax.pmap(lambda x: x * axis.size("data"), "batch", devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="'data' .* axis_name='batch'"):
        mapped(np.zeros(2))


def test_one_bound_axis_of_two_is_refused():
    with pytest.raises(ValueError, match="'b' .* 'a' .*axis_name='a'"):
        jax.vmap(lambda x: x * axis.size(("a", "b")), axis_name="a")(jnp.ones(2))
    # What was asked for, not the model's axis that is bound beside it.
    mesh = grid_mesh(("replica", "model"))
    with pytest.raises(ValueError, match="'fsdp' .*axis_name='replica'"):
        seen(mesh, lambda: axis.size(("replica", "fsdp")))


def test_of_several_other_axes_all_are_named():
    match = r"'data' .* 'replica', 'fsdp' .*axis_name=\('replica', 'fsdp'\)"
    with pytest.raises(ValueError, match=match):
        seen(grid_mesh(), lambda: axis.size("data"))


# Types


def test_only_a_typed_shard_map_is_typed(make_mesh):
    mesh = make_mesh(2)
    assert seen(mesh, lambda: axis.is_typed("data"), check_vma=True)
    assert not seen(mesh, lambda: axis.is_typed("data"), check_vma=False)
    assert not axis.is_typed("data")
    untyped = []
    mapped = jax.pmap(lambda x: (untyped.append(axis.is_typed("data")), x)[1], "data")
    mapped(np.zeros(1))
    assert untyped == [False]


def varying(tree):
    return jax.tree.map(lambda x: sorted(axis.varying_axes(x)), tree)


def test_values_are_made_varying_where_they_are_not_yet():
    def fn():
        mine = lax.axis_index("fsdp")
        tree = {"same": jnp.ones(2), "mine": mine, "number": 1.0, "host": np.ones(3)}
        made = axis.as_varying(tree, "fsdp")
        return varying(tree), varying(made), varying(axis.as_varying(made, ("replica", "fsdp")))

    before, once, both = seen(grid_mesh(), fn, check_vma=True)
    assert before == {"same": [], "mine": ["fsdp"], "number": [], "host": []}
    assert set(map(tuple, once.values())) == {("fsdp",)}
    assert set(map(tuple, both.values())) == {("fsdp", "replica")}


def test_values_are_typed_like_others():
    def fn():
        like = [jnp.ones(2), lax.axis_index("fsdp")]
        shapes = jax.eval_shape(lambda x: x, like)
        return varying(axis.as_typed_like([1.0, 2.0], like)), varying(
            axis.as_typed_like([lax.axis_index("replica"), jnp.ones(2)], shapes)
        )

    of_values, of_shapes = seen(grid_mesh(), fn, check_vma=True)
    assert of_values == [[], ["fsdp"]]
    assert of_shapes == [["replica"], ["fsdp"]]  # what varies already stays so


@pytest.mark.parametrize("mapped", [True, False])
def test_without_types_nothing_is_changed(make_mesh, mapped):
    tree = {"a": np.ones(2), "b": 3}

    def fn():
        made = axis.as_varying(tree, "data")
        alike = axis.as_typed_like(tree, tree)
        return made is tree, alike["a"] is tree["a"], alike["b"]

    assert (seen(make_mesh(2), fn) if mapped else fn()) == (True, True, 3)


def test_the_gradient_of_a_varying_value_stays_local(make_mesh):
    def local(w, x):
        w = axis.as_varying(w, "data")
        return jax.grad(lambda w: jnp.mean(w * x))(w)[None]

    x = np.array([1.0, 2.0, 6.0], np.float32)
    mapped = jax.shard_map(local, mesh=make_mesh(3), in_specs=(P(), P("data")), out_specs=P("data"))
    np.testing.assert_array_equal(jax.jit(mapped)(np.float32(1), x), x)
