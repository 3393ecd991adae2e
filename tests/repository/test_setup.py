"""Where setup.py builds the CUDA library, and for which GPUs, with a stand-in for nvcc."""

import importlib.util
import sys
from pathlib import Path

import pytest

# Writes its arguments beside itself, and what it was asked to.
NVCC = """#!{python}
import pathlib, sys
if sys.argv[1:] == ["--list-gpu-arch"]:
    print({known!r}.replace(" ", "\\n"))
    sys.exit({status})
pathlib.Path(__file__ + ".arguments").write_text("\\n".join(sys.argv[1:]))
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_text("a library")
"""
CUDA_13 = "compute_75 compute_80 compute_86 compute_90 compute_100 compute_103 compute_120"
CUDA_12_4 = "compute_50 compute_75 compute_80 compute_86 compute_90"


@pytest.fixture
def setup_py(monkeypatch):
    path = Path(__file__).parents[2] / "setup.py"
    spec = importlib.util.spec_from_file_location("setup_of_jdp", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("JDP_CUDA", raising=False)
    monkeypatch.delenv("JDP_CUDA_ARCH", raising=False)
    return module


@pytest.fixture
def build(setup_py, tmp_path, monkeypatch):
    """build(wanted, known, status, has_gpu): nvcc's arguments, None if it was not called."""
    library = tmp_path / "lib" / "libjdp_cuda.so"

    def build(wanted="auto", known=CUDA_13, status=0, has_gpu=False):
        nvcc = tmp_path / "nvcc"
        nvcc.write_text(NVCC.format(python=sys.executable, known=known, status=status))
        nvcc.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setenv("JDP_CUDA", wanted)
        signs = ("/is/not/there", str(nvcc)) if has_gpu else ("/is/not/there",)
        monkeypatch.setattr(setup_py, "SIGNS_OF_A_GPU", signs)
        arguments = tmp_path / "nvcc.arguments"
        arguments.unlink(missing_ok=True)
        setup_py.build_cuda(library)
        assert library.read_text() == "a library"
        return arguments.read_text().split("\n") if arguments.exists() else None

    return build


@pytest.mark.parametrize(
    "known, expected", [(CUDA_13, (80, 90, 100)), (CUDA_12_4, (80, 90)), ("compute_100", (100,))]
)
def test_nvcc_is_asked_for_the_gpus_that_it_knows(build, known, expected):
    flags = [flag for flag in build("on", known) if flag.startswith("-gencode")]
    assert flags == [
        *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in expected),
        f"-gencode=arch=compute_{expected[0]},code=compute_{expected[0]}",
    ]


@pytest.mark.parametrize("wanted, expected", [("90", ("90",)), ("90, 75", ("75", "90"))])
def test_it_is_built_for_the_gpus_that_are_demanded(build, monkeypatch, wanted, expected):
    monkeypatch.setenv("JDP_CUDA_ARCH", wanted)
    flags = [flag for flag in build("on") if flag.startswith("-gencode")]
    assert flags == [
        *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in expected),
        f"-gencode=arch=compute_{expected[0]},code=compute_{expected[0]}",
    ]


@pytest.mark.parametrize("wanted", ["sm_90", "90,1000", ","])
def test_a_demand_for_gpus_that_nvcc_does_not_know_is_the_reason(
    build, setup_py, monkeypatch, wanted
):
    monkeypatch.setenv("JDP_CUDA_ARCH", wanted)
    with pytest.raises(setup_py.BuildError, match="JDP_CUDA_ARCH is .*write some of these"):
        build("on")


@pytest.mark.parametrize("known, status", [("compute_50 compute_60", 0), ("", 0), (CUDA_13, 1)])
def test_an_nvcc_that_is_too_old_is_the_reason(build, setup_py, known, status):
    with pytest.raises(setup_py.BuildError, match="CUDA 11.8"):
        build("on", known, status)


@pytest.mark.parametrize("wanted, has_gpu", [("on", False), ("on", True), ("auto", True)])
def test_it_is_built_where_a_gpu_is_or_where_it_is_demanded(build, wanted, has_gpu):
    assert build(wanted, has_gpu=has_gpu)


@pytest.mark.parametrize(
    "wanted, has_gpu, reason", [("auto", False, "JDP_CUDA=on"), ("off", True, "JDP_CUDA=off")]
)
def test_it_is_not_built_elsewhere_and_the_reason_says_how(
    build, setup_py, wanted, has_gpu, reason, tmp_path
):
    with pytest.raises(setup_py.BuildError, match=reason):
        build(wanted, has_gpu=has_gpu)
    assert not (tmp_path / "nvcc.arguments").exists()


def test_one_that_was_built_before_stays_and_is_not_built_again(build):
    assert build("on")
    assert build("auto") is None
    assert build("on", CUDA_12_4)  # for other GPUs


def test_without_nvcc_that_is_the_reason(setup_py, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(setup_py.BuildError, match="^nvcc "):
        setup_py.build_cuda(tmp_path / "lib" / "libjdp_cuda.so")


@pytest.mark.parametrize("num_lines", [0, 40, 41, 10_000])
def test_the_messages_of_a_compiler_that_fails_are_bounded(setup_py, num_lines):
    program = f"import sys; [print(f'message {{i}}') for i in range({num_lines})]; sys.exit(3)"
    with pytest.raises(setup_py.BuildError, match=" 3, ") as raised:
        setup_py.run([sys.executable, "-c", program])
    lines = raised.value.messages.splitlines()
    assert lines[:40] == [f"message {i}" for i in range(min(num_lines, 40))]
    assert [str(num_lines - 40) in line for line in lines[40:]] == [True] * (num_lines > 40)
