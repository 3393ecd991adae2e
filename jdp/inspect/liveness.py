"""Which arrays of a compiled step are in memory when most of it is taken."""

from collections import defaultdict
from typing import NamedTuple

from jdp.inspect import hlo
from jdp.inspect.hlo import HloProgram, Instruction

# These make no array, or name one that another operation has made.
_ALIASES = frozenset(
    "parameter constant tuple get-tuple-element bitcast while after-all partition-id replica-id "
    "opt-barrier conditional".split()
)


class Live(NamedTuple):
    """The bytes that are in memory at once, beside arguments and results.

    Attributes:
      activations: made in the forward pass, and kept for the backward pass.
      gradients: made in the backward pass, or summed over ranks.
      others: everything else.
    """

    activations: int = 0
    gradients: int = 0
    others: int = 0

    def __add__(self, other: tuple) -> "Live":
        return Live(*map(sum, zip(self, other, strict=True)))

    def total(self) -> int:
        """Return all bytes."""
        return sum(self)


def fullest(program: HloProgram) -> Live:
    """Return what is in memory when the most temporary bytes are, by the order of operations."""
    return _Liveness(program).fullest(program.entry)


class _Liveness:
    def __init__(self, program: HloProgram):
        self._program = program
        self._found: dict[str, Live] = {}

    def fullest(self, name: str) -> Live:
        """Return the fullest moment of a computation and of the loops in it."""
        if name not in self._found:
            self._found[name] = self._of(name)
        return self._found[name]

    def _of(self, name: str) -> Live:
        computation = self._program.computations[name]
        made_by = _owners(computation)
        last = {owner: i for i, one in enumerate(computation) for x in one.operands()
                for owner in made_by.get(x, ())}  # fmt: skip
        root = next((one for one in computation if one.is_root), computation[-1])
        leaving = set(made_by.get(root.name, ())) | {root.name}
        ends: dict[int, list[str]] = defaultdict(list)
        sizes: dict[str, Live] = {}
        now = most = Live()
        for i, one in enumerate(computation):
            inner = Live()
            if one.op in ("while", "conditional", "call"):
                called = [x for x in one.called() if x in self._program.computations]
                inner = max(map(self.fullest, called), key=Live.total, default=Live())
            freed = [name for name in ends.pop(i, []) if name in sizes]
            if not _is_alias(one) and one.name not in leaving:
                owners = [sizes[x] for name in one.operands() for x in made_by.get(name, ())
                          if x in sizes]  # fmt: skip
                size = _size(one, owners)
                # An operation may write over an operand that nothing reads after it.
                if not any(sizes[x].total() == size.total() for x in freed):
                    now += size
                else:
                    over = next(x for x in freed if sizes[x].total() == size.total())
                    now = Live(*(a - b + c for a, b, c in zip(now, sizes[over], size, strict=True)))
                    freed.remove(over)
                sizes[one.name] = size
                ends[last.get(one.name, i)].append(one.name)
            most = max(most, now + inner, key=Live.total)
            for x in freed:
                now = Live(*(a - b for a, b in zip(now, sizes[x], strict=True)))
        return most


def _size(one: Instruction, operands: list[Live]) -> Live:
    arrays = hlo.arrays(one.shape)
    if one.op.endswith("-start"):  # its type begins with its operands
        arrays = arrays[len(one.operands()) :]
    # S(1) is a TPU's vector memory.
    num_bytes = sum(array.padded_bytes() for array in arrays if "S(1)" not in array.layout)
    name = one.op_name()
    if not name and operands:  # made by XLA, as the packing of gradients is
        return Live(*(num_bytes if field else 0 for field in _one_of(operands[0])))
    if "transpose(" in name or one.op.startswith(hlo.COLLECTIVES) or "jdp_" in one.target():
        return Live(gradients=num_bytes)
    if "jvp(" in name:
        return Live(activations=num_bytes)
    return Live(others=num_bytes)


def _one_of(operand: Live) -> tuple[bool, bool, bool]:
    is_activation, is_gradient = operand.activations > 0, operand.gradients > 0
    return is_activation, is_gradient, not is_activation and not is_gradient


def _is_alias(one: Instruction) -> bool:
    is_in_place = "output_to_operand_aliasing=" in one.attributes()
    return one.op in _ALIASES or one.op.endswith("-done") or is_in_place


def _owners(computation: list[Instruction]) -> dict[str, tuple[str, ...]]:
    """Return for each name the operations that made the arrays that it stands for."""
    found: dict[str, tuple[str, ...]] = {}
    for one in computation:
        if _is_alias(one):
            found[one.name] = tuple(
                dict.fromkeys(owner for x in one.operands() for owner in found.get(x, ()))
            )
        else:
            found[one.name] = (one.name,)
    return found
