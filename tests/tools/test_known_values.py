"""The exact results of collectives are those of the definition, on 1, 2, 3 and 8 ranks."""

import numpy as np
import pytest

from jdp.tools import known_values
from jdp.tools.known_values import OPERATIONS


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("slice_size", "m"), [(1, 251), (5, 3), (700, 251)])
def test_a_result_is_that_of_whole_arrays(operation, num_ranks, slice_size, m):
    n, size, call = num_ranks, num_ranks * slice_size, 4
    # [ranks, elements]; the formula of the module's docstring.
    r, i = np.mgrid[:n, : known_values.input_size(operation, n, size)]
    x = (i + 2 * r + 5 * call) % m
    right = {
        "all-reduce": lambda: np.tile(x.sum(0), (n, 1)),
        "reduce-scatter": lambda: x.sum(0).reshape(n, slice_size),
        "all-gather": lambda: np.tile(x.reshape(-1), (n, 1)),
        "all-to-all": lambda: x.reshape(n, n, slice_size).swapaxes(0, 1).reshape(n, size),
    }[operation]()
    for rank in range(n):
        found = known_values.result(operation, rank, n, call, size, m)
        np.testing.assert_array_equal(found, right[rank])
        own = known_values.values(rank, call, 0, x.shape[1], m)
        np.testing.assert_array_equal(own, x[rank])


@pytest.mark.parametrize(
    ("dtype", "largest"), [("bfloat16", 256), ("float16", 2048), ("int8", 127), ("float32", 2**24)]
)
@pytest.mark.parametrize("num_ranks", [1, 3, 60])
def test_sums_stay_below_what_a_dtype_holds_exactly(dtype, largest, num_ranks):
    assert num_ranks * (known_values.modulus(num_ranks, dtype) - 1) <= largest


def test_a_dtype_that_cannot_hold_the_sums_is_refused():
    with pytest.raises(ValueError, match="bfloat16.*256.*129 ranks"):
        known_values.modulus(129, "bfloat16")
