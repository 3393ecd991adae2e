"""Run a program of parameters that live as shards, and gather each where it is used.

A group of parameters is gathered while the group before it is used, and not earlier: its shards
wait for results of the group before that one. So at most two groups are in memory. The backward
pass gathers parameters again, and recomputes values that depend on parameters alone, so the forward
pass keeps neither. Source: Zhao et al. 2023, PyTorch FSDP, https://arxiv.org/abs/2304.11277.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdp.collectives import native_rows
from jdp.reduction import gather_schedule, scheduling_barrier, shard_registry, step_context
from jdp.reduction.flat_program import FlatOperation, FlatProgram, FlatValue
from jdp.reduction.rematerialization import find_derived, sources_of
from jdp.reduction.shard_registry import Shard


def first_floats(tree: Any) -> jax.Array | None:
    """Return the first array of floats, which a gather can be tied to; None if there is none."""
    arrays = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    return next((x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)), None)


class ScheduledEvaluator:
    """One run of a program.

    Args:
      program: the program.
      arguments: one for each of its inputs; for those in `shards` the whole array, which is used
        only where it is a result of the program.
      shards: position of an input -> the shard that it is gathered from.
      whole: positions of the other inputs that are parameters.
      capacity: bytes of whole parameters that are gathered together, > 0.
      after: an array that is there before the first gather, None if there is none.
      is_native: whether shards are gathered and scattered by native calls.
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
        self._uses = [sources_of(op.ins, self._derived, self._shards.keys()) for op in self._kept]
        self._members = gather_schedule.groups(self._uses, capacity)
        self._gathered: dict[FlatValue, jax.Array] = {}
        # Derived values, each with the gathered arrays that it was computed from.
        self._computed: dict[FlatValue, tuple[Any, list[jax.Array]]] = {}
        # The last results that a parameter was used for, and the arrays that a gather waits for.
        self._used_last = [] if after is None else [after]
        self._ties = self._used_last
        # Gradients that were sent since the last gather began, and in the group before.
        self._sent: list[jax.Array] = []
        self._sent_before: list[jax.Array] = []

    def run(
        self, to_send: Sequence[int], send: Callable[[list[int], list[Any]], list[Any]]
    ) -> list[Any]:
        """Return the outputs; those that are sent as `send` returns them."""
        outs = self._program.outs
        made_at = {v: i for i, op in enumerate(self._kept) for v in op.outs}
        ready = gather_schedule.by_readiness(
            [made_at.get(outs[i], -1) for i in to_send],
            [outs[i].num_bytes() for i in to_send],
            self._capacity,
        )
        sent: dict[int, Any] = {}

        def send_ready(operation: int) -> None:
            # As the tree has them: in the order in which they became ready, steps took longer.
            chosen = sorted(to_send[i] for i in ready.get(operation, ()))
            if not chosen:
                return
            grads = [self._values[outs[i]] for i in chosen]
            if not self._shards:
                if not self._is_native:
                    # No gather waits for them, and XLA would send all of it together, last.
                    grads = scheduling_barrier.after(grads, self._sent)
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
        """Return an output of the program, None while it is not computed; for `send` of `run`."""
        return self._values.get(self._program.outs[i])

    def _gather(self, members: Sequence[FlatValue]) -> None:
        """Gather a group once the group before the last one has been used."""
        parts = [self._shards[value] for value in members]
        ties = self._ties
        # A gradient has the time of one group to be sent in.
        self._ties = [*self._used_last, *self._sent_before]
        self._sent_before, self._sent = self._sent, []
        if self._is_native:
            scheduling_barrier.next_call_after(ties)
        else:
            values = scheduling_barrier.after([part.value for part in parts], ties)
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
        results = native_rows.exchanged(operation.eqn, operands, operation.calls, mesh)
        if results is None:
            results = operation.run(operands)
        self._values.update(zip(operation.outs, results, strict=True))
        if is_user:
            arrays = [x for x in results if jnp.issubdtype(x.dtype, jnp.floating)]
            self._used_last = arrays[:1] or self._used_last

    def _after_sent(self, operands: list[Any]) -> list[Any]:
        """Return operands that are not there before the group before the last one was sent.

        So no more than two groups of whole gradients are there at any time.
        """
        floats = [
            (x.size, i)
            for i, x in enumerate(operands)
            if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
        ]
        if not floats:
            return operands
        _, smallest = min(floats)
        (waits,) = scheduling_barrier.after([operands[smallest]], self._sent_before)
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
        """Whether a derived value was computed from the arrays that were gathered last."""
        if value not in self._computed:
            return False
        now = (self._gathered[source] for source in self._derived[value].sources)
        return all(old is new for old, new in zip(self._computed[value][1], now, strict=True))
