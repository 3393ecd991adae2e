"""A compiled step's memory on one rank, by purpose."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jdp.tools import hlo
from jdp.tools.hlo import Computation, HloProgram, Instruction

_BY_NAME = (("opt_state", "optimizer_state"), ("params", "parameters"))


def state_parts(state: Any) -> dict[str, str]:
    """Return each state leaf's part if its type shows it.

    >>> import optax
    >>> params = {"w": jax.numpy.zeros(2)}
    >>> state_parts((params, optax.sgd(0.1, momentum=0.9).init(params)))
    {"[1][0].trace['w']": 'optimizer_state'}
    """
    found: dict[str, str] = {}
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=_has_part):
        if part := _state_part(node):
            for inner, _ in jax.tree_util.tree_leaves_with_path(node):
                found[jax.tree_util.keystr((*path, *inner))] = part
    return found


def category(name: str, parts: Mapping[str, str]) -> str:
    """Return an argument's purpose.

    >>> names = [f"args[0]{path}" for path in (".params['w']", ".params_ema", "['params'].w")]
    >>> [category(name, {}) for name in names]
    ['parameters', 'other_state', 'parameters']
    """
    argument, _, path = name.partition("]")
    if argument == "args[1":
        return "batch"
    if argument != "args[0":
        return "other_arguments"
    for part, found in _BY_NAME:
        if re.search(rf"\.{part}\b|\['{part}'\]", path):
            return found
    return parts.get(path, "other_state")


def _has_part(node: Any) -> bool:
    return _state_part(node) is not None


def _state_part(node: Any) -> str | None:
    for kind in type(node).__mro__:
        if kind.__module__.startswith("optax"):
            return "optimizer_state"
        if kind.__module__.startswith("flax.nnx"):
            if kind.__name__ == "Param":
                return "parameters"
            if kind.__name__ == "OptState":
                return "optimizer_state"
    return None


# These make no array, or name another operation's.
_ALIASES = frozenset(
    "constant tuple get-tuple-element bitcast while after-all partition-id replica-id "
    "opt-barrier".split()
)
# These read nothing; their users do.
_NAMES = frozenset(("tuple", "get-tuple-element", "bitcast", "opt-barrier"))
_IN_PLACE = re.compile(r"\{(\d*)[^{}]*\}: \((\d+), \{(\d*)[^{}]*\}")  # {output}: (operand, {part})


class MadeArray(NamedTuple):
    """An operation's result, by number."""

    name: str
    index: int


# The arrays in each element of a tuple. An array is one element.
Parts = list[tuple[MadeArray, ...]]


def parts_of(computation: Computation) -> dict[str, Parts]:
    """Return each name's arrays."""
    found: dict[str, Parts] = {}
    for one in computation:
        found[one.name] = _parts(one, [found.get(x, []) for x in one.operands()])
    return found


def joined(parts: Parts) -> tuple[MadeArray, ...]:
    """Return a tuple's arrays."""
    return tuple(dict.fromkeys(made for part in parts for made in part))


def makes(one: Instruction, parts: dict[str, Parts]) -> list[MadeArray]:
    """Return the arrays made by an operation."""
    return [made for made in joined(parts[one.name]) if made.name == one.name]


def reads(one: Instruction, parts: dict[str, Parts]) -> list[MadeArray]:
    """Return the arrays taken by an operation."""
    return [made for x in one.operands() for made in joined(parts.get(x, []))]


