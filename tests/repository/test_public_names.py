import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import jdp


def run(program):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert not done.returncode, done.stderr
    return done.stdout.split()


def test_import_starts_no_backend():
    # JAX refuses to change the number of devices once a backend runs.
    program = """
import jax
from jdp import *
jax.config.update("jax_num_cpu_devices", 3)
print(jax.device_count())
"""
    assert run(program) == ["3"]


def test_import_loads_nothing_that_only_tests_and_examples_need():
    loaded = run(
        "import sys\nfrom jdp import *\nprint(*{name.split('.')[0] for name in sys.modules})"
    )
    assert {"jdp", "jax"} <= set(loaded)
    optional = ("sklearn", "matplotlib", "equinox", "grain", "pytest", "jax_plugins", "jax_cuda")
    assert not [name for name in loaded if name.startswith(optional)]


def test_a_room_may_be_imported_before_any_public_name():
    assert run("from jdp.reduction.optimizer import Replicated\nprint(Replicated.__name__)") == [
        "Replicated"
    ]


def test_all_lists_what_is_there_once():
    assert not [name for name in jdp.__all__ if not hasattr(jdp, name)]
    assert len(set(jdp.__all__)) == len(jdp.__all__)
    assert set(jdp.__all__) <= set(dir(jdp))
    with pytest.raises(AttributeError, match="module 'jdp' has no attribute 'nothing'"):
        jdp.nothing  # noqa: B018


def test_type_checkers_see_the_names_that_there_are():
    [block] = [
        node
        for node in ast.parse(Path(jdp.__file__).read_text()).body
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    ]
    imported = {alias.name: line.module for line in block.body for alias in line.names}
    assert set(imported) == set(jdp.__all__)
    for name, module in imported.items():
        found = getattr(importlib.import_module(module), name)
        assert found is getattr(jdp, name)


# `jdp.checkpoint` is a room; a room with the name of something public would take its place.
def test_no_room_has_the_name_of_something_public():
    rooms = {path.stem for path in Path(jdp.__file__).parent.iterdir()}
    assert rooms & {*jdp.__all__} == {"collectives"}  # itself public


def test_the_first_name_brings_all_but_tools_so_that_standbys_have_paid_for_them():
    program = "import jdp\njdp.init\nprint(*{*jdp.__all__} & {*vars(jdp)})"
    tools = {name for name, module in jdp._MODULES.items() if module.startswith("tools.")}
    assert {"explain", "profile"} < tools
    assert {*run(program)} == {*jdp.__all__} - tools
    assert {"explain", "init"} <= {*run(program.replace("init", "explain"))}


# The public names, and `Class.method` of the classes among them.
def public_things():
    for name in jdp.__all__:
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


def test_import_jdp_loads_nothing_else():
    program = "import sys; before = {*sys.modules}; import jdp; print({*sys.modules} - before)"
    found = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert found.strip() == "{'jdp'}"
