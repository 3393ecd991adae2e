"""An instruction's floating-point operations and bytes."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jdp.tools import hlo
from jdp.tools.hlo import Computation, Instruction

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
        """Count pairs of an output and a kernel element without padding or zeros of dilation."""
        found, length = 0, (num_inputs - 1) * self.lhs_dilate
        for k in range(self.size):
            # Output o reads position o * stride + shift; inputs are at multiples of lhs_dilate up
            # to length.
            shift = k * self.rhs_dilate - self.before
            first = max(0, -(shift // self.stride) if shift < 0 else 0)
            last = min(num_outputs - 1, (length - shift) // self.stride)
            period = self.lhs_dilate // math.gcd(self.lhs_dilate, self.stride)
            for o in range(first, min(first + period, last + 1)):
                if (o * self.stride + shift) % self.lhs_dilate == 0:
                    found += (last - o) // period + 1
                    break
        return found


def convolution_flops(one: Instruction, shapes: Mapping[str, str]) -> float:
    """Return a convolution's operations, 2 for each product."""
    labels = _LABELS.search(one.attributes())
    assert labels is not None
    lhs, rhs = (hlo.arrays(shapes[x])[0].dims for x in one.operands()[:2])
    output = hlo.arrays(one.shape)[0].dims
    # A library call for a convolution's operand has its labels and window.
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


class Kernel(NamedTuple):
    """A Pallas kernel, with its `cost_estimate`, and its results' dims."""

    name: str
    result: tuple[tuple[int, ...], ...]
    flops: float | None
    num_bytes: float | None


def kernel_of(eqn: Any) -> Kernel:
    """Return a `pallas_call` equation's kernel."""
    cost = eqn.params.get("cost_estimate")
    name = str(eqn.params.get("name") or "")
    result = tuple(tuple(out.aval.shape) for out in eqn.outvars)
    if cost is None:
        return Kernel(name, result, None, None)
    return Kernel(name, result, float(cost.flops), float(cost.bytes_accessed))


def find_kernel(one: Instruction, kernels: Sequence[Kernel]) -> Kernel | None:
    """Return a custom call's kernel, by name and shapes."""
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


# XLA runs some collectives on TPUs as a start, computations beside it, and a done: fusions with the
# same collective. The start and the done also contain a call.
_CHAIN = re.compile(r'\bchain_id="(\w+)"')
_START, _DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"


class ChainPart(NamedTuple):
    """A part of a collective; its parts share `chain`."""

    chain: str
    is_start: bool
    is_done: bool


def chain_part(inside: Sequence[Instruction]) -> ChainPart | None:
    """Return a fusion's part of a collective."""
    found = (_CHAIN.search(one.rest) for one in inside if one.op in hlo.COLLECTIVES)
    chain = next((each[1] for each in found if each), None)
    if chain is None:
        return None
    targets = {one.target() for one in inside if one.op == "custom-call"}
    return ChainPart(f"chain {chain}", _START in targets, _DONE in targets)


def chain_computation(inside: Computation) -> Computation:
    """Return a part's computation, without the collective and its operands."""
    passed = {one.name for one in inside if one.op in (*hlo.COLLECTIVES, "parameter")}
    found = Computation()
    for one in inside:
        if one.is_root:
            made = ", ".join(f"%{name}" for name in one.operands() if name not in passed)
            one = one._replace(rest=f"{made})")
        if one.op not in hlo.COLLECTIVES:
            found.append(one)
    return found


_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
# Of jdp, Python, random bits, sorts.
_WITHOUT_FLOPS = re.compile("^jdp_|callback|threefry|Sharding|AllocateBuffer|TopK|ConcatBitcast")
# These read a part of their first operand, or change it in place.
_SLICING = frozenset(("slice", "dynamic-slice", "gather"))
_IN_PLACE = frozenset(("dynamic-update-slice", "scatter"))
_CALLS_OF_ONE = ("all-reduce", "all-reduce-start", "reduce", "while", "conditional")


