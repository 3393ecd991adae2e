"""The ways that ARCHITECTURE.md draws are those that a real run takes, and they stay short."""

import functools
import re
import sys
import threading
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from repository.test_architecture_doc import ROOT, defines
from support.training import ranks

import jdp
from jdp import jax_compat

PACKAGE = Path(jdp.__file__).parent
ROW = re.compile(r"^\| `(jdp/[\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)

# The title of a way -> how many files it may have.
WAYS = {
    "A gradient leaf": 16,
    "A part of a parameter": 12,
    "A batch row": 10,
    "A state in a commit": 10,
}


# (file, function) for each row of the table below a title.
def drawn(title):
    _, _, text = (ROOT / "ARCHITECTURE.md").read_text().partition(f"### {title}")
    return ROW.findall(re.split(r"^##", text, flags=re.MULTILINE)[0])


def file_of(frame):
    """The file of jdp that a frame is in, but for the analysis."""
    return inside_of_jdp(frame.f_code.co_filename)


@functools.cache  # it is asked at every call that JAX makes
def inside_of_jdp(filename):
    path = Path(filename)
    inside = path.is_relative_to(PACKAGE) and not path.is_relative_to(PACKAGE / "analysis")
    return str(path.relative_to(PACKAGE.parent)) if inside else None


def holds(value, shapes):
    if isinstance(value, (list, tuple)):
        return any(holds(x, shapes) for x in value)
    if isinstance(value, dict):
        return any(holds(x, shapes) for x in value.values())
    return isinstance(value, (jax.Array, np.ndarray)) and value.shape in shapes


# The frames of jdp on the stack, the outermost first: those of one file in a row are one.
def entered(frame):
    found = []
    while frame is not None:
        if (file := file_of(frame)) and not (found and found[-1][0] == file):
            found.append((file, frame))
        elif file:
            found[-1] = file, frame  # the first function of the file that was called
        frame = frame.f_back
    return found[::-1]


def name(frame):
    return frame.f_code.co_qualname.partition(".<locals>")[0]


def way_of_a_gradient(step, shapes, author):
    """(file, function) from a step to its author's code, and from there on with a gradient."""
    way = []

    def look(frame, event, _):
        if event == "call" and frame.f_code is author:
            way[:] = [(file, name(each)) for file, each in entered(frame)]
        elif event == "call" and way and (file := file_of(frame)):
            above = entered(frame.f_back)[-1][0]
            if above != file and is_inside(frame) and holds([*frame.f_locals.values()], shapes):
                way.append((file, name(frame)))

    def is_inside(frame):
        while frame is not None and frame.f_code is not author:
            frame = frame.f_back
        return frame is not None

    sys.setprofile(look)
    try:
        step()
    finally:
        sys.setprofile(None)
    return way


def train(**options):
    ranks(2)
    w = jnp.ones((2, 17, 17) if options else (17, 13))

    def fit(state, batch):
        def loss(params):
            if not options:
                return jnp.mean((batch @ params["w"]) ** 2)
            layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
            return jnp.mean(jdp.scan_layers(layer, batch, params["w"], **options)[0] ** 2)

        grads = jax.grad(loss)(state.params)
        return state.apply_gradients(grads), {}

    state = jdp.TrainState.create({"w": w}, jdp.replicated(optax.sgd(0.1)))
    step = jdp.train_step(fit)
    shapes = {w.shape, w.shape[1:], (1, *w.shape[1:])}
    return way_of_a_gradient(lambda: step(state, jnp.ones((8, 17))), shapes, fit.__code__)


@pytest.mark.parametrize("title", WAYS)
def test_every_function_of_a_way_is_in_the_file_that_is_named(title):
    rows = drawn(title)
    assert rows and all(defines(ROOT / file, function) for file, function in rows)


@pytest.mark.parametrize("title", WAYS)
def test_a_way_is_short_and_enters_no_file_more_than_twice(title):
    counts = Counter(file for file, _ in drawn(title))
    assert len(counts) <= WAYS[title] and max(counts.values()) <= 3


def test_a_gradient_takes_the_way_that_is_drawn():
    assert train() == drawn("A gradient leaf")


def test_a_gradient_of_scanned_layers_passes_as_few_files():
    assert len({file for file, _ in train(late=True)}) <= WAYS["A gradient leaf"]


def files_that_hold(shapes, run):
    """The files with a function that holds an array of these shapes while `run()` runs."""
    found = set()

    def look(frame, event, arg):
        if event == "return" and (file := file_of(frame)) and file not in found:
            if holds([*frame.f_locals.values(), arg], shapes):
                found.add(file)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def test_a_row_takes_the_way_that_is_drawn():
    ranks(2)

    @jdp.eval_step
    def step(state, batch):
        return {"mean": (batch["x"].mean(1) * batch["mask"]).mean()}

    step(0.0, {"x": np.ones((6, 7)), "mask": np.ones(6, bool)})  # compiles it
    rows = {"x": np.ones((11, 7))}

    def run():
        for batch in jdp.batches(rows, 6, num_steps=2, mask=True):
            step(0.0, batch)

    shapes = {(6, 7), (6,)}  # rows, and which they are
    # These ask whether the batch is there.
    asking = {"jdp/jax_compat.py", "jdp/pytrees.py", "jdp/training/placing.py"}
    beside = asking if jax_compat.DELETED_ARRAY_CRASHES else set()
    assert files_that_hold(shapes, run) - beside == {file for file, _ in drawn("A batch row")}


def test_a_part_of_a_parameter_takes_the_way_that_is_drawn():
    ranks(2)
    called = set()

    def look(frame, event, _):
        if event == "call" and (file := file_of(frame)):
            called.add((file, name(frame)))

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2)

    @jdp.train_step
    def step(state, batch):
        loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    tx = jdp.sharded(optax.sgd(0.1), stage=3, min_size=1)
    state = jdp.TrainState.create({"w": jnp.ones((17, 26))}, tx)
    sys.setprofile(look)
    try:
        step(state, jnp.ones((8, 17)))
    finally:
        sys.setprofile(None)
    assert not set(drawn("A part of a parameter")) - called
