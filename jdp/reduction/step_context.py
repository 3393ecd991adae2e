"""The `Scope` of the traced step."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.sharding import Mesh

from jdp import axis, jax_compat
from jdp.analysis.diagnostics import TraceFindings
from jdp.analysis.marks import SHARE, WEIGHED, mark
from jdp.axis import AxisName, FurtherSpec
from jdp.reduction import row_weight


class Choices(NamedTuple):
    """How one program of a step differs from its others.

    Attributes:
      why_xla: why `collectives.auto` must use XLA, or None.
      uniform: paths of the uniform gradients; None in the probe, which finds them.
      ready: path of a gradient -> its position by readiness in the probe, or None.
      late: in a proof for another platform or more ranks: whether `scan_layers` reduces late by
        default; None in a program that runs.
      beside_xla: whether collectives of XLA may run beside its native calls.
    """

    why_xla: str | None = None
    uniform: frozenset[str] | None = None
    ready: dict[str, int] | None = None
    late: bool | None = None
    beside_xla: bool = False
    in_place: bool = False


PLAIN = Choices()  # of a function traced alone


class Reduction(NamedTuple):
    """A reduction of gradients."""

    all_reduce: Callable[..., Any]
    trace: Any
    num_bytes: int


@dataclass(frozen=True)
class Scope:
    """One trace of a step, on one rank.

    Attributes:
      num_rows: rows of the batch on this rank, None for an empty batch.
      weight: `[]` float, of this rank's rows, NaN if invalid; None without `weight_fn`.
      raw_weight: `[]` float, the result of `weight_fn`.
      total: `[]` float, sum of `weight` over ranks; None if not yet computed.
      mesh: None if a micro-batch's scope has only the axis.
      is_part: whether `weight` and `num_rows` are those of a micro-batch.
      why_no_gradient: why a sum over ranks of different weights has no transpose, or empty.
      weighed: names of jdp's functions that weight ranks.
      last_skips: whether a skipped update would be the last before an error, `[]` bool each.
      watched: whether gradients of this rank are nonfinite, `[]` float each, 0 if not asked for.
      skips: of each update the updates left to skip, its nonfinite gradients, their paths.
      integer_sums: whether an integer sum over ranks overflowed, and the author's line.
      split, marked, gathers, owned, averaged: as in `TraceFindings`.
      losses: not yet sent.
      loss_means: id of a loss -> itself and its mean over the ranks.
      shards: id of a whole array -> itself and this rank's shard.
      whole_owners: id of an unsharded parameter -> itself and its optimizer, if that splits others.
      means: id of a mean gradient -> itself.
      further: id of an array -> itself, and how the compiler splits it.
      groups: bytes of parameters gathered together.
      loss_dtypes: id of a parameter -> itself, its dtype in losses, and its optimizer.
      reduce_dtype: of the sent gradients; None: their own.
      reverse_only: jdp functions traced without a forward-mode derivative.
    """

    axis_name: tuple[str, ...]
    num_rows: int | None = None
    weight_fn: Callable[[Any], jax.Array] | None = None
    weight: jax.Array | None = None
    raw_weight: jax.Array | None = None
    total: jax.Array | None = None
    mesh: Mesh | None = None
    is_part: bool = False
    why_no_gradient: str = ""
    choices: Choices = PLAIN
    trace: Any = None
    batch_trace: Any = None
    last_skips: list[jax.Array] = field(default_factory=list)
    watched: list[jax.Array] = field(default_factory=list)
    skips: list[tuple[jax.Array, jax.Array, tuple[str, ...]]] = field(default_factory=list)
    integer_sums: list[tuple[jax.Array, str]] = field(default_factory=list)
    weighed: set[str] = field(default_factory=set)
    split: set[str] = field(default_factory=set)
    marked: set[str] = field(default_factory=set)
    reductions: list[Reduction] = field(default_factory=list)
    gathers: list[str] = field(default_factory=list)
    owned: list[str] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)
    loss_means: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    shards: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    whole_owners: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    means: dict[int, Any] = field(default_factory=dict)
    further: dict[int, tuple[Any, FurtherSpec]] = field(default_factory=dict)
    averaged: set[str] = field(default_factory=set)
    groups: set[int] = field(default_factory=set)
    loss_dtypes: dict[int, tuple[Any, Any, Any]] = field(default_factory=dict)
    reduce_dtype: Any = None
    updated: set[str] = field(default_factory=set)
    reverse_only: set[str] = field(default_factory=set)

    def is_here(self) -> bool:
        """Whether JAX traces the step itself, and no function in it."""
        return self.trace == jax.extend.core.get_opaque_trace_state()

    def found(self) -> TraceFindings:
        """Return the ended trace's findings."""
        return TraceFindings(
            marked=frozenset(self.marked),
            averaged=frozenset(self.averaged),
            split=frozenset(self.split),
            skips=tuple(paths for *_, paths in self.skips),
            integer_sums=tuple(dict.fromkeys(line for _, line in self.integer_sums)),
            weighed=frozenset(self.weighed),
            gradient_bytes=sum(reduction.num_bytes for reduction in self.reductions),
            gathers=tuple(self.gathers),
            owned=tuple(self.owned),
            gather_dtype=" and ".join(sorted(self.updated)),
            group_bytes=max(self.groups, default=0),
        )


