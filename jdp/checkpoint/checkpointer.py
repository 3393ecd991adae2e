"""`Checkpointer`: what a run goes on from when its processes die."""

import functools
import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax

from jdp import pytrees, rank_state
from jdp.checkpoint import directory as directories
from jdp.checkpoint import snapshot
from jdp.checkpoint.commit_memory import CommitMemory
from jdp.checkpoint.restore import Found, Sources, leaves_of, loaded, named, newest
from jdp.checkpoint.writer_thread import Background
from jdp.distributed import agree, in_flight, kv_store
from jdp.distributed.checks import known_leaves, startup
from jdp.distributed.checks.replicas import RanksDifferError, require_equal_copies
from jdp.distributed.preemption import Preemption
from jdp.validation import int_at_least
from jdp.worker import launcher_client, progress
from jdp.worker.exit_codes import SAVED

_log = logging.getLogger("jdp")

# After this many steps what writes to the disk is imported: later than the first, which a run that
# recovers is waiting for, and long before it is needed.
_PREPARED_AFTER = 3

_NOT_CLOSED = (
    "jdp: the Checkpointer of %s was not closed, and steps after its last checkpoint are saved "
    "nowhere. Write with jdp.Checkpointer(...) as ckpt: around the loop, or call ckpt.close()."
)


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
      keep: how many checkpoints are kept, the newest, at least 1.
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
        self._folder = directories.Folder(directory)
        self._commit_every = int_at_least("commit_every", commit_every, least=1)
        self._save_every = int_at_least("save_every", save_every, least=1)
        self._keep = int_at_least("keep", keep, least=1)
        self._resume = resume
        self._check_replicas = check_replicas
        self._steps = 0
        self._life: _Life | None = None

    @property
    def steps(self) -> int:
        """Steps done, counted over all lives of the run."""
        return self._steps

    def restore(self, state: Any, batches: Any = None) -> Any:
        """Go on from the newest commit or checkpoint that is whole, if there is one.

        Call it once, after `jdp.init()` and before the loop. A process whose host has no commit
        gets the state from one that has it.

        Args:
          state: the state of step 0: its leaves say which shapes, dtypes and shardings to restore
            to, so that a step which was compiled for it is not compiled again.
          batches: the run's `jdp.batches(...)`, or anything with an int `position`, which is set.

        Returns:
          The restored state, or `state`.

        Raises:
          TypeError: if `batches` have no position.
          ValueError: if what was written is of another model (naming the leaf), or without a
            position of the data although `batches` are given.
          RuntimeError: if `directory` holds an earlier run and this is no resumption, if another
            run writes there, if nothing there is whole, or if another process failed.
          OSError: if `directory` cannot be written to.
        """
        began = time.monotonic()
        if self._life is not None:
            raise RuntimeError("restore was called already: call it once, before the loop.")
        if batches is not None and not hasattr(batches, "position"):
            raise TypeError(
                f"a {type(batches).__name__} has no `position`: after a restart rows would count "
                "twice or never. Give jdp.batches(...), or an object with an int `position` that "
                "says what it has handed out, and goes on from there when it is set."
            )
        life = _Life(self._folder, has_data=batches is not None)
        in_flight.begins_anew()
        try:
            found, state = self._restored(life, state, batches)
        except BaseException:
            life.end()
            raise
        self._steps, self._life = found.step if found else 0, life
        life.note(state, batches)
        life.is_unsaved = found is not None and found.tier == "commit"
        life.begin(is_held=found is not None and found.tier == "commit" and not found.lacking)
        if life.member is not None:
            tier, seconds = found.tier if found else "none", time.monotonic() - began
            life.member.tell("restored", step=self._steps, tier=tier, s=seconds)
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
        life = self._noted(state, batches)
        life.commits.check()
        life.saves.check()
        self._steps += 1
        life.num_steps += 1
        if life.num_steps == 1 and life.process == 0:
            life.expect_close(self._folder.path)
        if life.preemption.reached(self._steps):
            self._stop(life)
        if self._steps % self._save_every == 0:
            self._begin_save(life)
        if life.memory and (self._steps % self._commit_every == 0 or not life.is_held):
            self._begin_commit(life, life.memory)
        if life.num_steps == _PREPARED_AFTER and life.process == 0 and life.saves.is_idle():
            life.saves.begin(directories.prepare)

    def save(self, state: Any, batches: Any = None) -> None:
        """Write a checkpoint of the last step now, and wait until it is whole.

        Args:
          state: what the last step returned.
          batches: as for `restore`.

        Raises:
          OSError: if it cannot be written.
          RuntimeError: if process 0 could not write it, if `restore` was not called, or as from
            `step`.
        """
        self._save(self._noted(state, batches))

    def close(self) -> None:
        """Save what is not saved yet, wait until it is, and let other runs use the directory.

        Then compare the state of all ranks, unless `check_replicas=False`. At the end of a `with`
        block `close` is called; if an exception ends the block, nothing is saved or compared.

        Raises:
          OSError, RuntimeError: as from `save`.
          RuntimeError: on every process, if ranks hold other bits of the state than each other.
            The last step is saved then, as process 0 holds it.
        """
        life = self._life
        if life is None or life.is_over:
            return
        try:
            if life.num_steps or life.is_unsaved:
                has_state = self._check_replicas and not pytrees.any_deleted(life.state)
                can_check = self._save(life, can_check=has_state)
                life.commits.wait()
                if can_check:
                    self._require_equal_ranks(life)
        finally:
            life.end()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._life is not None:
            self._life.end()

    def _restored(self, life: "_Life", state: Any, batches: Any) -> tuple[Found | None, Any]:
        resumes = life.resumes(self._resume)
        with agree.failing_together(life.group, "while it looked for what to restore"):
            if life.process == 0:
                self._folder.lock(resumes=life.was_replaced)
            sources = Sources(self._folder, life.memory)
        offer = sources.offer() | {"tag": life.tag, "resumes": resumes}
        offers = agree.told(life.group, offer, what="what there is to restore")
        life.number = 1 + max(each["life"] for each in offers.values())
        life.tag, resumes = offers[0]["tag"], offers[0]["resumes"]
        found = newest(offers)
        if found is None:
            if resumes and life.process == 0:
                _log.warning("jdp: nothing to resume in %s: this begins anew.", self._folder.path)
            return None, state
        if not resumes:
            raise RuntimeError(
                f"{self._folder.path} holds step {found.step} of an earlier run. To go on from "
                "there: jdp run --resume, JDP_RESUME=1 or Checkpointer(..., resume=True). To begin "
                "anew: another directory, or this one emptied."
            )
        facts, values = loaded(life.group, found, sources)
        with agree.failing_together(life.group, f"while it restored {found.where}"):
            values = rank_state.resized(state, values, found.where)
            saved = snapshot.with_shapes(leaves_of(facts), values)
            snapshot.require_same(saved, snapshot.describe(state), found.where)
            state = snapshot.place(state, values)
            if batches is not None:
                batches.position = _position(facts, found.where)
        agree.told(life.group, None, what=f"whether {found.where} is restored")
        known_leaves.vouch(jax.tree.leaves(state))  # All have it from one place.
        return found, state

    def _noted(self, state: Any, batches: Any) -> "_Life":
        life = self._life
        if life is None or life.is_over:
            what = "close() was called" if life else "restore was not called"
            raise RuntimeError(
                f"{what}, and what would be written now does not follow from what was. Write "
                "state = ckpt.restore(state, batches) before the loop, and close() after it."
            )
        if (batches is not None) != life.has_data:
            one, other = ("restore", "step") if life.has_data else ("step", "restore")
            raise ValueError(
                f"batches were given to ckpt.{one} and not to ckpt.{other}: rows would count twice "
                "or never after a restart. Give them to both, or to none."
            )
        snapshot.require_alive(state)
        life.note(state, batches)
        return life

    def _begin_commit(self, life: "_Life", memory: CommitMemory) -> None:
        life.commits.wait()
        life.committed.require_right()
        taken = life.for_commits.take(life.state, here=life.is_writer)
        life.is_held, life.committed = True, in_flight.Unchecked()
        if taken is not None:
            facts = self._facts(life, taken)
            life.commits.begin(_write_commit, memory, facts, taken, life.committed)

    def _begin_save(self, life: "_Life") -> None:
        with progress.SAVING:
            life.saves.wait()
        life.saved.require_right()
        taken = life.for_saves.take(life.state, here=life.process == 0)
        life.saved_at, life.saved = self._steps, in_flight.Unchecked()
        if taken is not None:
            facts = self._facts(life, taken)
            write = functools.partial(_write_checkpoint, self._folder, keep=self._keep)
            life.saves.begin(write, facts, taken, life.saved)

    def _save(self, life: "_Life", *, can_check: bool = False) -> bool:
        """Save, and return whether all processes can compare their states now."""
        doing = f"while it saved step {self._steps} to {self._folder.path}"
        with progress.SAVING:
            with agree.failing_together(life.group, doing):
                in_flight.drain()
                in_flight.require_right_states()
                if life.saved_at != self._steps:
                    self._begin_save(life)
                life.saved_at = -1  # if what follows fails, on whichever process
                life.saves.wait()
            told = agree.told(
                life.group, [self._steps, can_check], what=f"whether step {self._steps} is saved"
            )
            life.saved_at = self._steps
        return all(each == [self._steps, True] for each in told.values())

    def _require_equal_ranks(self, life: "_Life") -> None:
        with progress.COMPARING:
            try:
                with agree.failing_together(life.group, "while it hashed its state"):
                    require_equal_copies(life.state)
            except RanksDifferError as error:
                raise RanksDifferError(
                    f"{error} Step {self._steps} is saved in {self._folder.path} as process 0 "
                    "holds it, and earlier checkpoints may be of ranks that differed already."
                ) from None

    def _stop(self, life: "_Life") -> None:
        self._save(life)
        life.end()
        if life.process == 0:
            _log.warning(
                "jdp: SIGTERM: step %d is saved in %s. Run again with %s to go on.",
                self._steps,
                self._folder.path,
                "JDP_RESUME=1" if life.assigned is None else "--resume",
            )
        raise SystemExit(SAVED)

    def _facts(self, life: "_Life", taken: snapshot.Snapshot) -> dict[str, Any]:
        return {
            "directory": str(self._folder.path),
            "life": life.number,
            "tag": life.tag,
            "step": self._steps,
            "position": life.position,
            "jdp": startup.version(),
            "jax": jax.__version__,
            "leaves": taken.leaves,
        }


