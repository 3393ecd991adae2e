"""Sums over ranks that were changed since: whether anything divided what they became part of."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.analysed import AUTO, UNIFORM, VARYING, W, in_scan, pmean, psum, rank, report, table
from test_uniformity_scale import GROUPS, TOTALS, N, psum_in_groups, synced, weight

import jdp


def scattered(x):
    return lax.all_gather(lax.psum_scatter(x, "data", tiled=True), "data", tiled=True)


def gathered(x):
    return lax.all_gather(x, "data").sum(0)


def written(x):
    ref = jax.new_ref(jnp.zeros(4))
    ref[:] = jnp.sin(x)
    return jax.freeze(ref)


def optimum(matrix, vector):
    return jnp.linalg.solve(matrix + jnp.eye(4), vector)


# Functions of `total`, a sum over the ranks, and of what every rank has.
CHANGES = {
    "handed on": lambda total, w: total,
    "negated": lambda total, w: -total,
    "doubled by itself": lambda total, w: total + total,
    "clipped": lambda total, w: jnp.clip(total, -9, 9),
    "bounded by what every rank has": lambda total, w: jnp.maximum(total, w),
    "clipped by its norm": lambda total, w: total * jnp.minimum(1, 9 / jnp.linalg.norm(total)),
    "added to": lambda total, w: total + 0.1 * w,
    "chosen": lambda total, w: jnp.where(w > 0, total, w),
    "side by side with something": lambda total, w: jnp.concatenate([total, w]),
    "sorted": lambda total, w: jnp.sort(total),
    "by a branch": lambda total, w: lax.cond(w[0] < 2, lambda: total, lambda: w),
    "carried": lambda total, w: in_scan(lambda c: jnp.sin(c) + total, w),
    "carried while": lambda total, w: lax.while_loop(lambda c: c[0] < 9, lambda c: c + total, w),
    "bent": lambda total, w: jnp.exp(-total),
    "squared": lambda total, w: total**2,
    "the root": lambda total, w: jnp.sqrt(jnp.abs(total)),
    "times what every rank has": lambda total, w: total * w,
    "over what every rank has": lambda total, w: total / (1 + w**2),
    "multiplied by a matrix": lambda total, w: total @ jnp.outer(w, w),
    "multiplied by itself": lambda total, w: jnp.vdot(total, total),
    "the largest": lambda total, w: total.max(),
    "written into others": lambda total, w: w.at[1:3].set(total[:2]),
    "written into a Ref": lambda total, w: written(total),
    "singular values": lambda total, w: jnp.linalg.svd(jnp.outer(w, total))[1],
    "eigenvalues": lambda total, w: lax.linalg.eigh(
        jnp.outer(total, total), symmetrize_input=False
    )[1],
    "transformed": lambda total, w: jnp.abs(jnp.fft.fft(total)),
}

DIVIDED = {
    "by n": lambda total, w: jnp.sin(total / N),
    "by n at last": lambda total, w: jnp.sin(total) / N,
    "by another number": lambda total, w: jnp.clip(total, -9, 9) / 100,
    "by an array": lambda total, w: jnp.clip(total, -9, 9) / jnp.arange(1.0, 5),
    "by another sum": lambda total, w: jnp.sin(total) / psum(w.sum()),
    "by a root of itself": lambda total, w: total / jnp.sqrt(1 + total**2),
    "by its norm": lambda total, w: total / jnp.linalg.norm(total),
    "times one over it": lambda total, w: total * (1 / jnp.maximum(jnp.abs(total), 1)),
    "times one over its root": lambda total, w: total * lax.rsqrt(1 + total**2),
    "times its inverse": lambda total, w: total * (1 + total**2) ** -1,
    "times a power below zero": lambda total, w: total * (1 + total**2) ** -0.3,
    "as a system": lambda total, w: optimum(jnp.outer(total, total), jnp.sin(total)),
    "logarithm": lambda total, w: w - jnp.log(total),
    "compared": lambda total, w: jnp.where(total > 1, w, 0),
    "signs": lambda total, w: jnp.sign(total) * w,
    "chosen by": lambda total, w: w[jnp.argmax(total)],
    "in its order": lambda total, w: w[jnp.argsort(total)],
    "the places of the largest": lambda total, w: jnp.zeros(4).at[lax.top_k(total, 2)[1]].set(1),
    "an orthogonal base": lambda total, w: jnp.linalg.qr(jnp.outer(w, total))[0],
    "singular vectors": lambda total, w: jnp.linalg.svd(jnp.outer(w, total))[2],
    "eigenvectors": lambda total, w: lax.linalg.eigh(
        jnp.outer(total, total), symmetrize_input=False
    )[0],
    "a whole number": lambda total, w: total.astype(jnp.int32) * w,
    "averaged": lambda total, w: jdp.mean_over_ranks(jnp.sin(total)),
    "synced": lambda total, w: synced(jnp.sin(total)),
    "synced by weight": lambda total, w: synced(jnp.sin(total), weight=weight(w)),
    "asked for": lambda total, w: synced(jnp.sin(total), mean=False),
    "nothing": lambda total, w: 0 * total + w,
}

SUMS = {
    "psum": psum,
    "scattered and gathered": scattered,
    "gathered": gathered,
    "by an algorithm": lambda x: jdp.collectives.xla([[x]], "data")[0][0],
}


def found(program, *args, **options):
    (value,) = report(program, *args, **options).outputs
    return value.undivided, value.duplicated


@table(CHANGES)
def test_a_change_keeps_what_nothing_has_divided(program):
    assert found(lambda w, x: program(psum(x), w)) == (VARYING, UNIFORM)
    assert found(lambda w, x: program(psum(w), w)) == (UNIFORM, VARYING)


@table(DIVIDED)
def test_a_division_or_a_decision_is_seen(program):
    assert found(lambda w, x: program(psum(x), w)) == (UNIFORM, UNIFORM)
    assert found(lambda w, x: program(psum(w), w)) == (UNIFORM, UNIFORM)


@pytest.mark.parametrize("name", SUMS)
def test_every_kind_of_sum_is_seen(name):
    assert found(lambda w, x: jnp.sin(SUMS[name](x)))[0] == VARYING
    assert found(lambda w, x: jnp.sin(SUMS[name](w)))[1] == VARYING
    assert found(lambda w, x: jnp.sin(SUMS[name](x)) / 100) == (UNIFORM, UNIFORM)


NEITHER = {
    "a parameter": lambda w, x: w,
    "a mean": lambda w, x: jnp.sin(pmean(x)),
    "a mean of groups": lambda w, x: jnp.sin(lax.pmean(w, "data", axis_index_groups=GROUPS)),
    "the mean of what was gathered": lambda w, x: jnp.sin(lax.all_gather(x, "data").mean(0)),
    "the largest": lambda w, x: lax.pmax(x, "data"),
    "of nths": lambda w, x: jnp.sin(psum(x / N)),
    "of shares": lambda w, x: jnp.sin(psum(x / psum(weight(x)))),
    "of a gradient of shares": lambda w, x: jnp.sin(
        psum(jax.grad(lambda w: jnp.sum((w * x) ** 2) / psum(weight(x)))(w))
    ),
    "a count": lambda w, x: 1.0 * jnp.minimum(psum((x > 0).sum()), 9),
    "of constants": lambda w, x: jnp.sin(psum(1.0)) * w,
    "the mean of what a sum is part of": lambda w, x: pmean(jnp.sin(x * psum(x))),
    "if any": lambda w, x: jnp.minimum(psum((w > 0).astype(jnp.float32)), 1),
    "a gradient through a mean": lambda w, x: jax.grad(lambda w: jnp.sin(pmean(w * w)).sum())(w),
}


@table(NEITHER)
def test_what_is_no_sum_or_was_divided_has_nothing_left(program):
    assert found(program) == (UNIFORM, UNIFORM)


def test_a_sum_in_groups_is_seen():
    assert found(lambda w, x: jnp.sin(psum_in_groups(w)))[1] == VARYING
    assert not found(lambda w, x: jnp.sin(psum_in_groups(w)) / 2)[1]


def test_the_part_of_one_rank_is_a_sum_of_what_differs():
    def program(w, x):
        return jnp.sin(psum(jnp.where(rank() == 0, w, 0)))

    assert not found(program)[1]


def test_what_jax_sums_for_a_gradient_is_not_the_authors_sum():
    def program(w, x):
        return jax.grad(lambda w: jnp.sin(pmean(w) * psum(x)).sum() ** 2)(w)

    assert not found(program)[1]


@table(TOTALS)
def test_a_total_is_undivided(program):
    assert found(program)[0] == VARYING


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("name", ["clipped", "added to", "sorted", "carried", "by a branch"])
def test_is_seen_on_any_number_of_ranks(name, num_ranks):
    mesh = jax.sharding.AbstractMesh((num_ranks,), ("data",), axis_types=(AUTO,))
    rows, program = jnp.ones(4 * num_ranks), CHANGES[name]

    def on_ranks(body):
        return found(body, W, rows, mesh=mesh)

    assert on_ranks(lambda w, x: program(psum(x), w)) == (VARYING, UNIFORM)
    assert on_ranks(lambda w, x: program(psum(x), w) / num_ranks) == (UNIFORM, UNIFORM)
    assert on_ranks(lambda w, x: program(psum(w), w)) == (UNIFORM, VARYING)
    assert on_ranks(lambda w, x: program(psum(w), w) / num_ranks) == (UNIFORM, UNIFORM)
