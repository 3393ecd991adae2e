"""A program's isomorphic, independent parts, such as an optimizer's for each matrix."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jdp.analysis import jaxprs
from jdp.reduction.flat_program import FlatOperation, FlatProgram, FlatValue
from jdp.reduction.partition.costs import multiplies_matrices


def _number_key(value: Any) -> Any:
    if isinstance(value, (bool, int, float, complex, np.generic)) or (
        isinstance(value, np.ndarray) and not value.shape
    ):
        return type(value), np.asarray(value).tobytes()
    return id(value)


def _type_key(aval: Any) -> Any:
    return tuple(getattr(aval, name, None) for name in ("shape", "dtype", "weak_type"))


def _equation_key(eqn: Any) -> Any:
    program = jaxprs.called(eqn) if eqn.primitive.name in jaxprs.CALLS else None
    if program is not None:  # how it is differentiated does not matter
        return eqn.primitive, _program_key(program)
    params = tuple((name, _param_key(value)) for name, value in sorted(eqn.params.items()))
    return eqn.primitive, params


def _param_key(value: Any) -> Any:
    if jaxprs.is_jaxpr(value):
        return _program_key(value)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_param_key, value))
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def _program_key(program: Any) -> Any:
    body = jaxprs.opened(program)
    place = {variable: i for i, variable in enumerate(body.invars)}
    key: list[Any] = [tuple(_type_key(variable.aval) for variable in body.invars)]
    for variable, value in jaxprs.constants(program):
        place[variable] = len(place)
        key.append(_number_key(value))

    def at(atom: Any) -> Any:
        if jaxprs.is_literal(atom):
            return _type_key(atom.aval), _number_key(atom.val)
        return place[atom]

    for eqn in body.eqns:
        key.append((_equation_key(eqn), tuple(map(at, eqn.invars))))
        for variable in eqn.outvars:
            place[variable] = len(place)
    return tuple(key), tuple(map(at, body.outvars))


class Subprogram(NamedTuple):
    """Operations that run together."""

    operations: list[FlatOperation]
    ins: list[FlatValue]
    outs: list[FlatValue]


class AlikeParts(NamedTuple):
    """Parts that differ only in their inputs."""

    parts: list[Subprogram]

    def operations(self) -> list[FlatOperation]:
        """Return all parts' operations, in order."""
        return [each for part in self.parts for each in part.operations]

    @property
    def ins(self) -> list[FlatValue]:
        """Their inputs."""
        return [value for part in self.parts for value in part.ins]

    @property
    def outs(self) -> list[FlatValue]:
        """The results read by other operations."""
        return [value for part in self.parts for value in part.outs]


def with_alike_parts(
    program: FlatProgram, closed: Collection[FlatValue]
) -> list[FlatOperation | AlikeParts]:
    """Return a program's operations, with isomorphic parts grouped."""
    alike: dict[Any, list[Subprogram]] = defaultdict(list)
    uses = Counter(value for operation in program.operations for value in operation.ins)
    uses.update(program.outs)
    numbers = {c: _number_key(c.constant) for c in program.constants}
    maker = {out: operation for operation in program.operations for out in operation.outs}
    for connected in _connected(program, closed):
        operations = _with_operands(connected, maker, uses, numbers, closed)
        key, part = _keyed(operations, uses, numbers)
        alike[key].append(part)
    if not alike:
        return [*program.operations]
    return _in_order(program.operations, [AlikeParts(parts) for parts in alike.values()])


def _connected(program: FlatProgram, closed: Collection[FlatValue]) -> list[list[FlatOperation]]:
    operations = program.operations
    chosen = _between_products(operations)
    maker = {out: i for i in chosen for out in operations[i].outs}
    first = {i: i for i in chosen}

    def root(i: int) -> int:
        while first[i] != i:
            first[i] = i = first[first[i]]
        return i

    for i in chosen:
        for value in operations[i].ins:
            if value in maker:
                first[root(i)] = root(maker[value])
    found: dict[int, list[FlatOperation]] = defaultdict(list)
    for i in chosen:
        found[root(i)].append(operations[i])
    return [each for each in found.values() if not any(_stays(op, closed) for op in each)]


