"""Run a program of sharded parameters, and gather each where it is used.

At most two groups of parameters are in memory: one is gathered while the one before is used. The
backward pass gathers again, and recomputes values of parameters alone. Source: Zhao et al. 2023,
PyTorch FSDP, https://arxiv.org/abs/2304.11277.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdp.analysis import jaxprs
from jdp.collectives import split_rows
from jdp.reduction import flat_program, gradients, shard_registry, step_context, wait_order
from jdp.reduction.flat_program import FlatOperation, FlatProgram, FlatValue
from jdp.reduction.shard_registry import Shard


def gather_groups(uses: Sequence[Sequence[FlatValue]], capacity: int) -> dict[int, list[FlatValue]]:
    """Return the groups to gather, with at most two in memory.

    A parameter used after the next group has begun is gathered again.

    >>> import jax
    >>> first, second, third = (FlatValue(jax.typeof(jax.numpy.ones(4))) for _ in range(3))
    >>> found = gather_groups([[first], [second], [first], [third], [first]], capacity=16)
    >>> [*found], found[4] == [first]
    ([0, 1, 3, 4], True)
    """
    found: dict[int, list[FlatValue]] = {}
    last: list[FlatValue] = []
    place: dict[FlatValue, int] = {}  # parameter -> its latest group
    used = 0
    for i, needed in enumerate(uses):
        missing = _missing(needed, place, len(found) - 1)
        if not missing:
            continue
        num_bytes = sum(value.num_bytes() for value in missing)
        if not found or used + num_bytes > capacity:
            missing = _missing(needed, place, len(found))
            num_bytes = sum(value.num_bytes() for value in missing)
            found[i] = last = []
            used = 0
        last.extend(missing)
        used += num_bytes
        place.update(dict.fromkeys(missing, len(found) - 1))
    return found


def _missing(
    needed: Sequence[FlatValue], place: dict[FlatValue, int], group: int
) -> list[FlatValue]:
    return [value for value in needed if place.get(value, -3) < group - 1]


def by_readiness(
    made_at: Sequence[int], sizes: Sequence[int], capacity: int
) -> dict[int, list[int]]:
    """Group results by readiness, up to `capacity` bytes: operation -> results sent after it.

    >>> by_readiness([5, 2, 9], [8, 8, 8], capacity=16)
    {5: [1, 0], 9: [2]}
    """
    filled: list[list[int]] = []
    used = 0
    for i in sorted(range(len(made_at)), key=lambda i: made_at[i]):
        if not filled or used + sizes[i] > capacity:
            filled.append([])
            used = 0
        filled[-1].append(i)
        used += sizes[i]
    sent: dict[int, list[int]] = {}
    for group in filled:
        sent.setdefault(made_at[group[-1]], []).extend(group)
    return sent


# Keep results this much smaller than their operands.
_REDUCTION = 16
# A recomputation would gather so many parameters or more.
_MAX_SOURCES = 4
# Costlier than reading their operands: recomputed once, never in a chain.
_HEAVY = frozenset(
    "cholesky conv_general_dilated dot_general eig eigh fft geqrf hessenberg householder_product "
    "lu lu_pivots_to_permutation qr ragged_dot ragged_dot_general schur sort svd triangular_solve "
    "tridiagonal tridiagonal_solve".split()
)
# jdp's primitives without communication.
_LOCAL = frozenset("jdp_local jdp_mark jdp_tied jdp_together jdp_weigh".split())


class Derived(NamedTuple):
    """How a value is computed from sharded parameters; a heavy one costs more than reading them."""

    operation: FlatOperation
    sources: tuple[FlatValue, ...]
    is_heavy: bool


def find_derived(
    program: FlatProgram, split: Collection[FlatValue], whole: Collection[FlatValue]
) -> dict[FlatValue, Derived]:
    """Return the values to recompute at their uses, in order."""
    derived: dict[FlatValue, Derived] = {}
    known = [c for c in program.constants if not isinstance(c.constant, jax.core.Tracer)]
    pure = {*split, *whole, *known}
    results = {*program.outs}
    for operation in program.operations:
        if not pure.issuperset(operation.ins) or not _is_local(operation.eqn):
            continue
        pure.update(operation.outs)
        found = _derived(operation, derived, split)
        if found is not None and results.isdisjoint(operation.outs):
            derived.update(dict.fromkeys(operation.outs, found))
    return derived


def _sources_of(
    values: Collection[FlatValue], derived: dict[FlatValue, Derived], split: Collection[FlatValue]
) -> tuple[FlatValue, ...]:
    found: dict[FlatValue, None] = {}
    for value in values:
        if value in split:
            found[value] = None
        elif value in derived:
            found.update(dict.fromkeys(derived[value].sources))
    return tuple(found)


def _derived(
    operation: FlatOperation, derived: dict[FlatValue, Derived], split: Collection[FlatValue]
) -> Derived | None:
    sources = _sources_of(operation.ins, derived, split)
    if not 0 < len(sources) <= _MAX_SOURCES:
        return None
    read = [value for value in operation.ins if value in split or value in derived]
    if sum(v.num_bytes() for v in operation.outs) * _REDUCTION <= max(v.num_bytes() for v in read):
        return None
    was_heavy = any(value in derived and derived[value].is_heavy for value in read)
    is_heavy = operation.eqn.primitive.name in _HEAVY or bool(jaxprs.bodies(operation.eqn))
    if was_heavy and is_heavy:
        return None
    return Derived(operation, sources, was_heavy or is_heavy)


def _is_local(eqn: Any) -> bool:
    """Whether an equation only computes on this rank, so may run twice."""
    inside = [inner for body in jaxprs.bodies(eqn) for inner in jaxprs.equations(body)]
    return not any(_acts(each) for each in (eqn, *inside))


def _acts(eqn: Any) -> bool:
    name = eqn.primitive.name
    is_foreign = name.startswith("jdp_") and name not in _LOCAL
    return bool(eqn.effects) or is_foreign or name.endswith(("_callback", "ffi_call"))


def first_floats(tree: Any) -> jax.Array | None:
    """Return the first float array, to tie a gather to."""
    arrays = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    return next((x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)), None)


class ScheduledEvaluator:
    """One run of a program.

    Args:
      arguments: one per input; whole arrays for `shards`, used only as results.
      shards: position of an input -> its shard.
      whole: positions of the other parameters.
      capacity: bytes of whole parameters gathered together.
      after: an array that exists before the first gather, or None.
    """

    def __init__(
        self,
        program: FlatProgram,
        arguments: Sequence[Any],
        *,
        shards: Mapping[int, Shard],
        whole: Sequence[int],
        capacity: int,
        after: jax.Array | None,
        is_native: bool,
    ):
        self._is_native = is_native
        self._program = program
        self._shards = {program.ins[i]: shard for i, shard in shards.items()}
        self._capacity = capacity
        self._values: dict[FlatValue, Any] = dict(zip(program.ins, arguments, strict=True))
        self._values.update((value, value.constant) for value in program.constants)
        others = [program.ins[i] for i in whole]
        self._derived = find_derived(program, self._shards.keys(), others)
        operations = program.operations
        self._kept = [op for op in operations if not any(v in self._derived for v in op.outs)]
        self._uses = [_sources_of(op.ins, self._derived, self._shards.keys()) for op in self._kept]
        self._members = gather_groups(self._uses, capacity)
        self._gathered: dict[FlatValue, jax.Array] = {}
        # with the gathered arrays they were computed from
        self._computed: dict[FlatValue, tuple[Any, list[jax.Array]]] = {}
        # Last results of parameters, and the arrays before a gather.
        self._used_last = [] if after is None else [after]
        self._ties = self._used_last
        # since the last gather, and in the group before
        self._sent: list[jax.Array] = []
        self._sent_before: list[jax.Array] = []

    def run(
        self, to_send: Sequence[int], send: Callable[[list[int], list[Any]], list[Any]]
    ) -> list[Any]:
        """Return the outputs; `send` replaces those `to_send`."""
        outs = self._program.outs
        made_at = {v: i for i, op in enumerate(self._kept) for v in op.outs}
        ready = by_readiness(
            [made_at.get(outs[i], -1) for i in to_send],
            [outs[i].num_bytes() for i in to_send],
            self._capacity,
        )
        sent: dict[int, Any] = {}

        def send_ready(operation: int) -> None:
            # In the order of readiness steps took longer.
            chosen = sorted(to_send[i] for i in ready.get(operation, ()))
            if not chosen:
                return
            grads = [self._values[outs[i]] for i in chosen]
            if not self._shards:
                if not self._is_native:
                    # XLA would send them all together at the end.
                    grads = wait_order.after(grads, self._sent)
                self._sent_before, self._sent = self._sent, []
            results = send(chosen, grads)
            sent.update(zip(chosen, results, strict=True))
            self._sent.extend(results)

        send_ready(-1)
        for i, operation in enumerate(self._kept):
            if i in self._members:
                self._gather(self._members[i])
            self._keep(operation, is_user=bool(self._uses[i]))
            send_ready(i)
        return [sent[i] if i in sent else self._values[out] for i, out in enumerate(outs)]

    def result(self, i: int) -> Any:
        """Return an output, None if not yet computed."""
        return self._values.get(self._program.outs[i])

    def _gather(self, members: Sequence[FlatValue]) -> None:
        """Gather a group after the use of the group before the last one."""
        parts = [self._shards[value] for value in members]
        ties = self._ties
        # A gradient is sent in one group's time.
        self._ties = [*self._used_last, *self._sent_before]
        self._sent_before, self._sent = self._sent, []
        if self._is_native:
            wait_order.next_call_after(ties)
        else:
            values = wait_order.after([part.value for part in parts], ties)
            parts = [part._replace(value=x) for part, x in zip(parts, values, strict=True)]
        if (scope := step_context.innermost()) is not None:
            scope.groups.add(self._capacity)
        wholes = shard_registry.gathered(parts, self._capacity)
        self._gathered.update(zip(members, wholes, strict=True))

    def _keep(self, operation: FlatOperation, *, is_user: bool) -> None:
        operands = [self._read(value) for value in operation.ins]
        if not self._shards and self._sent_before:
            operands = self._after_sent(operands)
        scope = step_context.innermost()
        mesh = None if scope is None else scope.mesh
        results = split_rows.exchanged(operation.eqn, operands, operation.calls, mesh)
        if results is None:
            results = operation.run(operands)
        self._values.update(zip(operation.outs, results, strict=True))
        if is_user:
            arrays = [x for x in results if jnp.issubdtype(x.dtype, jnp.floating)]
            self._used_last = arrays[:1] or self._used_last

    def _after_sent(self, operands: list[Any]) -> list[Any]:
        """Make operands wait for sends, with at most two groups of whole gradients in memory."""
        floats = [
            (x.size, i)
            for i, x in enumerate(operands)
            if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
        ]
        if not floats:
            return operands
        _, smallest = min(floats)
        (waits,) = wait_order.after([operands[smallest]], self._sent_before)
        self._sent_before = []
        return [waits if i == smallest else x for i, x in enumerate(operands)]

    def _read(self, value: FlatValue) -> Any:
        if value in self._gathered:
            return self._gathered[value]
        if value not in self._derived:
            return self._values[value]
        pending = [value]
        while pending:
            derived = self._derived[pending[-1]]
            if self._is_computed(pending[-1]):
                pending.pop()
                continue
            ins = derived.operation.ins
            missing = [v for v in ins if v in self._derived and not self._is_computed(v)]
            if missing:
                pending.extend(missing)
                continue
            results = derived.operation.run([self._there(v) for v in ins])
            sources = [self._gathered[source] for source in derived.sources]
            for out, result in zip(derived.operation.outs, results, strict=True):
                self._computed[out] = result, sources
        return self._computed[value][0]

    def _there(self, value: FlatValue) -> Any:
        if value in self._derived:
            return self._computed[value][0]
        return self._gathered[value] if value in self._gathered else self._values[value]

    def _is_computed(self, value: FlatValue) -> bool:
        if value not in self._computed:
            return False
        now = (self._gathered[source] for source in self._derived[value].sources)
        return all(old is new for old, new in zip(self._computed[value][1], now, strict=True))


def call_gathering(function: Callable[[Any], Any], state: Any, batch: Any) -> Any:
    """Return `function(state)`, with at most two gathered groups in memory."""
    leaves, tree = jax.tree.flatten(state)
    found = {i: shard_registry.known(leaf) for i, leaf in enumerate(leaves)}
    shards = {i: part for i, part in found.items() if part is not None and not part.is_kept}
    if not shards:
        return function(state)
    wholes = {i: leaves[i] for i in shards}
    own = {i: part.value for i, part in shards.items()}
    others: list[Any] = []
    trees: list[Any] = []

    # JAX names it and its argument in errors: see `error_hints`.
    def reading(wholes: dict[int, jax.Array], own: dict[int, jax.Array]) -> list[Any]:
        given = [*leaves]
        for i, part in shards.items():
            part = part._replace(value=own[i], owner=None)
            given[i] = shard_registry.remember(wholes[i], part)
        result, result_tree = jax.tree.flatten(function(tree.unflatten(given)))
        trees.append(result_tree)
        others.extend(None if isinstance(leaf, jax.Array) else (leaf,) for leaf in result)
        return [leaf for leaf in result if isinstance(leaf, jax.Array)]

    with shard_registry.forgotten_after():
        flat = flat_program.flatten(jax.make_jaxpr(reading)(wholes, own))
        evaluation = ScheduledEvaluator(
            flat,
            [*wholes.values(), *own.values()],
            shards=dict(enumerate(shards.values())),
            whole=[],
            capacity=_capacity(list(shards.values())),
            after=first_floats(batch),
            is_native=shard_registry.are_native(shards.values()),
        )
        arrays = iter(evaluation.run([], lambda chosen, values: values))
    return trees[0].unflatten([next(arrays) if it is None else it[0] for it in others])


def _capacity(found: list[Shard]) -> int:
    sizes = [part.owner.sharding.bucket_bytes for part in found if part.owner is not None]
    return min(sizes, default=gradients.BUCKET_BYTES)
