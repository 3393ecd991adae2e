"""With --second-try a failed test that starts processes is run once more, by itself, at the end.

Deadlines of processes pass on a busy machine. If the test passes by itself, the run goes on: the
test counts as flaky, both reports are printed, and its name is written to tests/flaky.txt, whose
lines `tests/repository/test_flaky.py` wants explained. A test that starts no process has no such
excuse. Nor have many at once: then all of them have failed.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest

FILE = Path(__file__).parent / "flaky.txt"
MOST_TESTS = 5
TIMEOUT_S = 600.0
# What subprocess, multiprocessing and os raise as audit events when a process is started.
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"}


def pytest_addoption(parser):
    help = "run failed tests that start processes once more, by themselves"
    parser.addoption("--second-try", action="store_true", help=help)


def pytest_configure(config):
    if config.getoption("--second-try"):
        in_worker = hasattr(config, "workerinput")
        config.pluginmanager.register(_Starts())
        if not in_worker:
            config.pluginmanager.register(_SecondTry(config))


class _Starts:
    """Marks the reports of tests that have started a process, or use those of a fixture."""

    def __init__(self):
        self._has_started = False
        sys.addaudithook(self._audit)

    def _audit(self, event, _):
        if event in _STARTS:
            self._has_started = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        marks = item.iter_markers("xdist_group")
        self._has_started = any(mark.args == ("processes",) for mark in marks)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        report = yield
        if report.failed and self._has_started:
            # pytest-xdist appends the group to the id.
            report.to_repeat = f"{item.parent.nodeid}::{item.name}"
        return report


class _SecondTry:
    """Runs them again when all other tests have ended."""

    def __init__(self, config):
        self._config = config
        self._failed = {}  # by id: reports of the first try
        self._outputs = {}  # by id of a flaky test: of the second try

    def pytest_runtest_logreport(self, report):
        if report.failed and (test := getattr(report, "to_repeat", None)):
            self._failed.setdefault(test, []).append(report)

    @pytest.hookimpl(wrapper=True, trylast=True)  # inside of the terminal's, which sums up
    def pytest_sessionfinish(self, session, exitstatus):
        result = yield
        was_cut_short = session.shouldfail or session.shouldstop
        if exitstatus == pytest.ExitCode.TESTS_FAILED and not was_cut_short:
            if len(self._failed) <= MOST_TESTS:
                self._repeat()
            if self._outputs and not self._still_failed():
                session.exitstatus = pytest.ExitCode.OK
        return result

    def pytest_terminal_summary(self, terminalreporter):
        if self._outputs:
            terminalreporter.section("flaky", yellow=True)
        for test, output in self._outputs.items():
            terminalreporter.line(f"{test} failed, and passed by itself. Its first report:")
            for report in self._failed[test]:
                report.toterminal(terminalreporter._tw)
            terminalreporter.line(f"The second one:\n{output}")

    def _repeat(self):
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        for test, reports in self._failed.items():
            begin = time.monotonic()
            passed, output = _run_alone(test, self._config.rootpath)
            seconds = time.monotonic() - begin
            verdict = "passed: it is flaky" if passed else "failed again"
            reporter.write_line(f"\nsecond try of {test}: {verdict} ({seconds:.1f} s)")
            if passed:
                self._outputs[test] = output
                self._count_as_flaky(reports, reporter.stats)
                with FILE.open("a") as file:
                    file.write(f"{test}\n")
            else:
                reports[-1].sections.append(("second try", output))

    def _still_failed(self):
        stats = self._config.pluginmanager.get_plugin("terminalreporter").stats
        return "failed" in stats or "error" in stats

    @staticmethod
    def _count_as_flaky(reports, stats):
        stats.setdefault("flaky", []).append(reports[0])
        for kind in ("failed", "error"):
            if left := [report for report in stats.pop(kind, []) if report not in reports]:
                stats[kind] = left


def _run_alone(test, root):
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:xdist", test]
    try:
        done = subprocess.run(
            command,
            cwd=root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return False, f"no end within {TIMEOUT_S:g} s"
    return done.returncode == 0, done.stdout + done.stderr