def _between_products(operations: Sequence[FlatOperation]) -> list[int]:
    is_product = [multiplies_matrices(operation.eqn) for operation in operations]
    after: set[FlatValue] = set()
    before: set[FlatValue] = set()
    is_after = []
    for operation, product in zip(operations, is_product, strict=True):
        is_after.append(product or not after.isdisjoint(operation.ins))
        if is_after[-1]:
            after.update(operation.outs)
    chosen = []
    for i in range(len(operations) - 1, -1, -1):
        if is_product[i] or not before.isdisjoint(operations[i].outs):
            before.update(operations[i].ins)
            if is_after[i]:
                chosen.append(i)
    return chosen[::-1]


def _with_operands(
    operations: list[FlatOperation],
    maker: Mapping[FlatValue, FlatOperation],
    uses: Counter[FlatValue],
    numbers: Collection[FlatValue],
    closed: Collection[FlatValue],
) -> list[FlatOperation]:
    """Add operations that derive one operand from another, such as `x.T`."""
    made = {out for operation in operations for out in operation.outs}
    inside = Counter(value for operation in operations for value in operation.ins)
    ins = dict.fromkeys(value for value in inside if value not in made)
    pending = [*ins]
    found = []
    while pending:
        operation = maker.get(pending.pop())
        if operation is None or operation.outs[0] in made or _stays(operation, closed):
            continue
        is_read_outside = any(uses[out] > inside[out] for out in operation.outs)
        if is_read_outside or not all(v in ins or v in numbers for v in operation.ins):
            continue
        made.update(operation.outs)
        inside.update(operation.ins)
        found.append(operation)
        pending.extend(ins)
    return [*found[::-1], *operations]


def _stays(operation: FlatOperation, closed: Collection[FlatValue]) -> bool:
    return jaxprs.acts(operation.eqn) or any(out in closed for out in operation.outs)


def _keyed(
    operations: list[FlatOperation], uses: Counter[FlatValue], numbers: dict[FlatValue, Any]
) -> tuple[Any, Subprogram]:
    made: dict[FlatValue, int] = {}
    read: dict[FlatValue, Any] = {}
    key: list[Any] = []
    for operation in operations:
        places: list[Any] = []
        for value in operation.ins:
            if value in made:
                places.append(made[value])
                continue
            place = read.setdefault(value, len(read))
            places.append((place, _type_key(value.aval), numbers.get(value)))
        key.append((_equation_key(operation.eqn), tuple(places)))
        for out in operation.outs:
            made[out] = len(made)
    inside = Counter(value for operation in operations for value in operation.ins)
    outs = [value for value in made if uses[value] > inside[value]]
    key.append(tuple(made[value] for value in outs))
    return tuple(key), Subprogram(operations, [*read], outs)


def _in_order(
    operations: Sequence[FlatOperation], groups: Sequence[AlikeParts]
) -> list[FlatOperation | AlikeParts]:
    """Sort operations and groups topologically (Kahn 1962)."""
    inside = {id(op) for group in groups for op in group.operations()}
    items = [op for op in operations if id(op) not in inside]
    items = [*groups, *items]
    place = {id(op): i for i, op in enumerate(operations)}
    rank = [
        place[id(item.parts[0].operations[0] if isinstance(item, AlikeParts) else item)]
        for item in items
    ]
    maker = {out: i for i, item in enumerate(items) for out in item.outs}
    waits_for = [{maker[value] for value in item.ins if value in maker} for item in items]
    acting = [
        i
        for i, item in enumerate(items)
        if isinstance(item, FlatOperation) and jaxprs.acts(item.eqn)
    ]
    for before, after in zip(acting, acting[1:], strict=False):
        waits_for[after].add(before)
    readers: dict[int, list[int]] = defaultdict(list)
    for i, makers in enumerate(waits_for):
        for each in makers:
            readers[each].append(i)
    missing = Counter({i: len(makers) for i, makers in enumerate(waits_for)})
    ready = [(rank[i], i) for i in range(len(items)) if not missing[i]]
    heapq.heapify(ready)
    found = []
    while ready:
        _, i = heapq.heappop(ready)
        found.append(items[i])
        for reader in readers[i]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (rank[reader], reader))
    return found
