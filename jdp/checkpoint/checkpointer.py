"""`Checkpointer`: what a run goes on from when its processes die."""

import os
from typing import Any

from jdp.checkpoint.directory import Folder
from jdp.checkpoint.saved_leaves import describe
from jdp.checkpoint.session import Session
from jdp.checkpoint.snapshot import require_alive
from jdp.validation import int_at_least


class Checkpointer:
    """Keeps the state of a run, and where its data stands, outside of its processes.

    In two places. A *commit*, every `commit_every` steps, goes to memory of the host that the
    launcher owns (none without `jdp run`): what goes on when a process dies begins there. A
    *checkpoint*, every `save_every` steps, at the end and after SIGTERM, goes to the disk. Both
    are written in the background, from a copy that is made on the device before the next step may
    donate the state. A step waits only for the commit or checkpoint before it, if that is still
    being written: what a crash costs is then never more than was asked for. The copy for commits
    keeps its memory, once the size of the state, on one device of each host; the copy for a
    checkpoint takes as much while it is written.

    All processes make the same calls. The state may lie on any number of ranks, replicated or
    split; it is written as a whole, so that it is restored on any other number.

    After SIGTERM on any process all of them save after the same step, and `step` ends the process
    with exit code 75.

    Args:
      directory: of the checkpoints of this one run, on a disk that process 0 sees; no URL.
      commit_every: steps from commit to commit, at least 1.
      save_every: steps from checkpoint to checkpoint, at least 1.
      keep: how many of the latest checkpoints are kept, at least 1.
      resume: whether to go on from what `directory` holds. Default: `jdp run --resume`, or
        without it whether JDP_RESUME is 1. What `jdp run` starts again after a death always goes
        on.
      check_replicas: whether `close` makes sure that all ranks hold the same bits of the state,
        see `jdp.check_replicas`. Each device reads its copy of the state once.

    Raises:
      ValueError: if a number is out of its range, or `directory` is a URL.

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

    @property
    def steps(self) -> int:
        """Steps done, counted over all lives of the run."""
        return 0 if self._session is None else self._session.steps

    def restore(
        self,
        state: Any,
        batches: Any = None,
        *,
        missing: str = "error",
        allow: str | None = None,
    ) -> Any:
        """Go on from the latest intact commit or checkpoint, if there is one.

        Call it once, after `jdp.init()` and before the loop. A process whose host has no commit
        gets the state from one that has it.

        Args:
          state: the state of step 0: its leaves say which shapes, dtypes and shardings to restore
            to, so that a step which was compiled for it is not compiled again.
          batches: the run's `jdp.batches(...)`, or anything with an int `position`, which is set.
          missing: "keep" goes on with another optimizer, an added average or fewer layers: leaves
            of the same path, shape and dtype are restored, `state` keeps the others, and one line
            of the log lists them. "error": such a state is refused.
          allow: "new script" lets `jdp run` recover with a script, or modules in its folder, that
            were edited since. After `--resume` they always may be. One line of the log names the
            first line that differs.

        Returns:
          The restored state, or `state`.

        Raises:
          TypeError: if `batches` have no position, or a leaf is of a type that JAX does not have.
          ValueError: if what was written is of another model (naming the leaves), or without a
            position of the data although `batches` are given; if these read other data than the
            run began with (see `allow` of `jdp.batches`).
          RuntimeError: if `directory` holds an earlier run and this does not resume it, if another
            run writes there, if all checkpoints there are damaged, if the script was edited since
            the run wrote the state that it recovers, or if another process failed.
          OSError: if `directory` cannot be written to.
        """
        if self._session is not None:
            raise RuntimeError("restore was called already: call it once, before the loop.")
        if batches is not None and not hasattr(batches, "position"):
            raise TypeError(
                f"batches= is a {type(batches).__name__}, which has no `position`: after a restart "
                "rows would count twice or never. Give jdp.batches(...), or an object with an int "
                "`position`: how many rows it has handed out. After it is set, it goes on there."
            )
        if missing not in ("error", "keep"):
            raise ValueError(f'missing={missing!r} is neither "error" nor "keep".')
        if allow not in (None, "new script"):
            raise ValueError(f'allow={allow!r}: write "new script", or leave it out.')
        describe(state)
        session = Session(self._folder, has_data=batches is not None, **self._counts)
        try:
            state = session.restore(
                state,
                batches,
                self._resume,
                keeps_missing=missing == "keep",
                allows_edits=allow is not None,
            )
        except BaseException:
            session.end_session()
            raise
        self._session = session
        return state

    def step(self, state: Any, batches: Any = None) -> None:
        """Count a step, and commit or save if it is time.

        Args:
          state: what the step returned. It may be donated to the next one.
          batches: as for `restore`.

        Raises:
          SystemExit: with code 75, after SIGTERM, when the state is saved.
          ValueError: if `state` was donated, or `batches` are given here and not to `restore`.
          OSError: if an earlier commit or checkpoint could not be written.
          RuntimeError: if `restore` was not called; on every process, if a step got other arguments
            or another state on one of them, or what is not a weight: its state is not written.
        """
        self._recorded(state, batches).count_step()

    def save(self, state: Any, batches: Any = None) -> None:
        """Write a checkpoint of the last step now, and wait until it is on the disk.

        Args:
          state: what the last step returned.
          batches: as for `restore`.

        Raises:
          OSError: if it cannot be written.
          RuntimeError: if process 0 could not write it, if `restore` was not called, or as from
            `step`.
        """
        self._recorded(state, batches).save()

    def close(self) -> None:
        """Save what is not saved yet, wait until it is, and let other runs use the directory.

        Then compare the state of all ranks, unless `check_replicas=False`. At the end of a `with`
        block `close` is called; if an exception ends the block, nothing is saved or compared.

        Raises:
          OSError, RuntimeError: as from `save`.
          RuntimeError: on every process, if ranks hold other bits of the state than each other.
            The last step is saved then, as process 0 holds it.
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._session is not None:
            self._session.end_session()

    def _recorded(self, state: Any, batches: Any) -> Session:
        session = self._session
        if session is None or session.is_over:
            what = "close() was called" if session else "restore was not called"
            raise RuntimeError(
                f"{what}, so that this state would not continue the run in the directory. Write "
                "state = ckpt.restore(state, batches) before the loop, and close() after it."
            )
        if (batches is not None) != session.has_data:
            one, other = ("restore", "step") if session.has_data else ("step", "restore")
            raise ValueError(
                f"batches were given to ckpt.{one} and not to ckpt.{other}: rows would count twice "
                "or never after a restart. Give them to both, or to none."
            )
        require_alive(state)
        session.record(state, batches)
        return session
