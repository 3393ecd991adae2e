"""Programs for ranks, traced over abstract meshes and analysed. Nothing of them runs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
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


JAX_0_12 = jax.__version_info__ >= (0, 12)


def kernel(body):
    def call(x):
        return pl.pallas_call(body, out_shape=shape_of(x), interpret=True)(x)

    return call


def doubling_kernel(x, out):
    out[...] = 2 * x[...]


def rank_kernel(x, out):
    out[...] = x[...] + rank().astype(x.dtype)


# JAX 0.12 deprecates them; a program that has them is wrong in the same ways.
with_psend = pytest.mark.filterwarnings("ignore:jax.lax.p(send|recv) is dep:DeprecationWarning")


def closed(body, *args):
    return jax.make_jaxpr(body)(*args)


def root(f):
    def solve(f, x):
        return lax.fori_loop(0, 3, lambda _, x: x - f(x), x)

    return lax.custom_root(f, jnp.ones(()), solve, lambda g, y: y / g(1.0))


def cg(matvec, b):
    return jax.scipy.sparse.linalg.cg(matvec, b)[0]


def scaled_solve(matvec, b):
    return lax.custom_linear_solve(matvec, b, lambda matvec, b: 2 * b, symmetric=True)


def gathered(x, **options):
    return lax.all_gather(x, "data", tiled=True, **options)


def with_ref(body):
    """A program that makes a Ref of ones, hands it to body(ref, w, x), and reads it."""

    def program(w, x):
        ref = jax.new_ref(jnp.ones(4))
        body(ref, w, x)
        return ref[...]

    return program


def store(ref, value):
    ref[...] = value


def add(ref, value):
    jax.ref.addupdate(ref, ..., value)


def new_primitive(name):
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *args, **params: [args[-1]])
    return primitive


strange_p = new_primitive("strange")


def strange(*args, **params):
    return strange_p.bind(*args, **params)[0]
