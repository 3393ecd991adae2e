"""Python objects between a run's processes."""

import base64
import operator
import pickle
import threading
from typing import Any

import jax
import numpy as np

from jdp import jax_compat
from jdp.distributed import in_flight
from jdp.distributed.agree import all_gather, broadcast_bytes, propagating_errors

# Smaller ones travel in the message that tells their size.
_MAX_IN_MESSAGE = 2**15
_MAX_BYTES = 2**30


def all_gather_object(value: Any) -> list[Any]:
    """Return the objects that all processes pass to this call, in the order of processes.

    Every process must call it in its main thread, outside of a step, since it waits for all.
    Objects are pickled, and only processes of one run exchange them. For metrics of a step write
    `jdp.mean_over_ranks`.

    Args:
      value: anything that pickle takes, at most 1 GiB of it.

    Returns:
      A list with one object per process; of one process `[value]`, a copy.

    Raises:
      ValueError: the pickle is larger than 1 GiB; or inside a step or `jit`.
      RuntimeError: another process raised an error here, does not join in time, or makes another
        call; or in another thread than the main one.

    >>> import jdp
    >>> jdp.all_gather_object({"host": "a", "rows": [3, 4]})
    [{'host': 'a', 'rows': [3, 4]}]
    """
    return _gathered(value, range(jax.process_count()), "jdp.all_gather_object")


def broadcast_object(value: Any = None, source: int = 0) -> Any:
    """Return the object that one process passes to this call, on every process.

    As `all_gather_object`, for one sender: every process must call it.

    Args:
      value: of process `source`, anything that pickle takes, at most 1 GiB of it; other processes'
        objects are ignored.
      source: the sending process, 0 <= source < `jax.process_count()`, the same on all.

    Returns:
      A copy of that object.

    Raises:
      ValueError: there is no process `source`; otherwise as `all_gather_object`.
      RuntimeError: as `all_gather_object`.

    >>> import jdp
    >>> jdp.broadcast_object({"run": "a"})
    {'run': 'a'}
    """
    source, num_processes = operator.index(source), jax.process_count()
    if not 0 <= source < num_processes:
        raise ValueError(
            f"source={source} is not a process: the run has {num_processes}, from 0 on. Write the "
            "number of a process, which jax.process_index() returns, not of a rank."
        )
    return _gathered(value, [source], f"jdp.broadcast_object from process {source}")[0]


def _gathered(value: Any, sources: Any, what: str) -> list[Any]:
    if jax_compat.is_tracing():
        raise ValueError(
            f"{what} is called while JAX traces a step, which would run it once, not in each step. "
            "Call it between steps. In a step write jax.lax.all_gather(x, 'data')."
        )
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"{what} is called in a thread, and processes match calls only by their order, which "
            "threads do not keep. Call it in the main thread."
        )
    group, me = tuple(range(jax.process_count())), jax.process_index()
    with propagating_errors(group, f"in {what}"):
        data = pickle.dumps(value) if me in sources else b""
        if len(data) > _MAX_BYTES:
            raise ValueError(
                f"{what} got an object whose pickle has {len(data):,} bytes, and sends at most "
                f"{_MAX_BYTES:,}. Send arrays by TrainState.create(broadcast=True), or a path."
            )
        is_small = len(data) <= _MAX_IN_MESSAGE
        told = base64.b64encode(data).decode() if is_small else len(data)
        answers = all_gather(group, told, what=what)
        if not all(isinstance(answers[process], str) for process in sources):
            in_flight.drain()  # CPUs match collectives by their order
            all_gather(group, None, what=what)  # an earlier step's error
        received = [_received(answers[process], data, process, group) for process in sources]
    return [pickle.loads(each) for each in received]


def _received(answer: Any, data: bytes, process: int, group: tuple[int, ...]) -> bytes:
    if isinstance(answer, str):
        return base64.b64decode(answer)
    own = np.frombuffer(data, np.uint8) if process == jax.process_index() else None
    return broadcast_bytes(own, answer, group).tobytes()
