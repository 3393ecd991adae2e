"""A run's exit codes, and signal handlers in C."""

import ctypes
import signal

# At least C's struct sigaction.
_ACTION_BYTES = 512


def catches_signal(pid: int | str, number: int) -> bool:
    """Whether a process handles a signal, in Python or C."""
    with open(f"/proc/{pid}/status") as file:
        masks = dict(line.split(":", 1) for line in file)
    return bool(int(masks["SigCgt"], 16) & 1 << number - 1)


def use_handler_of(other: int, number: int) -> None:
    """Let the C handler of `other` also handle `number`, on any thread."""
    libc, action = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(_ACTION_BYTES)
    for arguments in ((other, None, action), (number, action, None)):
        if libc.sigaction(*arguments):
            raise OSError(ctypes.get_errno(), f"sigaction of signal {number}")


# Saved after a signal; EX_TEMPFAIL: run again.
SAVED = 75
# As of timeout(1).
STALLED = 124


def in_words(returncode: int, *, out_of_memory: bool = False) -> str:
    """Return how a process ended.

    >>> in_words(-9), in_words(-9, out_of_memory=True)
    ('was killed by SIGKILL (signal 9)', 'was killed by SIGKILL (signal 9): the OOM killer ...
    >>> in_words(-11)
    'was killed by SIGSEGV (signal 11): a crash in compiled code'
    """
    why = {
        -signal.SIGSEGV: "a crash in compiled code",
        -signal.SIGBUS: "a crash in compiled code, or /dev/shm is full",
        -signal.SIGABRT: "compiled code gave up, see its message above",
        SAVED: "it saved after a signal; run it again with --resume",
        STALLED: "the watchdog ended it",
    }
    if out_of_memory:
        why[-signal.SIGKILL] = "the OOM killer ran in its cgroup"
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = "a signal"
        words = f"was killed by {name} (signal {-returncode})"
    else:
        words = f"ended with exit code {returncode}"
    return f"{words}: {why[returncode]}" if returncode in why else words


def exit_code(returncode: int) -> int:
    """Return a run's exit code: 128 + n after signal n."""
    return 128 - returncode if returncode < 0 else returncode
