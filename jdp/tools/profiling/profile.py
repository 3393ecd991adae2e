"""`profile`: some steps of a loop, recorded on every rank."""

import logging
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path
from time import time_ns
from typing import Any

import jax

from jdp import jax_compat
from jdp.distributed import agree, in_flight, this_process
from jdp.tools.profiling import trace_file
from jdp.tools.profiling.process_trace import MarkedCall, Marks, process_trace
from jdp.worker import progress

_log = logging.getLogger("jdp")
_WRITING = progress.Phase("writing a profile")
_active: list["Profile"] = []


class Profile:
    """A context manager, see `profile`."""

    def __init__(self, folder: Path, steps: range) -> None:
        self._folder, self._steps = folder, steps
        self._run = ""
        self._marks = Marks(self._begin_step, self._end_step)
        self._num_steps = 0
        self._begin: int | None = None  # ns since 1970 while JAX's profiler runs
        self._calls: list[MarkedCall] = []
        self._annotation: Any = None
        self._error: Exception | None = None
        self._is_written = False

    def __enter__(self) -> None:
        mesh = this_process.current.mesh
        group = (jax.process_index(),) if mesh is None else agree.peers(mesh)
        with agree.propagating_errors(group, "while it began jdp.profile"):
            _require_none_runs()
            self._require_new()
            self._prepare()
        mine = [self._steps.start, self._steps.stop], secrets.token_hex(8)
        found = agree.all_gather(group, mine, what="steps of jdp.profile")
        steps = {process: tuple(each) for process, (each, _) in found.items()}
        if pair := agree.odd_one(steps):
            one, other = (f"process {i} range{steps[i]}" for i in pair)
            raise ValueError(
                f"jdp.profile got different steps: {one}, {other}. Processes would stop at "
                "different steps for their profiles, and block each other. Pass the same steps "
                "on all processes."
            )
        self._run = found[min(found)][1]
        _active.append(self)
        self._marks.begin()
        if self._steps.start <= 1:
            self._start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None = None, *_: object
    ) -> None:
        self._marks.end()
        _active.clear()
        if kind is not None:
            with this_process.current.leaving(error):  # JAX takes seconds to write a long profile
                self._abandon()
            return
        if self._begin is not None:
            self._stop()
        if self._error is not None:
            raise self._error
        if self._num_steps < self._steps.stop:
            missing = "it has the steps before" if self._is_written else "no step was profiled"
            _log.warning(
                "jdp.profile: the block ended after %d steps, but the profile was to have steps "
                "%d to %d: %s. A step counts when a function of jdp.train_step or "
                "Checkpointer.step returns.",
                self._num_steps, self._steps.start, self._steps.stop - 1, missing,
            )  # fmt: skip

    def _require_new(self) -> None:
        if self._run:
            raise RuntimeError(
                "this jdp.profile was already used, and a second block would replace its files "
                f"in {self._folder}. Make another one, in another folder: with "
                "jdp.profile(folder, steps=...)."
            )

    def _prepare(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise NotADirectoryError(
                f"jdp.profile needs the folder {self._folder}, but that path, or a part of it, "
                "is a file. Name another folder."
            ) from None
        trace_file.path_of(self._folder, jax.process_index()).unlink(missing_ok=True)
        self._own_folder().mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=self._own_folder()):
            pass
        if jax.process_index() == 0:
            (self._folder / trace_file.MERGED).unlink(missing_ok=True)

    def _own_folder(self) -> Path:
        return self._folder / f"process-{jax.process_index()}"

    def _begin_step(self) -> None:
        if self._begin is not None:
            self._annotation = jax.profiler.StepTraceAnnotation("step", step_num=self._num_steps)
            self._annotation.__enter__()

    def _end_step(self, call: MarkedCall) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        self._num_steps += 1
        if self._begin is not None:
            self._calls.append(call)
            if self._num_steps == self._steps.stop:
                self._stop()
        elif self._num_steps == self._steps.start - 1:
            self._start()

    def _start(self) -> None:
        in_flight.settle()  # all programs in the profile belong to its steps
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # events of Python calls would cost more than steps
        try:
            jax.profiler.start_trace(self._own_folder(), profiler_options=options)
        except Exception as error:  # a step that went well must not fail
            self._error = error
            return
        self._begin = time_ns()
        self._marks.phases.clear()

    def _stop(self) -> None:
        begin, self._begin = self._begin, None
        assert begin is not None
        try:
            with _WRITING:
                marks = list(self._marks.phases)
                in_flight.settle()
                jax_compat.stop_profiler()
                self._write(begin, marks)
        except Exception as error:
            self._error = error

    def _abandon(self) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
        if self._begin is not None:
            self._begin = None
            with suppress(Exception):  # the loop has an error of its own
                jax_compat.stop_profiler()

    def _write(self, begin: int, marks: list[tuple[int, str]]) -> None:
        first = self._num_steps - len(self._calls)
        if self._num_steps <= self._steps.start:
            return
        profile = max(self._own_folder().rglob("*.xplane.pb"), key=os.path.getmtime)
        facts = {"run": self._run, "steps": [self._steps.start, self._num_steps]}
        trace = process_trace(profile, begin, self._calls, marks, first, facts)
        trace_file.write(trace_file.path_of(self._folder, jax.process_index()), [trace], [0])
        self._is_written = True


