"""The tests find what they are for: the code is broken in a copy, and a test must fail there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What is broken: file, the text that is replaced, by what, and the tests that must see it.
MUTATIONS = {
    "the mean is not divided": (
        "jdp/reduction/weighted_sum.py",
        "1.0 / axis.size(axis_name) if mean else 1.0",
        "1.0",
        "tests/training/test_step.py::test_equals_plain_jax_on_the_whole_batch",
    ),
    "every bucket is reduced twice": (
        "jdp/collectives/buckets.py",
        "    found = {}\n",
        "    sums = all_reduce(sums, axes, scale=1.0)\n    found = {}\n",
        "tests/training/test_step.py::test_equals_plain_jax_on_the_whole_batch",
    ),
    "two leaves of a bucket change places": (
        "jdp/collectives/buckets.py",
        "found.update(zip(bucket, values, strict=True))",
        "found.update(zip(reversed(bucket), values, strict=True))",
        "tests/reduction/test_gradients.py",
    ),
    "the last bucket is skipped": (
        "jdp/collectives/buckets.py",
        "    for bucket, values in zip(buckets, sums, strict=True):\n",
        "    found = dict(enumerate(leaves))\n"
        "    for bucket, values in zip(buckets[:-1], sums[:-1], strict=True):\n",
        "tests/reduction/test_gradients.py",
    ),
    "the sampler is off by one": (
        "jdp/data/sampler.py",
        "np.divmod(positions, self.num_rows)",
        "np.divmod(positions + 1, self.num_rows)",
        "tests/data/test_sampler.py",
    ),
    "a native call may block a thread that a collective of XLA's needs": (
        "jdp/collectives/beside_xla.py",
        "return found.is_unknown or any(_pairs(found.native, found.xla))",
        "return False",
        "tests/collectives/test_beside_xla.py",
    ),
    "ranks take each other's slices": (
        "jdp/collectives/cpu/calls.py",
        "self._rank, self._group = lax.axis_index(axes), _group(axes)",
        "self._rank, self._group = axis.size(axes) - 1 - lax.axis_index(axes), _group(axes)",
        "tests/collectives/test_shards.py",
    ),
    "a gradient that stays whole is sent as a slice of another": (
        "jdp/reduction/gradient_pieces.py",
        "found = zip(chosen, parts, dims, strict=True)",
        "found = zip(chosen, parts[::-1], dims, strict=True)",
        "tests/reduction/test_gradient_pieces.py",
    ),
    "a scattered gradient is the sum, not the mean": (
        "jdp/reduction/scattered_gradients.py",
        "places, over, scale=scale, mesh=mesh)",
        "places, over, scale=1.0, mesh=mesh)",
        "tests/fuzz/test_fuzz.py::test_sharded_programs_train_as_plain_jax_does",
    ),
    "parts are averaged over the inner axis alone": (
        "jdp/reduction/scattered_gradients.py",
        "    if others:\n",
        "    if False:\n",
        "tests/fuzz/test_fuzz.py::test_sharded_programs_train_as_plain_jax_does",
    ),
    "a parameter is gathered from the slices of another": (
        "jdp/reduction/gathered_in_time.py",
        "self._gathered.update(zip(members, wholes, strict=True))",
        "self._gathered.update(zip(members[::-1], wholes, strict=True))",
        "tests/fuzz/test_fuzz.py::test_sharded_programs_train_as_plain_jax_does",
    ),
    "the predicate of a cond counts as uniform": (
        "jdp/analysis/rules/control_flow.py",
        "index, operands = ins[0] & interp.lattice.varying, ins[1:]",
        "index, operands = 0, ins[1:]",
        "tests/analysis/test_wrong_programs.py",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_copy_fails(name, tmp_path):
    file, text, instead, tests = MUTATIONS[name]
    for folder in ("jdp", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for each in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / each, tmp_path)
    broken = tmp_path / file
    source = broken.read_text()
    assert source.count(text) == 1, "the code has changed: say anew what to break"
    broken.write_text(source.replace(text, instead))
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tests],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 1 and "1 failed" in ended.stdout, ended.stdout + ended.stderr
