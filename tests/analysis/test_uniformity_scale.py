"""Sums and means over ranks: which of them a value is, and where nobody can tell."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P
from support.analysed import (
    AUTO,
    MESH_2D,
    MODEL,
    UNIFORM,
    VARYING,
    W,
    in_scan,
    pmean,
    psum,
    rank,
    report,
    table,
)

import jdp

N = 4
MEAN, TOTAL, UNCLEAR = "mean", "total", "unclear"


def kinds(value):
    """What a reduced value is, along the data axis."""
    if not value.reduced:
        return None
    return TOTAL if value.total else UNCLEAR if value.unclear else MEAN


def weight(x):
    return jnp.abs(x).sum()


def synced(x, **options):
    return jdp.sync_gradients(x, **options)


def mean_grad(w, x):
    # Of three rows: a mean of n rows is divided by n, too.
    return psum(jax.grad(lambda w: jnp.mean((w * x)[:3] ** 2))(w))


def mean_of_n(w, x):
    return jax.grad(lambda w: jnp.mean((w * x) ** 2))(w)


def bias_gradient(w, x):
    return jax.grad(lambda b: jnp.mean((w * x + b) ** 2))(w[0])


def micro_batches(w, x, number=1):
    """The sum of the gradients of n micro-batches."""

    def gradient(micro_batch):
        return jax.grad(lambda w: jnp.mean((w * micro_batch) ** 2) / number)(w)

    added = lax.scan(lambda g, row: (g + gradient(row), None), jnp.zeros(4), x.reshape(N, 1))
    return added[0]


MEANS = {
    "of n micro-batches": lambda w, x: psum(micro_batches(w, x)) / N / N,
    "of n elements": lambda w, x: psum(mean_of_n(w, x)) / N,
    "of n elements, copied": lambda w, x: jnp.tile((psum(mean_of_n(w, x)) / N)[:, None], (1, N)),
    "one over n of the gradient of n terms": lambda w, x: psum(bias_gradient(w, x)) / N,
    "pmean": lambda w, x: pmean(x),
    "divided by n": lambda w, x: psum(x) / N,
    "divided by the size of the axis": lambda w, x: psum(x) / lax.axis_size("data"),
    "times one over n": lambda w, x: (1 / N) * psum(x),
    "in bfloat16": lambda w, x: psum(x.astype(jnp.bfloat16)) * (1 / N),
    "of what was summed before": lambda w, x: pmean(x * psum(x)),
    "of everyones rows": lambda w, x: pmean(x * lax.all_gather(x, "data").sum()),
    "of a mean": lambda w, x: pmean(pmean(x)),
    "a mean of means": lambda w, x: pmean(pmean(x) * w),
    "times a parameter": lambda w, x: w * pmean(x),
    "times a mean": lambda w, x: pmean(x) * pmean(x * x),
    "over a parameter": lambda w, x: pmean(x) / w,
    "twice": lambda w, x: 2 * pmean(x),
    "an nth": lambda w, x: pmean(x) / N,
    "two means": lambda w, x: pmean(x) - 3 * pmean(x * x),
    "side by side": lambda w, x: jnp.concatenate([pmean(x), pmean(w * x)]),
    "stacked": lambda w, x: jnp.stack([pmean(x), pmean(w * x)]),
    "padded": lambda w, x: jnp.pad(pmean(x), 3),
    "sliced": lambda w, x: pmean(x)[1:3],
    "one element": lambda w, x: pmean(x)[0],
    "one that is chosen": lambda w, x: pmean(x)[jnp.argmax(w)],
    "one flat vector": lambda w, x: ravel_pytree({"a": pmean(x), "b": pmean(x * x)})[0],
    "reshaped": lambda w, x: pmean(x).reshape(2, 2).T,
    "cut in": lambda w, x: lax.dynamic_update_slice(jnp.zeros(8), pmean(x), (2,)),
    "synced": lambda w, x: synced(x),
    "synced by psum": lambda w, x: synced(x, all_reduce=jdp.collectives.xla),
    "synced by a ring": lambda w, x: synced(x, all_reduce=jdp.collectives.ring),
    "synced by weight": lambda w, x: synced(x, weight=weight(x)),
    "synced by a constant weight": lambda w, x: synced(x, weight=2.0),
    "synced by a weight of all": lambda w, x: synced(x, weight=weight(w)),
    "synced by weight and psum": lambda w, x: synced(
        x, weight=weight(x), all_reduce=jdp.collectives.xla
    ),
    "synced by weight in bfloat16": lambda w, x: synced(x.astype(jnp.bfloat16), weight=weight(x)),
    "mean over ranks": lambda w, x: jdp.mean_over_ranks(x),
    "mean over ranks by weight": lambda w, x: jdp.mean_over_ranks(x, weight=weight(x)),
    "gradient of a global mean": lambda w, x: jax.grad(jdp.global_mean(lambda w: (w * x).sum()))(w),
    "a multiplier": lambda w, x: jax.grad(lambda w: (w * pmean(x)).sum() + x.sum())(w),
    "a multiplier of a weighted mean": lambda w, x: jax.grad(
        lambda w: (w * jdp.mean_over_ranks(x, weight=weight(x))).sum()
    )(w),
    "in a scan": lambda w, x: in_scan(lambda c: c + pmean(x), jnp.zeros(4)),
    "of a cond": lambda w, x: lax.cond(w[0] < 2, lambda: pmean(x), lambda: jnp.zeros(4)),
    "where finite": lambda w, x: jnp.where(jnp.isfinite(pmean(x)), pmean(x), 0),
}

TOTALS = {
    "psum": lambda w, x: psum(x),
    "of a gradient": mean_grad,
    "of a mean over rows": lambda w, x: psum(x[:3].mean()),
    "times a parameter": lambda w, x: w * psum(x),
    "over a parameter": lambda w, x: psum(x) / w,
    "times a mean": lambda w, x: psum(x) * pmean(x),
    "normalised by means before": lambda w, x: psum(jnp.tanh(x - pmean(x))),
    "negated": lambda w, x: -psum(x),
    "two of them": lambda w, x: psum(x) + psum(w * x),
    "side by side": lambda w, x: jnp.concatenate([psum(x), psum(w * x)]),
    "padded": lambda w, x: jnp.pad(psum(x), 3),
    "one element": lambda w, x: psum(x)[0],
    "in a scan": lambda w, x: in_scan(lambda c: c + psum(x), jnp.zeros(4)),
    "by jax itself": lambda w, x: lax.psum((w * x), "data"),
}

# Right for what somebody has in mind, and wrong for something else.
# Means over as many elements as there are ranks.
TOTALS |= {
    f"of n elements: {name}": each
    for name, each in {
        "a mean": lambda w, x: psum(x.mean()),
        "a mean of what was squared": lambda w, x: psum((w * x**2).mean()),
        "a mean with the dim kept": lambda w, x: psum(x.mean(keepdims=True)),
        "a mean by hand": lambda w, x: psum(x.sum() / N),
        "a mean times one over n": lambda w, x: psum((1 / N) * x.sum()),
        "a gradient": lambda w, x: psum(jax.grad(lambda w: jnp.mean((w * x) ** 2))(w)),
        "a gradient by hand": lambda w, x: psum(jax.grad(lambda w: jnp.sum((w * x) ** 2) / N)(w)),
        "a gradient with the dim kept": lambda w, x: psum(
            jax.grad(lambda w: jnp.mean((w * x) ** 2, keepdims=True)[0])(w)
        ),
        "a gradient in bfloat16": lambda w, x: psum(
            jax.grad(lambda w: jnp.mean((w * x.astype(jnp.bfloat16)) ** 2))(w)
        ),
        "a gradient of a root": lambda w, x: psum(
            jax.grad(lambda w: jnp.sqrt(jnp.mean((w * x) ** 2)))(w)
        ),
        "a gradient of a matrix": lambda w, x: psum(
            jax.grad(lambda w: jnp.mean(jnp.outer(w[:3], x) ** 2, axis=1).sum())(w)
        ),
        "a gradient in a jit": lambda w, x: psum(
            jax.grad(jax.jit(lambda w: jnp.mean((w * x) ** 2)))(w)
        ),
        "a gradient in a remat": lambda w, x: psum(
            jax.grad(jax.checkpoint(lambda w: jnp.mean(jnp.sin(w * x) ** 2)))(w)
        ),
        "a gradient of micro-batches": lambda w, x: psum(micro_batches(w, x) / N),
        "a gradient in a vmap": lambda w, x: psum(
            jax.vmap(jax.grad(lambda w: jnp.mean((w * x) ** 2)))(jnp.stack([w, w, w]))
        ),
    }.items()
}

UNCLEARS = {
    "over its norm": lambda w, x: psum(x) / jnp.linalg.norm(psum(x)),
    "clipped by its norm": lambda w, x: psum(x) * jnp.minimum(1, 1 / jnp.linalg.norm(psum(x))),
    "divided by another number": lambda w, x: psum(x) / 3,
    "times another number": lambda w, x: 0.1 * psum(x),
    "of nths": lambda w, x: psum(x / N),
    "of a gradient of an nth": lambda w, x: psum(
        jax.grad(lambda w: jnp.sum((w * x)[:3] ** 2) / N)(w)
    ),
    "of an nth of a gradient": lambda w, x: psum(mean_of_n(w, x) / N),
    "of an nth of a gradient of n terms": lambda w, x: psum(bias_gradient(w, x) / N),
    "of an nth of the mean of n micro-batches": lambda w, x: psum(micro_batches(w, x) / N / N),
    "of an nth of n nths of micro-batches": lambda w, x: psum(micro_batches(w, x, N) / N),
    "of an nth through a loop of n layers": lambda w, x: psum(
        jax.grad(lambda w: (in_scan(lambda c: c * w, x, N) ** 2)[:3].sum() / N)(w)
    ),
    "of a gradient of an nth of a mean": lambda w, x: psum(
        jax.grad(lambda w: jnp.mean((w * x) ** 2) / N)(w)
    ),
    "of a gradient of a mean of nths": lambda w, x: psum(
        jax.grad(lambda w: jnp.mean((w * x) ** 2 / N))(w)
    ),
    "of the gradient of an nth of a mean over columns": lambda w, x: psum(
        jax.grad(lambda w: jnp.sum(jnp.outer(x[:3], w).mean(1) ** 2) / N)(w)
    ),
    "divided by a sum": lambda w, x: psum(x) / psum(weight(x)),
    "of what was divided by a sum": lambda w, x: psum(x / psum(weight(x))),
    "of a gradient of what was divided by a sum": lambda w, x: psum(
        jax.grad(lambda w: jnp.sum((w * x) ** 2) / psum(weight(x)))(w)
    ),
    "a product of sums": lambda w, x: psum(x) * psum(x * x),
    "of the part of one rank": lambda w, x: psum(jnp.where(rank() == 0, x, 0)),
    "of the mean, by one rank": lambda w, x: psum(jnp.where(rank() == 0, pmean(x), 0)),
    "of rows of all": lambda w, x: psum(x * lax.all_gather(x, "data").sum()),
    "a sum or a mean": lambda w, x: lax.cond(w[0] < 2, lambda: psum(x), lambda: pmean(x)),
    "a sum and a mean": lambda w, x: psum(x) + pmean(x),
    "that was asked for": lambda w, x: synced(x, mean=False),
}

SCALES = {
    **{f"{MEAN}: {name}": (each, MEAN) for name, each in MEANS.items()},
    **{f"{TOTAL}: {name}": (each, TOTAL) for name, each in TOTALS.items()},
    **{f"{UNCLEAR}: {name}": (each, UNCLEAR) for name, each in UNCLEARS.items()},
}


@pytest.mark.parametrize(("program", "want"), SCALES.values(), ids=SCALES)
def test_tells_a_sum_from_a_mean(program, want):
    found = report(program).outputs
    assert [kinds(value) for value in found] == [want]
    assert found[0].axes == UNIFORM and not found[0].repeated


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("program", "want"),
    [(pmean, MEAN), (psum, TOTAL), (synced, MEAN), (lambda x: psum(x) / 5, UNCLEAR)],
)
def test_knows_any_number_of_ranks(num_ranks, program, want):
    mesh = jax.sharding.AbstractMesh((num_ranks,), ("data",), axis_types=(AUTO,))
    (found,) = report(lambda w, x: program(x), W, jnp.ones(num_ranks), mesh=mesh).outputs
    assert kinds(found) == want


def on_ranks(num_ranks, program):
    """What `program(w, x, n)` gives, rows divided among as many ranks."""
    mesh = jax.sharding.AbstractMesh((num_ranks,), ("data",), axis_types=(AUTO,))
    body = functools.partial(program, n=num_ranks)
    (found,) = report(body, W, jnp.ones(12 * num_ranks), mesh=mesh).outputs
    return kinds(found)


def averaged_backward(w, n):
    """Hooked, as an author would: the gradient is averaged by hand in the backward pass."""
    hook = jax.custom_vjp(lambda w: w)
    hook.defvjp(lambda w: (w, None), lambda _, ct: (psum(ct) * (1 / n),))
    return hook(w)


ON_ANY_NUMBER = {
    "a multiplier": (lambda w, x, n: jax.grad(lambda v: v * psum(x.sum()))(w[0]), TOTAL),
    "divided": (lambda w, x, n: psum(x) / n, MEAN),
    "times one over n": (lambda w, x, n: (1 / n) * psum(x), MEAN),
    "a multiplier of an nth": (
        lambda w, x, n: jax.grad(lambda v: v * psum(x.sum()) * (1 / n))(w[0]),
        UNCLEAR,
    ),
    "in a hook": (
        lambda w, x, n: jax.grad(lambda w: (averaged_backward(w, n)[0] * x).sum() ** 2)(w),
        MEAN,
    ),
}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(("program", "want"), ON_ANY_NUMBER.values(), ids=ON_ANY_NUMBER)
def test_gives_the_same_verdict_on_any_number_of_ranks(num_ranks, program, want):
    assert on_ranks(num_ranks, program) == want


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_multiplier_of_a_sum_may_be_divided_with_it(num_ranks):
    mesh = jax.sharding.AbstractMesh((num_ranks,), ("data",), axis_types=(AUTO,))

    def program(w, x):
        return jax.grad(lambda w: (w * psum(x)).sum() / num_ranks)(w)

    (found,) = report(program, W, jnp.ones(4 * num_ranks), mesh=mesh).outputs
    assert kinds(found) != TOTAL


def test_a_mean_over_two_axes_may_be_divided_by_one_after_the_other():
    specs = {"mesh": MESH_2D, "in_specs": (P(), P(("data", "model")))}
    both = ("data", "model")

    def classes(program):
        (found,) = report(program, W, jnp.ones(8), **specs).outputs
        return found.total

    assert classes(lambda w, x: lax.psum(x, both)) == {"data", "model"}
    assert classes(lambda w, x: lax.pmean(x, both)) == UNIFORM
    assert classes(lambda w, x: lax.psum(x, both) / 4) == MODEL
    assert classes(lambda w, x: lax.psum(x, both) / 4 / 2) == UNIFORM
    assert classes(lambda w, x: lax.pmean(lax.psum(x, "data"), "model")) == VARYING


# Sums of what was the same everywhere

GROUPS = [[0, 1], [2, 3]]


def psum_in_groups(x):
    return lax.psum(x, "data", axis_index_groups=GROUPS)


REPEATED = {
    "of a parameter": lambda w, x: psum(w),
    "of a mean": lambda w, x: psum(pmean(x)),
    "of a sum": lambda w, x: psum(psum(x)),
    "times a number": lambda w, x: w - 0.1 * psum(pmean(x)),
    "added to something": lambda w, x: w + psum(w),
    "a multiplier of a parameter": lambda w, x: jax.grad(lambda w: psum(2 * w * W).sum() ** 2)(w),
    "side by side": lambda w, x: jnp.concatenate([psum(w), psum(2 * w)]),
    "in groups": lambda w, x: psum_in_groups(w),
    "a mean in groups": lambda w, x: psum_in_groups(pmean(x)),
    "bounded": lambda w, x: jnp.tanh(psum(w)),
    "a part of a moving average": lambda w, x: 0.9 * w + 0.1 * jax.nn.sigmoid(psum(w)),
    "exponential": lambda w, x: jnp.exp(-psum(w)),
    "added up": lambda w, x: psum(w).sum(),
    "the largest": lambda w, x: psum(w).max(),
    "its positive part": lambda w, x: jax.nn.relu(psum(w)),
    "a norm": lambda w, x: jnp.sqrt(psum(jnp.sum(w**2))),
    "a square": lambda w, x: psum(w) ** 2,
    "multiplied by a matrix": lambda w, x: psum(w) @ w.reshape(4, 1),
    "counted": lambda w, x: psum(w).astype(jnp.int32),
}

NOT_REPEATED = {
    "divided by n": lambda w, x: psum(w) / N,
    "of nths": lambda w, x: psum(w / N),
    "pmean": lambda w, x: pmean(w),
    "over a sum of them": lambda w, x: psum(w) / psum(w.sum()),
    "of what was divided by the sum": lambda w, x: psum(w / psum(w.sum())),
    "of constants": lambda w, x: w / psum(jnp.ones(4)),
    "over a sum of constants": lambda w, x: psum(w) / psum(jnp.ones(4)),
    "of rows": lambda w, x: psum(x),
    "of one rank": lambda w, x: psum(jnp.where(rank() == 0, w, 0)),
    "synced": lambda w, x: synced(w),
    "synced by weight": lambda w, x: synced(w, weight=weight(x)),
    "mean over ranks": lambda w, x: jdp.mean_over_ranks(w),
    "mean over ranks by weight": lambda w, x: jdp.mean_over_ranks(w, weight=weight(x)),
    "a gradient through pmean": lambda w, x: jax.grad(lambda w: pmean(w * w).sum() ** 2)(w),
    "a gradient through a ratio of sums": lambda w, x: jax.grad(
        lambda w: (psum((w * w).sum()) / psum(weight(w))) ** 2
    )(w),
    "a gradient through rows": lambda w, x: pmean(jax.grad(lambda w: psum(w * x).sum() ** 2)(w)),
    "a sum that was asked for": lambda w, x: synced(w, mean=False),
    "compared": lambda w, x: psum(w) == N * w,
    "in groups, and divided": lambda w, x: psum_in_groups(w) / 2,
    "in groups, and divided by their sizes": lambda w, x: (
        psum_in_groups(w) / psum_in_groups(jnp.ones(()))
    ),
    "a mean of groups": lambda w, x: lax.pmean(w, "data", axis_index_groups=GROUPS),
    "in groups of one": lambda w, x: lax.psum(w, "data", axis_index_groups=[[0], [1], [2], [3]]),
    "any": lambda w, x: psum((w > 0).astype(jnp.int32)).astype(bool),
    "one of them": lambda w, x: jnp.minimum(psum((w > 0).astype(jnp.int32)), 1),
    "all": lambda w, x: psum((w > 0).astype(jnp.int32)) - (N - 1),
    "signs": lambda w, x: jnp.sign(psum(w)),
    "the largest, by number": lambda w, x: jnp.argmax(psum(w)),
    "of length one": lambda w, x: psum(w) / jnp.linalg.norm(psum(w)),
    "times one over the length": lambda w, x: psum(w) * lax.rsqrt(jnp.sum(psum(w) ** 2)),
    "bounded, of a mean": lambda w, x: jnp.tanh(psum(w) / N),
    "positive part of a mean": lambda w, x: jax.nn.relu(psum(w)) / N,
    "a mean of ranks and elements": lambda w, x: psum(w).sum() / (N * 3),
    "a mean of ranks and products": lambda w, x: psum(w) @ w / (N * 3),
    "sum of a mean": lambda w, x: psum(w).sum() / N,
    "a square of a mean": lambda w, x: psum(w) ** 2 / N**2,
    "a root of a mean": lambda w, x: jnp.sqrt(psum(w**2)) / N**0.5,
    "a root of a mean, times something": lambda w, x: w * jnp.sqrt(psum(w**2)) * (0.1 / N**0.5),
    "a root times what was divided by one": lambda w, x: jnp.sqrt(psum(w**2)) * (w * N**-0.5),
    "a root over what was multiplied by one": lambda w, x: jnp.sqrt(psum(w**2)) / (w * N**0.5),
    "logarithm of a mean": lambda w, x: jnp.log(psum(jnp.exp(w))) - jnp.log(N),
    "logarithm of a ratio": lambda w, x: jnp.log(psum(jnp.exp(w))) - jnp.log(psum(w * w)),
    "logarithm of rows": lambda w, x: jnp.log(psum(jnp.exp(x))),
    "multiplied by a matrix of nths": lambda w, x: psum(w) @ (jnp.ones((4, 1)) / N),
}


@table(REPEATED)
def test_a_sum_of_what_was_the_same_everywhere_is_seen(program):
    assert [value.repeated for value in report(program).outputs] == [VARYING]


@table(NOT_REPEATED)
def test_what_is_divided_or_was_different_is_not_repeated(program):
    assert [value.repeated for value in report(program).outputs] == [UNIFORM]


# Means over ranks that all count alike, which are wrong where ranks have a weight


def weighed(x, w):
    return jdp.mean_over_ranks(x, weight=weight(w))


EVEN = {
    "pmean": lambda w, x: pmean(x),
    "divided by n": lambda w, x: psum(x) / N,
    "by an algorithm of jdp": lambda w, x: jdp.collectives.xla([[x]], "data", scale=1 / N)[0][0],
    "scaled and cast": lambda w, x: (0.1 * pmean(x)).astype(jnp.bfloat16),
    "added to a parameter": lambda w, x: w - 0.1 * pmean(x),
    "divided by a parameter": lambda w, x: pmean(x) / w,
    "a root": lambda w, x: jnp.sqrt(pmean(x * x) + 1e-6),
    "a variance": lambda w, x: pmean(x * x) - pmean(x) ** 2,
    "of what was averaged before": lambda w, x: pmean(pmean(x)),
    "in a scan": lambda w, x: in_scan(lambda c: c + pmean(x), jnp.zeros(4)),
    "where finite": lambda w, x: jnp.where(jnp.isfinite(weighed(x, x)), pmean(x), 0),
}

NOT_EVEN = {
    "a sum": lambda w, x: psum(x),
    "synced by weight": lambda w, x: synced(x, weight=weight(x)),
    "mean over ranks by weight": lambda w, x: weighed(x, x),
    "all count alike, and that is said": lambda w, x: jdp.mean_over_ranks(x, weight=1.0),
    "a ratio of means": lambda w, x: pmean(x * weight(x)) / pmean(weight(x)),
    "a ratio of means that is no division by 0": lambda w, x: (
        pmean(x * weight(x)) / jnp.maximum(pmean(weight(x)), 1e-6)
    ),
    "a ratio of means where there is one": lambda w, x: jnp.where(
        pmean(weight(x)) > 0, pmean(x * weight(x)) / pmean(weight(x)), 0
    ),
    "times one over a mean": lambda w, x: pmean(x * weight(x)) * (1 / pmean(weight(x))),
    "a ratio of sums": lambda w, x: psum(x * weight(x)) / psum(weight(x)),
    "of what was divided by a mean": lambda w, x: pmean(x * weight(x) / pmean(weight(x))),
    "of what was divided by a weighted mean": lambda w, x: pmean(x / weighed(x, x)),
    "of shares": lambda w, x: psum(x * (weight(x) / psum(weight(x)))),
    "mixed with a weighted mean": lambda w, x: pmean(x) + weighed(x, x),
    "of a weighted mean": lambda w, x: pmean(weighed(x, x)),
    "of what was the same": lambda w, x: pmean(w),
    "of the rows of all": lambda w, x: lax.all_gather(x, "data").mean(0),
    "mixed with the rows of all": lambda w, x: pmean(x) + lax.all_gather(x, "data").mean(0),
    "a sum that is summed again": lambda w, x: psum(psum(x)) / N,
    "a product of sums": lambda w, x: psum(x) * psum(x) / N,
    "synced, then divided": lambda w, x: synced(x, mean=False) / N,
    "of a rank": lambda w, x: x,
}


@table(EVEN)
def test_a_mean_over_ranks_that_count_alike_is_seen(program):
    assert [value.even for value in report(program).outputs] == [VARYING]


@table(NOT_EVEN)
def test_a_weighted_mean_is_not_taken_for_one_of_ranks_that_count_alike(program):
    assert [value.even for value in report(program).outputs] == [UNIFORM]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_ranks_that_count_alike_may_be_any_number(num_ranks):
    mesh = jax.sharding.AbstractMesh((num_ranks,), ("data",), axis_types=(AUTO,))
    (found,) = report(lambda w, x: pmean(x), W, jnp.ones(num_ranks), mesh=mesh).outputs
    assert found.even == VARYING
