import signal
from pathlib import Path

import jax
import pytest
from support import cuda_build
from support.launcher import Launcher
from support.processes import Processes

from jdp.distributed import this_process

ANALYSIS = Path(__file__).parent / "analysis"
AUTO = jax.sharding.AxisType.Auto


def pytest_configure(config):
    # The platform is chosen in ../conftest.py, before any backend starts; say so at once if a
    # test run lost it, since every mesh below would fail with an obscure shape error.
    assert jax.config.jax_num_cpu_devices == 8
    # A shell starts a background job with SIGINT ignored, and children would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(items):
    for item in items:
        if "processes" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)
            # One test process owns the children: two sets of them would compete for the cores.
            item.add_marker(pytest.mark.xdist_group("processes"))
        if "built_cuda_library" in getattr(item, "fixturenames", ()):
            # One test process builds it: another would only wait.
            item.add_marker(pytest.mark.xdist_group("cuda"))
        if item.path.is_relative_to(ANALYSIS):
            # An analysis of a small program takes milliseconds.
            item.add_marker(pytest.mark.all_sets)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU: JAX_PLATFORMS=cuda,cpu pytest -m gpu")


@pytest.fixture(scope="session")
def make_mesh():
    """make_mesh(n): the axis "data" over the first n CPU devices."""

    def make_mesh(num_ranks):
        devices = jax.devices("cpu")[:num_ranks]
        return jax.make_mesh((num_ranks,), ("data",), axis_types=(AUTO,), devices=devices)

    return make_mesh


@pytest.fixture(params=[1, 2, 3, 8], ids=lambda n: f"{n}ranks")
def mesh(request, make_mesh):
    return make_mesh(request.param)


@pytest.fixture(autouse=True)
def quick_compilation(request):
    """Where programs are large, XLA optimizes for tests marked optimized alone."""
    is_optimized = request.node.get_closest_marker("optimized")
    if is_optimized or request.path.parent.name not in ("reduction", "training"):
        yield
        return
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def nothing_logged_yet():
    """What is logged once in a process is logged once in each test."""
    this_process.log_once.cache_clear()


@pytest.fixture
def before_init(monkeypatch):
    """This process has learned nothing by `jdp.init` yet; afterwards it knows what it knew."""
    monkeypatch.setattr(this_process, "current", this_process.ThisProcess())


@pytest.fixture(scope="session")
def processes():
    """processes(n).run(function, *args): calls it in n processes of 2 CPU devices each."""
    started = {}

    def processes(num_processes=2):
        if num_processes not in started:
            started[num_processes] = Processes(num_processes)
        return started[num_processes]

    yield processes
    for each in started.values():
        each.close()


@pytest.fixture(scope="session")
def built_cuda_library(request):
    """The path of the CUDA library; tests that use it are slow, for nvcc takes a minute or two."""
    return cuda_build.build(request.config.cache.mkdir("cuda"))


@pytest.fixture
def jdp_run(tmp_path):
    """jdp_run(*flags, **scripts): starts `jdp run` and gives its `Launcher`."""
    started = []

    def jdp_run(*flags, **scripts):
        started.append(Launcher(tmp_path, *flags, **scripts))
        return started[-1]

    yield jdp_run
    for each in started:
        each.close()


@pytest.fixture(autouse=True)
def uncalibrated(request, tmp_path_factory, monkeypatch):
    """No test of `jdp.tools` predicts with what somebody has measured on this machine."""
    if request.path.parent.name == "tools":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
