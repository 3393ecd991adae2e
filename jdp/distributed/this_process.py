"""The state of this process in a run, in one place."""

from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh


class ThisProcess:
    """The state that `jdp.init` sets up; there is one, `current`.

    Attributes:
      mesh: of the last `jdp.init`; None before it.
      timeout_s: how long this process waits for others of which it hears nothing; inf: for ever.
      shows_errors: what showed exceptions that nobody catches before `fail_fast` did; None before.
      why_wrong: what was wrong with a training step, and so is with the states since; None if
        nothing.
      has_told: whether the launcher knows that this process fails.
    """

    def __init__(self) -> None:
        self.mesh: Mesh | None = None
        self.timeout_s = 300.0
        self.shows_errors: Callable[..., Any] | None = None
        self.why_wrong: str | None = None
        self.has_told = False


current = ThisProcess()
