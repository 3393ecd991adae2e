"""The command `jdp bench step`, and the models that it times."""

import argparse
import contextlib
import functools
import importlib.util
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jdp.inspect import models, results
from jdp.inspect.bench import flags, output
from jdp.inspect.bench.step import Made, Make, StepSetting, measure
from jdp.reduction.micro_batches import value_and_grad
from jdp.reduction.optimizer import replicated
from jdp.training.decorators import train_step
from jdp.training.state import TrainState

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
    "Return (step, state, batch): a jdp.train_step, which takes (state, batch) and returns (state, "
    "metrics), its first state, and a batch of num_rows rows. Give all_reduce to jdp.replicated or "
    "jdp.sharded."
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
    folder = os.getcwd()  # that of the options; a model may go to another one
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
    """Print the rows as a table, and write the files that are asked for."""
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
            f"there is no model {name!r}. Write mlp, transformer, or FILE.py:NAME with a function "
            f"NAME(num_rows, all_reduce). {_RETURNS}"
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
    """Return what a user's function returned, if that is a step, a state and a batch."""
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
                f"{name} was asked for {num_rows} rows, and batch{jax.tree_util.keystr(path)} has "
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
    """Return the numbers of ranks: some of one process, or all ranks of the first processes."""
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
        f"--ranks {text!r} asks for {wrong[0]} ranks, and there are {num_devices} devices. "
        f"Write {right}."
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
