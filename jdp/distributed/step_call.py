"""A call of a step that may still be running, and the checks that its ranks report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(slots=True, eq=False)
class CalledProgram:
    """What calls keep of the program that they run, without its executables.

    Attributes:
      arguments: compares the arguments between processes; None if they are not compared.
      jaxprs: the latest programs of the step on its mesh, each with the names of its inputs.
      check: raises a RuntimeError for a failure during a call that JAX does not report.
      why_invalid: returns an error for invalid weights of ranks, given `weight` and
        `reports.weight`; None if they are valid.
      waits_in_xla: whether ranks may wait for each other in collectives of XLA's, in the program
        that was traced last.
    """

    arguments: Arguments | None
    jaxprs: Sequence[tuple[Any, list[str]]]
    check: Callable[[], None]
    why_invalid: Callable[[jax.Array, jax.Array], str | None]
    waits_in_xla: bool = False


class StepCall:
    """A call of a step that may still be running. Each step makes one, so it has slots.

    Attributes:
      spec: the step.
      number: number of the call among those of the step, from 1.
      program: what it runs.
      given: the arguments that are compared.
      reports: the reports of the ranks; None while the call is being dispatched.
      weight: the weight of the batch, `[]` float; -inf if one of `integer_sums` has overflowed. It
        is ready when the call has run.
      integer_sums: the author's lines of sums of integers over ranks.
    """

    __slots__ = ("given", "integer_sums", "number", "program", "reports", "spec", "weight")

    def __init__(
        self, spec: StepSpec, number: int, program: CalledProgram, given: Given | None = None
    ) -> None:
        self.spec, self.number, self.program, self.given = spec, number, program, given
        self.reports: RankReports | None = None
        self.weight: Any = None
        self.integer_sums: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"call {self.number} of `{self.spec.name}`"

    @property
    def arguments(self) -> Arguments | None:
        """What compares the arguments; None if they are not compared."""
        return self.program.arguments

    def is_checked(self) -> bool:
        """Whether its ranks report anything."""
        reports = self.reports
        if reports is not None and (reports.differs is not None or reports.weight is not None):
            return True
        return bool(self.integer_sums)

    def differs(self) -> bool:
        """Wait for the call, and return whether its arguments differ between processes."""
        # All ranks of a process got the same arguments.
        differs = None if self.reports is None else self.reports.differs
        return differs is not None and bool(np.asarray(differs.addressable_data(0)).any())

    def weight_error(self) -> str | None:
        """Wait for the call, and return the error for its weights, None if they are valid."""
        given = None if self.reports is None else self.reports.weight
        return None if given is None else self.program.why_invalid(self.weight, given)

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
