"""What a rank may draw from other places than its operands, and what is known to draw nothing."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P
from support.analysed import UNIFORM, VARYING, mapped, report

import jdp
from jdp.analysis import rules


def new_primitive(name):
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x, **params: x)
    return primitive


def axes_of(program):
    (value,) = report(program).outputs
    return value.axes


# A primitive of somebody else's


def lowers_to_the_number_of_its_device(context, x):
    number = stablehlo.PartitionIdOp().result
    scalar = ir.RankedTensorType.get((), ir.F32Type.get())
    return [stablehlo.AddOp(x, stablehlo.ConvertOp(scalar, number).result).result]


add_number_p = new_primitive("add_number_of_device")
mlir.register_lowering(add_number_p, lowers_to_the_number_of_its_device)


def test_what_a_foreign_primitive_gives_may_differ_although_its_operand_does_not(make_mesh):
    program = mapped(lambda w, x: add_number_p.bind(w[0])[None], make_mesh(3), out_specs=P("data"))
    got = jax.jit(program)(jnp.ones(1), jnp.ones(3))
    assert np.unique(got).size == 3
    assert axes_of(lambda w, x: add_number_p.bind(w[0])) == VARYING


def step_with(primitive):
    @jdp.train_step
    def step(state, batch):
        state = state.apply_gradients(jax.grad(lambda p: (p * batch).mean())(state.params))
        return state.replace(params=primitive.bind(state.params)), {}

    return step


def new_state(make_mesh):
    jdp.init(make_mesh(2))
    return jdp.TrainState.create(jnp.float32(1), jdp.replicated(optax.sgd(0.1)))


def test_a_step_with_a_foreign_primitive_says_which_it_is_and_where(make_mesh):
    with pytest.raises(ValueError, match="add_number_of_device") as caught:
        step_with(add_number_p)(new_state(make_mesh), np.ones(2, np.float32))
    message = str(caught.value)
    assert "`new state.params`" in message and "test_sources.py" in message
    assert "jdp.declare_pure" in message


def test_a_primitive_that_was_declared_pure_gives_what_its_operands_say(make_mesh):
    double_p = new_primitive("double_of_mine")
    mlir.register_lowering(double_p, lambda context, x: [stablehlo.AddOp(x, x).result])
    step, state = step_with(double_p), new_state(make_mesh)
    batch = np.array([1, 3], np.float32)
    with pytest.raises(ValueError, match="double_of_mine"):
        step(state, batch)
    try:
        jdp.declare_pure(double_p)
        jdp.declare_pure(double_p)
        state, _ = step(state, batch)
        assert float(state.params) == pytest.approx(2 * (1 - 0.1 * 2))
        assert axes_of(lambda w, x: double_p.bind(x[0])) == VARYING
    finally:
        rules.RULES.pop("double_of_mine", None)


@pytest.mark.parametrize("name", ["axis_index", "add", "pallas_call", "semaphore_read"])
def test_what_jdp_knows_by_name_cannot_be_declared(name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        jdp.declare_pure(new_primitive(name))


def test_what_is_no_primitive_cannot_be_declared():
    with pytest.raises(TypeError, match="str"):
        jdp.declare_pure("double")


def test_a_step_that_is_wrong_for_another_reason_is_not_told_of_primitives(make_mesh):
    @jdp.train_step
    def step(state, batch):
        return state.replace(params=batch.mean()), {"unused": add_number_p.bind(jnp.float32(0))}

    with pytest.raises(ValueError) as caught:
        step(new_state(make_mesh), np.ones(2, np.float32))
    assert str(caught.value).count("add_number_of_device") == 0


# What JAX itself has


def callback_with(has_side_effect):
    def program(w, x):
        fill = buffer_callback(
            lambda context, out, y: None,
            jax.ShapeDtypeStruct(w.shape, w.dtype),
            has_side_effect=has_side_effect,
        )
        return fill(w)

    return program


def test_a_buffer_callback_is_pure_if_it_says_so():
    assert axes_of(callback_with(has_side_effect=False)) == UNIFORM
    assert axes_of(callback_with(has_side_effect=True)) == VARYING


def exported(f, *args):
    return jax.export.export(jax.jit(f))(*args).call


def test_an_exported_function_of_one_device_gives_what_its_operands_say():
    assert axes_of(lambda w, x: exported(jnp.sin, w)(w)) == UNIFORM
    assert axes_of(lambda w, x: exported(jnp.sin, w)(x)) == VARYING


def test_an_exported_function_with_effects_may_give_anything():
    class Exported:
        nr_devices, ordered_effects, unordered_effects = 1, (), ("an effect",)

    call_p = new_primitive("call_exported")
    call_p.multiple_results = True
    call_p.def_abstract_eval(lambda w, **params: [w])
    assert axes_of(lambda w, x: call_p.bind(w, exported=Exported())[0]) == VARYING
    Exported.unordered_effects = ()
    assert axes_of(lambda w, x: call_p.bind(w, exported=Exported())[0]) == UNIFORM
    Exported.nr_devices = 2
    assert axes_of(lambda w, x: call_p.bind(w, exported=Exported())[0]) == VARYING


def test_a_box_may_hold_what_a_rank_has_put_into_it():
    if jax.__version_info__ >= (0, 11):
        pytest.skip("this JAX has no Box")

    def program(w, x):
        kept = jax._src.hijax.Box(w)
        kept.set(x)
        return kept.get()

    assert axes_of(program) == VARYING


LISTING = """
import gc, importlib, json, pkgutil, warnings
warnings.simplefilter("ignore")
import jax
from jax._src.core import Primitive
left_out = ("internal_test_util", "jax2tf", "test_", "_test", "jax.tools", "collect_profile")
for found in pkgutil.walk_packages(jax.__path__, "jax."):
    if not any(each in found.name for each in left_out):
        try:
            importlib.import_module(found.name)
        except Exception:  # what needs a package or a GPU that is not there
            pass
from jdp.analysis.rules import RULES
names = {each.name for each in gc.get_objects() if isinstance(each, Primitive)}
print(json.dumps([len(names), sorted(name for name in names if name not in RULES)]))
"""


def test_every_primitive_of_this_jax_is_on_a_list():
    done = subprocess.run(
        [sys.executable, "-c", LISTING],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not done.returncode, done.stderr
    num_found, unlisted = json.loads(done.stdout.splitlines()[-1])
    assert num_found > 300
    assert not unlisted, (
        f"jdp/uniformity does not know these primitives of JAX {jax.__version__}, and takes their "
        f"results for different on every rank: {unlisted}. List each of them as what it is."
    )
