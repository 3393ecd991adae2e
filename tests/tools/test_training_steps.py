"""The factors of training steps are those that their times were made with."""

import jax
import numpy as np
import pytest

import jdp
from jdp.tools.bench import calibrate
from jdp.tools.bench.calibrate import AloneSeconds, TimedStep, Training, fit_slowness
from jdp.tools.hlo import HloProgram
from jdp.tools.known_values import WrongResultError
from jdp.tools.rate import Rate
from jdp.tools.rates import UNITS

# Of a billion each second, so that a byte or an operation takes 1 ns.
RATES = {name: Rate(1e9, 1e9, 1e9, "", "") for name in UNITS if not name.endswith("times")}
RATES |= {"operation_start_s": Rate(1.0, 1.0, 1.0, "s", "")}

# 4 x 8 x 4 multiplications and additions; 3 arrays of 32 numbers; 2 of them, a sum that is turned.
PROGRAM = """HloModule it

%turn (p: f32[4,8]) -> f32[8,4] {
  %p = f32[4,8]{1,0} parameter(0)
  %two = f32[4,8]{1,0} add(%p, %p)
  ROOT %t = f32[8,4]{1,0} transpose(%two), dimensions={1,0}
}

ENTRY %main (x: f32[4,8], y: f32[8,4]) -> f32[8,4] {
  %x = f32[4,8]{1,0} parameter(0)
  %y = f32[8,4]{1,0} parameter(1)
  %product = f32[4,4]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %sum = f32[4,8]{1,0} add(%x, %x)
  ROOT %turned = f32[8,4]{1,0} fusion(%sum), kind=kLoop, calls=%turn
}
"""


def test_operations_are_added_up_by_kind():
    found = calibrate.alone_seconds(HloProgram(PROGRAM), RATES)
    bytes_of_sum, bytes_of_turned = 3 * 128, 2 * 128
    # The bytes of the product take longer than its operations: 320 against 256.
    assert found == pytest.approx((320e-9, bytes_of_sum * 1e-9, bytes_of_turned * 1e-9, 3.0))


@pytest.mark.parametrize("factors", [(1.0, 1.0, 1.0, 1.0), (1.5, 6.0, 30.0, 70.0)])
def test_factors_of_exact_times_are_found(factors):
    random = np.random.default_rng(0)
    alone = random.uniform(0.1, 1.0, (6, 4)) * [1.0, 0.1, 0.02, 0.01]
    found = fit_slowness([TimedStep(AloneSeconds(*each), float(each @ factors)) for each in alone])
    got = found.matmul, found.elementwise, found.strided, found.start
    assert got == pytest.approx(factors, rel=1e-3) and found.largest_error < 1e-6


def test_a_kind_that_would_have_a_negative_factor_is_joined_to_another():
    # By itself the second kind would have to give back time.
    steps = [((1.0, 0.0), 2.0), ((1.0, 1.0), 1.5), ((2.0, 1.0), 4.0)]
    found = fit_slowness([TimedStep(AloneSeconds(*alone), seconds) for alone, seconds in steps])
    assert found.matmul == found.elementwise > 0
    assert 0 < found.largest_error < 1


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_steps_on_three_ranks_are_timed_and_their_state_is_compared(monkeypatch, num_micro_batches):
    mesh = jdp.init(cpu_ranks=3)
    small = calibrate.models.mlp(width=8, num_layers=2, num_rows=6)
    trainings = [Training(small, num_micro_batches)]
    monkeypatch.setattr(calibrate, "_trainings", lambda platform: trainings)
    monkeypatch.setattr(calibrate, "_BUDGET_S", 0.0)
    found = calibrate.measured_slowness(mesh, RATES)
    assert found.matmul > 0 and np.isfinite(found.largest_error)
    right = calibrate._right
    monkeypatch.setattr(calibrate, "_right", lambda *args: [1.01 * x for x in right(*args)])
    with pytest.raises(WrongResultError, match="the state of mlp"):
        calibrate.measured_slowness(mesh, RATES)


def test_micro_batches_have_the_gradients_of_the_whole_batch():
    model = calibrate.models.mlp(width=8, num_layers=2, num_rows=6)
    whole, split = (Training(model, num).gradients(model.params, model.batch) for num in (1, 3))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), whole, split)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_steps_of_a_platform_have_names_of_their_own_and_rows_that_divide(platform):
    trainings = calibrate._trainings(platform)
    assert len({each.name for each in trainings}) == len(trainings)
    for each in trainings:
        rows = {len(x) for x in each.model.batch.values()}
        assert all(num % each.num_micro_batches == 0 for num in rows)
