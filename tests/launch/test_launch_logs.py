"""What processes write: prefixed and whole on the console, complete in files, kept for the end."""

import io
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest

from jdp.launch.host.output import TAIL_LINES, OutputMux
from jdp.launch.options import parse

TIMEOUT_S = 10.0


# A process as `spawn` starts it; it writes what the test says.
class Writer:
    def __init__(self):
        self.pid = os.getpid()
        self._ends = {}
        for name in ("stdout", "stderr"):
            read, self._ends[name] = os.pipe()
            setattr(self, name, open(read, "rb", buffering=0))

    def write(self, text, name="stdout"):
        os.write(self._ends[name], text.encode())

    def close(self):
        for end in self._ends.values():
            os.close(end)


class Run:
    """Logs of processes that the test plays."""

    def __init__(self, *flags, num=2):
        self.out, self.err = io.BytesIO(), io.BytesIO()
        options = parse(["--nproc-per-node", str(num), *flags, "train.py"], {})
        self.logs = OutputMux(options, self.out, self.err)
        self.writers, self.outputs = [], []

    def add(self, local_rank=0, standby=False):
        writer = Writer()
        output = self.logs.add(writer, local_rank, standby=standby)
        self.writers.append(writer)
        return writer, output

    def end(self):
        for writer in self.writers:
            writer.close()
        self.logs.finish(TIMEOUT_S)
        assert not self.logs._thread.is_alive()
        return [console.getvalue().decode(errors="replace") for console in (self.out, self.err)]


def test_lines_have_their_rank_in_front_and_go_where_they_were_written_to():
    run = Run("--local-ranks-filter", "all")
    for rank in (0, 1):
        writer, output = run.add(rank)
        output.assign(rank + 2, rank, 0)
        output.last_lines()
        writer.write(f"one{rank}\ntwo{rank}\n")
        writer.write(f"error{rank}\n", "stderr")
    out, err = run.end()
    assert sorted(out.splitlines()) == [
        *("[process 2] one0", "[process 2] two0"),
        *("[process 3] one1", "[process 3] two1"),
    ]
    assert sorted(err.splitlines()) == ["[process 2] error0", "[process 3] error1"]


RAISED = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    step(state)
ValueError: it is refused:
  write another line.
