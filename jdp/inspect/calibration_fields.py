"""What the fields of a file of calibration may hold. Needs no JAX."""

import dataclasses
import math
from typing import Any

from jdp.inspect import json_fields
from jdp.inspect.compute_rates import Slowness
from jdp.inspect.json_fields import AMOUNT, COUNT, OBJECT, POSITIVE, TEXT, Field

FORMAT = 6


def _is_point(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return COUNT.holds(value[0]) and POSITIVE.holds(value[1])


def _are_points(value: Any) -> bool:
    if not isinstance(value, list) or not all(map(_is_point, value)):
        return False
    sizes = [num_bytes for num_bytes, _ in value]
    return len(sizes) > 1 and sizes == sorted(set(sizes))


_NUMBER = Field("a whole number from 1", lambda it: COUNT.holds(it) and it > 0)
BYTES_PER_S = Field(
    f"{POSITIVE.what}, or null", lambda it: it in (None, math.inf) or POSITIVE.holds(it)
)
CALIBRATION = {
    "format": Field(str(FORMAT), lambda it: it == FORMAT),
    "host": TEXT, "platform": TEXT, "device_kind": TEXT, "num_devices": _NUMBER,
    "num_cores": _NUMBER, "date": TEXT, "versions": json_fields.dict_of(TEXT),
    "computation": json_fields.LIST, "rates": json_fields.LIST,
}  # fmt: skip
_POINTS = Field("a list of at least two [bytes, seconds] with ascending bytes", _are_points)
LAW = {
    "operation": TEXT, "algorithm": TEXT, "num_ranks": _NUMBER, "num_processes": _NUMBER,
    "dtype": TEXT, "alpha_s": AMOUNT, "bytes_per_s": BYTES_PER_S, "largest_error": AMOUNT,
    "points": _POINTS, "cpu_points": _POINTS,
}  # fmt: skip
_BY_DTYPE = Field(
    f"an object of dtypes, each {POSITIVE.what}",
    lambda it: it != {} and json_fields.dict_of(POSITIVE).holds(it),
)
COMPUTATION = {
    "num_ranks": _NUMBER, "matmul_flops_per_s": _BY_DTYPE,
    "memory_bytes_per_s": POSITIVE, "cached_bytes_per_s": POSITIVE,
    "transcendentals_per_s": POSITIVE, "operation_start_s": AMOUNT, "slowness": OBJECT,
}  # fmt: skip
SLOWNESS = {each.name: AMOUNT for each in dataclasses.fields(Slowness)}
