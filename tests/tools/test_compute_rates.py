"""The rates of `jdp bench --calibrate` divide by the operations that the programs really have.

XLA could merge or drop operations of a program that is timed, and a rate would then be too high. So
the compiled programs are counted as `explain` counts them, and the numbers are known by hand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdp
from jdp.tools import timeline
from jdp.tools.bench import calibrate
from jdp.tools.calibration import CACHED_BYTES, ComputeRates, Slowness
from jdp.tools.hlo import HloProgram
from jdp.tools.known_values import WrongResultError

MIB = 2**20


class Recorder:
    """Speeds that keep the work of each operation."""

    def __init__(self):
        self.works = []

    def compute_s(self, work):
        self.works.append(work)
        return 1.0

    def transfer_s(self, kind, algorithm, num_bytes, groups=()):
        raise AssertionError("a program of one rank has a collective")


@pytest.fixture
def programs(monkeypatch):
    """The compiled programs of what is timed, each of which takes a second."""
    found = []

    def seconds(run, x, other, right, what, num_calls=1):
        found.append(HloProgram(run.lower(x, other).compile().as_text()))
        return 1.0

    monkeypatch.setattr(calibrate, "_seconds", seconds)
    return found


@pytest.fixture
def mesh():
    return jdp.init(devices=jax.devices()[:1])


def counted(program):
    """Return the simulated operations, with all iterations of loops, and their kinds of work."""
    recorder = Recorder()
    return timeline.simulate(program, recorder).step_s, recorder.works


def test_the_chain_of_tiny_operations_has_as_many_as_its_time_is_divided_by(mesh, programs):
    rate = calibrate.operation_start_s(mesh)
    seconds, works = counted(programs[0])
    assert seconds == len(works) and 1 / rate == 512
    # One more where XLA copies the argument.
    assert 512 <= len(works) <= 513
    assert {work.num_bytes for work in works} == {2 * 8 * 4}


def test_an_operation_of_the_cached_loop_reads_and_writes_what_its_rate_says(mesh, programs):
    calibrate.loop_s(mesh, lambda x: x + 1, CACHED_BYTES // 8, 64.0)
    large = [work for work in counted(programs[0])[1] if work.num_bytes >= MIB]
    assert large and {work.num_bytes for work in large} == {CACHED_BYTES}
    assert {(work.transcendentals, *work.flops) for work in large} == {(0,)}


def test_an_operation_of_the_loop_of_tangents_has_one_for_each_element(mesh, programs):
    calibrate.loop_s(mesh, jnp.tanh, MIB, 0.0)
    works = [work for work in counted(programs[0])[1] if work.transcendentals]
    assert {work.transcendentals for work in works} == {MIB}


def test_each_rate_is_its_work_over_its_seconds(mesh, programs, monkeypatch):
    slowness = Slowness(1.0, 1.0, 1.0, 1.0, 0.0)
    monkeypatch.setattr(calibrate, "measured_slowness", lambda mesh, rates: slowness)
    monkeypatch.setitem(calibrate._WIDTH, "cpu", 4)
    monkeypatch.setattr(calibrate, "_ELEMENTS", 256)
    assert calibrate.compute_rates(mesh, 3) == ComputeRates(
        num_ranks=3,
        matmul_flops_per_s=dict.fromkeys(("float32", "bfloat16"), 2 * 4**3),
        memory_bytes_per_s=2 * 4 * 256,
        # 64 operations in a second, each on a cache of 8 MiB or on a million numbers.
        cached_bytes_per_s=64 * CACHED_BYTES,
        transcendentals_per_s=64 * MIB,
        operation_start_s=1 / 512,
        slowness=slowness,
    )


@pytest.mark.parametrize("right", [64.0, 63.0, np.nan])
def test_a_loop_whose_result_is_wrong_has_no_rate(right, make_mesh):
    run = lambda: calibrate.loop_s(make_mesh(3), lambda x: x + 1, 5, right)  # noqa: E731
    if right == 64.0:
        assert run() > 0
        return
    with pytest.raises(WrongResultError, match="a loop"):
        run()