def _parts(one: Instruction, operands: list[Parts]) -> Parts:
    if one.op == "tuple":
        return [joined(x) for x in operands]
    if one.op == "get-tuple-element":
        return [_part(operands[0], one.element())]
    if one.op.endswith("-done"):  # the start's operands come first, but of this one
        return operands[0] if one.op == "all-reduce-done" else operands[0][1:]
    if one.op in _ALIASES:
        return operands[0] if operands else []
    results: Parts = [(MadeArray(one.name, i),) for i in range(len(hlo.elements(one.shape)))]
    if one.op.endswith("-start") and one.op != "all-reduce-start":
        # A copy's type begins with its result, others' types with their operands.
        result = MadeArray(one.name, 0 if one.op == "copy-start" else 1)
        return [joined([joined(x) for x in operands]), (result,)]
    for output, operand, part in _IN_PLACE.findall(one.attributes()):
        results[int(output or 0)] = _part(operands[int(operand)], int(part or 0))
    return results


def _part(parts: Parts, i: int) -> tuple[MadeArray, ...]:
    return parts[i] if i < len(parts) else joined(parts)


class _Live(NamedTuple):
    """Bytes in memory at once, beside arguments and results; gradients with their sums."""

    activations: int = 0
    gradients: int = 0
    others: int = 0

    def __add__(self, other: tuple) -> "_Live":
        return _Live(*map(sum, zip(self, other, strict=True)))

    def __sub__(self, other: tuple) -> "_Live":
        return _Live(*(a - b for a, b in zip(self, other, strict=True)))

    def total(self) -> int:
        return sum(self)


def fullest(program: HloProgram) -> _Live:
    """Return the memory at the peak of temporary bytes, by operation order."""
    return _Liveness(program).fullest(program.entry)


class _KindOfArray(NamedTuple):
    num_elements: int
    num_bytes: int
    kind: str

    def live(self) -> _Live:
        return _Live(**{self.kind: self.num_bytes})


class _Liveness:
    def __init__(self, program: HloProgram):
        self._program = program
        self._found: dict[str, _Live] = {}

    def fullest(self, name: str) -> _Live:
        if name not in self._found:
            self._found[name] = self._of(name)
        return self._found[name]

    def _of(self, name: str) -> _Live:
        computation = self._program.computations[name]
        parts, arrays = parts_of(computation), self._arrays(name)
        leaving = set(joined(parts[_result(computation)]))
        last = {made: i for i, one in enumerate(computation) if one.op not in _NAMES
                for made in reads(one, parts)}  # fmt: skip
        ends: dict[int, list[MadeArray]] = defaultdict(list)
        now = most = _Live()
        for i, one in enumerate(computation):
            inner = _Live()
            if one.op in ("while", "conditional", "call"):
                called = [x for x in one.called() if x in self._program.computations]
                inner = max(map(self.fullest, called), key=_Live.total, default=_Live())
            freed, unread = ends.pop(i, []), []
            for made in makes(one, parts):
                if made in leaving or one.op == "parameter":
                    continue
                now += arrays[made].live()
                # An operation may overwrite an operand at its last use.
                size = arrays[made].num_bytes
                over = next((x for x in freed if arrays[x].num_bytes == size), None)
                if over is not None:
                    now -= arrays[over].live()
                    freed.remove(over)
                (ends[last[made]] if made in last else unread).append(made)
            most = max(most, now + inner, key=_Live.total)
            for made in freed + unread:
                now -= arrays[made].live()
        return most

    def _arrays(self, name: str) -> dict[MadeArray, _KindOfArray]:
        """Without those carried into a loop."""
        computation = self._program.computations[name]
        parts = parts_of(computation)
        found: dict[MadeArray, _KindOfArray] = {}
        for one in computation:
            if one.op == "parameter" and name != self._program.entry:
                continue
            read = [found[made] for made in reads(one, parts) if made in found]
            types = hlo.elements(one.shape)
            for made in makes(one, parts):
                found[made] = _array(one, types[made.index], read)
            if one.op == "while":
                for part, kind in zip(parts[one.name], self._written(one), strict=False):
                    for made in part if kind else ():
                        if made in found:
                            found[made] = found[made]._replace(kind=kind)
        return found

    def _written(self, loop: Instruction) -> list[str]:
        """ "" for unchanged arrays."""
        body = loop.computation("body")
        computation = self._program.computations[body]
        arrays, parts = self._arrays(body), parts_of(computation)
        return [
            next((arrays[made].kind for made in part if made in arrays), "")
            for part in parts[_result(computation)]
        ]