_scope: ContextVar[Scope | None] = ContextVar("jdp_scope", default=None)

# JAX keeps its traces of jitted functions apart by value.
_trace = jax.make_user_context(0)
_numbers_of_traces = itertools.count(1)


def current(axis_name: AxisName) -> Scope | None:
    """Return the traced step's scope over these axes, in any order."""
    scope = _scope.get()
    wanted = set(axis.names(axis_name))
    return scope if scope is not None and set(scope.axis_name) == wanted else None


def around(axis_name: AxisName) -> Scope | None:
    """Return the traced step's scope, if it has one of these axes."""
    scope = _scope.get()
    if scope is None or set(scope.axis_name).isdisjoint(axis.names(axis_name)):
        return None
    return scope


def default_weight(axis_name: AxisName, caller: str) -> jax.Array | None:
    """Return the step's weight over these axes; None: equal weights."""
    step = around(axis_name)
    if step is None or step.weight is None:
        return None
    if set(step.axis_name) != set(axis.names(axis_name)):
        raise ValueError(
            f"{caller}(axis_name={axis_name!r}) does not reduce over the axes {step.axis_name} "
            "of the step, whose weight= is for a mean over all its ranks. A mean over other "
            f"ranks would weight rows differently. Write axis_name={step.axis_name!r}, or pass "
            f"the weight for these ranks: {caller}(..., weight=...)."
        )
    return step.weight


def innermost() -> Scope | None:
    """Return the traced step's scope, for any axis."""
    return _scope.get()


def platform() -> str:
    """Return the traced step's platform, otherwise JAX's default."""
    step = innermost()
    return axis.platform(None if step is None else step.mesh)


def share_of(weight: jax.Array, axis_name: AxisName) -> jax.Array:
    """Return this rank's share of the total weight: 0 for 0, NaN after an overflow."""
    scope = current(axis_name)
    if scope is not None and weight is scope.weight and scope.total is not None:
        total = scope.total  # Summed once, at the step's start.
    else:
        total = row_weight.total_weight(weight, axis_name)
    share = jnp.asarray(weight, float) / row_weight.divisor(total)
    return mark(share, kind=SHARE, path="", axes=axis.names(axis_name))


@contextlib.contextmanager
def entered(
    axis_name: AxisName,
    batch: Any,
    weight_fn: Callable[[Any], Any] | None,
    *,
    nested: bool = False,
    why_no_gradient: str = "",
    mesh: Mesh | None = None,
    choices: Choices = PLAIN,
    reduce_dtype: Any = None,
) -> Iterator[Scope]:
    """Trace the `with` body as a step on `batch`."""
    leaves = jax.tree.leaves(batch)
    # The marks distinguish a mask that only the weight reads.
    seen = jax.tree.map(lambda x: mark(x, kind=WEIGHED, path="", axes=()), batch)
    raw_weight = None if weight_fn is None else _weighed(weight_fn, seen, nested)
    weight = None if raw_weight is None else row_weight.valid(raw_weight)
    around = _scope.get()
    scope = Scope(
        axis_name=axis.names(axis_name),
        num_rows=jnp.shape(leaves[0])[0] if leaves else None,
        weight_fn=weight_fn,
        weight=weight,
        raw_weight=raw_weight,
        total=None if weight is None or nested else row_weight.total_weight(weight, axis_name),
        is_part=nested,
        why_no_gradient=why_no_gradient,
        choices=choices,
        trace=jax.extend.core.get_opaque_trace_state(),
        batch_trace=jax_compat.trace_of(leaves[0]) if leaves else None,
        reduce_dtype=reduce_dtype,
        **_shared_with(around, mesh),
    )
    if weight is not None:
        (around or scope).weighed.add("jdp.value_and_grad" if nested else "jdp.train_step")
    token = _scope.set(scope)
    try:
        with _traced_apart(scope):
            yield scope
    finally:
        _scope.reset(token)


def _weighed(weight_fn: Callable[[Any], Any], batch: Any, nested: bool) -> jax.Array:
    """An error for a micro-batch gets a note."""
    try:
        return row_weight.number(weight_fn(batch))
    except Exception as error:
        if nested:
            error.add_note(
                "jdp: weight= is also called with each micro-batch, which jdp.value_and_grad "
                "makes from the second argument of the loss, here of shapes "
                f"{jax.tree.map(jnp.shape, batch)}. Pass the whole batch of the step to the "
                "loss: jdp.value_and_grad(loss_fn, accumulate=k)(state.params, batch)."
            )
        raise


def _traced_apart(scope: Scope) -> contextlib.AbstractContextManager[Any]:
    """Return a context without functions traced with another weight or late reduction."""
    is_plain = scope.weight is None and scope.choices.late is None and scope.reduce_dtype is None
    return contextlib.nullcontext() if is_plain else _trace(next(_numbers_of_traces))


def _shared_with(around: Scope | None, mesh: Mesh | None) -> dict[str, Any]:
    if around is None:
        return {"mesh": mesh}
    names = (
        "shards", "whole_owners", "means", "averaged", "groups", "loss_dtypes", "updated",
        "reverse_only",
    )  # fmt: skip
    shared = {name: getattr(around, name) for name in names}
    if around.shards:
        shared["marked"] = around.marked
        mesh = around.mesh if mesh is None else mesh
    return {"mesh": mesh, **shared}
