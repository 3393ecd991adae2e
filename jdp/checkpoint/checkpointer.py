"""`Checkpointer`: keeps the state that a run resumes from."""

import logging
import os
from typing import Any

from jdp import pytrees
from jdp.checkpoint.directory import Folder
from jdp.checkpoint.restore import require_position
from jdp.checkpoint.session import Session
from jdp.checkpoint.write_plan import require_alive
from jdp.data import loops
from jdp.distributed import this_process
from jdp.validation import allows, int_at_least
from jdp.worker import progress

_log = logging.getLogger("jdp")
_NO_POSITION = (
    "jdp: ckpt.step got no batches, so the position of jdp.batches is not saved. A restarted run "
    "reads the first rows again and repeats all num_steps.\nWrite state = "
    "ckpt.restore(state, batches) before the loop, and ckpt.step(state, batches) in it."
)


class Checkpointer:
    """Keep the state and data position of a run outside its processes.

    A *commit*, every `commit_every` steps, goes to host memory owned by the launcher; without `jdp
    run` there are no commits. A run recovers from it when a process dies. A *checkpoint*, every
    `save_every` steps, at the end and at a signal, goes to disk. Both are written in the
    background, from values copied before the next step can donate the state. A step waits only for
    a write in progress. So a crash loses at most the steps of two intervals.

    Commits occupy twice the state's memory on each host, where each process writes a share. CPU
    devices write into it directly. Other devices, or processes without jdp's native library, keep a
    copy of the share on their devices. A checkpoint takes the state's size on the devices of
    process 0 while it is written.

    All processes must make the same calls. The state may be replicated or sharded over any number
    of ranks, and restored to any other number, in any placement. If it is sharded over processes,
    each writes its own shards; the next host keeps a copy of each shard of a commit.

    At SIGTERM, SIGUSR1 or SIGUSR2 to any process, all save after the same step, and `step` exits
    with code 75. An earlier handler of SIGUSR1 or SIGUSR2 runs after the save. After Ctrl-C the
    `with` block saves the last step of a single process, unless the next step has donated it; the
    log names the kept step. For several processes use `jdp run`.

    Args:
      directory: for the checkpoints of this run only, on a disk that process 0 can access; all
        processes, if the state is sharded over them. Not a URL.
      commit_every: steps between commits, >= 1, the same on all processes.
      save_every: steps between checkpoints, >= 1.
      keep: number of latest checkpoints to keep, >= 1.
      resume: whether to resume from `directory`. Default: true under `jdp run --resume`, otherwise
        whether JDP_RESUME is 1. Processes that `jdp run` restarts after a `restore` always resume.
      check_replicas: whether `close` checks that the state is bitwise equal on all ranks, see
        `jdp.check_replicas`. Each device reads its copy of the state once.

    Raises:
      TypeError: a number is not an integer, or `directory` is not a path.
      ValueError: a number is out of its range, or `directory` is a URL or empty.

    >>> import tempfile, jax.numpy as jnp, jdp
    >>> directory = tempfile.mkdtemp()
    >>> with jdp.Checkpointer(directory) as ckpt:
    ...     state = ckpt.restore({"w": jnp.zeros(2)})
    ...     for _ in range(3):
    ...         state = {"w": state["w"] + 1}
    ...         ckpt.step(state)
    >>> with jdp.Checkpointer(directory, resume=True) as ckpt:
    ...     ckpt.restore({"w": jnp.zeros(2)}), ckpt.steps
    ({'w': Array([3., 3.], dtype=float32)}, 3)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        commit_every: int = 10,
        save_every: int = 1000,
        keep: int = 3,
        resume: bool | None = None,
        check_replicas: bool = True,
    ) -> None:
        self._folder = Folder(directory)
        counts = {"commit_every": commit_every, "save_every": save_every, "keep": keep}
        self._counts = {name: int_at_least(name, n, least=1) for name, n in counts.items()}
        self._resume = resume
        self._check_replicas = check_replicas
        self._session: Session | None = None
        self._is_first = True  # no state was recorded

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}={n}" for name, n in self._counts.items())
        return f"<jdp.Checkpointer of {self._folder.path}: {self.steps} steps done, {counts}>"

    @property
    def steps(self) -> int:
        """Steps done, counted over all lives of the run."""
        return 0 if self._session is None else self._session.steps

    def restore(
        self, state: Any, batches: Any = None, *, missing: str = "error", allow: str | None = None
    ) -> Any:
        """Resume from the latest intact commit or checkpoint, if there is one.

        Call it once, after `jdp.init()` and before the loop. A process on a host without a commit
        receives the state from another.

        Args:
          state: the state of step 0, or a function without arguments that makes it. Its leaves give
            the shapes, dtypes and shardings to restore to, so a step compiled for it is not
            recompiled. A run that resumes only traces a function, so its arrays are never beside
            the restored ones. The function is called if nothing is saved, if JAX cannot trace it,
            if it makes arrays beside a `TrainState`, if it places arrays or reads placed ones
            without one, if the mesh has further axes, and with `missing="keep"`. It must not store
            arrays elsewhere: traced ones have no values.
          batches: the run's `jdp.batches(...)`; `jdp.shard_batches(loader)` of a loader that saves
            its own state; or an object with an int `position`, which is set.
          missing: "error" raises if leaves differ. "keep" allows another optimizer, an added
            average or fewer layers: leaves of equal path, shape and dtype are restored, others keep
            their value in `state`, and one log line lists them.
          allow: "new script" lets `jdp run` recover although the script, or a module in its folder,
            was edited. After `--resume` edits are always allowed. One log line names the first
            edited line, another the first differing operation of a step traced to another program
            on the same ranks and shapes.

        Returns:
          The restored state, or that of step 0.

        Raises:
          TypeError: `batches` has no position, or JAX does not support a leaf's type.
          ValueError: the saved state is of a different model (the error names the leaves), or has
            no data position although `batches` is given; `batches` reads other data than the run
            began with (see `allow` of `jdp.batches`).
          RuntimeError: `directory` holds an earlier run that this does not resume; this resumes,
            and only Orbax or Flax has written there; another run writes there; all checkpoints are
            damaged; the script was edited since the run wrote the state; `commit_every` differs
            between processes; or another process failed.
          OSError: `directory` cannot be written to; or the state is sharded over processes, and one
            of them sees another directory than process 0.
        """
        if self._session is not None:
            raise RuntimeError("restore was already called. Call it once, before the loop.")
        require_position(batches)
        if missing not in ("error", "keep"):
            raise ValueError(f'missing must be "error" or "keep", got {missing!r}.')
        allows_edits = allows(allow, "new script")
        session = Session(self._folder, has_data=batches is not None, **self._counts)
        try:
            with progress.RESTORING:
                state = session.restore(
                    state,
                    batches,
                    self._resume,
                    keeps_missing=missing == "keep",
                    allows_edits=allows_edits,
                )
        except BaseException:
            session.end_session()
            raise
        self._session = session
        return state

    def step(self, state: Any, batches: Any = None) -> None:
        """Count a step, and commit or save if it is due.

        Args:
          state: what the step returned. It may be donated to the next one.
          batches: as for `restore`.

        Raises:
          SystemExit: with code 75, after a signal, when the state is saved.
          ValueError: `state` was donated, or `batches` is given here and not to `restore`.
          OSError: an earlier commit or checkpoint could not be written. This step counts, and is
            written if it is due.
          RuntimeError: `restore` was not called; or, on every process, one of them had different
            arguments or state in a step, or an invalid weight. That state is not written.
        """
        self._recorded(state, batches).count_step()

    def save(self, state: Any, batches: Any = None) -> None:
        """Write a checkpoint of the last step now, and wait until it is on disk.

        Args:
          state: what the last step returned.
          batches: as for `restore`.

        Raises:
          OSError: it cannot be written.
          RuntimeError: process 0 could not write it, `restore` was not called, or as from `step`.
        """
        self._recorded(state, batches).save()

    def close(self) -> None:
        """Save the last step unless it is saved, and release the directory for other runs.

        Then compare the state of all ranks, unless `check_replicas=False`. A `with` block calls
        `close` at its end. If an exception ends the block, it does not save or compare.

        Raises:
          OSError, RuntimeError: as from `save`.
          RuntimeError: on every process, if the state is not bitwise equal on all ranks. The last
            step is still saved, with the values of process 0.
        """
        session = self._session
        if session is None or session.is_over:
            return
        try:
            session.save_last(compares=self._check_replicas)
            session.tell_closed()
        finally:
            session.end_session()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None = None, *_: object
    ) -> None:
        if kind is None:
            self.close()
        elif self._session is not None:
            with this_process.current.leaving(error):
                try:
                    if kind is KeyboardInterrupt:
                        self._session.save_interrupted()
                finally:
                    self._session.end_session()

    def _recorded(self, state: Any, batches: Any) -> Session:
        session = self._session
        if session is None or session.is_over:
            what = "close() was called" if session else "restore was not called"
            raise RuntimeError(
                f"{what}, so this state would not continue the run in the directory. Write state "
                "= ckpt.restore(state, batches) before the loop, and close() after it."
            )
        if (batches is not None) != session.has_data:
            one, other = ("restore", "step") if session.has_data else ("step", "restore")
            raise ValueError(
                f"batches were passed to ckpt.{one} but not to ckpt.{other}, so rows would be "
                "duplicated or skipped after a restart. Pass them to both or to neither."
            )
        if self._is_first and not session.has_data and loops.is_handing_out():
            _log.warning(_NO_POSITION)
        self._is_first = False
        if pytrees.any_first_deleted(state):  # all shards are asked before they are written
            require_alive(state)
        session.record(state, batches)
        return session