def _result(computation: Computation) -> str:
    assert computation.root is not None
    return computation.root.name


def _array(one: Instruction, shape: str, read: list[_KindOfArray]) -> _KindOfArray:
    # S(1) is a TPU's vector memory.
    sizes = (x.padded_bytes() for x in hlo.arrays(shape) if "S(1)" not in x.layout)
    num_elements = hlo.num_elements(shape)
    return _KindOfArray(num_elements, sum(sizes), _kind(one, num_elements, read))


def _kind(one: Instruction, num_elements: int, read: list[_KindOfArray]) -> str:
    name = one.op_name()
    is_sent = one.op.startswith(hlo.COLLECTIVES) or "jdp_" in one.target()
    # Gathers are of parameters, or of forward values.
    is_gathered = one.op.startswith("all-gather") or "all_gather" in one.target()
    if "transpose(" in name or is_sent and not is_gathered:
        return "gradients"
    if not name and read:  # made by XLA, as the packing of gradients
        return read[0].kind
    if "jvp(" in name:
        return "activations"
    # A sum over micro-batches, unlike an update, does not read parameters.
    large = {x.kind for x in read if x.num_elements >= num_elements}
    return "gradients" if "gradients" in large and "others" not in large else "others"


@dataclass(frozen=True)
class Memory:
    """Bytes of memory of one rank while the step runs.

    Attributes:
      activations: kept by the forward pass, at the peak of temporary memory.
      gradients: of gradients and the backward pass, at that peak.
      temporaries: the rest of XLA's temporary memory.
      outputs: results that do not overwrite an argument.
      saved_by_donation: results that overwrite a donated argument.
      limit: of the device, or None if unknown.
    """

    parameters: int
    optimizer_state: int
    other_state: int
    batch: int
    other_arguments: int
    activations: int
    gradients: int
    temporaries: int
    outputs: int
    code: int
    saved_by_donation: int
    limit: int | None = None

    @property
    def arguments(self) -> int:
        """All arguments' bytes."""
        state = self.parameters + self.optimizer_state + self.other_state
        return state + self.batch + self.other_arguments

    @property
    def temporary(self) -> int:
        """Temporary values' bytes."""
        return self.activations + self.gradients + self.temporaries

    @property
    def total(self) -> int:
        """All bytes."""
        return self.arguments + self.temporary + self.outputs + self.code


def memory_of(
    compiled: Any, program: HloProgram, parts: Mapping[str, str], limit: int | None
) -> Memory:
    """Return a step's memory; `limit` is a device's, or None."""
    allocated = compiled.memory_analysis()
    sizes = dict.fromkeys(
        ("parameters", "optimizer_state", "other_state", "batch", "other_arguments"), 0
    )
    for name, array in program.parameters.items():
        sizes[category(name, parts)] += array.padded_bytes()
    temporary = allocated.temp_size_in_bytes
    live = fullest(program)
    # XLA lets more arrays share memory than the operations' order shows.
    share = min(1.0, temporary / max(1, live.activations + live.gradients))
    activations, gradients = int(share * live.activations), int(share * live.gradients)
    return Memory(
        **sizes,
        activations=activations,
        gradients=gradients,
        temporaries=temporary - activations - gradients,
        outputs=allocated.output_size_in_bytes - allocated.alias_size_in_bytes,
        code=allocated.generated_code_size_in_bytes,
        saved_by_donation=allocated.alias_size_in_bytes,
        limit=limit,
    )


def allocated_bytes(compiled: Any) -> int:
    """Return XLA's bytes for a compiled step on one rank."""
    found = compiled.memory_analysis()
    arrays = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return arrays + found.temp_size_in_bytes + found.generated_code_size_in_bytes
