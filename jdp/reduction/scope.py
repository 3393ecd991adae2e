"""`Scope`: the data axis, the rows and the weight of one trace of a step, and its records."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jdp.analysis.traced import TraceFindings


class Choices(NamedTuple):
    """How one program of a step differs from its others.

    Attributes:
      why_xla: why `collectives.auto` must leave its gradients to XLA; None where it may choose.
      uniform: paths of the gradients that the probe found to be the same on every rank; None in
        the probe.
      ready: path of a gradient -> its place in the order in which the probe found gradients to be
        ready; None where the order does not matter.
      late: in a program that is traced only to prove the step for another platform or for more
        ranks, whether `scan_layers` reduces late where its caller leaves that to the platform;
        None in a program that runs.
      beside_xla: whether collectives of XLA may run beside its native calls.
      in_place: whether new parameters take the memory of the old ones, which nothing needs later.
    """

    why_xla: str | None = None
    uniform: frozenset[str] | None = None
    ready: dict[str, int] | None = None
    late: bool | None = None
    beside_xla: bool = False
    in_place: bool = False


PLAIN = Choices()  # of a function that is traced by itself


class Reduction(NamedTuple):
    """How gradients were reduced, in which of JAX's traces, and how many bytes of them."""

    all_reduce: Callable[..., Any]
    trace: Any
    num_bytes: int


@dataclass(frozen=True)
class Scope:
    """One trace of a step, on one rank.

    Attributes:
      axis_name: the data axis of the step.
      num_rows: rows of the batch on this rank, None if the batch is empty.
      weight_fn: gives the weight of a batch, or None where every row counts the same.
      weight: `[]` float, of this rank's rows, NaN if it is invalid; None without `weight_fn`.
      raw_weight: `[]` float, the result of `weight_fn`.
      total: `[]` float, sum of `weight` over ranks; None where it was not taken yet.
      mesh: where the ranks are; None where a micro-batch's scope has only the axis.
      is_part: whether `weight` and `num_rows` are those of a micro-batch.
      why_no_gradient: why a sum over ranks that weigh differently has no transpose, or empty.
      weighed: names of the functions of jdp that gave ranks different weights.
      choices: how this program differs from others of the step.
      trace: JAX's trace in which the step begins.
      batch_trace: JAX's trace of the batch; None if that holds no tracer.
      integer_sums: whether a sum of integers over ranks has overflowed, and the author's line.
      split: paths of the gradients that go through `collectives.split`.
      marked: paths of the gradients that were marked for reduction in this trace.
      reductions: how gradients were reduced in this trace, one after the other.
      gathers: what the update of a sharded optimizer gathers whole, a text each.
      owned: which matrices that update computes on one rank each, a text for each kind.
      losses: losses that were computed in this trace, and not sent yet.
      loss_means: id of a loss -> itself and its mean over the ranks, see `loss_means`.
      shards: id of a whole array -> itself and this rank's shard of it, see `known_shards`.
      whole_owners: id of a parameter that stays whole -> itself and its optimizer, if that splits
        the gradients of others.
      means: id of a gradient that is the mean over ranks -> itself.
      averaged: paths of the gradients that were averaged where they were computed.
      groups: bytes of parameters that are gathered together, see `gathered_in_time`.
      loss_dtypes: id of a parameter -> itself, the dtype in which a loss sees it, and its
        optimizer, see `mixed_precision`.
      reduce_dtype: in which the optimizers of the state have gradients sent; None: in their own.
      updated: the dtypes in which losses see parameters that the step updates.
      reverse_only: functions of jdp that were traced without a forward-mode derivative.
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
    averaged: set[str] = field(default_factory=set)
    groups: set[int] = field(default_factory=set)
    loss_dtypes: dict[int, tuple[Any, Any, Any]] = field(default_factory=dict)
    reduce_dtype: Any = None
    updated: set[str] = field(default_factory=set)
    reverse_only: set[str] = field(default_factory=set)

    def found(self) -> TraceFindings:
        """Return the findings of the trace, once it has ended."""
        return TraceFindings(
            marked=frozenset(self.marked),
            averaged=frozenset(self.averaged),
            split=frozenset(self.split),
            integer_sums=tuple(dict.fromkeys(line for _, line in self.integer_sums)),
            weighed=frozenset(self.weighed),
            gradient_bytes=sum(reduction.num_bytes for reduction in self.reductions),
            gathers=tuple(self.gathers),
            owned=tuple(self.owned),
            gather_dtype=" and ".join(sorted(self.updated)),
            group_bytes=max(self.groups, default=0),
        )
