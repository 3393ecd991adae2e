"""Serves the leader's metrics over HTTP in Prometheus' format.

One thread answers scrapes in turn, so strangers delay one by at most TIMEOUT_S each. The leader's
event loop collects the numbers, since it owns their state.
"""

import asyncio
import contextlib
import importlib.util
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from jdp.launch.leader.failure import CODES
from jdp.launch.leader.progress_watch import Slow
from jdp.worker.run_progress import RunHistory, RunSummary

# For a connection, and for the leader's answer.
TIMEOUT_S = 5.0

# Attribute of a `RunSummary`, name, help.
_OF_SUMMARY = (
    ("step", "jdp_step", "Last step that all processes have called, over all lives of the run."),
    ("target", "jdp_target_steps", "Step at which the loop over jdp.batches ends."),
    ("steps_per_s", "jdp_steps_per_second", "Steps per second, lately."),
    ("rows_per_s", "jdp_examples_per_second", "Examples per second in these steps."),
    ("commit", "jdp_commit_step", "Step of the last commit that all hosts have."),
    ("checkpoint", "jdp_checkpoint_step", "Step of the last checkpoint."),
    (
        "ettr",
        "jdp_effective_training_time_ratio",
        "Share of the time since the first step in which the run came further.",
    ),
)


class ProcessMetrics(NamedTuple):
    """A living process; `data_s` is its wait for data."""

    process_id: int
    host: str
    data_s: float
    slow: Slow | None = None


class RunMetrics(NamedTuple):
    """A run at a scrape; generation -1 is before the first, no summary before the first step."""

    generation: int
    standbys: int
    processes: tuple[ProcessMetrics, ...]
    history: RunHistory
    summary: RunSummary | None


def require_endpoint(port: int | None, *, may_lead: bool) -> None:
    """Refuse an unusable port, before any process starts."""
    if port is None:
        return
    if importlib.util.find_spec("prometheus_client") is None:
        raise ValueError(
            "--metrics-port needs a package that is not installed: pip install prometheus_client"
        )
    try:
        if may_lead:
            _Server.of_port(port).server_close()
    except OSError as error:
        raise ValueError(
            f"--metrics-port {port} cannot be used: {_why(error)}. Pass a free port, or 0 for any."
        ) from None


class RunCollector:
    """Collects metrics from any thread; the event loop runs `read`."""

    def __init__(self, read: Callable[[], RunMetrics]) -> None:
        self._read, self._loop = read, asyncio.get_running_loop()

    def collect(self) -> Iterator[Any]:
        """Yield the current metric families."""
        answer: Future[RunMetrics] = Future()
        try:
            self._loop.call_soon_threadsafe(self._answer, answer)
        except RuntimeError:  # the run is over
            return
        yield from _families(answer.result(TIMEOUT_S))

    # An error fails the scrape, not the run.
    def _answer(self, answer: Future[RunMetrics]) -> None:
        try:
            answer.set_result(self._read())
        except Exception as error:
            answer.set_exception(error)


class MetricsEndpoint:
    """Serves a run's metrics on all addresses; port 0 is any free one."""

    def __init__(self, port: int, read: Callable[[], RunMetrics]) -> None:
        from prometheus_client import CollectorRegistry, make_wsgi_app

        registry = CollectorRegistry()  # without the launcher's Python
        registry.register(RunCollector(read))  # type: ignore[arg-type]
        self._server = _Server.of_port(port)
        self._server.set_app(make_wsgi_app(registry))
        self.url = f"http://{socket.gethostname()}:{self._server.server_port}/metrics"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Begin to close it."""
        threading.Thread(target=self._server.shutdown, daemon=True).start()

    def _serve(self) -> None:
        with self._server:
            self._server.serve_forever()


def serve(
    port: int | None, read: Callable[[], RunMetrics], say: Callable[[str], None]
) -> MetricsEndpoint | None:
    """Serve the metrics on a port, if any; say where, or why not."""
    if port is None:
        return None
    try:
        endpoint = MetricsEndpoint(port, read)
    except OSError as error:
        say(f"no metrics from this host: --metrics-port {port} cannot be used: {_why(error)}.")
        return None
    say(f"metrics are at {endpoint.url}.")
    return endpoint


class _Server(WSGIServer):
    # Dual-stack IPv6 accepts IPv4.
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    allow_reuse_port = False  # two runs would take turns

    @classmethod
    def of_port(cls, port: int) -> "_Server":
        return make_server("", port, lambda *_: [], cls, _Handler)

    # http.server's method asks DNS, perhaps slowly.
    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = socket.gethostname(), self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class _Handler(WSGIRequestHandler):
    timeout = TIMEOUT_S

    # A socket's timeout restarts with each byte.
    def handle(self) -> None:
        timer = threading.Timer(self.timeout or TIMEOUT_S, self._disconnect)
        timer.start()
        try:
            super().handle()
        finally:
            timer.cancel()

    def _disconnect(self) -> None:
        with contextlib.suppress(OSError):  # the client has gone
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _families(run: RunMetrics) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for attribute, name, text in _OF_SUMMARY:
        value = getattr(run.summary, attribute, None)
        if value is not None:
            yield GaugeMetricFamily(name, text, value)
    if run.generation >= 0:
        yield GaugeMetricFamily("jdp_generation", "Number of the last generation.", run.generation)
    text = "Processes of the running generation that live."
    yield GaugeMetricFamily("jdp_processes", text, len(run.processes))
    text = "Standbys that wait to take over, on all hosts."
    yield GaugeMetricFamily("jdp_standbys", text, run.standbys)
    text = "Seconds since the first step in which the run did not come further."
    yield CounterMetricFamily("jdp_lost_seconds", text, run.history.lost_s)
    text = "Recoveries from failures, by the error code of the first failure of each."
    recoveries = CounterMetricFamily("jdp_recoveries", text, labels=["cause"])
    # Zero at first: Prometheus misses a new counter's rise.
    for cause, number in {**dict.fromkeys(CODES, 0), **run.history.recoveries}.items():
        recoveries.add_metric([cause], number)
    yield recoveries
    text = "Seconds that a process waited for data; a wait counts when it ends."
    waits = CounterMetricFamily("jdp_data_wait_seconds", text, labels=["process", "host"])
    text = "Share of each step for which the other processes wait for a slow one, by where it is."
    slow = GaugeMetricFamily("jdp_slow_process_ratio", text, labels=["process", "host", "part"])
    for each in run.processes:
        who = [str(each.process_id), each.host]
        waits.add_metric(who, each.data_s)
        if each.slow is not None:
            slow.add_metric([*who, each.slow.part], each.slow.share)
    yield from (waits, slow)


def _why(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
