"""The environment of the tests is as the Makefile makes it."""

from importlib.util import cache_from_source
from pathlib import Path

import jax
import jaxlib
import numpy
import optax
import pytest


@pytest.mark.all_sets
@pytest.mark.parametrize("package", [jax, jaxlib, numpy, optax], ids=lambda it: it.__name__)
def test_packages_have_bytecode(package):
    remedy = "each process compiles it anew: make clean test, or python -m compileall"
    assert Path(cache_from_source(package.__file__)).exists(), remedy
