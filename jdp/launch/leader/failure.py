"""The causes that end a generation."""

import re
import signal
import time
from dataclasses import dataclass, field, replace

from jdp.error_codes import with_code
from jdp.worker.exit_codes import STALLED, exit_code, in_words
from jdp.worker.run_progress import LeaderLoss

CODES = ("JDP301", "JDP302", "JDP303", "JDP304", "JDP305", "JDP311")


@dataclass(frozen=True)
class Cause:
    """The cause that ends a generation.

    Attributes:
      code: exit code of the run if it ends now.
      full_text: with the traceback or last output of the process.
      error_code: "" without a fault.
      silent_s: until it was noticed.
      is_of_program: whether a process failed by itself; false for a lost host and for SIGKILL.
      error: last line of the script's traceback.
      step: last step that the process called.
      is_sure: whether it cannot be another failure's consequence.
      grows: not a fault: there is room for more processes.
      noticed: time.monotonic().
    """

    text: str
    code: int
    full_text: str
    error_code: str
    silent_s: float = 0.0
    is_of_program: bool = True
    error: str = ""
    step: int | None = None
    is_sure: bool = False
    grows: bool = False
    noticed: float = field(default_factory=time.monotonic)


# It would be the last line of different errors.
_NOTE_OF_JAX = re.compile(r"-{20}\nFor simplicity, JAX has removed its internal frames.*\n?")


def exit_of_process(
    process_id: int,
    host: str,
    pid: int,
    returncode: int,
    traceback: str | None,
    last_lines: list[str],
    step: int | None = None,
    out_of_memory: bool = False,
) -> Cause:
    """Return the cause for a failed process; `last_lines` are shown without a traceback."""
    text = f"{_who(process_id, host, pid)} {in_words(returncode, out_of_memory=out_of_memory)}"
    error_code = "JDP302" if returncode < 0 else "JDP301"
    lines = [with_code(error_code, f"the cause: {text}")]
    traceback = _NOTE_OF_JAX.sub("", traceback or "").rstrip()
    if traceback:
        lines += [f"  {line}" for line in traceback.splitlines()]
    elif last_lines:
        lines += ["its last output:", *(f"  {line}" for line in last_lines)]
    return Cause(
        text,
        exit_code(returncode),
        "\n".join(lines),
        error_code,
        error=traceback.rpartition("\n")[2],
        step=step,
        is_of_program=returncode != -signal.SIGKILL,
        # Its report may follow those of failures that it caused; JAX aborts a process that lost
        # another.
        is_sure=returncode < 0 and returncode != -signal.SIGABRT,
    )


def stall_of_process(process_id: int, host: str, pid: int, stalled_s: float, report: str) -> Cause:
    """Return the cause for a stalled process."""
    text = f"{_who(process_id, host, pid)} made no progress for {stalled_s:.1f} s"
    full_text = with_code("JDP303", f"the cause: {report}")
    return Cause(text, STALLED, full_text, "JDP303", stalled_s)


def early_end(process_id: int, other: int, grace_s: float, *, in_step: bool) -> Cause:
    """Return the cause for a process that waits for an ended one."""
    where = "a step or an evaluation that it did not call"
    if not in_step:
        where = "a call that all must make, such as ckpt.step, ckpt.save or ckpt.close"
    text = (
        f"process {process_id} reached the end of the script, and process {other} waited for it "
        f"for {grace_s:g} s in {where}"
    )
    advice = (
        "All processes must call the same steps, saves and jdp.evaluate. Look for a break, or "
        "for an `if` on the number of a process."
    )
    full_text = with_code("JDP304", f"the cause: {text}. {advice}")
    return Cause(text, 1, full_text, "JDP304", grace_s)


def after_end(why: Cause, process_id: int) -> Cause:
    """Return the cause for a failure after, perhaps because of, another process's end."""
    text = f"process {process_id} reached the end of the script"
    full_text = f"{text}. After that:\n{why.full_text}"
    return replace(why, text=f"{text}, then {why.text}", full_text=full_text)


def loss_of_host(host: str, why: str, silent_s: float) -> Cause:
    """Return the cause for a lost host."""
    text = f"host {host} was lost: {why}"
    full_text = with_code("JDP305", f"the cause: {text}.")
    return Cause(text, 1, full_text, "JDP305", silent_s, is_of_program=False)


def loss_of_leader(loss: LeaderLoss) -> Cause:
    """Return the cause for the previous leader's loss."""
    full_text = with_code("JDP311", f"the cause: {loss.why}.")
    return Cause(
        *(loss.why, 1, full_text, "JDP311", loss.silent_s),
        is_of_program=False,
        step=loss.step,
        noticed=loss.at,
    )


def growth() -> Cause:
    """Return the cause for growth."""
    return Cause("there is room for more processes", 0, "", "", grows=True)


def _who(process_id: int, host: str, pid: int) -> str:
    return f"process {process_id} (pid {pid} on {host})"
