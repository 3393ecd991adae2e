"""The rates of `jdp bench --calibrate` are work over seconds, with checked results."""

import pytest

from jdp.tools.bench import calibrate
from jdp.tools.calibration import ComputeRates
from jdp.tools.known_values import WrongResultError


def test_each_rate_is_its_work_over_its_seconds(make_mesh, monkeypatch):
    monkeypatch.setattr(calibrate, "_seconds", lambda *args: 1.0)
    monkeypatch.setitem(calibrate._WIDTH, "cpu", 4)
    monkeypatch.setattr(calibrate, "_ELEMENTS", 256)
    flops = dict.fromkeys(("float32", "bfloat16"), 2 * 4**3)
    assert calibrate.compute_rates(make_mesh(1), 3) == ComputeRates(3, flops, 2 * 4 * 256)


def test_a_program_whose_result_is_wrong_has_no_rate(make_mesh, monkeypatch):
    mesh, on_all = make_mesh(3), calibrate._on_all

    def wrong(mesh, function, **options):
        return on_all(mesh, lambda x, old: function(x, old).at[0, 5].add(1), **options)

    monkeypatch.setattr(calibrate, "_ELEMENTS", 256)
    assert calibrate.memory_bytes_per_s(mesh) > 0
    monkeypatch.setattr(calibrate, "_on_all", wrong)
    with pytest.raises(WrongResultError, match="a scaled array"):
        calibrate.memory_bytes_per_s(mesh)