class _Life:
    """What a Checkpointer holds from `restore` to `close`."""

    def __init__(self, folder: directories.Folder, *, has_data: bool) -> None:
        self.has_data = has_data
        self.group, self.process = _all_processes(), jax.process_index()
        self.member = launcher_client.current()
        self.assigned = None if self.member is None else self.member.assignment
        self.memory, self.is_writer = None, False
        if self.member and self.assigned:
            _require_alone(self)
            self.memory = CommitMemory(self.member.commit_file)
            self.is_writer = self.assigned.local_id == 0
        self.number, self.tag = 0, secrets.token_hex(4)  # then those that all agreed on
        self.state: Any = None  # after the last step, as the position is
        self.position: int | None = None
        self.num_steps, self.saved_at = 0, -1
        self.is_unsaved = False  # what was restored may be on no disk
        self.is_held = False  # whether all hosts have a commit of this life, or the one before
        self.is_over = False
        self._ends: list[Callable[[], object]] = [folder.unlock]

    @property
    def was_replaced(self) -> bool:
        """Processes before these have died, or stopped at SIGTERM."""
        return self.assigned is not None and self.assigned.generation > 0

    def resumes(self, resume: bool | None) -> bool:
        if self.assigned is not None and self.assigned.resumes:
            return True
        return os.environ.get("JDP_RESUME", "") not in ("", "0") if resume is None else resume

    def note(self, state: Any, batches: Any) -> None:
        self.state, self.position = state, None if batches is None else int(batches.position)

    def begin(self, *, is_held: bool) -> None:
        self.is_held = is_held
        self.commits, self.saves = Background("jdp commit"), Background("jdp save")
        self.for_commits = snapshot.Snapshots(reuse=True)
        self.for_saves = snapshot.Snapshots(reuse=False)
        # What led to the last commit and checkpoint, and may have gone wrong.
        self.committed, self.saved = in_flight.Unchecked(), in_flight.Unchecked()
        self.preemption = Preemption()
        self._ends = [self.commits.end, self.saves.end, self.preemption.close, *self._ends]

    def expect_close(self, path: os.PathLike[str]) -> None:
        warning = weakref.finalize(self, _log.warning, _NOT_CLOSED, path)
        self._ends.append(warning.detach)

    def end(self) -> None:
        self.is_over, self.state = True, None
        while self._ends:
            self._ends.pop(0)()


