"""Pallas kernels of a traced step, whose work their compiled text does not show."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jdp.inspect import hlo
from jdp.inspect.computation import Instruction


class Kernel(NamedTuple):
    """A Pallas kernel.

    Attributes:
      name: of it, as `pl.pallas_call(name=)` has it; empty without one.
      result: dims of each of its results.
      flops: floating-point operations of its `cost_estimate`, None without one.
      num_bytes: bytes that it reads and writes, None without a `cost_estimate`.
      transcendentals: exponentials and the like, 0 without a `cost_estimate`.
    """

    name: str
    result: tuple[tuple[int, ...], ...]
    flops: float | None
    num_bytes: float | None
    transcendentals: float = 0.0


def kernel_of(eqn: Any) -> Kernel:
    """Return the kernel of a `pallas_call` equation."""
    cost = eqn.params.get("cost_estimate")
    name = str(eqn.params.get("name") or "")
    result = tuple(tuple(out.aval.shape) for out in eqn.outvars)
    if cost is None:
        return Kernel(name, result, None, None)
    work = cost.flops, cost.bytes_accessed, cost.transcendentals
    return Kernel(name, result, *map(float, work))


def find(one: Instruction, kernels: Sequence[Kernel]) -> Kernel | None:
    """Return the kernel of a custom call, by its name and the shapes of its results."""
    name = one.op_name()
    if one.op != "custom-call" or not name.endswith("pallas_call"):
        return None
    result = tuple(array.dims for array in hlo.arrays(one.shape))
    found = [each for each in kernels if each.result == result and _is_in(each.name, name)]
    # A kernel without a name may be any.
    return max(found, key=lambda kernel: len(kernel.name), default=None)


def _is_in(kernel: str, op_name: str) -> bool:
    """Whether a name is a whole part of another, as `add` of `jit(f)/jvp(add)/pallas_call`."""
    return not kernel or re.search(rf"(?<![^/(]){re.escape(kernel)}(?![^/)])", op_name) is not None
