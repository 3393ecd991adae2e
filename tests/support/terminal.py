"""Programs on a pseudoterminal, for tests; and training without JAX, as far as a test says."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time

from support.launcher import DEADLINE_S, PACKAGES, SCRIPT
from support.screen import Screen

# Trains as far as the test says, without JAX: `go(steps)`.
TRAINS = """
from jdp.worker.progress_board import Board
slot = Board.attach(launcher.board_file).slot(launcher.slot)
from jdp.worker import progress, watching
watching.begin_watching(600.0, a.process_id, a.num_processes)
def go(steps, rows=25, loss=None):
    for _ in range(steps):
        with progress.DATA:
            progress.own.slot.counter.next_rows = rows
        with progress.TRAIN_STEP:
            pass
        time.sleep(0.01)
    if loss is not None:
        counter, step = progress.own.slot.counter, progress.own.num_steps
        counter.write_metrics(10 * a.generation + step, loss=loss)
"""
# Generation 1 begins at step 10, as SCRIPT says.
AFTER = """
go(40, loss=0.25 / (a.generation + 1))
print("x" * 30 + f" of {a.process_id}")
(folder / f"trained {a.generation} {a.process_id}").touch()
"""
# Plain lines come often.
OFTEN = "from jdp.launch.host import console; console.PLAIN_S = 0.1"


class Terminal:
    """A program on a pseudoterminal, whose screen the test reads."""

    def __init__(self, command, columns=500, err=None, **variables):
        self.columns = columns
        self._ours, theirs = pty.openpty()
        self._resize(theirs, columns)
        self.before = termios.tcgetattr(theirs)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("JDP_", "PET_", "NO_"))}
        self.process = subprocess.Popen(
            command,
            env={**kept, "PYTHONPATH": PACKAGES, "TERM": "xterm-256color", **variables},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs if err is None else err,
            start_new_session=True,
        )
        self._theirs = theirs
        self.data = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def type(self, text):
        os.write(self._ours, text.encode())

    @staticmethod
    def _resize(fd, columns):
        termios.tcsetwinsize(fd, (24, columns))

    def resize(self, columns):
        self._resize(self._theirs, columns)
        self.process.send_signal(signal.SIGWINCH)

    def _read(self):
        while True:
            try:
                data = os.read(self._ours, 1 << 16)
            except OSError:
                return
            if not data:
                return
            self.data += data

    @property
    def lines(self):
        screen = Screen(self.columns)
        # What was read may end in the middle of a sequence or of a character.
        whole = re.sub(rb"\x1b(\[[\d;]*)?\Z", b"", self.data)
        screen.write(whole.decode(errors="ignore").encode())
        return screen.lines

    def until(self, condition, what):
        deadline = time.monotonic() + DEADLINE_S
        while not (found := condition()):
            assert time.monotonic() < deadline, f"no {what}: {self.data.decode()}"
            time.sleep(0.01)
        return found

    def end(self, code=0):
        assert self.process.wait(DEADLINE_S) == code, self.data.decode()
        assert termios.tcgetattr(self._theirs) == self.before
        return self.close()

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._theirs)
        self._reader.join(1.0)  # ends with the output, unless another process holds the terminal
        os.close(self._ours)
        return self.lines


class RunTerminal(Terminal):
    """`jdp run` on a pseudoterminal."""

    def __init__(self, folder, *flags, changes="", **options):
        self.folder = folder
        (folder / "train.py").write_text(SCRIPT)
        program = f"{changes}\nimport sys; from jdp.__main__ import main; sys.exit(main())"
        super().__init__(
            [sys.executable, "-c", program, "run", "--nproc-per-node=2", *flags]
            + ["--local-ranks-filter=all", f"--log-dir={folder / 'logs'}", "--shutdown-timeout-s=2"]
            + [str(folder / "train.py"), "", TRAINS, AFTER],
            **options,
        )

    def trained(self, generation):
        here = [f"trained {generation} {i}" for i in (0, 1)]
        return lambda: all((self.folder / name).exists() for name in here)

    def events(self, event):
        text = (self.folder / "logs" / "events.jsonl").read_text()
        found = [json.loads(line) for line in text.splitlines()]
        return [it for it in found if it["event"] == event]

    def end(self, code=0):
        (self.folder / "done").touch()
        return super().end(code)
