import pytest

from jdp.distributed import metrics_log


@pytest.fixture
def path(tmp_path):
    """The file of `jdp.log`, which is closed after the test."""
    yield tmp_path / "metrics.jsonl"
    metrics_log.end()
