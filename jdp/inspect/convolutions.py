"""The floating-point operations of a convolution, which a matmul on a TPU is, too."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from jdp.inspect import hlo
from jdp.inspect.computation import Instruction

_LABELS = re.compile(r"dim_labels=([?\w]+)_([?\w]+)->([?\w]+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")


class _KernelWindow(NamedTuple):
    """How a kernel moves along one dim."""

    size: int = 1
    stride: int = 1
    before: int = 0  # zeros in front of the input
    lhs_dilate: int = 1
    rhs_dilate: int = 1

    def pairs(self, num_inputs: int, num_outputs: int) -> int:
        """Count the pairs of an output and an element of the kernel that meet an input.

        The others meet padding, or a zero between the inputs of a dilated dim.
        """
        found, length = 0, (num_inputs - 1) * self.lhs_dilate
        for k in range(self.size):
            # Output o meets the place o * stride + shift, which has an input at each multiple of
            # lhs_dilate from 0 to length.
            shift = k * self.rhs_dilate - self.before
            first = max(0, -(shift // self.stride) if shift < 0 else 0)
            last = min(num_outputs - 1, (length - shift) // self.stride)
            period = self.lhs_dilate // math.gcd(self.lhs_dilate, self.stride)
            for o in range(first, min(first + period, last + 1)):
                if (o * self.stride + shift) % self.lhs_dilate == 0:
                    found += (last - o) // period + 1
                    break
        return found


def is_convolution(one: Instruction) -> bool:
    """Whether an instruction is a convolution, or calls a library for one."""
    return _LABELS.search(one.attributes()) is not None


def flops(one: Instruction, shapes: Mapping[str, str]) -> float:
    """Return the operations of a convolution: 2 for each product of two numbers of arrays."""
    labels = _LABELS.search(one.attributes())
    assert labels is not None
    lhs, rhs = (hlo.arrays(shapes[x])[0].dims for x in one.operands()[:2])
    output = hlo.arrays(one.shape)[0].dims
    # A library that computes an operand of a convolution has its labels and its window.
    if "Filter" in one.target():
        rhs, output = output, rhs
    elif re.search("[Bb]ackward", one.target()):
        lhs, output = output, lhs
    num_inputs, num_outputs = (rhs[labels[2].index(name)] for name in "io")
    products = output[labels[3].index("b")] * num_inputs * num_outputs
    windows = _windows(one)
    dims = sorted(set(labels[3]) - {"b", "f", "?"})
    for name in dims:
        window = windows[int(name)] if int(name) < len(windows) else _KernelWindow()
        products *= window.pairs(lhs[labels[1].index(name)], output[labels[3].index(name)])
    return 2.0 * products


def _windows(one: Instruction) -> list[_KernelWindow]:
    found = _WINDOW.search(one.attributes())
    fields = dict(each.split("=") for each in found[1].split()) if found else {}
    lists = {name: text.split("x") for name, text in fields.items()}
    return [
        _KernelWindow(
            size=int(size),
            stride=int(lists["stride"][i]) if "stride" in lists else 1,
            before=int(lists["pad"][i].split("_")[0]) if "pad" in lists else 0,
            lhs_dilate=int(lists["lhs_dilate"][i]) if "lhs_dilate" in lists else 1,
            rhs_dilate=int(lists["rhs_dilate"][i]) if "rhs_dilate" in lists else 1,
        )
        for i, size in enumerate(lists.get("size", ()))
    ]
