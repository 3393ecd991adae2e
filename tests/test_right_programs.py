"""Right programs: every one is accepted, without a warning, by its trace alone."""

import equinox as eqx
import jax
import pytest
from corpus import right_equinox, right_linen, right_nnx
from corpus.right import batch
from training import assert_close, fetched

import jdp
from jdp import axis, statics
from jdp.program import Program

MODULES = [right_equinox, right_linen, right_nnx]
PROGRAMS = [program for module in MODULES for program in module.PROGRAMS]
BATCH = batch()


def mesh_of(program):
    names, sizes = zip(*program.axes, strict=True)
    num = 1
    for size in sizes:
        num *= size
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.make_mesh(sizes, names, axis_types=auto, devices=jax.devices()[:num])


def test_they_are_many_and_have_names_of_their_own():
    names = [program.name for program in PROGRAMS]
    assert len(names) >= 150
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("right", PROGRAMS, ids=lambda right: right.name)
def test_is_accepted(right):
    mesh = jdp.init(mesh_of(right), axis_name=right.axis_name)
    program = Program(
        right.step,
        mesh,
        axis.names(right.axis_name),
        weight_fn=right.weight,
        returns_state=True,
        donate=True,
    )
    state = statics.hold(eqx.filter_eval_shape(right.make_state))
    program.trace(state, BATCH, *right.rest)


def train(right, mesh):
    jdp.init(mesh, axis_name=right.axis_name)
    step = jdp.train_step(right.step, axis_name=right.axis_name, weight=right.weight)
    state, reported = right.make_state(), []
    for i in range(2):
        state, metrics = step(state, batch(i), *right.rest)
        reported.append(metrics)
    return fetched((state, reported))


@pytest.mark.parametrize("right", [p for p in PROGRAMS if p.runs], ids=lambda right: right.name)
def test_trains_as_one_rank_does(right):
    one = right._replace(axes=tuple((name, 1) for name, _ in right.axes))
    assert_close(train(right, mesh_of(right)), train(one, mesh_of(one)))
