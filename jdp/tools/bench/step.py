"""A training step's times by number of ranks."""

import argparse
import contextlib
import functools
import importlib.util
import inspect
import operator
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jdp import collectives
from jdp.analysis.marks import ALL_REDUCED, mark
from jdp.data.sharding import Layout, batch_sharding
from jdp.distributed import agree
from jdp.distributed.mesh import init
from jdp.reduction.micro_batches import value_and_grad
from jdp.reduction.optimizer import replicated
from jdp.tools import known_values, models, paired_timing, results
from jdp.tools.bench import flags, output
from jdp.tools.bench.collectives import Case, Trial
from jdp.training.state import TrainState
from jdp.training.step import train_step

# Of a leaf's largest element: the order of float32 sums differs.
TOLERANCE = 1e-4
Made = tuple[Any, Any, Any]
Make = Callable[[int, Any], Made]  # (num_rows, all_reduce) -> (step, state, batch)


class StepSetting(NamedTuple):
    """How steps are timed; each round has two runs of every contestant."""

    rows: int
    num_steps: int
    num_rounds: int


def measure(make: Make, numbers: Sequence[int], setting: StepSetting) -> list[dict[str, Any]]:
    """Time steps by number of ranks, on all processes."""
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
    """Runs of a step on some ranks, from the same initial state.

    Without the all-reduce, each rank's state must be that of one device with its rows. Processes
    without such a rank wait.
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
        self._barrier = Trial([Case("all-reduce", "xla", "float32", 1)], mesh)

    def clock(self) -> float:
        seconds, wrong = 0.0, None
        if self._start is not None:
            seconds, state = self._timed()
            try:
                self._check(state)
            except known_values.WrongResultError as error:
                wrong = str(error)
        everyone = tuple(range(jax.process_count()))
        mine = [seconds, self.difference, wrong]
        found = agree.all_gather(everyone, mine, what="the results of jdp bench step")
        for process, (_, _, text) in found.items():
            if text is not None:
                where = f"process {process}: " if len(everyone) > 1 else ""
                raise known_values.WrongResultError(f"{where}{text}")
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
                known_values.require_equal(
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
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"the step of the model returned a {type(result).__name__}, not (state, metrics). "
            "Make it a jdp.train_step that returns both."
        )
    return result[0]


def _tolerance(right: np.ndarray) -> float:
    if right.size == 0 or not np.issubdtype(right.dtype, np.floating):
        return 0.0
    return TOLERANCE * float(np.abs(right).max())


def _none(buckets: Any, axis_name: Any, *, scale: Any = 1.0, mesh: Any = None) -> list:
    """Keep own gradients, marked as reduced; a barrier keeps XLA from fusing updates."""
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    marked = [[mark(x, kind=ALL_REDUCED, path="", axes=axes) for x in bucket] for bucket in buckets]
    return [jax.lax.optimization_barrier(bucket) for bucket in marked]


_DESCRIPTION = """\
How much faster is a training step on n ranks than on one, and how much of it
is communication that nothing hides? Each rank gets the same number of rows.
The state after each timed run is compared with that of one device. Takes about
a minute. Under jdp run, n ranks are some of the first process, or those of the
first processes; a step takes as long as on the slowest of them.

MODEL is mlp, transformer, or FILE.py:NAME, a function of yours:

  def NAME(num_rows, all_reduce):
      ...
      return step, state, batch

