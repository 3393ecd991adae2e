"""The memory that a compiled step takes on one rank, by what it is for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jdp.inspect import liveness
from jdp.inspect.hlo import HloProgram
from jdp.inspect.state_parts import category


@dataclass(frozen=True)
class Memory:
    """Bytes of memory of one rank while the step runs.

    Attributes:
      parameters: of the state's parameters, this rank's part of them.
      optimizer_state: of the optimizer's state.
      other_state: of the rest of the state.
      batch: of this rank's rows.
      other_arguments: of further arguments.
      activations: of what the forward pass keeps, when the most temporary memory is taken.
      gradients: of gradients and what the backward pass needs, at that moment.
      temporaries: of the rest of the temporary memory that XLA allocates.
      outputs: of results that do not take the place of an argument.
      code: of the program itself.
      saved_by_donation: of results that take the place of a donated argument.
      limit: of the device, None if it is not known.
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
        """Bytes of all arguments."""
        state = self.parameters + self.optimizer_state + self.other_state
        return state + self.batch + self.other_arguments

    @property
    def temporary(self) -> int:
        """Bytes of what only lives while the step runs."""
        return self.activations + self.gradients + self.temporaries

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.arguments + self.temporary + self.outputs + self.code


def memory_of(
    compiled: Any, program: HloProgram, parts: Mapping[str, str], limit: int | None
) -> Memory:
    """Return the memory of a compiled step.

    Args:
      limit: bytes of memory of a device, None if it is not known.
    """
    allocated = compiled.memory_analysis()
    sizes = dict.fromkeys(
        ("parameters", "optimizer_state", "other_state", "batch", "other_arguments"), 0
    )
    for name, array in program.parameters.items():
        sizes[category(name, parts)] += array.padded_bytes()
    temporary = allocated.temp_size_in_bytes
    live = liveness.fullest(program)
    # XLA lets more arrays share memory than the order of operations shows.
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
    """Return the memory that XLA allocates for a compiled step on one rank."""
    found = compiled.memory_analysis()
    arrays = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return arrays + found.temp_size_in_bytes + found.generated_code_size_in_bytes
