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
    """Return the results of a custom call.

    Args:
      name: name of the call, from `runtime`.
      context: context of the lowering.
      args: rank, group, scale, token and leaves.
      in_place: positions of the operands whose memory the results overwrite.
      number: number of the call, see `call_order.next_number`.
      num_ranks: number of ranks that make the call together.
      communicator: key of the memory that they share; 0 within one process.
      beside_xla: see `runtime.target`.
      attributes: further attributes of the call.
    """
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
