"""The progress of this process, in one place; `progress` changes it."""

import math
from collections.abc import Callable

from jdp.worker import hang_detector, launcher_client
from jdp.worker.progress_board import Board, Slot, record
from jdp.worker.watchdog import SelfWatch


class OwnProgress:
    """The progress of this process, whatever the thread; there is one, `own`.

    Attributes:
      slot: where it is written.
      phases: that have begun, as in the slot, and when; the first is what goes on without any, and
        the last is shown.
      between: what goes on without any once the first step is done; since when, is not kept.
      num_steps: training steps called.
      is_first_step: whether none was called yet, by a process that is not alone.
      compile_s: spent with compiling.
      longest_wait_s: for how long others may keep this process waiting; inf: nobody watches.
      kept: the newest step that this run could go on from, in words.
      watch: the thread that watches this process.
      num_running: returns how many steps the devices have not finished.
    """

    def __init__(self) -> None:
        self.slot = _own_slot()
        self.phases: list[tuple[bytes, int]] = [(record(""), 0)]
        self.between: tuple[bytes, int] = (record(hang_detector.BETWEEN), 0)
        self.num_steps = 0
        self.is_first_step = False
        self.compile_s = 0.0
        self.longest_wait_s = math.inf
        self.kept: str | None = None
        self.watch: SelfWatch | None = None
        self.num_running: Callable[[], int] = int


def _own_slot() -> Slot:
    launcher = launcher_client.current()
    if launcher is None:
        return Board.create(1).slot(0)
    return Board.attach(launcher.board_file).slot(launcher.slot)


own = OwnProgress()
