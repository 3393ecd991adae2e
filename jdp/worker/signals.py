"""What happens to a process at a signal, beside what Python knows."""

import ctypes

# At least the size of C's struct sigaction.
_ACTION_BYTES = 512


def catches(pid: int | str, number: int) -> bool:
    """Whether a process has a handler for a signal, in Python or in C."""
    with open(f"/proc/{pid}/status") as file:
        masks = dict(line.split(":", 1) for line in file)
    return bool(int(masks["SigCgt"], 16) & 1 << number - 1)


def use_handler_of(other: int, number: int) -> None:
    """Let the handler in C of another signal handle this signal, too, on any thread."""
    libc, action = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(_ACTION_BYTES)
    for arguments in ((other, None, action), (number, action, None)):
        if libc.sigaction(*arguments):
            raise OSError(ctypes.get_errno(), f"sigaction of signal {number}")