class Costs:
    """The costs of a program's instructions, see `hlo.parse`."""

    def __init__(self, computations: dict[str, Computation], kernels: Sequence[Kernel] = ()):
        self._computations = computations
        self._kernels = kernels
        self._flops: dict[str, dict[str, float]] = {}

    def inside(self, one: Instruction) -> Computation:
        """Return a fusion's computation, else an empty one."""
        called = [] if one.op in _CALLS_OF_ONE else one.called()
        return self._computations.get(called[0] if called else "", Computation())

    def part(self, one: Instruction) -> ChainPart | None:
        """Return a collective's part."""
        return chain_part(self.inside(one))

    def kernel(self, one: Instruction) -> Kernel | None:
        """Return the instruction's Pallas kernel."""
        return find_kernel(one, self._kernels)

    def uncounted(self, one: Instruction) -> str:
        """Describe the operations that `flops` does not count."""
        if kernel := self.kernel(one):
            if kernel.flops is not None:
                return ""
            name = kernel.name or "without a name"
            return (
                f"the operations of the Pallas kernel {name}; give its pallas_call a cost_estimate="
            )
        if one.op != "custom-call" or _WITHOUT_FLOPS.search(one.target()):
            return ""
        return f"the operations of {one.target()}, which a library computes"

    def flops(self, one: Instruction, shapes: dict[str, str]) -> dict[str, float]:
        """Return the operations of matmuls, by dtype."""
        if one.op == "dot":
            return {_dtype(one, shapes): hlo.dot_flops(one, shapes)}
        if _LABELS.search(one.attributes()):
            return {_dtype(one, shapes): convolution_flops(one, shapes)}
        if kernel := self.kernel(one):
            return {_dtype(one, shapes): kernel.flops} if kernel.flops else {}
        if len(one.operands()) > 1 and re.search("gemm|matmul|dot", one.target()):
            return {_dtype(one, shapes): _library_flops(one, shapes)}
        name = next(iter(one.called()), None)
        if name not in self._computations or one.op in _CALLS_OF_ONE:
            return {}
        if name not in self._flops:
            inner = self._computations[name]
            total: dict[str, float] = {}
            for each in inner:
                for dtype, flops in self.flops(each, inner.shapes).items():
                    total[dtype] = total.get(dtype, 0) + flops
            self._flops[name] = total
        return self._flops[name]

    def num_bytes(self, one: Instruction, shapes: dict[str, str]) -> int:
        """Count the bytes read and written: of a sliced array, the slice."""
        if (kernel := self.kernel(one)) and kernel.num_bytes is not None:
            return int(kernel.num_bytes)
        inner = self.inside(one) if one.op in ("fusion", "fusion-start", "call") else Computation()
        if not inner:
            return _bytes_alone(one, shapes)
        if chain_part(inner):
            inner = chain_computation(inner)
        read = 0
        for i, name in enumerate(one.operands()):
            enters = inner.parameters.get(i)
            whole = hlo.num_bytes(shapes.get(name, ""))
            read += whole if enters is None else _bytes_read(enters, inner)
        return read + _bytes_written(inner)


def _bytes_alone(one: Instruction, shapes: Mapping[str, str]) -> int:
    sizes = [hlo.num_bytes(shapes.get(x, "")) for x in one.operands()]
    if one.op in _SLICING:
        return 2 * hlo.num_bytes(one.shape) + sum(sizes[1:])
    if one.op in _IN_PLACE:
        # A scatter adds to what it changes.
        return sum(sizes[1:]) + (1 + (one.op == "scatter")) * _bytes_changed(one, shapes)
    result = hlo.num_bytes(one.shape)
    return sum(sizes) + (result - sum(sizes) if one.op.endswith("-start") else result)


def _bytes_read(one: Instruction, inner: Computation) -> int:
    """Of a slice, count the slice."""
    whole = hlo.num_bytes(one.shape)
    read = whole if one.is_root else 0
    for user in inner.users[one.name]:
        is_array = [i for i, name in enumerate(user.operands()) if name == one.name] == [0]
        if user.op == "bitcast":
            read += _bytes_read(user, inner)
        elif user.op in _SLICING and is_array:
            read += hlo.num_bytes(user.shape)
        elif user.op == "scatter" and is_array:
            read += _bytes_changed(user, inner.shapes)
        elif user.op != "dynamic-update-slice" or not is_array:
            read = whole
    return min(read, whole)


def _bytes_written(inner: Computation) -> int:
    """In place, count the change."""
    written, made = 0, [inner.root or inner[-1]]
    while made:
        one = made.pop()
        if one.op in ("tuple", "bitcast"):
            made += [inner.by_name[x] for x in one.operands()]
        else:
            is_changed = one.op in _IN_PLACE
            written += _bytes_changed(one, inner.shapes) if is_changed else hlo.num_bytes(one.shape)
    return written


def _bytes_changed(one: Instruction, shapes: Mapping[str, str]) -> int:
    operands = one.operands()
    if one.op == "dynamic-update-slice":
        return hlo.num_bytes(shapes[operands[1]])
    # A scatter takes arrays, indices, and as many updates as arrays.
    return sum(hlo.num_bytes(shapes[x]) for x in operands[len(operands) // 2 + 1 :])


def _dtype(one: Instruction, shapes: dict[str, str]) -> str:
    # XLA may write f32 for a fused matmul of 16-bit operands.
    found = [array.dtype for x in one.operands()[:2] for array in hlo.arrays(shapes.get(x, ""))]
    return min(found, key=lambda dtype: hlo.Array(dtype, (8,), "").num_bytes(), default="f32")


def _library_flops(one: Instruction, shapes: dict[str, str]) -> float:
    lhs, rhs = (hlo.arrays(shapes[x])[0] for x in one.operands()[:2])
    result = hlo.arrays(one.shape)[0].num_elements()
    if found := _CONTRACTED.search(one.rest):
        return 2.0 * result * math.prod(lhs.dims[int(i)] for i in re.findall(r"\d+", found[1]))
    # [m, k] [k, n] -> [m, n]: all sizes multiply to the square of m k n.
    return 2 * (lhs.num_elements() * rhs.num_elements() * result) ** 0.5