# The one that commits, or did: a host has room for the commits of one run.
_committing: weakref.ref[_Life] | None = None


def _require_alone(life: _Life) -> None:
    global _committing
    other = None if _committing is None else _committing()
    if other is not None and not other.is_over:
        raise RuntimeError(
            "another Checkpointer is at work in this process, and the launcher keeps the commits "
            "of one. Keep all states in one tree, ckpt.restore((state, other)), or close() the "
            "other one first."
        )
    _committing = weakref.ref(life)


# What has gone wrong is not written. It is an error on all processes, when the next one is written
# or before: here it would come on one alone.
def _write_commit(
    memory: CommitMemory,
    facts: dict[str, Any],
    taken: snapshot.Snapshot,
    steps: in_flight.Unchecked,
) -> None:
    values = taken.fetch()
    if not steps.went_wrong():
        memory.write(facts, snapshot.pack(values))
        progress.kept(facts["step"], "a commit in this host's memory")


def _write_checkpoint(
    folder: directories.Folder,
    facts: dict[str, Any],
    taken: snapshot.Snapshot,
    steps: in_flight.Unchecked,
    *,
    keep: int,
) -> None:
    arrays = named(taken.leaves, taken.fetch())
    if not steps.went_wrong():
        folder.write(facts["life"], facts["step"], facts, arrays)
        progress.kept(facts["step"], str(folder.path))
        folder.keep(keep)


def _all_processes() -> tuple[int, ...]:
    if jax.process_count() > 1 and not kv_store.is_open():
        raise RuntimeError(
            f"there are {jax.process_count()} processes, and this JAX gives no store in which they "
            "could agree on what to restore. Use a version of JAX that jdp was tested with."
        )
    return tuple(range(jax.process_count()))


def _position(facts: dict[str, Any], where: str) -> int:
    if facts["position"] is None:
        raise ValueError(
            f"{where} was written without batches, so it is not known where the data stood. Write "
            "state = ckpt.restore(state), and set batches.position yourself."
        )
    return facts["position"]