def profile(folder: str | os.PathLike[str], *, steps: range) -> Profile:
    """Record some steps of a training loop on every rank, for `jdp timeline` and for Perfetto.

    Steps count from 0 at the start of the with block: calls of a function of `jdp.train_step`, or
    of `Checkpointer.step` in a loop without one. All processes profile the same steps. They wait
    for their devices before the first profiled step and after the last, and then write the files.

    `folder` gets, for each process i:

    - `process-i.perfetto.json.gz`, for https://ui.perfetto.dev and `jdp timeline FOLDER`: for each
      rank its steps, programs, computing operations and collectives, named by bucket, with bytes,
      algorithm and leaves; for the process its phases (waiting for data, compiling, saving, the
      author's `jdp.phase`) and its calls of steps.
    - `process-i/`, JAX's own profile for XProf, from the same run: `*.xplane.pb`,
      `*.trace.json.gz`. It contains the programs' HLO.

    A rank's step lasts from the end of the step before on its device to its own end. One more
    step is recorded for that, unless the profile begins with step 0, which includes compiling.

    Args:
      folder: output folder, readable for `jdp timeline`; files of an earlier profile are replaced.
      steps: numbers of the steps, such as `range(10, 20)`; at least one, from 0, without gaps.

    Returns:
      A context manager. If the block ends before the last step, it logs a warning, and the profile
      has the steps before. If the block raises, JAX's profiler stops, and the error is raised.
      Errors of writing are raised at the block's end.

    Raises:
      ValueError, TypeError: here, if `folder` is not a path or `steps` not such a range; at the
        block's start, if processes have different steps.
      RuntimeError: at the block's start, if a profile already runs, also one of JAX's, or if this
        one had a block before.
      OSError: at the block's start, if `folder` cannot be written.

    >>> import jax.numpy as jnp, optax, jdp, tempfile
    >>> mesh = jdp.init(cpu_ranks=2)
    >>> state = jdp.TrainState.create({"w": jnp.zeros(4)}, jdp.replicated(optax.sgd(0.1)))
    >>> @jdp.train_step
    ... def step(state, x):
    ...     return state.apply_gradients({"w": x.mean(0)}), {}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with jdp.profile(folder, steps=range(2, 4)):
    ...         for _ in range(5):
    ...             state, _ = step(state, jnp.ones((2, 4)))
    ...     sorted(os.listdir(folder))
    ['process-0', 'process-0.perfetto.json.gz']
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f'folder must be a path, such as "profile", got {folder!r}.')
    if not isinstance(steps, range):
        raise TypeError(f"steps must be a range, such as range(10, 20), got {steps!r}.")
    if steps.step != 1 or len(steps) == 0 or steps.start < 0:
        raise ValueError(
            f"steps={steps} must be at least one step, from 0, without gaps, counted from the "
            "start of the block. Write for example steps=range(10, 20)."
        )
    return Profile(Path(folder).absolute(), steps)  # the loop may change the working directory


def _require_none_runs() -> None:
    if _active:
        raise RuntimeError(
            "jdp.profile already runs in this process, and JAX records one profile at a time. "
            "End that with block first."
        )
    if jax_compat.is_profiling():
        raise RuntimeError(
            "JAX's profiler already runs (jax.profiler.start_trace, or trace), and it records "
            "one profile at a time. Stop it first; jdp.profile writes its files, too."
        )
