"""The floating-point operations and the bytes of one instruction of a compiled program."""

import math
import re
from collections.abc import Iterator, Sequence

from jdp.inspect import hlo, kernels
from jdp.inspect.hlo import Instruction
from jdp.inspect.kernels import Kernel

_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_TRANSCENDENTAL = frozenset(
    "exponential exponential-minus-one log log-plus-one tanh logistic power sine cosine tan erf "
    "atan2 cbrt".split()
)
_CALLS_OF_ONE = ("all-reduce", "all-reduce-start", "reduce", "while", "conditional")


class Costs:
    """The costs of the instructions of a program.

    Args:
      computations: of the program, see `hlo.parse`.
      kernels: its Pallas kernels.
    """

    def __init__(self, computations: dict[str, list[Instruction]], kernels: Sequence[Kernel] = ()):
        self._computations = computations
        self._kernels = kernels
        self._flops: dict[str, dict[str, float]] = {}

    def inside(self, one: Instruction) -> Iterator[Instruction]:
        """Yield the instructions of a fusion, or of another computation that runs as one."""
        if one.op not in _CALLS_OF_ONE:
            for name in one.called()[:1]:
                yield from self._computations.get(name, [])

    def kernel(self, one: Instruction) -> Kernel | None:
        """Return the Pallas kernel that an instruction runs, None if it runs none."""
        return kernels.find(one, self._kernels)

    def flops(self, one: Instruction, shapes: dict[str, str]) -> dict[str, float]:
        """Return the floating-point operations of the matmuls in an instruction, by dtype.

        Args:
          one: the instruction.
          shapes: type of each instruction of its computation, by name.
        """
        if one.op == "dot":
            return {_dtype(one, shapes): hlo.dot_flops(one, shapes)}
        if _LABELS.search(one.attributes()):
            return {_dtype(one, shapes): _convolution_flops(one, shapes)}
        if kernel := self.kernel(one):
            return {_dtype(one, shapes): kernel.flops} if kernel.flops else {}
        if re.search("gemm|matmul|dot", one.target()):
            # [m, k] [k, n] -> [m, n]: the product of all sizes is the square of m k n.
            sizes = [hlo.num_elements(shapes[x]) for x in one.operands()[:2]]
            result = hlo.arrays(one.shape)[0].num_elements()
            return {_dtype(one, shapes): 2 * (sizes[0] * sizes[1] * result) ** 0.5}
        name = next(iter(one.called()), None)
        if name not in self._computations or one.op in _CALLS_OF_ONE:
            return {}
        if name not in self._flops:
            inner = self._computations[name]
            own = {each.name: each.shape for each in inner}
            total: dict[str, float] = {}
            for each in inner:
                for dtype, flops in self.flops(each, own).items():
                    total[dtype] = total.get(dtype, 0) + flops
            self._flops[name] = total
        return self._flops[name]

    def transcendentals(self, one: Instruction) -> int:
        """Return how many exponentials, logarithms and the like an instruction computes."""
        return sum(
            hlo.num_elements(each.shape)
            for each in [one, *self.inside(one)]
            if each.op in _TRANSCENDENTAL
        )

    def is_strided(self, one: Instruction, shapes: dict[str, str]) -> bool:
        """Whether an instruction reads or writes an array across its rows.

        Args:
          one: the instruction.
          shapes: type of each instruction of its computation, by name.
        """
        if changes_order(one, shapes):
            return True
        inner = list(self.inside(one)) if one.op in ("fusion", "call") else []
        own = {each.name: each.shape for each in inner}
        return any(changes_order(each, own) for each in inner)

    def num_bytes(self, one: Instruction, shapes: dict[str, str]) -> int:
        """Count the bytes that are read and written: of an array that is sliced, the slice.

        Args:
          one: the instruction.
          shapes: the type of each value, by name.
        """
        if (kernel := self.kernel(one)) and kernel.num_bytes is not None:
            return int(kernel.num_bytes)
        inner = list(self.inside(one)) if one.op in ("fusion", "fusion-start", "call") else []
        if one.op.endswith("-start"):  # its type includes its operands
            one = one._replace(shape=inner[-1].shape if inner else one.shape)
        whole = sum(hlo.num_bytes(shapes.get(x, "")) for x in one.operands())
        whole += hlo.num_bytes(one.shape)
        if one.op in ("dynamic-slice", "dynamic-update-slice"):
            inner = [one]
        own = {each.name: each.shape for each in inner if each is not one} or shapes
        for each in inner:
            if each.op == "dynamic-slice":
                whole -= hlo.num_bytes(own[each.operands()[0]])
                whole += hlo.num_bytes(each.shape)
            elif each.op == "dynamic-update-slice":
                whole -= 2 * hlo.num_bytes(each.shape)
                whole += hlo.num_bytes(own[each.operands()[1]])
        return max(whole, 0)


def changes_order(one: Instruction, shapes: dict[str, str]) -> bool:
    """Whether the elements of the result of a copy or transpose lie in another order.

    Args:
      one: an instruction.
      shapes: type of each instruction of its computation, by name.

    >>> text = "f32[2,3]{1,0} f32[3,2]{0,1} f32[3,2]{1,0}".split()
    >>> turned = [Instruction("t", x, "transpose", "%x), dimensions={1,0}") for x in text[1:]]
    >>> [changes_order(each, {"x": text[0]}) for each in turned]
    [False, True]
    """
    if one.op not in ("copy", "transpose"):
        return False
    given, made = (hlo.arrays(shape) for shape in (shapes.get(one.operands()[0], ""), one.shape))
    if not given or not made:
        return False
    dims = list(range(len(made[0].dims)))
    if one.op == "transpose":
        found = re.search(r"\bdimensions=\{([\d,]*)\}", one.rest)
        dims = [int(dim) for dim in found[1].split(",")] if found and found[1] else dims
    before, after = given[0].order(), [dims[i] for i in made[0].order()]
    # Dims of size 1 may stand anywhere.
    sizes = given[0].dims
    return [i for i in before if sizes[i] > 1] != [i for i in after if sizes[i] > 1]


def _dtype(one: Instruction, shapes: dict[str, str]) -> str:
    # Of a fused matmul, XLA may write f32 where the operands have 16 bits.
    found = [array.dtype for x in one.operands()[:2] for array in hlo.arrays(shapes.get(x, ""))]
    return min(found, key=lambda dtype: hlo.Array(dtype, (8,), "").num_bytes(), default="f32")


def _convolution_flops(one: Instruction, shapes: dict[str, str]) -> float:
    """Return the operations of a convolution, which a matmul on a TPU is, too."""
    found = _LABELS.search(one.attributes())
    assert found is not None
    kernel = hlo.arrays(shapes[one.operands()[1]])[0].dims
    output = hlo.arrays(one.shape)[0].dims
    if re.search("[Bb]ackward", one.target()):  # computes an operand of the one that is meant
        kernel, output = (
            (output, kernel) if "Filter" in one.target() else (
                kernel, hlo.arrays(shapes[one.operands()[0]])[0].dims
            )
        )  # fmt: skip
    num_outputs = kernel[found[2].index("o")] or 1
    return 2 * math.prod(output) * math.prod(kernel) / num_outputs
