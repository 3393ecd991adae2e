"""Each rule on slices along each dim, against the function itself on whole arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.per_rank import assert_equal_bits

from jdp.reduction.partition import Piece, partitioned

A = (24, 48)  # each dim divides by 1, 2, 3 and 8
B = (2, 24, 24)


def _nested(x):
    return jnp.where(lax.stop_gradient(x) > 2, jax.nn.relu(x), -x)


# Functions and shapes of their arguments, which are small integers: sums are exact in any order.
# These gather nothing, along whichever dim one argument is sliced.
LOCAL = {
    "add": (lambda x, y: x + y, [A, A]),
    "add_row": (lambda x, y: x * y[None, :], [A, (48,)]),
    "and_any": (lambda x: jnp.any(x > 7, 0), [A]),
    "and_all": (lambda x: jnp.all(x > -7, 1), [A]),
    "argmax_0": (lambda x: jnp.argmax(x, 0), [A]),
    "argmin_1": (lambda x: jnp.argmin(x, 1), [A]),
    "batched_dot": (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), [(24, 3, 24), (24, 24, 5)]),
    "bits": (lambda x: x + jax.random.bits(jax.random.key(3), A, jnp.uint8), [A]),
    "clip": (lambda x: jnp.clip(x, -2, 2), [A]),
    "cast": (lambda x: x.astype(jnp.int32) // 2, [A]),
    "iota": (lambda x: x + jnp.arange(48.0) + lax.broadcasted_iota(jnp.float32, A, 0), [A]),
    "max": (lambda x: jnp.max(x, 0), [A]),
    "min": (lambda x: jnp.min(x), [A]),
    "nested_calls": (_nested, [A]),
    "ones": (lambda x: x + jnp.ones(A), [A]),
    "prod": (lambda x: jnp.prod(jnp.where(x > 3, 2.0, 1.0), 0), [A]),
    "norm_of_vector": (lambda x: jnp.vdot(x, x + 1) + jnp.sum(x.ravel()), [B]),
    "split_dim": (lambda x: x.reshape(24, 24, 2), [A]),
    "squeeze": (lambda x: jnp.squeeze(x, 1), [(24, 1, 48)]),
    "stack_of_sums": (lambda x, y: jnp.stack([x.sum(), y.sum(), x.max()]), [A, A]),
    "stack": (lambda x, y: jnp.stack([x, y], 1), [A, A]),
    "std": (lambda x: x - x.mean(0, keepdims=True), [A]),
    "sum": (lambda x: x.sum(), [B]),
    "sum_of_ints": (lambda x: x.astype(jnp.int32).sum((0, 1)), [B]),
    "transpose": (lambda x: x.T * 2, [A]),
    "unravel": (lambda x: (x.ravel() * 2 + 1).reshape(B), [B]),
    "xor": (lambda x: lax.reduce_xor(x.astype(jnp.int32), (0,)), [A]),
    "zeros": (lambda x: jnp.zeros(A), [A]),
}

# Along some dim these need a whole array.
ELSE = {
    "concatenate": (lambda x, y: jnp.concatenate([x, y], 1), [A, A]),
    "cumsum": (lambda x: jnp.cumsum(x, 1), [A]),
    "dot": (lambda x, y: x @ y, [(24, 48), (48, 24)]),
    "dot_with_itself": (lambda x: x @ x.T, [A]),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (3, 0), (5, 48)), [A]),
    "dynamic_update": (lambda x, y: lax.dynamic_update_slice(x, y, (7, 0)), [A, (8, 48)]),
    "expand": (lambda x: jnp.expand_dims(x, 1) + jnp.expand_dims(x, 2), [(24, 24)]),
    "gather_rows": (lambda x: x[jnp.array([3, 1, 3])], [A]),
    "merge": (lambda x: x.reshape(48, 24), [B]),
    "outer": (lambda x, y: jnp.outer(x, y), [(24,), (48,)]),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 2))), [A]),
    "permute": (lambda x: x.reshape(48, 24), [A]),
    "reverse": (lambda x: x[:, ::-1], [A]),
    "scatter_row": (lambda x, y: x.at[jnp.int32(5)].set(y).at[2].add(1.0), [A, (48,)]),
    "slice": (lambda x: x[1:9:2], [A]),
    "sort": (lambda x: jnp.sort(x, 0), [A]),
    "split": (lambda x: jnp.split(x, 2, 1)[1], [A]),
    "top": (lambda x: lax.top_k(x, 3)[0], [A]),
    "triangle": (lambda x: jnp.tril(x), [A]),
    "unstack": (lambda x: x[3] + jnp.unstack(x)[5], [A]),
}


def _arguments(shapes):
    draw = np.random.default_rng(0)
    return [draw.integers(-5, 6, size=shape).astype(np.float32) for shape in shapes]


def _dims(shape, n):
    return [None, *(i for i, size in enumerate(shape) if size % n == 0 and size >= n)]


def _cases(table, n):
    """Every function with every dim of each argument, the others whole; on 3 ranks also sliced.

    On one rank nothing is sliced.
    """
    for name, (function, shapes) in table.items():
        for i, shape in enumerate(shapes):
            for dim in _dims(shape, n) if n > 1 else [0]:
                for are_others_sliced in (False, True) if n == 3 else (False,):
                    dims = [_dims(each, n)[-1] if are_others_sliced else None for each in shapes]
                    dims[i] = dim
                    yield name, function, _arguments(shapes), tuple(dims)


def _run(mesh, cases):
    """The results of all cases in one program, whole and as joined slices, and the gathers."""
    found = []

    def on_rank(all_args):
        results = []
        for (_, function, _, dims), args in zip(cases, all_args, strict=True):
            rank = lax.axis_index("data")
            n = mesh.size
            pieces = [
                Piece(x if d is None else _cut(x, d, rank, n), d)
                for x, d in zip(args, dims, strict=True)
            ]
            wanted = _dims(jax.eval_shape(function, *args).shape, n)[-1]
            (whole, part), gathers, _ = partitioned(
                lambda *xs, f=function: [f(*xs)] * 2, pieces, ("data",), [None, wanted]
            )
            joined = part.value
            if wanted is not None:
                joined = lax.all_gather(joined, "data", axis=wanted, tiled=True)
            found.append([g for g in gathers if g.primitive != "output"])
            results.append((whole.value[None], joined[None]))
        return results

    mapped = jax.shard_map(on_rank, mesh=mesh, in_specs=P(), out_specs=P("data"), check_vma=False)
    return jax.device_get(jax.jit(mapped)([args for _, _, args, _ in cases])), found


def _cut(x, dim, rank, n):
    return lax.dynamic_slice_in_dim(x, rank * (x.shape[dim] // n), x.shape[dim] // n, dim)


@pytest.mark.parametrize("table", [LOCAL, ELSE], ids=["local", "else"])
def test_slices_give_the_result_of_whole_arrays(mesh, table):
    cases = [*{(case[0], case[3]): case for case in _cases(table, mesh.size)}.values()]
    results, found = _run(mesh, cases)
    for (name, function, args, dims), outs, gathers in zip(cases, results, found, strict=True):
        want = np.asarray(function(*map(jnp.asarray, args)))
        for out in outs:
            assert_equal_bits(out)
            np.testing.assert_array_equal(out[0], want, err_msg=f"{name} {dims}")
        if table is LOCAL and sum(dim is not None for dim in dims) <= 1:
            assert not gathers, f"{name} {dims}"
