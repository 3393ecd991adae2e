"""The XLA custom calls of the native CPU library."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jdp.collectives import call_order
from jdp.collectives.cpu import runtime as cpu_runtime


def lowered(
    name: str,
    context: Any,
    args: Sequence[Any],
    *,
    in_place: Iterable[int],
    number: int,
    num_ranks: int,
    communicator: int,
    beside_xla: bool,
    **attributes: Any,
) -> Any:
    """Return the results of a custom call."""
    rule = jax.ffi.ffi_lowering(
        cpu_runtime.target(name, beside_xla=beside_xla),
        operand_output_aliases={i: i - call_order.TOKEN for i in in_place},
    )
    return rule(
        context,
        *args,
        num_ranks=np.int32(num_ranks),
        bucket=np.int32(number),
        communicator=np.int64(communicator),
        **attributes,
    )
