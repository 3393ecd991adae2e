"""A `Checkpointer`'s work between `restore` and `close`."""

import contextlib
import logging
import time
import weakref
from typing import Any

import jax

from jdp import pytrees
from jdp.checkpoint import directory, orbax_files
from jdp.checkpoint.code_change import Edits
from jdp.checkpoint.host_commits import HostCommits
from jdp.checkpoint.restore import is_maker, restored, shapes_of
from jdp.checkpoint.restore_candidates import Found, all_processes, find
from jdp.checkpoint.saved_leaves import describe
from jdp.checkpoint.state_writer import (
    checkpoint_writer,
    commit_writer,
    of_all_processes,
    position_of,
)
from jdp.checkpoint.write_plan import Share, is_split
from jdp.distributed import agree, in_flight, metrics_log, this_process
from jdp.distributed.checks.replicas import RanksDifferError, require_equal_copies
from jdp.distributed.preemption import Preemption
from jdp.worker import launcher_client, progress
from jdp.worker.exit_codes import SAVED
from jdp.worker.launcher_client import Assignment, LauncherClient

_committing: weakref.WeakSet["Session"] = weakref.WeakSet()


def _commits_of(
    session: "Session", launcher: LauncherClient, assigned: Assignment, num_processes: int
) -> HostCommits | None:
    if not all(other.is_over for other in _committing):
        raise RuntimeError(
            "this process already has an open Checkpointer, and the launcher keeps the commits "
            "of one. Keep all states in one tree, ckpt.restore((state, other)), or close() the "
            "other one first."
        )
    _committing.add(session)
    num_shares = assigned.num_local if num_processes > 1 else 1
    if assigned.local_id >= num_shares:
        return None
    return HostCommits(launcher.commit_file, Share(assigned.local_id, num_shares))


_log = logging.getLogger("jdp")
_SAVED = "jdp: step %d is saved in %s, after %s. Run again with %s to continue."
_LOST = (
    "jdp: step %d is not saved after Ctrl-C, because %s. Latest kept: %s. `jdp run` saves its "
    "latest commit after Ctrl-C."
)

_UNCOUNTED = (
    "step {step} is not saved: ckpt.step has not counted the step after it, to which its state was "
    "donated. Latest kept: {kept}.\nCall ckpt.step(state, batches) after each step, and let "
    "KeyboardInterrupt and other exceptions leave the `with` block: it then saves what it can."
)

# Steps before Orbax is imported, well before a checkpoint.
_PREPARED_AFTER = 3

_NOT_CLOSED = (
    "jdp: the Checkpointer of %s was not closed, so steps after its last checkpoint are lost. "
    "Write with jdp.Checkpointer(...) as ckpt: around the loop, or call ckpt.close()."
)


