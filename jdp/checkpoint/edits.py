"""Detects edits to the script between the start of a run and its recovery."""

import logging
from collections.abc import Mapping
from typing import Any

import jax

from jdp.worker import launcher_client, source_files

_log = logging.getLogger("jdp")


def facts_of_program() -> dict[str, Any]:
    """Return the facts about the program of this process that are written with each state."""
    source_files.record()
    return {"run": _run()[0], "sources": source_files.digests()}


def require_unedited(facts: Mapping[str, Any], *, allows_edits: bool) -> None:
    """Compare the user's files with those of the process that wrote `facts`, and log an edit.

    A recovery with edited files raises. A resumption that the user requested may follow an edit.

    Raises:
      RuntimeError: if the run recovers, and not `allows_edits`.
    """
    edit = source_files.difference(facts.get("sources", {}))
    if edit is None:
        return
    run, generation = _run()
    if generation > 0 and facts["run"] == run and not allows_edits:
        raise RuntimeError(
            f"the program was edited since it wrote step {facts['step']}: {edit}. This recovery "
            "would train on with other code than the run began with. Undo the edit, or begin with "
            'the new code by jdp run --resume. ckpt.restore(..., allow="new script") lets '
            "recoveries begin with it, too."
        )
    if jax.process_index() == 0:
        _log.warning("jdp: the program was edited since it wrote step %d: %s.", facts["step"], edit)


def _run() -> tuple[str | None, int]:
    launcher = launcher_client.current()
    assigned = None if launcher is None else launcher.assignment
    return (None, 0) if assigned is None else (assigned.run_id, assigned.generation)
