"""Gathers all processes' values, finds differences, broadcasts bytes."""

import contextlib
import hashlib
import json
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdp.distributed import call_log, kv_store, this_process
from jdp.distributed.call_log import Call
from jdp.distributed.fail_fast import OtherFailedError
from jdp.error_codes import with_code
from jdp.worker import progress

# Each group's gathers, which make the store's keys unique.
_num_gathered: Counter[tuple[int, ...]] = Counter()
_num_failures: Counter[tuple[int, ...]] = Counter()
_NUM_BLOCKS, _GRACE_S = 256, 2.0
_SAME_CALLS = (
    "All processes of a mesh must make the same calls in the same order. Look for a call below "
    "`if jax.process_index() == 0`, such as jdp.TrainState.create, a loop over jdp.batches, "
    "Checkpointer.restore or jdp.evaluate."
)
# The store rejects an infinite timeout.
_SLICE_S = 60.0


def set_timeout_s(timeout_s: float) -> None:
    """Set later comparisons' deadline, in seconds; initially 300, inf for none."""
    this_process.current.timeout_s = timeout_s


def timeout_s() -> float:
    """Return how long this process waits for another in a comparison."""
    return this_process.current.timeout_s


def peers(mesh: Mesh) -> tuple[int, ...]:
    """Return the processes with devices in `mesh`; only this one if the store is closed."""
    if not kv_store.is_open():
        return (jax.process_index(),)
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def all_gather(group: tuple[int, ...], value: Any, *, what: str, of: str = "") -> dict[int, Any]:
    """Return process -> value passed to this call, for all processes of a group."""
    me = jax.process_index()
    if group == (me,):
        return {me: value}
    number = _put(group, {"value": value, "what": what}, f"{what}{of}")
    end, found = time.monotonic() + timeout_s(), {}
    for process in group:
        with progress.WAITING:
            text = _get(_key(group, number, process), end)
        if text is None:
            text = (
                f"process {process} did not join process {me} within {timeout_s():g} s to "
                f"compare {what}{of}. It has ended, hangs or runs other code; see its output. "
                f"{_SAME_CALLS}"
            )
            raise RuntimeError(with_code("JDP207", text))
        answer = json.loads(text)
        if "failed" in answer:
            _num_failures[group] += 1
            text = f"process {process} failed {answer['failed']}"
            raise OtherFailedError(with_code("JDP208", text))
        if answer["what"] != what:  # every process detects this and raises
            _num_failures[group] += 1
            text = (
                f"process {process} compares {answer['what']} while process {me} compares {what}"
                f"{of}. {_SAME_CALLS}"
            )
            raise RuntimeError(with_code("JDP207", text))
        found[process] = answer["value"]
    if number:  # all have read the previous values
        kv_store.delete(_key(group, number - 1, me))
    return found


def offered(group: tuple[int, ...], key: str, value: Any, *, timeout_s: float) -> dict[int, Any]:
    """Return process -> value, for the processes that offer a value in time; never raises."""
    me, found = jax.process_index(), {jax.process_index(): value}
    end = time.monotonic() + timeout_s
    try:
        kv_store.offer(f"jdp/offered/{key}/{me}", json.dumps(value))
        for process in group:
            left_s = max(0.0, end - time.monotonic())
            text = kv_store.get(f"jdp/offered/{key}/{process}", timeout_s=left_s)
            if text is not None:
                found[process] = json.loads(text)
    except Exception:  # the store may have ended with a failed process
        pass
    return dict(sorted(found.items()))


@contextlib.contextmanager
def propagating_errors(group: tuple[int, ...], doing: str) -> Iterator[None]:
    """Report an error in the body to the other processes once, so they stop waiting."""
    before = _num_failures[group]
    try:
        yield
    except Exception as error:
        # A failure gathered in the body is known to all.
        if len(group) > 1 and _num_failures[group] == before:
            _num_failures[group] += 1
            text = f"{doing}, so no process can continue: {type(error).__name__}: {error}"
            with contextlib.suppress(Exception):  # the store may have ended
                _report_failure(group, text[:4000])
        raise


def odd_one(values: Mapping[int, Any]) -> tuple[int, int] | None:
    """Return (process or rank with an unusual value, one with the usual value).

    >>> odd_one({0: "a", 1: "a", 2: "b"}), odd_one({0: "a", 1: "a"})
    ((2, 0), None)
    """
    counts = Counter(values.values())
    if len(counts) < 2:
        return None
    usual = counts.most_common(1)[0][0]
    return (
        next(process for process, value in values.items() if value != usual),
        next(process for process, value in values.items() if value == usual),
    )


