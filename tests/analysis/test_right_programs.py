import math

import equinox as eqx
import jax
import optax
import pytest
from corpus.right import LOSSES, PROGRAMS, batch, corpus
from jax.sharding import AxisType
from support.training import assert_close, fetched

import jdp

pytestmark = pytest.mark.all_sets


def name_of(program):
    return program.name


def make_mesh(program):
    sizes = tuple(program.axes.values())
    mesh = jax.make_mesh(
        sizes,
        tuple(program.axes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[: math.prod(sizes)],
    )
    return jdp.init(mesh, axis_name=program.axis_name())


@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_is_accepted(program):
    make_mesh(program)
    # Only traced, in a trace around it: neither compiled nor lowered.
    state = eqx.filter_eval_shape(program.make_state)
    step = jdp.train_step(program.step, **program.options)
    eqx.filter_eval_shape(step, state, batch(), *program.rest)


@pytest.mark.parametrize("program", PROGRAMS[::16], ids=name_of)
def test_is_accepted_where_its_state_is_split(program):
    make_mesh(program)
    options = {"stage": 3, "min_size": 1, "axis_name": program.axis_name()}

    def make_state():
        def split(node):
            is_default = getattr(node, "tx", None) is corpus.SGD
            return node.replace(tx=jdp.sharded(optax.sgd(0.1), **options)) if is_default else node

        is_state = lambda node: isinstance(node, jdp.TrainState)  # noqa: E731
        return jax.tree.map(split, program.make_state(), is_leaf=is_state)

    step = jdp.train_step(program.step, **program.options)
    eqx.filter_eval_shape(step, eqx.filter_eval_shape(make_state), batch(), *program.rest)


def train(program):
    make_mesh(program)
    step = jdp.train_step(program.step, **program.options)
    state, reported = program.make_state(), []
    for i in range(2):
        state, metrics = step(state, batch(i), *program.rest)
        reported.append(metrics)
    return eqx.filter(fetched((state, reported)), eqx.is_array)


@pytest.mark.few_sets(12)
@pytest.mark.slow
@pytest.mark.parametrize("program", [each for each in PROGRAMS if each.runs], ids=name_of)
def test_trains_as_one_rank_does(program):
    # Along all axes: XLA cannot sum over an axis of one device beside an axis of its own.
    one = program._replace(axes=dict.fromkeys(program.axes, 1))
    assert_close(train(program), train(one))


@pytest.mark.parametrize("name", LOSSES)
def test_is_uniform_without_a_reduction_on_rows_that_all_ranks_share(name):
    loss_fn, make_params = LOSSES[name]
    jdp.init(devices=jax.devices()[:4])

    @jdp.train_step
    def step(params, own_rows, rows):
        grads = jax.grad(loss_fn)(params, rows)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {}

    jax.eval_shape(step, make_params(), batch(0), batch(1))


def test_is_a_corpus():
    names = [program.name for program in PROGRAMS]
    assert len(set(names)) == len(names) >= 150
