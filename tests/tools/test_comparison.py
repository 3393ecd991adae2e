"""`--compare` explains the same step with each combination of options, fastest first."""

import argparse
import dataclasses
import json

import jax
import numpy as np
import optax
import pytest
from support.training import step_of

import jdp
from benchmarks.harness import models
from jdp.tools import comparison
from jdp.tools.explain_command import _choice
from jdp.tools.rate import UNUSED

WIDTH, LAYERS = 64, 3


@pytest.fixture
def given():
    found = models.mlp(width=WIDTH, num_layers=LAYERS, num_rows=16)
    jdp.init(devices=jax.devices()[:4])
    tx = jdp.sharded(optax.adam(1e-3), stage=1, min_size=WIDTH * WIDTH)
    return step_of(found.loss_fn), (jdp.TrainState.create(found.params, tx), found.batch)


def test_each_plan_is_the_step_with_that_optimizer(given):
    step, args = given
    layer = 4 * (WIDTH * WIDTH + WIDTH)
    plans = comparison.compare(
        step, args, {}, {"stage": [0, 3], "bucket_bytes": [layer, 4 * layer]}
    )
    assert len(plans) == 4
    times = [plan.report.time.likely_s for plan in plans]
    assert times == sorted(times)
    whole = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    split = 4 * LAYERS * (WIDTH * WIDTH // 4 + WIDTH)
    for options, report in plans:
        assert report.memory.parameters == (whole if options["stage"] == 0 else split)
        if options["stage"] == 0:
            sent = [bucket for bucket in report.buckets if bucket.num_bytes >= layer]
            assert len(sent) == (LAYERS if options["bucket_bytes"] == layer else 1)
    # More collectives of the same bytes take longer.
    order = [x.options["bucket_bytes"] for x in plans if x.options["stage"] == 0]
    assert order == [4 * layer, layer]


def test_json_has_the_options_and_the_report_of_each_plan(given):
    step, args = given
    plans = comparison.compare(step, args, {}, {"stage": [1]})
    (value,) = json.loads(comparison.to_json(plans))
    assert value["plan"] == {"stage": 1}
    assert value["memory"]["parameters"] == plans[0].report.memory.parameters
    assert "stage=1" in comparison.table(plans)


def test_rates_that_no_plan_takes_are_shown_once_below_the_table(given):
    step, args = given
    rates = {"matmul_flops": 1e12, "matmul_flops_f32": 1e12}
    plans = comparison.compare(step, args, {}, {"stage": [0, 1]}, rates=rates)
    *_, last = lines = comparison.table(plans).splitlines()
    assert len(lines) == 2 + 2 + 1
    assert last.startswith("  matmul_flops = 1e+12 FLOP/s: given, but no operation")


def test_a_rate_that_one_plan_takes_is_not_shown_below_the_table(given):
    step, args = given
    first, second = comparison.compare(step, args, {}, {"stage": [0, 1]})
    rate = dataclasses.replace(first.report.rates["matmul_flops"], source=UNUSED)
    unused = dataclasses.replace(first.report, rates={**first.report.rates, "matmul_flops": rate})
    lines = comparison.table([first._replace(report=unused), second]).splitlines()
    assert len(lines) == 2 + 2


def test_an_option_that_is_not_the_optimizers_is_an_error(given):
    step, args = given
    with pytest.raises(ValueError, match="'rows'.*stage, bucket_bytes"):
        comparison.compare(step, args, {}, {"rows": [1]})
    local = jdp.TrainState.create(args[0].params, jdp.local_sgd(optax.sgd(0.1), every=2))
    for state in (np.zeros(3), local):
        with pytest.raises(ValueError, match="TrainState"):
            comparison.compare(step, (state, args[1]), {}, {"stage": [1]})


def test_sizes_have_units():
    assert _choice("bucket_bytes=1M,4k,7") == ("bucket_bytes", [2**20, 4096, 7])
    sizes = _choice("bucket_bytes=1.5M,4MiB,1G,40GB,1e6")[1]
    assert sizes == [3 * 2**19, 2**22, 2**30, 4 * 10**10, 10**6]


@pytest.mark.parametrize("text", ["stage=1.5", "stage=1k", "stage=", "bucket_bytes=-1", "stage"])
def test_values_that_are_none_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not OPTION=VALUES"):
        _choice(text)
