"""Programs for ranks, traced over abstract meshes and analysed. Nothing of them runs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jdp.analysis import analyse, find_shard_maps
from jdp.analysis.marks import mark

AUTO = AxisType.Auto
MESH = AbstractMesh((4,), ("data",), axis_types=(AUTO,))
MESH_2D = AbstractMesh((4, 2), ("data", "model"), axis_types=(AUTO, AUTO))

UNIFORM = frozenset()
VARYING = frozenset({"data"})
BOTH = frozenset({"data", "model"})
MODEL = frozenset({"model"})

# What every program of a table gets: w float32[4] the same on every rank, x float32[4] of this
# rank's rows, on two axes also m float32[4], which is split over "model".
W, X = jnp.ones(4), jnp.ones(16)
IN_SPECS, SHARED = (P(), P("data")), P()


def mapped(body, mesh=MESH, in_specs=IN_SPECS, out_specs=SHARED, check_vma=False, **options):
    options = {"mesh": mesh, "in_specs": in_specs, "check_vma": check_vma, **options}
    return jax.shard_map(body, out_specs=out_specs, **options)


def report(body, *args, **options):
    (eqn,) = find_shard_maps(jax.make_jaxpr(mapped(body, **options))(*(args or (W, X))))
    return analyse(eqn)


def report_2d(body, **options):
    specs = (P(), P("data"), P("model"))
    return report(body, W, X, jnp.ones(8), mesh=MESH_2D, in_specs=specs, **options)


def rank():
    return lax.axis_index("data")


def psum(x):
    return lax.psum(x, "data")


def pmean(x):
    return lax.pmean(x, "data")


def local(x, path="['w']", axes=("data",)):
    return mark(x, kind="local", path=path, axes=axes)


def table(rows):
    return pytest.mark.parametrize("program", list(rows.values()), ids=list(rows))


def pair_table(rows):
    return pytest.mark.parametrize(("right", "wrong"), list(rows.values()), ids=list(rows))


def in_scan(body, init, length=3):
    return lax.scan(lambda carry, _: (body(carry), None), init, None, length=length)[0]


def shape_of(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
