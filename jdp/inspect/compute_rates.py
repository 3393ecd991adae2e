"""Rates of computation while some ranks of a host compute at once. Needs no JAX."""

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Slowness:
    """How many times as long operations take in training steps as by themselves.

    Attributes:
      matmul: of matmuls, beside large ones.
      elementwise: of others that read arrays in order, beside a loop over one array.
      strided: of operations that compute while they read or write an array across its rows, beside
        the same.
      start: of the start of an operation, beside that of a tiny one that follows another.
      largest_error: the largest |predicted / measured - 1| of the steps that these are fitted to.
    """

    matmul: float
    elementwise: float
    strided: float
    start: float
    largest_error: float


@dataclasses.dataclass(frozen=True)
class ComputeRates:
    """What each of some devices computes per second, while all of them do and others idle.

    Attributes:
      num_ranks: number of these devices, all of one host.
      matmul_flops_per_s: dtype -> floating-point operations per second of large matmuls.
      memory_bytes_per_s: bytes read and written per second, where a large array is scaled.
      cached_bytes_per_s: the same for an array of which CACHED_BYTES are read and written.
      transcendentals_per_s: hyperbolic tangents per second.
      operation_start_s: seconds of an operation that does next to nothing.
      slowness: of training steps.
    """

    num_ranks: int
    matmul_flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    cached_bytes_per_s: float
    transcendentals_per_s: float
    operation_start_s: float
    slowness: Slowness

    def shared(self, share: float, alone: "ComputeRates") -> "ComputeRates":
        """Return the rates of ranks that have another share of cores and memory.

        Args:
          share: of what these ranks have, > 0.
        """
        both = self.matmul_flops_per_s.keys() & alone.matmul_flops_per_s.keys()
        flops = {
            dtype: min(share * self.matmul_flops_per_s[dtype], alone.matmul_flops_per_s[dtype])
            for dtype in both
        }
        speeds = "memory_bytes_per_s", "cached_bytes_per_s", "transcendentals_per_s"
        return dataclasses.replace(
            self,
            matmul_flops_per_s=flops,
            operation_start_s=max(self.operation_start_s / share, alone.operation_start_s),
            **{name: min(share * getattr(self, name), getattr(alone, name)) for name in speeds},
        )


def of_ranks(
    measured: Sequence[ComputeRates], num_ranks: int, *, share_cores: bool
) -> ComputeRates:
    """Return the rates of each of some ranks of a host, while all of them compute.

    They follow from those of the next larger number of ranks that was measured, or of the largest.

    Args:
      num_ranks: number of ranks, >= 1.
    """
    found = next((it for it in measured if it.num_ranks >= num_ranks), measured[-1])
    share = found.num_ranks / num_ranks if share_cores else 1.0
    return dataclasses.replace(found.shared(share, measured[0]), num_ranks=num_ranks)
