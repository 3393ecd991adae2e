"""`RankProgram`: the author's function on a rank's rows, in a `shard_map`."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdp import axis, jax_compat, pytrees
from jdp.analysis.diagnostics import TraceFindings
from jdp.collectives import call_order
from jdp.distributed.checks import hashes
from jdp.distributed.in_flight import RankReports
from jdp.reduction import (
    fsdp_schedule,
    metrics,
    nonfinite,
    optimizer,
    rank_trace,
    slice_pushdown,
    step_context,
    step_metrics,
    wait_order,
)
from jdp.reduction.step_context import Choices, Scope
from jdp.step_spec import StepSpec
from jdp.training import error_hints, host_constants, parameters, shard_layout, virtual_ranks
from jdp.training.shard_layout import StateLayout, parted
from jdp.training.state import between_steps, within_step


class SplitInputs(NamedTuple):
    """The arguments sharded over the ranks; JAX names them so in its errors."""

    batch: Any
    state: list[list[Any]]  # arrays of `per_rank`, and shards by dim


class UniformOutputs(NamedTuple):
    """Outputs of a step that are equal on every rank, as the analysis proves."""

    state: list[jax.Array]  # without sharded arrays
    metrics: Any
    weight: jax.Array
    own_metrics: list[jax.Array]  # float scalars of this rank, before the average
    layout: StateLayout
    found: TraceFindings


class SplitOutputs(NamedTuple):
    """Outputs of a step that are sharded over the ranks."""

    rows: list[jax.Array]
    reports: RankReports
    state: list[list[jax.Array]]  # arrays of `per_rank`, and shards by dim


class RankOutputs(NamedTuple):
    """All outputs of a step, in the order in which `step_refusals` reads them."""

    uniform: Any  # UniformOutputs; in specs their prefixes
    split: Any  # SplitOutputs

    def state(self) -> Any:
        """Return the new state, as `pytrees.hold` does."""
        return self.uniform.layout.joined([self.uniform.state, *self.split.state])


@dataclass(frozen=True)
class RankProgram:
    """The part of a step that runs on each rank of a mesh.

    Attributes:
      mesh: further axes are left to the compiler.
      checksum_spec: sharding of the last argument, the checksums of the arguments; None if
        processes do not compare arguments.
      series: see `call_order.next_series`.
      floats: see `parameters.floats_of_equinox`.
    """

    spec: StepSpec
    mesh: Mesh
    checksum_spec: P | None
    series: str
    floats: frozenset[str]

    def mapped(
        self, layout: StateLayout, shard_axes: tuple[str, ...], num_args: int, choices: Choices
    ) -> Any:
        """Return the program `(uniform arrays of the state, SplitInputs, *rest) -> RankOutputs`."""
        on_rank: Any = functools.partial(self._on_rank, layout, shard_axes, choices)
        if choices.ready:
            on_rank = wait_order.update_between(on_rank)
        if layout.adds_whole_updates:
            on_rank = slice_pushdown.sliced_early(on_rank)
        axis_name = self.spec.axis_name
        rows: Any = P(axis_name)
        parts: Any = [*shard_layout.specs(axis_name, shard_axes or axis_name)]
        specs: list[Any] = [P(), SplitInputs(rows, parts), *(P() for _ in range(num_args - 2))]
        if self.checksum_spec is not None:
            specs[-1] = self.checksum_spec
        return jax.jit(
            jax_compat.shard_map(
                rank_trace.meshless(on_rank),
                mesh=virtual_ranks.traced_mesh(self.spec, self.mesh),
                in_specs=tuple(specs),
                out_specs=RankOutputs(P(), SplitOutputs(rows, rows, parts)),
                axis_names=set(axis_name),
                check_vma=False,  # JAX's types refuse right steps; the analysis proves instead.
            ),
            inline=jax_compat.INLINE_EARLY,
        )

    def _on_rank(
        self,
        layout: StateLayout,
        shard_axes: tuple[str, ...],
        choices: Choices,
        state: list[jax.Array],
        split: SplitInputs,
        *rest: Any,
    ) -> RankOutputs:
        spec = self.spec
        rest, given = (rest[:-1], rest[-1]) if self.checksum_spec is not None else (rest, ())
        in_parts = pytrees.restore(layout.joined([state, *split.state]))
        dtype = optimizer.reduce_dtype_of(in_parts)
        mesh = virtual_ranks.sending_mesh(spec, self.mesh)
        options: Any = {"mesh": mesh, "choices": choices, "reduce_dtype": dtype}
        entered = step_context.entered(spec.axis_name, split.batch, spec.weight_fn, **options)
        order = call_order.entered(
            why_not=choices.why_xla, series=self.series, beside_xla=choices.beside_xla
        )
        explained = self._explaining(layout, [state, *split.state], split.batch, rest)
        with explained, order, entered as scope, error_hints.refused_derivative(spec.name, scope):
            wholes = shard_layout.whole_state(split.state, layout, shard_axes)
            entered_state = layout.joined([state, *wholes])
            layout.remember_further(entered_state)
            given_state = pytrees.restore(entered_state)
            if spec.returns_state:
                given_state = within_step(given_state)
            shard_layout.claim_update(given_state, trains=spec.returns_state)
            nonfinite.expect_skips(scope, given_state)
            tree = jax.tree.structure(given_state)  # the author's function may change it
            positional, named = spec.by_keyword(rest)
            # Called here: JAX records the whole stack for each operation.
            call = spec.fn if spec.returns_state else self._measured
            with parameters.not_trained(self.floats, scope.marked, spec.argument(0)):
                returned = call(given_state, split.batch, *positional, **named)
            new_state, metrics = self._pair(returned, tree)
            metrics, rows = step_metrics.take_rows(metrics)
            step_metrics.require_numbers(metrics)
            own_metrics = step_metrics.float_scalars(metrics)
            metrics, differs = self._averaged(metrics, rest, given)
            new_state = between_steps(jax.tree.map(_strong, new_state))
            layout.remember_further(pytrees.hold(new_state))
            new_groups, new_layout, _ = parted(
                new_state, virtual_ranks.traced_mesh(spec, self.mesh), spec.axis_name
            )
            arrays, *parts = shard_layout.state_parts(new_groups, shard_axes)
            weight, skips = self._weight(scope), nonfinite.report(scope)
        raw_weight = None if scope.raw_weight is None else scope.raw_weight.reshape(1)
        uniform = UniformOutputs(arrays, metrics, weight, own_metrics, new_layout, scope.found())
        reports = RankReports(differs, raw_weight, skips)
        return RankOutputs(uniform, SplitOutputs(rows, reports, parts))

    def _averaged(self, metrics: Any, rest: Sequence[Any], given: Any) -> tuple[Any, Any]:
        """Return mean metrics, and whether arguments differ, a bool or None."""
        axis_name = self.spec.axis_name
        pieces = None if self.checksum_spec is None else hashes.checksum_pieces(rest, given)
        metrics, sums = step_metrics.averaged(metrics, axis_name, pieces)
        if pieces is None or sums is None:
            return metrics, None
        return metrics, hashes.checksums_differ(pieces, sums, axis.size(axis_name))

    def _measured(self, state: Any, batch: Any, *rest: Any, **named: Any) -> Any:

        def measured(state: Any) -> Any:
            before = parameters.batch_statistics(state)
            metrics = self.spec.fn(state, batch, *rest, **named)
            parameters.warn_of_statistics(self.spec, state, before)
            return metrics

        return fsdp_schedule.call_gathering(measured, state, batch)

    def _weight(self, scope: Scope) -> jax.Array:
        total = scope.total
        if total is None:
            total = jnp.float32((scope.num_rows or 0) * axis.size(self.spec.axis_name))
        return metrics.marked_sum(total, scope)

    @contextlib.contextmanager
    def _explaining(
        self, layout: StateLayout, lists: Sequence[Sequence[Any]], batch: Any, rest: Sequence[Any]
    ) -> Iterator[None]:
        """Raise jdp's error if the author's functions need a value; warn of draws."""
        try:
            with host_constants.warned_of_draws(self.spec):
                yield
        except TypeError as error:
            held = layout.joined(lists)
            paths, *parts = layout.parted(self.spec.paths(0, held))
            named = {"state": paths, "wholes": self.spec.paths(0, pytrees.restore(held))}
            named |= {f"split.state[{i}]": names for i, names in enumerate(parts)}
            text = error_hints.explained_value(error, self.spec, named)
            if text is None:
                num_ranks = axis.size(self.spec.axis_name)
                error_hints.add_hint(
                    error, self.spec, batch, rest, num_ranks, pytrees.restore(held)
                )
                raise
            raise TypeError(text) from error
        except Exception as error:  # also libraries', such as Flax's of shapes
            error_hints.add_hint(error, self.spec, batch, rest, axis.size(self.spec.axis_name))
            raise

    def _pair(self, returned: Any, tree: Any) -> tuple[Any, Any]:
        if not self.spec.returns_state:
            return None, returned
        is_tuple = isinstance(returned, tuple)
        if not is_tuple or len(returned) != 2:
            found = f"{len(returned)} values" if is_tuple else pytrees.kind_of(returned)
            raise TypeError(
                f"`{self.spec.name}` returned {found}, but a train step returns `(state, "
                "metrics)`. Write `return state, {}` if there are no metrics."
            )
        first, second = map(jax.tree.structure, returned)
        if first != tree == second:
            raise TypeError(
                f"`{self.spec.name}` returned `(metrics, state)`: only its second value has the "
                "structure of the state. Return the state first: `return state, metrics`."
            )
        return returned


def _strong(leaf: Any) -> Any:
    # A weak type in place of a strong one would compile the next call again.
    if isinstance(leaf, jax.Array) and leaf.weak_type:
        return jax.lax.convert_element_type(leaf, leaf.dtype)
    return leaf
