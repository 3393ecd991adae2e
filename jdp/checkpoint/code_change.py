"""Detects edits of the program since the run wrote its state."""

import logging
from collections.abc import Mapping
from typing import Any

import jax

from jdp.distributed.checks import startup
from jdp.worker import launcher_client, source_files

_log = logging.getLogger("jdp")

# Only a digest is kept of a program with more different lines.
_MAX_LINES = 20_000
_MAX_PROGRAMS, _MAX_KINDS = 8, 32

# kind of a program -> its digest -> count of each line
_Programs = dict[str, dict[str, Mapping[str, int]]]


def facts_of_script() -> dict[str, Any]:
    """Return the facts about this process's script."""
    source_files.record()
    return {"run": _run()[0], "sources": source_files.digests()}


class Edits:
    """Finds program changes since the state was written."""

    def __init__(self, *, allows: bool) -> None:
        self._allows = allows
        self._step: int | None = None  # of the written state; None once programs are compared
        self._programs: _Programs = {}

    def continue_from(self, facts: Mapping[str, Any]) -> None:
        """Compare the user's files with `facts`, and log an edit.

        A recovery with edited files raises, unless allowed; a requested resume may follow an edit.
        """
        self._step, self._programs = facts["step"], dict(facts.get("programs", {}))
        edit = source_files.difference(facts.get("sources", {}))
        if edit is None:
            return
        run, generation = _run()
        if generation > 0 and facts.get("run") == run and not self._allows:
            raise RuntimeError(
                f"the program was edited since it wrote step {facts['step']}: {edit}. This "
                "recovery would continue the run with other code. Undo the edit, or start with "
                'the new code: jdp run --resume. ckpt.restore(..., allow="new script") also lets '
                "recoveries start with it."
            )
        _warn("jdp: the program was edited since it wrote step %d: %s.", facts["step"], edit)

    def compare_programs(self) -> None:
        """Log each program that differs from the one that wrote the state; never an error."""
        step, self._step = self._step, None
        if step is None:
            return
        for kind, programs in startup.traced.kinds().items():
            saved = self._programs.get(kind, {})
            if not saved or saved.keys() & programs.keys():
                continue
            del self._programs[kind]
            counts, program = [*saved.values()][-1], [*programs.values()][-1]
            difference = f": {program.difference(counts)}" if counts else ""
            _warn(
                "jdp: `%s` is another program than at step %d, on the same ranks and shapes%s. "
                "Training continues with it. If you did not intend this, look for a changed "
                "flag, environment variable or file.",
                kind.rpartition(" ")[0],
                step,
                difference,
            )

    def facts_of_programs(self) -> _Programs:
        """Return the training steps' programs so far."""
        found = {**self._programs}
        for kind, programs in startup.traced.kinds().items():
            mine = {
                digest: program.counts if len(program.counts) <= _MAX_LINES else {}
                for digest, program in programs.items()
            }
            others = {key: x for key, x in found.pop(kind, {}).items() if key not in mine}
            found[kind] = dict([*others.items(), *mine.items()][-_MAX_PROGRAMS:])
        return dict([*found.items()][-_MAX_KINDS:])


def _warn(text: str, *args: Any) -> None:
    if jax.process_index() == 0:
        _log.warning(text, *args)


def _run() -> tuple[str | None, int]:
    launcher = launcher_client.current()
    assigned = None if launcher is None else launcher.assignment
    return (None, 0) if assigned is None else (assigned.run_id, assigned.generation)
