"""Cases of an all-reduce, for the programs of this folder that run them (see cases.h).

    python ring_cases.py [--few] ./virtual_ranks

runs all cases (with `--few` a selection, for tools that slow a program down) and prints the number
that equal the model.
"""

import dataclasses
import itertools
import struct
import subprocess
import sys
from typing import NamedTuple

import ml_dtypes
import numpy as np
import ring_model

# As in arguments.h.
DTYPES = ("float32", "float64", "bfloat16", "float16", "uint8", "uint16", "uint32", "uint64")
ALGORITHMS = ("ring", "one_shot", "two_shot")
LATE, ABORTED, MISMATCHED = 1, 2, 3
REPORT = struct.Struct("=IIiiiiiIiiIiI")

RANKS = (2, 3, 4, 5, 8)
PRIMES = (997, 10007)


@dataclasses.dataclass(frozen=True)
class Case:
    """One all-reduce; the fields are those of CaseHeader."""

    num_ranks: int
    sizes: tuple[int, ...]
    dtype: str = "float32"
    algorithm: str = "ring"
    num_channels: int = 2
    slot_bytes: int = 256
    exchange_bytes: int = 64
    num_calls: int = 1
    num_threads: int = 2
    in_place: bool = False
    missing_rank: int = -1
    first_number: int = 0
    seed: int = 0
    shift_bytes: int = 0
    timeout_ms: int = 60_000
    timeout_rank: int = -1
    abort_rank: int = -1
    odd_rank: int = -1
    odd_call: int = 0

    @property
    def scale(self):
        return 1 / self.num_ranks

    def leaves(self):
        """Return [rank][leaf], the same for every call."""
        random = np.random.default_rng(len(self.sizes) + self.num_ranks)
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        if dtype.kind == "u":
            draw = lambda size: random.integers(0, 2**8, size).astype(dtype)  # noqa: E731
        else:
            draw = lambda size: random.standard_normal(size).astype(dtype)  # noqa: E731
        return [[draw(size) for size in self.sizes] for _ in range(self.num_ranks)]

    def pack(self):
        header = struct.pack(
            "=iiqqiiiiiiiiIIiiiiiid",
            *(self.num_ranks, self.num_channels, self.slot_bytes, self.exchange_bytes),
            *(DTYPES.index(self.dtype), ALGORITHMS.index(self.algorithm), self.num_channels),
            *(self.num_calls, self.num_threads, len(self.sizes), self.in_place, self.missing_rank),
            *(self.first_number, self.seed, self.shift_bytes, self.timeout_ms),
            *(self.timeout_rank, self.abort_rank, self.odd_rank, self.odd_call, self.scale),
        )
        sizes = np.array(self.sizes, np.int64).tobytes()
        leaves = (leaf.tobytes() for of_rank in self.leaves() for leaf in of_rank)
        return b"".join([header, sizes, *leaves])


class Report(NamedTuple):
    """As in arguments.h."""

    outcome: int
    call: int
    bucket: int
    rank: int
    gave_up: int
    peer: int
    step: int
    why: int
    num_vectors: int
    sent_bucket: int
    sent_call: int
    sent_vectors: int
    abort: int


def run(command, cases, timeout_s):
    """Return [case][rank]: pairs of a Report and the leaves after the last call."""
    packed = b"".join(case.pack() for case in cases)
    done = subprocess.run(command, input=packed, capture_output=True, timeout=timeout_s)
    if done.returncode:
        raise RuntimeError(
            f"{command} exited with {done.returncode}:\n{done.stderr.decode()[-4000:]}"
        )
    output = memoryview(done.stdout)
    results = []
    for case in cases:
        ranks = []
        dtype = case.leaves()[0][0].dtype
        for _ in range(case.num_ranks):
            report, output = Report(*REPORT.unpack(output[: REPORT.size])), output[REPORT.size :]
            leaves = []
            for size in case.sizes:
                num_bytes = size * dtype.itemsize
                leaves.append(np.frombuffer(output[:num_bytes], dtype))
                output = output[num_bytes:]
            ranks.append((report, leaves))
        results.append(ranks)
    return results