step is a jdp.train_step, which takes (state, batch) and returns (state, metrics);
state is its first state; batch has num_rows rows, those of all ranks. all_reduce
goes to jdp.replicated or jdp.sharded. docs/bench.md has an example."""
_RETURNS = (
    "Return (step, state, batch): a jdp.train_step from (state, batch) to (state, metrics), its "
    "first state, and a batch of num_rows rows. Pass all_reduce to jdp.replicated or jdp.sharded."
)
COLUMNS = {
    "ranks": "{ranks}",
    "processes": "{processes}",
    "step ms": "{step_ms:.3f}",
    "rows/s": "{rows_per_s:.1f}",
    "efficiency": "{efficiency:.2f}",
    "exposed": "{exposed:.2f}",
    "difference": "{difference:.1e}",
}


def main(arguments: Sequence[str]) -> int:
    """Run `jdp bench step`."""
    options = _parser().parse_args(arguments)
    folder = os.getcwd()  # a model may change the folder
    make = found_model(options.model)
    setting = StepSetting(options.rows or 64, options.steps, options.rounds)
    mesh = flags.started(options.cpu_ranks)
    inputs = [options.model.rpartition(":")[0]]
    with contextlib.chdir(folder):
        flags.require_files(mesh, lambda: flags.require_outputs(options, inputs))
    facts, numbers = output.machine(), _numbers(options.ranks, mesh.size, jax.local_device_count())
    rows = measure(make, numbers, setting)
    if jax.process_index() == 0:
        with contextlib.chdir(folder):
            _show(options, facts, setting, rows)
    return 0


def _show(
    options: argparse.Namespace, facts: Any, setting: StepSetting, rows: Sequence[Any]
) -> None:
    if options.json != results.STDOUT:
        print(f"{output.heading(facts)}\n{options.model}, {setting.rows} rows for each rank")
        print(output.aligned(list(COLUMNS)))
        for row in rows:
            print(output.aligned([form.format(**row) for form in COLUMNS.values()]))
        most = max(row["ranks"] for row in rows)
        if most > facts["num_cores"] and facts["platform"] == "cpu":
            print(
                f"{most} ranks share {facts['num_cores']} cores: an efficiency of "
                f"{facts['num_cores'] / most:.2f} would be full use of them."
            )
    if options.json:
        result = {**facts, "model": options.model, "rows": rows}
        results.write(results.to_json(result), options.json)
    if options.png:
        _draw(options.png, rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jdp bench step",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL")
    text = "numbers of ranks, such as 1,2,4 (default: powers of 2 up to all devices)"
    parser.add_argument("--ranks", metavar="N,...", help=text)
    parser.add_argument("--rows", type=flags.read_positive, help="rows of each rank (default 64)")
    text = "steps of a run (default 5)"
    parser.add_argument("--steps", type=flags.read_positive, default=5, help=text)
    text = "rounds, each with two runs (default 5)"
    parser.add_argument("--rounds", type=flags.read_positive, default=5, help=text)
    flags.add_common(parser)
    return parser


def found_model(name: str) -> Make:
    """Return the function that makes a model."""
    if name in ("mlp", "transformer"):
        return functools.partial(_built_in, name)
    path, _, function = name.rpartition(":")
    if not path.endswith(".py") or not Path(path).exists():
        raise ValueError(
            f"the model {name!r} does not exist. Write mlp, transformer, or FILE.py:NAME with a "
            f"function NAME(num_rows, all_reduce). {_RETURNS}"
        )
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    make = getattr(module, function, None)
    if not callable(make) or len(inspect.signature(make).parameters) != 2:
        raise ValueError(
            f"{path} has no function {function}(num_rows, all_reduce). Write one. {_RETURNS}"
        )
    return lambda num_rows, all_reduce: _checked(make(num_rows, all_reduce), name, num_rows)


def _checked(made: Any, name: str, num_rows: int) -> Made:
    if not isinstance(made, tuple | list) or len(made) != 3:
        many = f" of {len(made)} values" if isinstance(made, tuple | list) else ""
        raise ValueError(f"{name} returned a {type(made).__name__}{many}. {_RETURNS}")
    step, state, batch = made
    if not callable(step):
        raise ValueError(
            f"{name} returned a {type(step).__name__} first, which is not a step. {_RETURNS}"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if len(shape := np.shape(leaf)) and shape[0] != num_rows:
            raise ValueError(
                f"{name} got num_rows={num_rows}, but batch{jax.tree_util.keystr(path)} has "
                f"{shape[0]}. Steps on other numbers of ranks would not be comparable. {_RETURNS}"
            )
    return step, state, batch


def _built_in(name: str, num_rows: int, all_reduce: Any) -> Made:
    if name == "mlp":
        problem = models.mlp(width=512, num_layers=4, num_rows=num_rows)
    else:
        problem = models.transformer(dim=128, num_layers=4, num_rows=num_rows, length=32)

    @train_step
    def step(state: TrainState, batch: Any) -> Any:
        loss, grads = value_and_grad(problem.loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    tx = replicated(optax.sgd(0.1, momentum=0.9), all_reduce=all_reduce)
    return step, TrainState.create(problem.params, tx), problem.batch


def _numbers(text: str | None, num_devices: int, num_local: int) -> list[int]:
    """Return numbers of ranks: some of one process, or all of the first processes."""
    possible = [n for n in range(1, num_devices + 1) if n <= num_local or n % num_local == 0]
    if text is None:
        return [n for n in possible if n.bit_count() == 1 or n == num_devices]
    found = [int(word) if word.isdecimal() else 0 for word in text.split(",")]
    if not (wrong := [number for number in found if number not in possible]):
        return found
    if num_local < num_devices:
        right = f"at most {num_local}, or {num_local} for each of several processes"
    else:
        more = f", or --cpu-ranks {max(found)} for more" if max(found) > num_devices else ""
        right = f"numbers from 1 to {num_devices}{more}"
    raise ValueError(
        f"--ranks {text!r} requests {wrong[0]} ranks, but this machine has {num_devices} "
        f"devices. Write {right}."
    )


def _draw(path: str, rows: Sequence[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    panel = figure.subplots()
    numbers = [row["ranks"] for row in rows]
    panel.plot(numbers, [row["rows_per_s"] for row in rows], marker=".", label="measured")
    ideal = [rows[0]["rows_per_s"] * number for number in numbers]
    panel.plot(numbers, ideal, "--", label="one rank times n")
    panel.set(xlabel="ranks", ylabel="rows per second")
    panel.grid(alpha=0.3)
    panel.legend()
    results.write_picture(figure, path)
