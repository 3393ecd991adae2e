"""A call of a step that may still be running, and the checks that its ranks report."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp import pytrees
from jdp.distributed.checks.arguments import Arguments, Given
from jdp.step_spec import StepSpec


class RankReports(NamedTuple):
    """One value of each rank, split over the ranks.

    Attributes:
      differs: whether the arguments differ between ranks, `[ranks]` bool; None if the step does
        not compare them.
      weight: the result of `weight_fn`, `[ranks]` float; None without a `weight_fn`.
    """

    differs: jax.Array | None
    weight: jax.Array | None


class StepCall(NamedTuple):
    """A call of a step that may still be running.

    Attributes:
      spec: the step.
      number: number of the call among those of the step, from 1.
      arguments: compares the arguments between processes; None if they are not compared.
      given: the arguments that are compared.
      check: raises a RuntimeError for a failure during the call that JAX does not report.
      why_invalid: returns an error for invalid weights of ranks, given `weight` and
        `reports.weight`; None if they are valid.
      jaxprs: the latest programs of the step on its mesh, each with the names of its inputs.
      waits_in_xla: whether its ranks may wait for each other in collectives of XLA's.
      reports: the reports of the ranks; None while the call is being dispatched.
      weight: the weight of the batch, `[]` float; -inf if one of `integer_sums` has overflowed. It
        is ready when the call has run.
      integer_sums: the author's lines of sums of integers over ranks.
    """

    spec: StepSpec
    number: int
    arguments: Arguments | None
    given: Given | None
    check: Callable[[], None]
    why_invalid: Callable[[jax.Array, jax.Array], str | None]
    jaxprs: Sequence[tuple[Any, list[str]]] = ()
    waits_in_xla: bool = False
    reports: RankReports | None = None
    weight: Any = None
    integer_sums: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"call {self.number} of `{self.spec.name}`"

    def dispatched(
        self,
        weight: Any,
        reports: RankReports,
        integer_sums: tuple[str, ...],
        waits_in_xla: bool,
    ) -> "StepCall":
        """Return the call with its results, see the fields."""
        return self._replace(
            weight=weight,
            reports=reports,
            integer_sums=integer_sums,
            waits_in_xla=waits_in_xla,
        )

    def is_checked(self) -> bool:
        """Whether its ranks report anything."""
        reports = (*(self.reports or ()), self.integer_sums or None)
        return any(report is not None for report in reports)

    def differs(self) -> bool:
        """Wait for the call, and return whether its arguments differ between processes."""
        # All ranks of a process got the same arguments.
        differs = None if self.reports is None else self.reports.differs
        return differs is not None and bool(np.asarray(differs.addressable_data(0)).any())

    def weight_error(self) -> str | None:
        """Wait for the call, and return the error for its weights, None if they are valid."""
        given = None if self.reports is None else self.reports.weight
        return None if given is None else self.why_invalid(self.weight, given)

    def overflow(self) -> str | None:
        """Wait for the call, and return the lines of sums of which one overflowed, or None."""
        if not self.integer_sums or not np.isneginf(self.weight.addressable_data(0)):
            return None
        return " or ".join(line or "a line of a library" for line in self.integer_sums)

    def is_deleted(self) -> bool:
        """Whether the arrays that are needed to check the call were deleted."""
        return any(map(pytrees.is_deleted, (self.weight, *(self.reports or ()))))

    def difference(self, timeout_s: float) -> str | None:
        """Return a sentence about the argument that differs between processes, None if unknown."""
        if self.arguments is None or self.given is None:
            return None
        if not (self.given.small or self.given.large):
            return None
        return self.arguments.difference(self.given, timeout_s=timeout_s)
