"""Slow ranks and failures of `jdp plan` cost what closed forms and played-out chances say."""

import math
import random
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdp.tools.plan.prediction import EXPONENTIAL, LOGNORMAL, NONE, Failures, Stragglers


@pytest.mark.parametrize("n", [1, 2, 3, 1000, 16384])
def test_the_slowest_of_n_exponentials_is_the_sum_of_the_first_n_fractions(n):
    found = fmean(Stragglers(EXPONENTIAL, 0.1).slowest(n, num_samples=20_000))
    assert found == pytest.approx(0.9 + 0.1 * sum(1 / i for i in range(1, n + 1)), abs=3e-4)


@pytest.mark.parametrize("n", [1, 3, 512])
def test_the_slowest_of_n_lognormals_is_that_of_n_draws(n):
    draws = np.random.default_rng(0).normal(-(0.2**2) / 2, 0.2, (4000, n))
    found = Stragglers(LOGNORMAL, 0.2).slowest(n, num_samples=4000)
    drawn = np.exp(draws).max(axis=1)
    assert fmean(found) == pytest.approx(drawn.mean(), abs=4 * drawn.std() / 4000**0.5)
    assert np.quantile(found, 0.9) == pytest.approx(np.quantile(drawn, 0.9), rel=0.02)


@pytest.mark.parametrize("kind", [LOGNORMAL, EXPONENTIAL])
def test_few_samples_have_nearly_the_mean_of_many_and_one_seed_gives_the_same(kind):
    slow = Stragglers(kind, 0.02, seed=7)
    assert slow.slowest(64) == slow.slowest(64) != slow._replace(seed=8).slowest(64)
    assert fmean(slow.slowest(64)) == pytest.approx(fmean(slow.slowest(64, 10_000)), abs=2e-3)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([LOGNORMAL, EXPONENTIAL]), st.floats(1e-3, 0.5), st.integers(1, 10**6))
def test_more_ranks_and_a_larger_scale_make_the_slowest_slower(kind, scale, n):
    slow = Stragglers(kind, scale)
    assert fmean(slow.slowest(2 * n)) > fmean(slow.slowest(n))
    wider = slow._replace(scale=1.5 * scale)
    assert fmean(wider.slowest(2 * n)) > fmean(slow.slowest(2 * n))


@pytest.mark.parametrize("kind", [LOGNORMAL, EXPONENTIAL])
def test_one_rank_has_the_mean_1_in_few_samples(kind):
    assert fmean(Stragglers(kind, 0.3).slowest(1)) == pytest.approx(1, abs=1e-12)


def test_equal_ranks_have_no_slowest():
    assert Stragglers(NONE, 0.5).slowest(1000) == Stragglers(LOGNORMAL, 0.0).slowest(10) == [1.0]


def test_a_run_without_failures_loses_its_commits():
    assert Failures(0.0, 100.0, commit_s=1.0).effective(9.0) == 0.9
    assert Failures(0.0, 100.0, commit_s=1.0).highest(9.0) == 0.9
    assert Failures(0.0, 100.0, commit_s=1.0).best_interval_s(2.0) == math.inf


def test_recoveries_alone_cost_their_time():
    found = Failures(per_s=0.02, recovery_s=10.0)
    assert found.effective(1e-6) == pytest.approx(0.8)
    assert found.highest(1e-6) == pytest.approx(math.exp(-0.2))
    missing = found._replace(degraded_s=20.0, missing=0.25)
    assert missing.effective(1e-6) == pytest.approx(0.8 - 0.02 * 20 * 0.25)


# Play one run: failures at random times; steps are kept once their commit is complete.
def played(failures, every, *, waits, num_failures=20_000):
    chance = random.Random(1)
    now, kept = 0.0, 0.0
    strike = chance.expovariate(failures.per_s)
    for _ in range(num_failures):
        stretches = int((strike - now) / (every + failures.commit_s))
        kept += stretches * every
        now, pending = strike + failures.recovery_s, 0
        strike += chance.expovariate(failures.per_s)
        while strike < now:  # a failure during the recovery
            now = now + failures.recovery_s if waits else strike + failures.recovery_s
            strike += chance.expovariate(failures.per_s)
            pending += 1
    return kept / now


@pytest.mark.parametrize(
    ("failures", "every"),
    [
        (Failures(per_s=1 / 100, recovery_s=20.0), 1e-3),
        (Failures(per_s=1 / 100, recovery_s=20.0, commit_s=2.0), 20.0),
        (Failures(per_s=1 / 1000, recovery_s=5.0, commit_s=0.5), 100.0),
    ],
)
def test_the_effective_time_is_that_of_a_run_that_is_played(failures, every):
    assert failures.effective(every) == pytest.approx(played(failures, every, waits=True), rel=0.02)
    assert failures.highest(every) == pytest.approx(played(failures, every, waits=False), rel=0.02)


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-7, 1e-3), st.floats(0, 500), st.floats(1e-3, 50), st.floats(1, 1e4))
def test_more_failures_recovery_or_commits_never_make_more_time_effective(
    rate, recovery, commit, every
):
    run = Failures(rate, recovery, commit)
    best = run.effective(every)
    assert 0 <= best <= run.highest(every) <= 1
    for worse in (
        run._replace(per_s=2 * rate), run._replace(recovery_s=recovery + 10),
        run._replace(commit_s=2 * commit), run._replace(degraded_s=100, missing=0.5),
    ):  # fmt: skip
        assert worse.effective(every) <= best


@pytest.mark.parametrize("commit_s", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("mtbf_s", [3600.0, 86400.0])
def test_no_interval_of_commits_is_much_better_than_youngs(commit_s, mtbf_s):
    run = Failures(1 / mtbf_s, 10.0, commit_s)
    chosen = run.best_interval_s(step_s=0.01)
    assert chosen == pytest.approx((2 * commit_s * mtbf_s) ** 0.5)
    best = max(run.effective(chosen * 1.05**i) for i in range(-60, 61))
    assert run.effective(chosen) >= best - 0.001
