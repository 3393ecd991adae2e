import pytest


@pytest.fixture(autouse=True)
def uncalibrated(tmp_path_factory, monkeypatch):
    """No test predicts with what somebody has measured on this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
