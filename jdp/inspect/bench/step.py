"""Times of a training step on several numbers of ranks, each compared with one device."""

import operator
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp import collectives
from jdp.analysis.marks import ALL_REDUCED, mark
from jdp.data.sharding import Layout, batch_sharding
from jdp.distributed import agree
from jdp.distributed.mesh import init
from jdp.inspect import exact, paired_timing
from jdp.inspect.collective_case import Case, Trial

# Relative to the largest element of a leaf: the order of float32 sums differs.
TOLERANCE = 1e-4
Made = tuple[Any, Any, Any]
Make = Callable[[int, Any], Made]  # (num_rows, all_reduce) -> (step, state, batch)


class StepSetting(NamedTuple):
    """How steps are timed.

    Attributes:
      rows: rows of each rank.
      num_steps: steps of a run, from the initial state.
      num_rounds: rounds, each with two runs of every contestant.
    """

    rows: int
    num_steps: int
    num_rounds: int


def measure(make: Make, numbers: Sequence[int], setting: StepSetting) -> list[dict[str, Any]]:
    """Time steps on several numbers of ranks, and return a row for each.

    All processes must make the same call.
    """
    numbers = sorted({1, *numbers})
    made: dict[tuple[int, bool], _Contestant] = {}
    for num_ranks in numbers:
        made[num_ranks, True] = _Contestant(make, num_ranks, setting, all_reduces=True)
        if num_ranks > 1:
            made[num_ranks, False] = _Contestant(make, num_ranks, setting, all_reduces=False)
    clocks = {str(key): each.clock for key, each in made.items()}
    found = paired_timing.alternate(
        clocks, budget_s=0.0, min_rounds=setting.num_rounds, max_rounds=setting.num_rounds
    )
    rows, alone = [], found[str((1, True))]
    for num_ranks in numbers:
        seconds = found[str((num_ranks, True))]
        without = found.get(str((num_ranks, False)), seconds)
        rows.append(
            {
                "ranks": num_ranks,
                "processes": made[num_ranks, True].num_processes,
                "step_ms": float(np.median(seconds)) * 1e3,
                "rows_per_s": setting.rows * num_ranks / float(np.median(seconds)),
                "efficiency": float(np.median(alone / seconds)),
                "exposed": float(np.median(1 - without / seconds)),
                "difference": made[num_ranks, True].difference,
            }
        )
    return rows


class _Contestant:
    """Runs of a step on some ranks, from the same initial state each time.

    Without the all-reduce each rank trains on its own rows, so its state must be that of one device
    with these rows. Processes without such a rank wait.
    """

    def __init__(self, make: Make, num_ranks: int, setting: StepSetting, *, all_reduces: bool):
        self._num_steps, self._devices = setting.num_steps, jax.devices()[:num_ranks]
        self._name = f"{num_ranks} ranks" + ("" if all_reduces else " without all-reduce")
        self.difference, self._start = 0.0, None
        self.num_processes = len({device.process_index for device in self._devices})
        if not (own := [i for i, x in enumerate(self._devices) if x in jax.local_devices()]):
            return
        rows = setting.rows * num_ranks
        self._expected = _expected(make, rows, num_ranks, setting, all_reduces)
        mesh = init(devices=self._devices, timeout_s=None)
        self._step, self._start, batch = make(rows, collectives.auto if all_reduces else _none)
        part = slice(own[0] * setting.rows, (own[-1] + 1) * setting.rows)
        batch = jax.tree.map(operator.itemgetter(part), batch)
        self._batch = Layout.of_batch(batch, batch_sharding(mesh, "data")).place(batch)
        # A sum of one element: processes that leave it start at nearly the same time.
        self._barrier = Trial([Case("all-reduce", "xla", "float32", 1)], mesh)

    def clock(self) -> float:
        """Return the seconds of a step on the slowest process; all compare its results."""
        seconds, wrong = 0.0, None
        if self._start is not None:
            seconds, state = self._timed()
            try:
                self._check(state)
            except exact.WrongResultError as error:
                wrong = str(error)
        everyone = tuple(range(jax.process_count()))
        mine = [seconds, self.difference, wrong]
        found = agree.all_gather(everyone, mine, what="the results of jdp bench step")
        for process, (_, _, text) in found.items():
            if text is not None:
                where = f"process {process}: " if len(everyone) > 1 else ""
                raise exact.WrongResultError(f"{where}{text}")
        self.difference = max(difference for _, difference, _ in found.values())
        return max(seconds for seconds, _, _ in found.values())

    def _timed(self) -> tuple[float, Any]:
        state = jax.block_until_ready(jax.tree.map(jax.numpy.copy, self._start))
        self._barrier.prepare()
        self._barrier()
        begin = time.perf_counter()
        for _ in range(self._num_steps):
            state, _ = self._step(state, self._batch)
        jax.block_until_ready(state)
        return (time.perf_counter() - begin) / self._num_steps, state

    def _check(self, state: Any) -> None:
        found = jax.tree_util.tree_leaves_with_path(state)
        for number, (path, leaf) in enumerate(found):
            for shard in leaf.addressable_shards:
                rank = self._devices.index(shard.device)
                right = self._expected[rank % len(self._expected)][number][shard.index]
                exact.require(
                    value := np.asarray(shard.data),
                    right,
                    contestant=f"the step on {self._name}",
                    rank=rank,
                    round_number=0,
                    what=f"state{jax.tree_util.keystr(path)} after {self._num_steps} steps",
                    tolerance=_tolerance(right),
                )
                if tolerance := _tolerance(right):
                    apart = float(np.abs(value - right).max()) / tolerance * TOLERANCE
                    self.difference = max(self.difference, apart)


def _expected(
    make: Make, num_rows: int, num_ranks: int, setting: StepSetting, all_reduces: bool
) -> list[list[np.ndarray]]:
    """Return the leaves of the last state of one device, for all rows or those of each rank."""
    init(devices=jax.local_devices()[:1], timeout_s=None)
    found = []
    for rank in range(1 if all_reduces else num_ranks):
        step, state, batch = make(num_rows, collectives.auto)
        if not all_reduces:
            own = slice(rank * setting.rows, (rank + 1) * setting.rows)
            batch = jax.tree.map(operator.itemgetter(own), batch)
        for _ in range(setting.num_steps):
            state = _state_of(step(state, batch))
        found.append([np.asarray(leaf) for leaf in jax.tree.leaves(state)])
    return found


def _state_of(result: Any) -> Any:
    """Return the state that a step returned."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"the step of the model returned a {type(result).__name__}, and not (state, metrics). "
            "Make it a jdp.train_step that returns both."
        )
    return result[0]


def _tolerance(right: np.ndarray) -> float:
    if right.size == 0 or not np.issubdtype(right.dtype, np.floating):
        return 0.0
    return TOLERANCE * float(np.abs(right).max())


def _none(buckets: Any, axis_name: Any, *, scale: Any = 1.0, mesh: Any = None) -> list:
    """Leave every rank its own gradients. The mark is not true, so that the step is accepted.

    The barrier takes the place of the call in the compiled program, but with JAX 0.10, which drops
    it first. Without it XLA fuses gradients with updates and copies parameters that are still read:
    the step may take longer than one that reduces.
    """
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    marked = [[mark(x, kind=ALL_REDUCED, path="", axes=axes) for x in bucket] for bucket in buckets]
    return [jax.lax.optimization_barrier(bucket) for bucket in marked]