def difference(case, result):
    """Return the error in the result of a case in which no rank is missing, or None."""
    expected = ring_model.all_reduce(
        case.leaves(),
        case.scale,
        algorithm=case.algorithm,
        num_channels=case.num_channels,
        slot_bytes=case.slot_bytes,
    )
    for rank, (report, leaves) in enumerate(result):
        if report.outcome:
            return f"{case}: rank {rank} reports {report}"
        for i, (got, want) in enumerate(zip(leaves, expected, strict=True)):
            if got.tobytes() != want.tobytes():
                bits = f"u{got.dtype.itemsize}"
                wrong = np.flatnonzero(got.view(bits) != want.view(bits))
                return f"{case}: rank {rank}, leaf {i}: {wrong.size} differ, first {wrong[:8]}"
    return None


def shapes(num_ranks):
    """Return sizes at the edges: below a vector, a chunk and a message; partial vectors; empty
    leaves."""
    return ((1,), (15,), (16,), (17,), PRIMES, (0, 3, 0, 16 * num_ranks, 1, 5))


def small_cases():
    """Each algorithm and dtype at the edges."""
    for num_ranks, algorithm in itertools.product((1, *RANKS), ALGORITHMS):
        for sizes in shapes(num_ranks):
            yield Case(num_ranks, sizes, algorithm=algorithm)
        for dtype in DTYPES[1:]:
            yield Case(num_ranks, (0, 3, 0, 97, 1, 5), dtype, algorithm)
        yield Case(num_ranks, PRIMES, "bfloat16", algorithm, in_place=True)
        yield Case(num_ranks, PRIMES, "bfloat16", algorithm, shift_bytes=2, num_channels=3)
        yield Case(num_ranks, (1,) * 96, algorithm=algorithm)


def repeated_cases(num_calls):
    """Several calls with random delays, past the largest number of a message."""
    for num_ranks, algorithm in itertools.product(RANKS, ALGORITHMS):
        sizes = (40 * num_ranks + 1, 7)
        repeated = Case(
            num_ranks, sizes, "float16", algorithm, num_calls=num_calls, first_number=2**32 - 20
        )
        yield repeated
        yield dataclasses.replace(repeated, seed=num_ranks)


def large_cases(slot_bytes=16384, num_channels=2):
    """1 MiB of f32 and 3 elements, in messages of many vectors."""
    for num_ranks, algorithm in itertools.product(RANKS, ALGORITHMS):
        yield Case(
            num_ranks,
            (2**18 + 3,),
            algorithm=algorithm,
            num_channels=num_channels,
            slot_bytes=slot_bytes,
            exchange_bytes=slot_bytes // 2,
        )


def missing_cases(timeout_ms):
    """Rank 1 is missing. All ranks have a deadline, or only rank 0 has one."""
    for num_ranks, algorithm in itertools.product(RANKS, ALGORITHMS):
        missing = Case(
            num_ranks,
            (997,),
            algorithm=algorithm,
            missing_rank=1,
            timeout_ms=timeout_ms,
            num_calls=2,
        )
        yield missing
        yield dataclasses.replace(missing, timeout_rank=0)


def missing_difference(case, result):
    """Return the error in the result of a case in which a rank is missing, or None."""
    present = [report for rank, (report, _) in enumerate(result) if rank != case.missing_rank]
    outcomes = [report.outcome for report in present]
    if not set(outcomes) <= {LATE, ABORTED} or LATE not in outcomes:
        return f"{case}: outcomes {outcomes}"
    # In a ring only the neighbours of the missing rank wait for it; the others may report a
    # neighbour that waits itself.
    if case.algorithm != "ring" and {report.peer for report in present} != {case.missing_rank}:
        return f"{case}: {present}"
    if case.timeout_rank >= 0 and {report.gave_up for report in present} != {case.timeout_rank}:
        return f"{case}: {present}"
    return _keeps_numbers(case, result)


