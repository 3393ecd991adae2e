"""Steps compiled for 8 x H200, which are not there, hide what can be hidden of their reductions.

Run where JAX's CUDA plugin is installed; that of JAX 0.12 describes an H200, and others take the
description from the file that JDP_TARGET_CONFIG names.
"""

import os
from pathlib import Path

import pytest

from benchmarks.gpu import topology

DESCRIBED = os.environ.get("JDP_TARGET_CONFIG")


@pytest.fixture(scope="module")
def measured():
    """measured(model, optimizer, method): what `schedules.measure` finds, once for each."""
    try:
        mesh = topology.mesh_of_h200s(described=DESCRIBED and Path(DESCRIBED).read_text())
    except topology.UnavailableError as reason:
        pytest.skip(str(reason))
    from benchmarks.gpu import programs, schedules

    programs.register_handlers()
    found = {}

    def measured(model, optimizer, method):
        step = model, optimizer, method
        if step not in found:
            found[step] = schedules.measure(model, optimizer, method, mesh)
        return found[step]

    return measured


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("model", ["mlp", "transformer"])
def test_the_split_ring_hides_all_that_can_be_hidden(model, optimizer, measured):
    found = measured(model, optimizer, "split")
    assert found["hidden_mib"] >= found["ceiling_mib"] > 0


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_transformer_waits_for_2_percent_of_its_reductions_at_most(optimizer, measured):
    assert measured("transformer", optimizer, "split")["exposed_share"] <= 0.02


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_an_mlp_waits_no_longer_than_with_the_best_psum(optimizer, measured):
    best = min(
        measured("mlp", optimizer, method)["exposed_us"]
        for method in ("psum", "psum, XLA's default", "psum, 4 MiB", "psum, 16 MiB")
    )
    assert measured("mlp", optimizer, "split")["exposed_us"] <= best


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("model", ["mlp", "transformer"])
def test_psum_never_takes_longer_than_as_xla_merges_it_by_itself(model, optimizer, measured):
    as_xla_does = measured(model, optimizer, "psum, XLA's default")["step_ms"]
    assert measured(model, optimizer, "psum")["step_ms"] <= as_xla_does


def test_a_small_model_is_merged_less_than_xla_does_by_itself(measured):
    default = measured("mlp", "sgd", "psum, XLA's default")
    assert measured("mlp", "sgd", "psum")["exposed_us"] < default["exposed_us"]


@pytest.mark.parametrize("method", ["scan_layers, psum", "scan_layers, split"])
@pytest.mark.parametrize("model", ["mlp", "transformer"])
def test_scanned_layers_hide_all_but_the_last_of_them(model, method, measured):
    found = measured(model, "sgd", method)
    assert found["hidden_mib"] >= found["ceiling_mib"] > 0


@pytest.mark.parametrize("method", ["scan_layers, psum, remat", "scan_layers, split, remat"])
def test_rematerialised_layers_hide_as_much(method, measured):
    found = measured("transformer", "sgd", method)
    assert found["hidden_mib"] >= found["ceiling_mib"] > 0


def test_plainly_scanned_layers_hide_nothing(measured):
    assert measured("mlp", "sgd", "scan, psum")["hidden_mib"] < 0.001  # the loss, perhaps
