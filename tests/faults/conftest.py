import harness
import pytest


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """trainings(...): a `Training` in a folder of its own, of which nothing is left at the end."""
    before = harness.shared_memory()
    started = []

    def trainings(**arguments):
        started.append(harness.Training(tmp_path_factory.mktemp("training"), **arguments))
        return started[-1]

    yield trainings
    for each in started:
        each.close()
    assert harness.shared_memory() <= before


@pytest.fixture(scope="session")
def oracle(tmp_path_factory):
    """A run of 3 processes to which nothing happens."""
    return harness.uninterrupted(tmp_path_factory.mktemp("oracle"))