def aborted_cases():
    """Rank 1 is missing, no rank has a deadline, and the last rank's host aborts."""
    for num_ranks, algorithm in itertools.product(RANKS[1:], ALGORITHMS):
        yield Case(
            num_ranks,
            (997,),
            algorithm=algorithm,
            missing_rank=1,
            timeout_ms=0,
            abort_rank=num_ranks - 1,
        )


def aborted_difference(case, result):
    """Return the error in the result of a case in which a host aborts, or None."""
    for rank, (report, _) in enumerate(result):
        # The first rank was aborted by its host, the others by that rank.
        gave_up = -1 if rank == case.abort_rank else case.abort_rank
        expected = (ABORTED, gave_up, -1)
        told = (report.outcome, report.gave_up, report.peer)
        if rank != case.missing_rank and told != expected:
            return f"{case}: rank {rank} reports {report}"
    return _keeps_numbers(case, result)


def mismatched_cases():
    """One rank reduces another bucket: in the first call, or after a successful one."""
    for num_ranks, algorithm in itertools.product(RANKS, ALGORITHMS):
        for num_calls, odd_rank in ((1, 0), (3, num_ranks - 1)):
            yield Case(
                num_ranks,
                (997, 3),
                algorithm=algorithm,
                num_calls=num_calls,
                odd_rank=odd_rank,
                odd_call=num_calls // 2,
            )


def mismatched_difference(case, result):
    """Return the error in the result of a case in which a rank has another bucket, or None."""
    for rank, (report, _) in enumerate(result):
        if report.outcome not in (MISMATCHED, ABORTED) or report.why != MISMATCHED:
            return f"{case}: rank {rank} reports {report}"
        own, other = (8, 7) if rank == case.odd_rank else (7, 8)
        size = sum(-(-size * 4 // 16) for size in case.sizes)
        seen = (report.bucket, report.num_vectors, report.sent_bucket, report.sent_call)
        # A rank that was aborted by another may not have reached that call.
        if report.outcome == MISMATCHED and seen != (own, size, other, case.odd_call):
            return f"{case}: rank {rank} reports {report}"
    if MISMATCHED not in [report.outcome for report, _ in result]:
        return f"{case}: no rank found the mismatch"
    return _keeps_numbers(case, result)


def _keeps_numbers(case, result):
    for rank, (_, leaves) in enumerate(result):
        if rank != case.missing_rank and not np.isnan(leaves[0]).all():
            return f"{case}: rank {rank} keeps numbers instead of NaN"
    return None


def groups(few):
    """Return pairs of cases and the function that checks their results, for a GPU."""
    if few:
        some = [case for case in small_cases() if case.num_ranks in (3, 8)]
        missing = list(missing_cases(timeout_ms=500))
        return [(some[::9], difference), (missing[::9], missing_difference)]
    return [
        (list(small_cases()), difference),
        (list(repeated_cases(num_calls=10_000)), difference),
        (list(large_cases(slot_bytes=262144, num_channels=8)), difference),
        (list(missing_cases(timeout_ms=500)), missing_difference),
        (list(aborted_cases()), aborted_difference),
        (list(mismatched_cases()), mismatched_difference),
    ]


def main():
    few = sys.argv[1] == "--few"
    command = sys.argv[2:] if few else sys.argv[1:]
    wrong, num_cases = [], 0
    for cases, find in groups(few):
        num_cases += len(cases)
        try:
            results = run(command, cases, timeout_s=100)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            # None of these cases has a result, so count all as wrong.
            wrong += [str(error)[-2000:]] * len(cases)
        else:
            wrong += filter(None, map(find, cases, results))
    for line in dict.fromkeys(wrong[:20]):
        print(line)
    print(f"{num_cases - len(wrong)} of {num_cases} cases equal the model bit by bit")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
