import os
from pathlib import Path

import pytest

from benchmarks.gpu import topology


@pytest.fixture(scope="module")
def mesh():
    """8 x H200 that are not there; JDP_TARGET_CONFIG names a file that describes one of them."""
    described = os.environ.get("JDP_TARGET_CONFIG")
    try:
        return topology.mesh_of_h200s(described=described and Path(described).read_text())
    except topology.UnavailableError as reason:
        if described:
            raise
        pytest.skip(str(reason))
