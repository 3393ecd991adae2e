"""What every process leaves at the end is compared, not what one of them leaves."""

import harness
import numpy as np
import pytest

LEAVES = {".params['w']": np.zeros(3, np.float32), ".step": np.int32(7)}


@pytest.fixture
def ended(tmp_path):
    """ended(name, leaves by process): a run that has ended so."""

    def ended(name, finals):
        training = harness.Training(tmp_path / name)
        for rank, leaves in finals.items():
            np.savez(training.folder / f"final.{rank}.npz", **leaves)
        return training

    return ended


@pytest.fixture
def oracle(ended):
    return ended("oracle", {0: LEAVES})


def test_equal_bits_in_every_process_are_right(ended, oracle):
    assert not harness.wrong_bits(ended("run", dict.fromkeys(range(3), LEAVES)), oracle)


SIGN = {**LEAVES, ".params['w']": np.array([0, -0.0, 0], np.float32)}


@pytest.mark.parametrize(
    ("finals", "named"),
    [
        ([LEAVES, LEAVES, SIGN], "process 2: .params['w'] has other bits"),
        ([LEAVES, LEAVES | {".step": np.int32(8)}, LEAVES], "process 1: .step has other bits"),
        ([LEAVES, LEAVES], "process 2 left no state"),
    ],
)
def test_other_bits_of_any_leaf_and_a_missing_state_are_named(finals, named, ended, oracle):
    assert harness.wrong_bits(ended("run", dict(enumerate(finals))), oracle) == [named]


def test_a_difference_in_the_last_process_is_not_close(ended, oracle):
    other = {**LEAVES, ".params['w']": np.full(3, 1e-3, np.float32)}
    with pytest.raises(AssertionError, match="process 1"):
        harness.assert_close(ended("run", {0: LEAVES, 1: other}), oracle, num_processes=2)