"""
CAUSE = "the cause: process 1 ended\n{}It is not restarted."


@pytest.mark.parametrize("shown", [RAISED, RAISED.replace("line 3", "line 4"), ""])
def test_a_traceback_that_a_process_has_shown_is_not_shown_again(shown):
    run = Run()
    writer, output = run.add()
    output.assign(0, 0, 0)
    writer.write(shown, "stderr")
    output.last_lines()
    cause = CAUSE.format("".join(f"  {line}\n" for line in RAISED.splitlines()))
    run.logs.post(lambda: run.logs.say(cause))
    _, err = run.end()
    said = err.partition("jdp run: ")[2].rstrip("\n")
    error = CAUSE.format("  ValueError: it is refused:\n    write another line.\n")
    assert said == (error if shown == RAISED else cause)


GLOO = "[Gloo] Rank 0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3"


def test_lines_of_gloo_are_in_the_files_alone_and_take_nothing_of_the_script_with_them(tmp_path):
    run = Run("--log-dir", str(tmp_path))
    writer, output = run.add()
    output.assign(0, 0, 0)
    output.last_lines()
    writer.write(f"{GLOO}\nmine\n{GLOO}[0, 2]\n")
    assert output.last_lines() == ["mine", f"{GLOO}[0, 2]"]
    out, _ = run.end()
    assert out.splitlines() == ["[process 0] mine", f"[process 0] {GLOO}[0, 2]"]
    [file] = tmp_path.rglob("process_0.log")
    assert file.read_text().splitlines() == [GLOO, "mine", f"{GLOO}[0, 2]"]


def test_lines_of_several_processes_stay_whole():
    run = Run("--local-ranks-filter", "all")
    (a, out_a), (b, out_b) = run.add(0), run.add(1)
    for part in ("x" * 9, "y" * 9, "\n"):
        a.write(part)
        out_a.last_lines()
        b.write(part)
        out_b.last_lines()
    out, _ = run.end()
    assert sorted(out.splitlines()) == [f"[local process {i}] {'x' * 9}{'y' * 9}" for i in (0, 1)]


def test_a_last_line_without_an_end_is_shown():
    run = Run()
    run.add()[0].write("no end")
    assert run.end()[0] == "[local process 0] no end\n"


def test_a_progress_bar_moves_while_it_is_written():
    run = Run()
    writer, output = run.add()
    writer.write("10%\r20%\r")
    output.last_lines()
    assert run.out.getvalue() == b"[local process 0] 10%\r"
    writer.write("\ndone\r\n")
    assert (
        run.end()[0] == "[local process 0] 10%\r[local process 0] 20%\r\n[local process 0] done\r\n"
    )


def test_one_process_alone_has_no_prefix():
    run = Run(num=1)
    run.add()[0].write("hello\n")
    assert run.end()[0] == "hello\n"


def test_only_local_rank_0_is_shown_and_that_is_said_once():
    run = Run()
    for rank in (0, 1):
        writer, output = run.add(rank)
        output.assign(rank, rank, 0)
        writer.write("a\nb\n")
    out, err = run.end()
    named = {line.partition("] ")[0] for line in out.splitlines()}
    assert named <= {"[process 0", "[local process 0"}
    assert err.count("--local-ranks-filter all") == len(err.splitlines()) == 1


def test_files_have_everything_by_generation_and_rank(tmp_path):
    for generation in (0, 1):
        run = Run("--log-dir", str(tmp_path))
        for rank in (0, 1):
            writer, output = run.add(rank)
            writer.write("before\n")
            output.last_lines()
            output.assign(rank, rank, generation)
            output.last_lines()
            writer.write(f"generation {generation}\n")
            writer.write("error", "stderr")
        run.end()
    files = {str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*.log")}
    assert files == {
        f"generation_{generation}/process_{rank}.log": f"before\ngeneration {generation}\nerror\n"
        for generation in (0, 1)
        for rank in (0, 1)
    }


def test_a_resumed_run_appends_to_the_files_of_the_one_before(tmp_path):
    for text in ("first\n", "second\n"):
        run = Run("--log-dir", str(tmp_path))
        writer, output = run.add()
        output.assign(0, 0, 0)
        writer.write(text)
        run.end()
    assert (tmp_path / "generation_0/process_0.log").read_text() == "first\nsecond\n"


def test_redirects_keep_a_stream_off_the_console(tmp_path):
    run = Run("--log-dir", str(tmp_path), "--redirects", "0:2", "--tee", "1:1")
    for rank in (0, 1):
        writer, output = run.add(rank)
        output.assign(rank, rank, 0)
        output.last_lines()
        writer.write("out\n")
        writer.write("error\n", "stderr")
    out, err = run.end()
    assert sorted(out.splitlines()) == ["[process 0] out", "[process 1] out"]
    assert err == ""
    for rank in (0, 1):
        text = (tmp_path / f"generation_0/process_{rank}.log").read_text()
        assert sorted(text.splitlines()) == ["error", "out"]


def test_a_long_line_without_an_end_does_not_hold_up_the_launcher():
    run = Run()
    writer, output = run.add(0)
    output.assign(0, 0, 0)
    for _ in range(64):
        writer.write("x" * 2**14)  # looked through again and again, this took minutes
    writer.write("\n")
    assert output.last_lines(timeout_s=10.0)
    assert run.end()[0].count("x") == 2**20


def test_a_log_folder_that_is_gone_ends_nothing(tmp_path):
    run = Run("--log-dir", str(tmp_path))
    writer, output = run.add(0, standby=True)
    writer.write("before\n")
    output.last_lines()
    shutil.rmtree(tmp_path / "before_init")
    output.assign(0, 0, 1)
    output.last_lines()
    writer.write("after\n")
    out, err = run.end()
    assert "after" in out
    assert "before_init" in err and "generation_1" in err


def test_what_the_filter_hides_is_shown_once_it_is_revealed():
    run = Run()
    writer, output = run.add(1)
    output.assign(1, 1, 0)
    writer.write("hidden\n")
    output.last_lines()
    output.reveal()
    output.last_lines()
    writer.write("its stack\n")
    out, _ = run.end()
    assert out == "[process 1] its stack\n"


def test_a_standby_is_silent_until_it_is_wanted(tmp_path):
    run = Run("--log-dir", str(tmp_path), "--local-ranks-filter", "all")
    writer, output = run.add(1, standby=True)
    writer.write("importing\n")
    assert output.last_lines() == ["importing"]
    [file] = (tmp_path / "before_init").iterdir()
    assert file.read_text() == "importing\n"
    output.assign(1, 1, 1)
    output.last_lines()
    writer.write("training\n")
    assert run.end()[0] == "[process 1] training\n"
    assert not file.exists()
    assert (tmp_path / "generation_1/process_1.log").read_text() == "importing\ntraining\n"


def test_what_a_standby_wrote_before_it_was_wanted_is_never_shown():
    run = Run()
    writer, output = run.add(standby=True)
    goes_on = threading.Event()
    run.logs.post(lambda: goes_on.wait(TIMEOUT_S) and None)  # the thread reads nothing meanwhile
    writer.write("importing\n")
    output.assign(0, 0, 1)
    goes_on.set()
    assert run.end()[0] == ""


def test_what_a_standby_writes_as_soon_as_it_is_wanted_is_shown():
    run = Run()
    writer, output = run.add(standby=True)
    writer.write("importing\n")
    output.hold()  # it waits now
    output.last_lines()
    writer.write("loading\n")
    writer.write("in error\n", "stderr")
    assert "loading" in output.last_lines()  # read before the thread hears that it is wanted
    output.assign(3, 0, 1)
    output.last_lines()
    writer.write("training\n")
    out, err = run.end()
    assert out == "[process 3] loading\n[process 3] training\n"
    assert err == "[process 3] in error\n"


def test_a_dead_process_has_its_last_lines_at_once():
    run = Run()
    writer, output = run.add(1)
    writer.write("".join(f"{i}\n" for i in range(2 * TAIL_LINES)) + "the end")
    assert output.last_lines() == [*map(str, range(TAIL_LINES + 1, 2 * TAIL_LINES)), "the end"]
    run.end()


def test_a_folder_that_cannot_be_written_is_said_and_costs_only_the_files(tmp_path):
    (tmp_path / "logs").touch()
    run = Run("--log-dir", str(tmp_path / "logs"))
    writer, output = run.add()
    output.assign(0, 0, 0)
    output.last_lines()
    writer.write("on\n")
    out, err = run.end()
    assert out == "[process 0] on\n"
    assert err.count(str(tmp_path / "logs")) == 1


def test_a_console_that_nobody_reads_costs_only_the_console(tmp_path):
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb", buffering=0) as nobody:
        run = Run("--log-dir", str(tmp_path))
        run.logs.console.streams[1] = nobody
        writer, output = run.add()
        output.assign(0, 0, 0)
        writer.write("a\n")
        output.last_lines()
        writer.write("b\n")
        run.end()
    assert (tmp_path / "generation_0/process_0.log").read_text() == "a\nb\n"


def test_a_stopped_console_does_not_hold_up_the_launcher():
    class Stopped(io.BytesIO):
        goes_on = threading.Event()

        def write(self, data):
            assert self.goes_on.wait(TIMEOUT_S)
            return super().write(data)

    run = Run()
    run.logs.console.streams[1] = stopped = Stopped()
    writer, output = run.add()
    writer.write("a\n")
    while not output.tail:
        time.sleep(0.001)
    assert output.last_lines(timeout_s=0.01) == ["a"]
    stopped.goes_on.set()
    run.end()
    assert stopped.getvalue() == b"[local process 0] a\n"


def test_a_process_that_never_stops_writing_does_not_keep_others_from_being_heard():
    class Refills(io.BytesIO):
        def write(self, data):
            if not heard:
                chatty.write("on\n")
            return super().write(data)

    heard = []
    run = Run()
    run.logs.console.streams[1] = Refills()
    chatty, _ = run.add(0)
    quiet, output = run.add(1)
    quiet.write("here\n")
    chatty.write("on\n")
    try:
        heard = output.last_lines(TIMEOUT_S)
    finally:
        heard = heard or ["nothing"]
        run.end()
    assert heard == ["here"]


def test_bytes_that_are_no_text_are_shown_as_they_are():
    run = Run(num=1)
    writer, output = run.add()
    os.write(writer._ends["stdout"], b"\xff\n")
    assert output.last_lines() == ["\ufffd"]
    run.end()
    assert run.out.getvalue() == b"\xff\n"


def test_a_terminal_sees_ranks_in_colour():
    program = """
import os
from jdp.launch.host.output import OutputMux
from jdp.launch.options import parse
logs = OutputMux(parse(["--nproc-per-node", "2", "x"], {}))
os.write(1, repr([logs.prefix("process 0", 0), logs.prefix("process 1", 1)]).encode())
os._exit(0)
"""
    ours, theirs = os.openpty()
    variables = {**os.environ, "TERM": "xterm-256color"}
    for name in ("NO_COLOR", "FORCE_COLOR"):
        variables.pop(name, None)
    subprocess.run(
        [sys.executable, "-c", program], stdout=theirs, env=variables, timeout=240, check=True
    )
    text = os.read(ours, 1000).decode()
    os.close(ours)
    os.close(theirs)
    first, second = eval(text)
    assert b"[process 0]" in first and first.startswith(b"\x1b[") and first[:5] != second[:5]
