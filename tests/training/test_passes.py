"""`probe` describes a step in a plain value, and `build` traces it again only where that helps."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.training import ranks

import jdp
from jdp.analysis.diagnostics import TraceFindings
from jdp.reduction.step_context import Choices
from jdp.step_spec import StepSpec
from jdp.training import passes
from jdp.training.rank_program import RankProgram

W = jnp.ones((2, 3, 3))


def probed(num_ranks, weight=None, late=None):
    mesh = ranks(num_ranks)

    def fit(state, batch, scale):
        x, y = batch
        train, own = state
        layer = lambda x, w: (x @ w, None)  # noqa: E731
        scan = lambda p: jdp.scan_layers(layer, x, p["w"], late=late)[0]  # noqa: E731
        grads = jdp.value_and_grad(lambda p, _: scale * scan(p).mean())(train.params, batch)[1]
        return (train.apply_gradients(grads), own), {"y": jdp.rows(y), "mean": y.mean()}

    train = jdp.TrainState.create({"w": W}, jdp.replicated(optax.sgd(0.1)))
    state = train, jdp.per_rank(jnp.zeros(8))
    batch = jnp.ones((8, 3)), jnp.ones(8)
    spec = StepSpec(fit, ("data",), weight, donate=False, returns_state=True)
    made = RankProgram(spec, mesh, checksum_spec=None, series="", floats=frozenset())
    args = state, batch, np.float32(1)
    return made, passes.probe(made, Choices(), args, args)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_probe_names_what_goes_in_and_what_leaves(num_ranks):
    _, found = probed(num_ranks)
    traced = found.traced
    state = ["[0].step", "[0].params['w']", "[0].seed"]
    own = ["[1].value"]
    assert traced.inputs == [
        *(f"state{path}" for path in state),
        *("batch[0]", "batch[1]"),
        *(f"state{path}" for path in own),
        "scale",
    ]
    assert [(output.path, output.kind) for output in traced.outputs] == [
        *((f"new state{path}", "state") for path in state),
        ("metrics['mean']", "metric"),
        ("weight", "metric"),
        ("metrics[0]", "own"),
        ("rows[0][0]", "rows"),
        *((f"new state{path}", "rows") for path in own),
    ]


@pytest.mark.parametrize("weight", [None, lambda batch: batch[1].sum()])
def test_a_probe_says_what_the_trace_found(weight):
    _, found = probed(2, weight)
    weighed = frozenset() if weight is None else frozenset({"jdp.train_step"})
    assert found.traced.found == TraceFindings(
        marked=frozenset({"['w']"}), split=frozenset(), weighed=weighed, gradient_bytes=W.nbytes
    )


def test_what_needs_no_second_trace_is_built_as_it_was_probed():
    made, found = probed(2)
    assert passes.build(made, found) is found


def test_a_gradient_that_the_probe_found_to_be_a_mean_is_not_sent_again():
    made, found = probed(2, late=True)
    built = passes.build(made, found)
    assert built.choices.uniform == {"['w']"} and found.choices.uniform is None
    assert found.traced.found.gradient_bytes == W.nbytes
    assert built.traced.found.gradient_bytes == 0
