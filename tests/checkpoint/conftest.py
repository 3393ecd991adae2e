import logging
import os

import pytest


@pytest.fixture
def file():
    """An empty file for the memory of commits, as a launcher keeps it."""
    file = os.memfd_create("test")
    yield file
    os.close(file)


@pytest.fixture
def quiet(before_init, monkeypatch, caplog):
    monkeypatch.delenv("JDP_RESUME", raising=False)
    caplog.set_level(logging.WARNING, "jdp")
