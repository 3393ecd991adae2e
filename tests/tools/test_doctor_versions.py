"""Combinations of versions that are known not to work are found, and others are not."""

import pytest

from jdp.tools.doctor import versions
from jdp.tools.doctor.versions import Installed

NEW = {"jdp": "0.1.0", "jax": "0.12.0.1", "jaxlib": "0.12.0.1"}
OLD = {"jdp": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2"}


@pytest.mark.parametrize(
    ("here", "level", "named"),
    [
        (Installed({**NEW, "jax-cuda13-plugin": "0.11.2"}, None, "gpu", 1), "error", "0.11.2"),
        (Installed({**NEW, "jax-cuda13-pjrt": "0.12.0.1"}, "570.86", "gpu", 1), "error", "580"),
        (Installed({**NEW, "jax-cuda12-pjrt": "0.12.0.1"}, "515.1", "gpu", 1), "error", "525"),
        (Installed({**NEW, "jax": "0.9.2"}, None, "gpu", 1), "error", "0.10.2"),
        (Installed(OLD, None, "cpu", 1), "warning", "0.10.2"),
        (Installed({**NEW, "jax": "0.11.2"}, None, "cpu", 2), "warning", "reduce-scatter"),
    ],
)
def test_a_known_bad_combination_is_found_with_its_source(here, level, named):
    [found] = versions.known_bad(here)
    assert found.level == level and named in found.found
    assert found.do.endswith(")")


@pytest.mark.parametrize(
    "here",
    [
        Installed(NEW, None, "cpu", 2),
        Installed({**NEW, "jax": "0.11.2"}, None, "cpu", 1),
        Installed(OLD, None, "gpu", 2),
        Installed({**NEW, "jax-cuda13-plugin": "0.12.0"}, "580.65.06", "gpu", 8),
    ],
)
def test_other_combinations_are_fine(here):
    assert [it.level for it in versions.known_bad(here)] == ["ok"]


@pytest.mark.parametrize(
    ("line", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Rel", "580.65.06"),
    ],
)
def test_the_version_of_the_driver_is_read_from_its_own_line(line, driver, tmp_path):
    (tmp_path / "nvidia").mkdir()
    (tmp_path / "nvidia" / "version").write_text(line)
    assert versions.installed("gpu", 1, str(tmp_path)).driver == driver


def test_what_is_installed_here_is_listed():
    import jax

    here = versions.installed("cpu", 1)
    assert here.versions["jax"] == jax.__version__
    assert here.versions["jax"] in versions.versions(here).found
