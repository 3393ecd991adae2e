"""A step that asks for the value of an argument while it is traced is told which one it is."""

import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest
from support.training import ranks

import jdp


def as_an_if(x):
    if x:
        pass


ASKS = {
    "if": as_an_if,
    "range": lambda x: [*range(x)],
    "shape": jnp.zeros,
    "int": int,
    "float": float,
    "index": lambda x: (1, 2)[x],
    "bool": bool,
}


def asked(ask):
    """A step that asks for what `ask` takes out of its arguments."""

    @jdp.train_step
    def fit(state, rows, flag, options):
        ask(state, rows, flag, options)
        return state, {}

    own = jdp.per_rank({"a": np.zeros(4, np.int32)})
    state = {"w": jnp.int32(0), "own": own, "act": jnp.tanh}
    return lambda: fit(state, {"x": np.zeros((4, 2), np.int32)}, True, {"n": 3})


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("how", ASKS)
def test_a_further_argument_is_named(num_ranks, how):
    ranks(num_ranks)
    first = "Return it as a metric" if how in ("int", "float") else "Write jnp.where"
    named = rf"(?s)`fit`.*`flag` at test_unknown_value\.py:\d+[^\n]*\n{first}.*lambda"
    with pytest.raises(TypeError, match=named):
        asked(lambda state, rows, flag, options: ASKS[how](flag.astype(int)))()


WHERE = {
    "`flag`": lambda state, rows, flag, options: flag,
    "`options['n']`": lambda state, rows, flag, options: options["n"] > 2,
    "`state['w']`": lambda state, rows, flag, options: state["w"] == 0,
    "`rows['x']`": lambda state, rows, flag, options: rows["x"][0, 0],
    "`state['own'].value['a']`": lambda state, rows, flag, options: state["own"].value["a"][0],
    "`state['w']` and `flag`": lambda state, rows, flag, options: flag & (state["w"] > 0),
    "`state['w']`, `rows['x']` and `options['n']`": lambda state, rows, flag, options: (
        state["w"] + rows["x"].sum() > options["n"]
    ),
}


@pytest.mark.parametrize("named", WHERE)
def test_every_argument_is_called_as_the_author_calls_it(named):
    ranks(2)
    with pytest.raises(TypeError) as caught:
        asked(lambda *args: as_an_if(WHERE[named](*args)))()
    assert set(re.findall(r"`[^`]*`", named)) <= set(re.findall(r"`[^`]*`", str(caught.value)))
    assert "_on_rank" not in str(caught.value)
    assert isinstance(caught.value.__cause__, TypeError)  # with the whole traceback of JAX


def test_other_errors_of_types_are_the_authors():
    ranks(2)
    with pytest.raises(TypeError, match="^unsupported operand"):
        asked(lambda state, rows, flag, options: rows + 1)()


def test_a_flag_that_is_closed_over_chooses_the_program():
    ranks(2)

    def fit(state, rows, doubles):
        return state + (2 if doubles else 1), {}

    for doubles in (False, True):
        for step in (
            lambda state, rows, doubles=doubles: fit(state, rows, doubles),
            functools.partial(fit, doubles=doubles),
        ):
            step = jdp.train_step(step)
            assert float(step(jnp.zeros(()), np.zeros(2))[0]) == 1 + doubles


def test_an_array_that_numpy_asks_for_is_told_of_jax_numpy():
    ranks(2)
    step = jdp.train_step(lambda state, batch: (state, {"x": np.sin(state["w"])}))
    message = r"`state\['w'\]` to NumPy at test_unknown_value\.py.*\n.*jax\.numpy.*JDP127"
    with pytest.raises(TypeError, match=message):
        step({"w": jnp.ones(2)}, np.zeros((4, 2), np.float32))
