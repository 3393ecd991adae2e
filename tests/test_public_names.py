import inspect
import os
import subprocess
import sys

import pytest

import jdp


def run(program):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=os.path.dirname(os.path.dirname(__file__)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not done.returncode, done.stderr
    return done.stdout.split()


def test_import_starts_no_backend():
    # JAX refuses to change the number of devices once a backend runs.
    program = """
import jax, jdp
jax.config.update("jax_num_cpu_devices", 3)
print(jax.device_count())
"""
    assert run(program) == ["3"]


def test_import_loads_nothing_that_only_tests_and_examples_need():
    loaded = run("import sys, jdp; print(*{name.split('.')[0] for name in sys.modules})")
    assert {"jdp", "jax"} <= set(loaded)
    optional = ("sklearn", "matplotlib", "equinox", "grain", "pytest", "jax_plugins", "jax_cuda")
    assert not [name for name in loaded if name.startswith(optional)]


def test_all_lists_what_is_there_once():
    assert not [name for name in jdp.__all__ if not hasattr(jdp, name)]
    assert len(set(jdp.__all__)) == len(jdp.__all__)


# The public names, and `Class.method` of the classes among them.
def public_things():
    for name in filter(jdp.__dict__.get, jdp.__all__):
        thing = getattr(jdp, name)
        yield name, thing
        if inspect.isclass(thing):
            for method in filter(lambda method: not method.startswith("_"), vars(thing)):
                if inspect.isroutine(getattr(thing, method)):
                    yield f"{name}.{method}", getattr(thing, method)


THINGS = dict(public_things())


@pytest.mark.parametrize("name", THINGS)
def test_public_name_is_documented(name):
    thing = THINGS[name]
    doc = thing.__doc__
    assert doc
    assert not doc.startswith(f"{name}("), "a docstring that dataclass made up"
    if inspect.isroutine(thing):
        parameters = set(inspect.signature(thing).parameters) - {"self"}
        assert len(parameters) < 2 or "Args:" in doc
