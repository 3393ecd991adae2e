import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from support.training import ranks

import jdp

ROWS = {"x": np.arange(23.0, dtype=np.float32), "label": np.arange(23) % 3}  # 23 is prime


@jdp.eval_step(weight=lambda batch: batch["mask"].sum())
def measure(scale, batch):
    x, mask = batch["x"] * scale, batch["mask"]
    return {
        "mean": (x * mask).sum() / mask.sum(),
        "per_label": jdp.sum_over_ranks(jnp.bincount(batch["label"], mask * 1, length=3)),
        "x": jdp.rows(x),
    }


@pytest.mark.parametrize("n, batch_size", [(1, 5), (2, 8), (3, 24), (8, 8)])
def test_counts_every_row_once_on_any_number_of_ranks(n, batch_size):
    ranks(n)
    batches = jdp.batches(ROWS, batch_size, epochs=1, shuffle=False)
    found = jdp.evaluate(measure, jnp.float32(2), batches)
    assert found["mean"] == 2 * ROWS["x"].mean()  # 22: exact in float32
    np.testing.assert_array_equal(found["per_label"], np.bincount(ROWS["label"]))
    np.testing.assert_array_equal(found["x"], 2 * ROWS["x"])


@pytest.mark.parametrize("n", [1, 3])
def test_arguments_by_keyword_are_passed_on(n):
    ranks(n)

    @jdp.eval_step(weight=lambda batch: batch["mask"].sum())
    def step(scale, batch, power, /, *, offset, factor=1.0):
        x = batch["x"] * scale**power * factor + offset
        return {"mean": (x * batch["mask"]).sum() / batch["mask"].sum(), "x": jdp.rows(x)}

    batches = jdp.batches(ROWS, 10, epochs=1, shuffle=False)
    found = jdp.evaluate(step, jnp.float32(2), batches, 2, offset=3)
    assert found["mean"] == 4 * ROWS["x"].mean() + 3
    found = jdp.evaluate(step, jnp.float32(2), batches, 2, offset=jnp.ones(()), factor=2.0)
    np.testing.assert_array_equal(found["x"], 8 * ROWS["x"] + 1)
    with pytest.raises(TypeError, match="'offset'"):
        jdp.evaluate(step, jnp.float32(2), batches, 2)


@pytest.mark.parametrize("num_steps, num_more", [(2, 0), (3, 1), (4, 9), (23, 0)])
def test_rows_that_num_steps_count_once_more_than_others_are_a_warning(num_steps, num_more):
    ranks(2)
    batches = jdp.batches(ROWS, 8, num_steps=num_steps, mask=True, shuffle=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jdp.evaluate(measure, jnp.float32(2), batches)
    told = [str(each.message) for each in caught if "once more" in str(each.message)]
    assert len(told) == (num_more > 0)
    assert not told or f" of 23: {num_more} of them" in told[0] and "epochs=1" in told[0]


def test_the_same_batches_serve_again():
    ranks(2)
    batches = jdp.batches(ROWS, 8, epochs=1, shuffle=False)
    first, second = (jdp.evaluate(measure, jnp.float32(2), batches) for _ in range(2))
    assert first["mean"] == second["mean"] and len(second["x"]) == 23


def test_a_mean_of_batch_means_would_be_another_number():
    ranks(2)
    means = [ROWS["x"][i : i + 8].mean() for i in (0, 8, 16)]
    assert np.mean(means) != ROWS["x"].mean()


def test_without_a_weight_every_row_counts_the_same():
    ranks(2)
    step = jdp.eval_step(lambda scale, batch: batch["x"].mean() * scale)
    batches = jdp.batches(ROWS, 10, epochs=1, shuffle=False, tail="drop")
    assert jdp.evaluate(step, jnp.float32(1), batches) == ROWS["x"][:20].mean()


def test_a_batch_in_which_nothing_counts_contributes_nothing():
    ranks(2)
    batches = [
        {**ROWS, "x": np.zeros(4), "label": np.zeros(4, int), "mask": np.zeros(4, bool)},
        {"x": np.ones(4), "label": np.zeros(4, int), "mask": np.arange(4) < 1},
    ]
    found = jdp.evaluate(measure, jnp.float32(3), batches)
    assert found["mean"] == 3 and found["x"].tolist() == [3]


def test_no_batches_are_an_error():
    ranks(2)
    with pytest.raises(ValueError, match="evaluate"):
        jdp.evaluate(measure, jnp.float32(1), [])


def test_bfloat16_is_averaged_too():
    ranks(2)
    step = jdp.eval_step(lambda _, batch: batch["x"].mean().astype(jnp.bfloat16))
    batches = jdp.batches(ROWS, 4, epochs=1, shuffle=False, tail="drop")
    assert jdp.evaluate(step, None, batches) == 9.5


def test_a_complex_mean_keeps_its_imaginary_part():
    ranks(2)
    step = jdp.eval_step(lambda _, batch: jdp.mean_over_ranks((1 + 2j) * batch["x"].mean()))
    batches = jdp.batches(ROWS, 4, epochs=1, shuffle=False, tail="drop")
    assert jdp.evaluate(step, None, batches) == 9.5 * (1 + 2j)


def test_bool_labels_are_no_mask():
    ranks(2)
    step = jdp.eval_step(lambda _, batch: jdp.rows(batch[1]))
    labels = np.array([True, False, False, True])
    found = jdp.evaluate(step, None, [(np.zeros(4), labels)])
    np.testing.assert_array_equal(found, labels)


def test_nothing_counted_is_nan():
    ranks(2)
    batch = {"x": np.zeros(4), "label": np.zeros(4, int), "mask": np.zeros(4, bool)}
    assert np.isnan(jdp.evaluate(measure, jnp.float32(1), [batch])["mean"])


@pytest.mark.parametrize("rows", [{"x": np.ones(4)}, np.ones(4), "rows"])
def test_rows_in_the_place_of_batches_are_refused(rows):
    with pytest.raises(TypeError, match=r"evaluate takes an iterable of batches.*\[batch\]"):
        jdp.evaluate(jdp.eval_step(lambda state, batch: {}), None, rows)


def test_a_step_that_trains_is_refused():
    with pytest.raises(TypeError, match="jdp.eval_step"):
        jdp.evaluate(jdp.train_step(lambda s, b: (s, {})), None, [])
    with pytest.raises(TypeError, match="jdp.train_step"):
        jdp.check_step(measure, None, None)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint8", "int16"])
def test_whole_numbers_of_few_bits_are_summed_over_batches_in_64(dtype):
    ranks(2)
    largest = jnp.iinfo(dtype).max
    measure = jdp.eval_step(lambda state, batch: {"n": state, "all": state[None]})
    found = jdp.evaluate(measure, jnp.asarray(largest, dtype), [np.ones(2)] * 3)
    assert found["n"] == 3 * largest and found["all"].tolist() == [3 * largest]
