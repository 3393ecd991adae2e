"""A decorated step is sent to another process, as Ray sends the functions of a script."""

import pickle

import cloudpickle
import numpy as np
import pytest
from support.training import ranks

import jdp


@jdp.train_step(weight=lambda batch: batch["mask"].sum(), donate=False)
def step(state, batch):
    return state + jdp.mean_over_ranks(batch["x"].mean(where=batch["mask"])), {}


@pytest.mark.parametrize("has_run", [False, True])
def test_a_copy_has_the_function_and_the_options_of_the_step(has_run):
    ranks(2)
    batch = {"x": np.arange(4.0, dtype="float32"), "mask": np.array([True, True, True, False])}
    state = np.float32(1)
    if has_run:
        step(state, batch)
    data = cloudpickle.dumps(step)
    twin = pickle.loads(data)
    assert twin is not step and twin.__name__ == "step" and not twin.spec.donate
    assert float(twin(state, batch)[0]) == 1 + 1  # (0 + 1 + 2) / 3