class Session:
    """This process's last state, and when and where it is written."""

    def __init__(
        self,
        folder: directory.Folder,
        *,
        has_data: bool,
        commit_every: int,
        save_every: int,
        keep: int,
    ) -> None:
        self.steps, self.has_data, self.is_over = 0, has_data, False
        self._folder, self._commit_every, self._save_every = folder, commit_every, save_every
        self._group, self._process = all_processes(), jax.process_index()
        self._launcher = launcher_client.current()
        self._assigned = None if self._launcher is None else self._launcher.assignment
        self._host_commits: HostCommits | None = None
        if self._launcher and self._assigned:
            self._host_commits = _commits_of(self, self._launcher, self._assigned, len(self._group))
        self._num_steps_before = progress.num_steps()
        self._identity: dict[str, Any] = {}  # of this life, equal on all processes
        self._state: Any = None  # after the last step; self._data belongs to it
        self._data: dict[str, Any] = {"position": None}
        self._num_steps = 0  # in this life
        self._splits = False  # whether all processes write the state
        self._saved_at = -1
        self._is_unsaved = False  # the restored state may be missing on disk
        self._is_committed = False  # all hosts have a commit of this or the previous life
        self._ends = contextlib.ExitStack()
        self._ends.callback(folder.unlock)
        self._commits = commit_writer(self._host_commits)
        self._saves = checkpoint_writer(folder, keep=keep, is_here=self._process == 0)

    def restore(
        self,
        state: Any,
        batches: Any,
        resume: bool | None,
        *,
        keeps_missing: bool,
        allows_edits: bool,
    ) -> Any:
        """Return the state to resume from, and set the batches to it; `state` may make it."""
        began, self._edits = time.monotonic(), Edits(allows=allows_edits)
        make = None
        if is_maker(state):
            shapes = shapes_of(state) if self._resumes(resume) and not keeps_missing else None
            state, make = (state(), None) if shapes is None else (shapes, state)
        describe(state)
        in_flight.accept_new_state()
        self._splits = is_split(state)
        everything = self._find(resume)
        found = everything.latest
        if found is None and make is not None:
            state = make()
        if found is not None:
            state = restored(
                self._group,
                everything,
                state,
                batches,
                self._host_commits.own if self._host_commits else None,
                keeps_missing=keeps_missing,
                edits=self._edits,
            )
            self.steps, this_process.current.has_restored = found.key.step, True
            if found.key.is_commit:
                self._is_unsaved, self._is_committed = True, not found.lacking
        self.record(state, batches)
        if self._host_commits:
            self._host_commits.begin_life(everything.tag)
            self._commits.prepare_for(state, everything.hosts, everything.memories)
        self._preemption = Preemption()
        self._ends.callback(self._preemption.stop_listening)
        self._ends.callback(self._saves.end_thread)
        self._ends.callback(self._commits.end_thread)
        self._tell_restored(found.tier if found else "none", time.monotonic() - began)
        return state

    def _tell_restored(self, tier: str, seconds: float) -> None:
        base = self.steps + progress.own.closed_steps - progress.own.num_steps
        progress.own.restored = {"step": self.steps, "tier": tier, "base": base}
        if self._launcher is not None:
            facts = {**progress.own.restored, "is_complete": progress.own.is_complete}
            self._launcher.tell("restored", **facts, s=seconds)

    def _find(self, resume: bool | None) -> Found:
        found = find(
            self._group,
            self._folder,
            self._host_commits.shared if self._host_commits else None,
            resumes=self._resumes(resume),
            is_later=self._assigned is not None and self._assigned.generation > 0,
            host=self._assigned.host_id if self._assigned else 0,
            splits=self._splits,
            commit_every=self._commit_every,
        )
        self._identity = {"directory": str(self._folder.path), **found.identity()}
        return found

    def record(self, state: Any, batches: Any) -> None:
        """Record the state after the last step."""
        self._state = state
        self._data = position_of(batches)

    def count_step(self) -> None:
        """Count the step that led to the state, and write it if due."""
        # Earlier errors last: other processes may write with this one.
        self.steps += 1
        self._num_steps += 1
        progress.count_step()
        self._edits.compare_programs()
        if self._num_steps == 1 and self._process == 0:
            warning = weakref.finalize(self, _log.warning, _NOT_CLOSED, self._folder.path)
            self._ends.callback(warning.detach)
        if self._preemption.reached(self.steps):
            self._stop()
        try:
            if self.steps % self._save_every == 0:
                self._begin_save()
        finally:  # others may begin this commit
            is_due = self.steps % self._commit_every == 0 or not self._is_committed
            if self._host_commits and is_due:
                self._begin_commit()
        if self._num_steps == _PREPARED_AFTER and (self._process == 0 or self._splits):
            self._saves.prepare(orbax_files.prepare_parts if self._splits else orbax_files.prepare)
        self._commits.raise_failure()
        self._saves.raise_failure()

    def save(self, *, can_compare: bool = False) -> bool:
        """Save the state now; return whether all processes passed `can_compare`."""
        doing = f"while it saved step {self.steps} to {self._folder.path}"
        with progress.SAVING:
            with agree.propagating_errors(self._group, doing):
                in_flight.drain()
                in_flight.require_right_states()
                if self._saved_at != self.steps:
                    if pytrees.any_deleted(self._state):
                        kept = progress.own.latest_kept or "no step"
                        raise ValueError(_UNCOUNTED.format(step=self.steps, kept=kept))
                    self._begin_save()
                self._saved_at = -1  # the following may fail on any process
                self._saves.wait()
            mine = [self.steps, can_compare]
            gathered = agree.all_gather(
                self._group, mine, what="whether ckpt.save has written", of=f", step {self.steps},"
            )
            self._saved_at = self.steps
        return all(each == [self.steps, True] for each in gathered.values())

    def save_last(self, *, compares: bool) -> None:
        """Save the last step unless saved, then compare the ranks' states."""
        if not self._num_steps and not self._is_unsaved:
            return
        can_compare = self.save(can_compare=compares and not pytrees.any_deleted(self._state))
        self._commits.settle()
        if can_compare:
            self._require_equal_ranks()
        self._commits.raise_failure()

    def save_interrupted(self) -> None:
        """After Ctrl-C save the last step without a launcher, and log a lost one."""
        if self._launcher is not None or not self._num_steps:
            return
        is_alone, has_begun = len(self._group) == 1, self._saved_at == self.steps
        why = "the next step has donated it" if is_alone else "other processes still run"
        try:
            if is_alone and not has_begun and not pytrees.any_deleted(self._state):
                self.save()
                has_begun = True
            self._saves.wait()
        except KeyboardInterrupt:
            has_begun, why = False, "the save was interrupted, too"
        except Exception as error:  # Ctrl-C stays the author's error
            has_begun, why = False, f"{type(error).__name__}: {error}"
        if has_begun and self._process == 0:
            _log.warning(_SAVED, self.steps, self._folder.path, "Ctrl-C", "JDP_RESUME=1")
        elif self._process == 0:
            kept = progress.own.latest_kept or "no step"
            _log.warning(_LOST, self.steps, why, kept)

    def tell_closed(self) -> None:
        """Report to the launcher that the last step is saved."""
        if self._launcher is not None:
            self._launcher.tell("closed", step=self.steps)

    def end_session(self) -> None:
        """Wait for pending writes, and release the directory."""
        if not self.is_over:
            progress.own.closed_steps += self.steps
        self.is_over, self._state = True, None
        self._ends.close()

    def _begin_commit(self) -> None:
        pairs = zip(progress.num_steps(), self._num_steps_before, strict=True)
        num_own, num_calls = (now - before for now, before in pairs)
        if num_own:
            self._commits.write_alone()
        self._is_committed = True  # even if it fails: all processes begin the next one together
        self._commits.begin_write(self._state, self._facts() | {"num_calls": num_calls})

    def _begin_save(self) -> None:
        with progress.SAVING:
            self._saves.settle()
        self._saves.begin_write(self._state, self._facts())
        self._saved_at = self.steps

    def _stop(self) -> None:
        self.save()
        self._commits.settle()
        self.tell_closed()
        self.end_session()
        if self._process == 0:
            again = "JDP_RESUME=1" if self._assigned is None else "--resume"
            _log.warning(_SAVED, self.steps, self._folder.path, "a signal", again)
            try:
                metrics_log.flush()
            except Exception as error:  # the state is saved
                _log.error("jdp: %s", error)
        self._preemption.call_earlier_handlers()
        raise SystemExit(SAVED)

    def _facts(self) -> dict[str, Any]:
        data = of_all_processes(self._group, self._data)
        programs = self._edits.facts_of_programs()
        return {**self._identity, "step": self.steps, "programs": programs, **data}

    def _resumes(self, resume: bool | None) -> bool:
        if self._assigned is not None and self._assigned.resumes:
            return True
        return launcher_client.is_asked_to_resume() if resume is None else resume

    def _require_equal_ranks(self) -> None:
        with progress.COMPARING:
            try:
                with agree.propagating_errors(self._group, "while it hashed its state"):
                    require_equal_copies(self._state)
            except RanksDifferError as error:
                raise RanksDifferError(
                    f"{error} Step {self.steps} is saved in {self._folder.path} from process 0; "
                    "earlier checkpoints may come from ranks that already differed."
                ) from None
