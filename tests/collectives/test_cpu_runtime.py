"""The native library: found or not, it says why, and it never brings a backend down."""

import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdp
from jdp.collectives.cpu import runtime as cpu_runtime

needs_library = pytest.mark.skipif(
    cpu_runtime.why_missing() is not None, reason=str(cpu_runtime.why_missing())
)


def in_child(program, timeout_s=240):
    """Run a program in a Python of its own; it prints JSON last."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def all_reduce(value, *, rank=0, num_ranks=1, communicator=0, scale=1.0):
    """Call the handler as one rank would."""
    token = jax.ShapeDtypeStruct((1,), jnp.float32)
    call = jax.ffi.ffi_call(
        cpu_runtime.TARGET, [token, jax.ShapeDtypeStruct(value.shape, value.dtype)]
    )
    _, total = call(
        jnp.int32(rank),
        jnp.int32(0),
        jnp.asarray(scale, value.dtype if value.dtype == jnp.float64 else jnp.float32),
        jnp.zeros(1, jnp.float32),
        value,
        num_ranks=np.int32(num_ranks),
        bucket=np.int32(5),
        algorithm=np.int32(0),
        communicator=np.int64(communicator),
        as_xla=False,
    )
    return jax.block_until_ready(total)


@pytest.fixture
def timeout_s():
    before = cpu_runtime.timeout_s()
    cpu_runtime.set_timeout_s(0.1)
    yield 0.1
    cpu_runtime.set_timeout_s(before)


@pytest.mark.parametrize("of_author", [[], [5.0]])
def test_waits_are_only_made_longer_and_not_against_the_authors_word(monkeypatch, of_author):
    before = cpu_runtime.timeout_s()
    monkeypatch.setattr(cpu_runtime, "_timeout_of_author_s", of_author)
    cpu_runtime.wait_at_least(before / 2)
    assert cpu_runtime.timeout_s() == before
    cpu_runtime.wait_at_least(before * 2)
    assert cpu_runtime.timeout_s() == (before if of_author else before * 2)
    cpu_runtime.set_timeout_s(before)


def test_loading_starts_no_backend():
    # A device count can only be set before there is a backend.
    program = """
        import json
        import jax
        from jdp.collectives.cpu import runtime as library
        why = library.why_missing()
        jax.config.update("jax_num_cpu_devices", 3)
        print(json.dumps([why, len(jax.devices())]))
    """
    assert in_child(program) == [cpu_runtime.why_missing(), 3]


def test_importing_jdp_loads_nothing():
    program = """
        import json
        import jdp
        print(json.dumps("libjdp" in open("/proc/self/maps").read()))
    """
    assert in_child(program) is False


def test_a_library_that_was_not_built_is_missing_for_the_reason_of_the_build(tmp_path):
    (tmp_path / "libjdp_cpu.txt").write_text("there is no C++ compiler\n")
    program = f"""
        import json, pathlib
        from jdp.collectives.cpu import runtime as library
        library._PATH = pathlib.Path({str(tmp_path)!r}, "libjdp_cpu.so")
        try:
            library.abort("")
        except RuntimeError as error:
            print(json.dumps([library.why_missing(), str(error)]))
    """
    why, error = in_child(program)
    assert re.match("libjdp_cpu.so .*: there is no C\\+\\+ compiler.$", why)
    assert error.startswith(why)


@needs_library
def test_a_library_of_newer_headers_is_refused_and_the_backend_lives():
    program = """
        import json
        import jax
        from jdp.collectives.cpu import runtime as library
        library._runtime_version = lambda: (0, 2)
        why = library.why_missing()
        print(json.dumps([why, float(jax.numpy.ones(3).sum())]))
    """
    why, total = in_child(program)
    assert "XLA's FFI" in why and "(0, 2)" in why
    assert total == 3


@needs_library
def test_a_file_that_is_no_library_is_refused(tmp_path):
    path = tmp_path / "libjdp_cpu.so"
    path.write_text("not a library")
    program = f"""
        import json, pathlib
        from jdp.collectives.cpu import runtime as library
        library._PATH = pathlib.Path({str(path)!r})
        print(json.dumps(library.why_missing()))
    """
    assert re.match(f"libjdp_cpu.so .*{path}", in_child(program))


# As after an update of the sources without a new build.
def test_a_library_without_a_function_of_these_sources_is_refused():
    program = """
        import _ctypes, json, pathlib
        from jdp.collectives.cpu import runtime as library
        library._PATH = pathlib.Path(_ctypes.__file__)
        print(json.dumps(library.why_missing()))
    """
    assert re.search("_ctypes.* has no jdp_.* install jdp again.$", in_child(program))


@needs_library
@pytest.mark.parametrize(
    "dtype", "float32 float16 bfloat16 int8 int16 int32 uint8 uint16 uint32".split()
)
def test_one_rank_gets_its_own_value_scaled(dtype):
    value = jnp.arange(20).astype(dtype)
    halved = value // 2 * 2 if jnp.issubdtype(dtype, jnp.integer) else value * 0.5
    start = value // 2 * 2 if jnp.issubdtype(dtype, jnp.integer) else value
    total = all_reduce(start, scale=0.5)
    np.testing.assert_array_equal(np.asarray(total), np.asarray(halved))


@needs_library
def test_64_bit_types_keep_all_bits():
    program = """
        import json
        import jax
        jax.config.update("jax_enable_x64", True)
        import jax.numpy as jnp
        from tests.collectives.test_cpu_runtime import all_reduce
        whole = all_reduce(jnp.array([2**60 + 1, -1]))
        float_ = all_reduce(jnp.array([1.0]), scale=1 / 3)
        print(json.dumps([whole.tolist(), float_.tolist()]))
    """
    assert in_child(program) == [[2**60 + 1, -1], [1 / 3]]


@needs_library
def test_types_that_cannot_be_added_up_are_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT.*bucket 5"):
        all_reduce(jnp.ones(3, bool))


@needs_library
def test_a_missing_rank_is_named_after_the_deadline(timeout_s):
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=r"DEADLINE_EXCEEDED: .*bucket 5, call \d+: rank 1 of 3 .*\d\.\d s .*ranks 0, 2",
    ):
        all_reduce(jnp.ones(3), rank=1, num_ranks=3)


@needs_library
def test_abort_holds_until_reset():
    cpu_runtime.abort("enough")
    with pytest.raises(jax.errors.JaxRuntimeError, match="ABORTED: .*: enough"):
        all_reduce(jnp.ones(3), num_ranks=2)
    cpu_runtime.reset()
    np.testing.assert_array_equal(all_reduce(jnp.ones(3)), np.ones(3))


@needs_library
@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_deadline_that_is_none_is_refused(timeout_s):
    with pytest.raises(ValueError, match=f"timeout_s={timeout_s}"):
        cpu_runtime.set_timeout_s(timeout_s)


@needs_library
def test_a_segment_serves_the_rank_that_attached_it():
    segment = cpu_runtime.create_segment(1)
    cpu_runtime.attach(7, 0, 1, [0], segment)
    value = all_reduce(jnp.arange(100_000.0), communicator=7, scale=0.5)
    np.testing.assert_array_equal(value, np.arange(100_000) / 2)
    cpu_runtime.reset()
    np.testing.assert_array_equal(
        all_reduce(jnp.arange(100_000.0), communicator=7, scale=0.5), np.arange(100_000) / 2
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="rank 0 of 1"):
        all_reduce(jnp.ones(3), communicator=8)


@needs_library
def test_a_segment_of_another_process_is_refused():
    segment = cpu_runtime.create_segment(2)
    with pytest.raises(OSError, match="segment"):
        cpu_runtime.attach(7, 0, 2, [0], segment._replace(nonce=segment.nonce ^ 1))
    with pytest.raises(OSError, match="/proc/1/fd/999"):
        cpu_runtime.attach(7, 0, 2, [0], cpu_runtime.Segment(1, 999, 0))


def test_a_source_tree_without_its_library_says_so_once(tmp_path):
    package = Path(jdp.__file__).parent
    shutil.copytree(package, tmp_path / "jdp", ignore=shutil.ignore_patterns("lib", "csrc"))
    script = (
        "import jdp; from jdp.collectives.cpu import runtime; "
        "print(jdp.__file__, [runtime.why_missing() is None for _ in range(2)])"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert run.stdout.endswith("[False, False]\n") and str(tmp_path) in run.stdout
    assert run.stderr.count("without the compiled library") == 1
    assert f"pip install -e {tmp_path}" in run.stderr
