"""The state of this process in a run, in one place."""

from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh


class ThisProcess:
    """The state that `jdp.init` sets up; `current` is the only one.

    Attributes:
      mesh: that of the last `jdp.init`; None before it.
      timeout_s: how long this process waits for others in comparisons, in seconds; inf: for ever.
      excepthook: the `sys.excepthook` that `fail_fast` replaced; None before.
      state_error: the error of a training step that ran to its end and was wrong, so that later
        states are wrong, too; None if there is none.
      has_reported_failure: whether the launcher knows that this process fails.
    """

    def __init__(self) -> None:
        self.mesh: Mesh | None = None
        self.timeout_s = 300.0
        self.excepthook: Callable[..., Any] | None = None
        self.state_error: str | None = None
        self.has_reported_failure = False


current = ThisProcess()