def first_difference(
    pair: tuple[int, int], group: tuple[int, ...], items: Sequence[Any] | np.ndarray
) -> int:
    """Return the index of the first item that differs between two processes, or that one lacks."""
    lengths = all_gather(group, len(items), what="lengths")
    start, stop = 0, max(lengths[process] for process in pair)
    while stop - start > 1:
        size = -(-(stop - start) // _NUM_BLOCKS)
        blocks = range(start, stop, size)
        mine = [digest(items[i : i + size]) for i in blocks]
        digests = all_gather(group, mine, what="parts of what differs")
        one, other = (digests[process] for process in pair)
        first = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        start, stop = blocks[first], min(blocks[first] + size, stop)
    return start


def digest(items: Sequence[Any] | np.ndarray) -> str:
    """Return 16 hexadecimal digits of items, or of an array's bits."""
    if isinstance(items, np.ndarray):
        flat = np.ascontiguousarray(items).reshape(-1)
        return hashlib.sha256(flat.view(np.uint8).data).hexdigest()[:16]
    return hashlib.sha256(repr(items).encode()).hexdigest()[:16]


def _report_failure(group: tuple[int, ...], text: str) -> None:
    number = _put(group, {"failed": text}, "failures")
    # The store may end with this process, so wait until others have read the report.
    end = time.monotonic() + _GRACE_S
    for process in group:
        kv_store.get(_key(group, number, process), timeout_s=end - time.monotonic())


def _put(group: tuple[int, ...], answer: dict[str, Any], what: str) -> int:
    text = json.dumps(answer)  # if this raises, the call has used no number
    number = _num_gathered[group]
    _num_gathered[group] += 1
    call_log.log_of(group).record(Call(f"the comparison of {what}"))
    kv_store.put(_key(group, number, jax.process_index()), text)
    return number


def _get(key: str, end: float) -> str | None:
    call_log.num_waiting += 1
    try:
        while True:
            left_s = end - time.monotonic()
            text = kv_store.get(key, timeout_s=min(left_s, _SLICE_S))
            if text is not None or left_s <= _SLICE_S:
                return text
    finally:
        call_log.num_waiting -= 1


def _key(group: tuple[int, ...], number: int, process: int) -> str:
    return f"jdp/gathered/{zlib.crc32(repr(group).encode())}/{number}/{process}"


# They bound the temporary memory, and have few sizes, since each size is compiled.
_CHUNK_BYTES, _LEAST_CHUNK_BYTES = 64 << 20, 1 << 12


def broadcast_bytes(data: np.ndarray | None, num_bytes: int, group: Sequence[int]) -> np.ndarray:
    """Broadcast one process's `data`, `[num_bytes]` uint8, in a group; None on the others."""
    received = np.empty(num_bytes, np.uint8) if data is None else data
    if len(group) == 1:
        return received
    mesh = _mesh(group)
    for start in range(0, num_bytes, _CHUNK_BYTES):
        chunk = received[start : start + _CHUNK_BYTES]
        size = max(_LEAST_CHUNK_BYTES, 1 << (chunk.size - 1).bit_length())
        sent = np.zeros(size, np.uint8)
        if data is not None:
            sent[: chunk.size] = chunk
        words = _sum(sent.view(np.uint32), mesh)
        if data is None:
            chunk[:] = words.view(np.uint8)[: chunk.size]
    return received


def _mesh(group: Sequence[int]) -> Mesh:
    first: dict[int, jax.Device] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    devices = np.array([first[process] for process in group])
    return Mesh(devices, ("processes",), axis_types=(AxisType.Auto,))


def _sum(words: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Return the sum over processes, of integers: with floats, -0.0 would become 0."""
    rows = NamedSharding(mesh, PartitionSpec("processes"))
    shape = (mesh.size, *words.shape)
    placed = jax.make_array_from_callback(shape, rows, lambda index: words[None])
    whole = NamedSharding(mesh, PartitionSpec())
    total = jax.jit(_total, out_shardings=whole)(placed)
    return np.asarray(total.addressable_data(0))


def _total(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=0, dtype=x.dtype)
