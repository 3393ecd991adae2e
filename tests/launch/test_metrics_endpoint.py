"""Prometheus reads from the host that leads what the leader knows of the run."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support import launcher
from support.terminal import TRAINS

from jdp.launch.leader import failure, metrics_endpoint
from jdp.launch.leader.metrics_endpoint import (
    MetricsEndpoint,
    ProcessMetrics,
    RunCollector,
    RunMetrics,
)
from jdp.launch.leader.progress_watch import Slow
from jdp.worker.run_progress import RunHistory, RunSummary

BEGINS = RunMetrics(-1, 0, (), RunHistory(), None)
TRAINS_ON = RunMetrics(
    2,
    3,
    (
        ProcessMetrics(0, "a", 1.5),
        ProcessMetrics(1, "b", 0.25, Slow(4000, 20000, "compute", 20000, 16000)),
    ),
    RunHistory([], 10.0, 7.5, {"JDP302": 2, "JDP311": 1}),
    RunSummary(340, 3.4375, 10.0, 2500.0, 0.03, 330, 300, 3, 0.875, target=1000),
)
NONE = {"301": 0, "302": 0, "303": 0, "304": 0, "305": 0, "311": 0}


def recoveries(**numbers):
    return {
        ("jdp_recoveries_total", ("cause", f"JDP{code}")): number
        for code, number in (
            NONE | {name.removeprefix("JDP"): n for name, n in numbers.items()}
        ).items()
    }


def samples(page):
    """The values of a page, by name and labels."""
    return {
        (each.name, *sorted(each.labels.items())): each.value
        for family in text_string_to_metric_families(page)
        for each in family.samples
    }


def page_of(run):
    async def collect():
        registry = CollectorRegistry()
        registry.register(RunCollector(lambda: run))
        return (await asyncio.to_thread(generate_latest, registry)).decode()

    return asyncio.run(collect())


def read(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def url_of(run):
    run.until_true(lambda: "metrics are at" in run.output, "metrics")
    [port] = re.findall(r"metrics are at http://[^:]+:(\d+)/metrics\.", run.output)
    return f"http://127.0.0.1:{port}/metrics"


def scrape(run):
    return samples(read(url_of(run)))


def scraped(run, **values):
    """The samples once those without labels have these values."""
    found = {}

    def has_them():
        with contextlib.suppress(OSError):  # the run has ended, which is the failure to report
            found["now"] = scrape(run)
        return {(name,): value for name, value in values.items()}.items() <= found.get(
            "now", {}
        ).items()

    run.until_true(has_them, values)
    return found["now"]


def test_all_that_is_known_is_collected():
    assert samples(page_of(TRAINS_ON)) == {
        ("jdp_step",): 340,
        ("jdp_target_steps",): 1000,
        ("jdp_steps_per_second",): 10,
        ("jdp_examples_per_second",): 2500,
        ("jdp_commit_step",): 330,
        ("jdp_checkpoint_step",): 300,
        ("jdp_effective_training_time_ratio",): 0.875,
        ("jdp_generation",): 2,
        ("jdp_processes",): 2,
        ("jdp_standbys",): 3,
        ("jdp_lost_seconds_total",): 7.5,
        **recoveries(JDP302=2, JDP311=1),
        ("jdp_data_wait_seconds_total", ("host", "a"), ("process", "0")): 1.5,
        ("jdp_data_wait_seconds_total", ("host", "b"), ("process", "1")): 0.25,
        ("jdp_slow_process_ratio", ("host", "b"), ("part", "compute"), ("process", "1")): 0.2,
    }


def test_the_table_of_the_documentation_has_all_metrics():
    page = (Path(__file__).parents[2] / "docs" / "running.md").read_text()
    listed = re.findall(r"^\| `(jdp_\w+)", page, re.MULTILINE)
    assert sorted(listed) == sorted({name for name, *_ in samples(page_of(TRAINS_ON))})


def test_before_the_first_step_there_are_no_numbers_of_steps():
    expected = dict.fromkeys(("jdp_processes", "jdp_standbys", "jdp_lost_seconds_total"), 0)
    expected = {(name,): value for name, value in expected.items()} | recoveries()
    assert samples(page_of(BEGINS)) == expected


def test_each_code_of_a_failure_has_a_counter_from_the_start():
    source = Path(failure.__file__).read_text()
    used = re.findall(r'"(JDP\d+)"', source.partition("class Cause")[2])
    assert {*used} - {"JDP301"} == {*failure.CODES} - {"JDP301"} and "JDP301" in used


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's prometheus")
@pytest.mark.parametrize("run", [BEGINS, TRAINS_ON], ids=["begins", "trains on"])
def test_promtool_has_no_complaint(run):
    check_by_promtool(page_of(run))


def check_by_promtool(page):
    command = ["promtool", "check", "metrics"]
    checked = subprocess.run(command, input=page, capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", ""), page


def test_numbers_are_read_in_the_loop_and_only_when_somebody_asks():
    loops = []

    def read_numbers():
        loops.append(asyncio.get_running_loop())
        return BEGINS._replace(generation=len(loops))

    async def ask():
        endpoint = MetricsEndpoint(0, read_numbers)
        await asyncio.sleep(0.05)
        assert not loops
        url = f"http://127.0.0.1:{endpoint.url.rpartition(':')[2]}"
        pages = [samples(await asyncio.to_thread(read, url)) for _ in range(2)]
        endpoint.close()
        assert [page["jdp_generation",] for page in pages] == [1, 2]
        assert loops == [asyncio.get_running_loop()] * 2

    asyncio.run(ask())


def test_a_stranger_that_is_silent_keeps_a_scrape_waiting_for_some_time_alone(monkeypatch, capfd):
    handler = metrics_endpoint._Handler
    monkeypatch.setattr(handler, "timeout", handler.timeout / 50)

    async def ask():
        endpoint = MetricsEndpoint(0, lambda: BEGINS)
        port = int(endpoint.url.split(":")[2].partition("/")[0])
        with socket.create_connection(("127.0.0.1", port)):
            page = await asyncio.to_thread(read, f"http://127.0.0.1:{port}/metrics")
        endpoint.close()
        return page

    assert "jdp_processes 0.0" in asyncio.run(ask())
    assert capfd.readouterr().err == ""


def test_a_stranger_that_sends_byte_by_byte_does_not_keep_scrapes_waiting(monkeypatch, capfd):
    monkeypatch.setattr(metrics_endpoint._Handler, "timeout", 0.2)

    def drip(connection, is_over):
        with contextlib.suppress(OSError):
            while not is_over.wait(0.05):
                connection.sendall(b"G")

    async def ask():
        endpoint, is_over = MetricsEndpoint(0, lambda: BEGINS), threading.Event()
        port = int(endpoint.url.split(":")[2].partition("/")[0])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            thread = threading.Thread(target=drip, args=(connection, is_over))
            thread.start()
            try:
                url = f"http://127.0.0.1:{port}/metrics"
                return await asyncio.wait_for(asyncio.to_thread(read, url), 10)
            finally:
                is_over.set()
                thread.join()
                endpoint.close()

    assert "jdp_processes 0.0" in asyncio.run(ask())
    assert capfd.readouterr().err == ""


def test_an_error_ends_the_scrape_and_not_the_run(capfd):
    async def ask():
        endpoint = MetricsEndpoint(0, lambda: 1 / 0)
        url = f"http://127.0.0.1:{endpoint.url.rpartition(':')[2]}"
        with pytest.raises(urllib.error.HTTPError, match="500"):
            await asyncio.to_thread(read, url)
        endpoint.close()

    asyncio.run(ask())
    assert "ZeroDivisionError" in capfd.readouterr().err


# Process 1 computes for all of its steps, in which the other waits 5 of 25 ms.
TRAINED = """
from jdp.worker.progress_board import NUM_RECORDS, StepRecord
go(30, rows=25)
progress.own.slot.counter.write_commit(10 * a.generation + 30)
for _ in range(NUM_RECORDS):
    slot.times.write(StepRecord(1, 25_000_000, waited_ns=0 if a.process_id else 5_000_000))
"""


def numbers_of(run, generation):
    """The samples of a run once TRAINED has trained, and which are exact at any time."""
    run.until("slow", process_id=1, generation=generation)
    step = 30 + 10 * generation
    page = scraped(run, jdp_step=step, jdp_commit_step=step, jdp_standbys=2)
    return page, {each: value for each, value in page.items() if not re.match(OF_TIME, each[0])}


OF_TIME = "jdp_(effective|steps_per|examples_per|lost|data).*"


def test_a_run_that_recovers_serves_its_exact_numbers(jdp_run):
    run = jdp_run("--metrics-port=0", "--nproc-per-node=2", init=TRAINS, after=TRAINED)
    host = ("host", socket.gethostname())
    exact = {("jdp_processes",): 2, ("jdp_standbys",): 2}
    exact["jdp_slow_process_ratio", host, ("part", "compute"), ("process", "1")] = 0.2
    waits = {("jdp_data_wait_seconds_total", host, ("process", str(i))) for i in (0, 1)}

    before, found = numbers_of(run, 0)
    of_steps = {("jdp_generation",): 0, ("jdp_step",): 30, ("jdp_commit_step",): 30}
    assert found == exact | of_steps | recoveries()
    assert before["jdp_lost_seconds_total",] == 0
    assert before["jdp_effective_training_time_ratio",] == 1
    steps_per_s = before["jdp_steps_per_second",]
    assert steps_per_s > 0
    assert before["jdp_examples_per_second",] == pytest.approx(25 * steps_per_s)
    assert {each for each in before if each[0] == "jdp_data_wait_seconds_total"} == waits
    assert all(0 < before[each] < 60 for each in waits)

    os.kill(run.pids(0, 2)[1], signal.SIGKILL)
    after, found = numbers_of(run, 1)
    of_steps = {("jdp_generation",): 1, ("jdp_step",): 40, ("jdp_commit_step",): 40}
    assert found == exact | of_steps | recoveries(JDP302=1)
    [recovered], lost_s = run.events("recovered"), after["jdp_lost_seconds_total",]
    began = run.events("first_step", generation=0)[0]["at"]
    assert recovered["whole_s"] - 0.001 < lost_s < time.time() - began
    assert 0 < after["jdp_effective_training_time_ratio",] < 1
    assert scrape(run)["jdp_lost_seconds_total",] == lost_s  # the run has come further
    assert run.finish() == 0


# Trains as far as the file `leash` says.
SCRIPT = """
import os, time
from pathlib import Path
import jax, numpy as np, optax
import jdp
folder = Path(__file__).parent
rows = {"x": np.arange(320, dtype="float32").reshape(80, 4)}

@jdp.train_step
def step(state, batch):
    loss, grads = jdp.value_and_grad(lambda p, b: (b["x"] @ p["w"]).mean())(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}

jdp.init()
state = jdp.TrainState.create({"w": np.ones(4, "float32")}, jdp.replicated(optax.sgd(0.5)))
batches = jdp.batches(rows, 8, num_steps=40)
with jdp.Checkpointer(folder / "checkpoints", commit_every=5, save_every=10) as ckpt:
    state = ckpt.restore(state, batches)
    for batch in batches:
        while ckpt.steps >= int((folder / "leash").read_text()):
            time.sleep(0.01)
        state, metrics = step(state, batch)
        ckpt.step(state, batches)
"""


@pytest.mark.thorough
def test_a_training_run_knows_its_target_commits_and_checkpoints(jdp_run, tmp_path):
    def train(steps):
        (tmp_path / "part").write_text(str(steps))
        (tmp_path / "part").rename(tmp_path / "leash")

    train(12)
    flags = "--metrics-port=0", "--nproc-per-node=2"
    run = jdp_run(*flags, script=SCRIPT, JAX_NUM_CPU_DEVICES="1")
    kept = {"jdp_commit_step": 10, "jdp_checkpoint_step": 10, "jdp_target_steps": 40}
    before = scraped(run, jdp_step=12, jdp_processes=2, jdp_generation=0, **kept)
    assert before["jdp_examples_per_second",] == pytest.approx(8 * before["jdp_steps_per_second",])
    os.kill(run.pids(0, 2)[1], signal.SIGKILL)
    train(22)
    kept = {"jdp_commit_step": 20, "jdp_checkpoint_step": 20, "jdp_target_steps": 40}
    after = scraped(run, jdp_step=22, jdp_processes=2, jdp_generation=1, **kept)
    assert recoveries(JDP302=1).items() <= after.items()
    train(40)
    assert run.wait() == 0
    final = run.events("progress")[-1]
    assert (final["step"], final["target"], final["recoveries"]) == (40, 40, 1)


class Prometheus:
    """A real one, which scrapes a URL."""

    def __init__(self, folder, url):
        port = url.split(":")[2].partition("/")[0]
        config = {
            "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"},
            "scrape_configs": [
                {"job_name": "jdp", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self._address = f"127.0.0.1:{launcher.free_port()}"
        self._output = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                *launcher.DIES_WITH_US,
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address={self._address}",
            ],
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def query(self, text):
        """The values of a query, by name and labels other than those of the target."""
        asked = urllib.parse.urlencode({"query": text})
        try:
            found = json.loads(read(f"http://{self._address}/api/v1/query?{asked}"))
        except OSError:  # it starts
            return {}
        assert found["status"] == "success"
        return {
            (
                each["metric"].get("__name__"),
                *((k, v) for k, v in sorted(each["metric"].items()) if k not in NOT_OURS),
            ): float(each["value"][1])
            for each in found["data"]["result"]
        }

    def close(self):
        self._process.terminate()
        self._process.wait(30)
        self._output.close()


NOT_OURS = ("__name__", "instance", "job")


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's prometheus")
def test_a_real_prometheus_has_the_values_of_the_page(jdp_run, tmp_path):
    run = jdp_run("--metrics-port=0", "--nproc-per-node=2", init=TRAINS, after=TRAINED)
    server = Prometheus(tmp_path, url_of(run))
    select = f'{{__name__=~"jdp_.*",__name__!~"{OF_TIME}"}}'
    try:
        for generation in (0, 1):
            _, exact = numbers_of(run, generation)
            run.until_true(lambda: server.query(select) == exact, f"{exact}")  # noqa: B023
            if not generation:
                os.kill(run.pids(0, 2)[1], signal.SIGKILL)
        assert server.query("sum(increase(jdp_recoveries_total[1h])) > 0")
        assert server.query('up{job="jdp"}') == {("up",): 1}
        check_by_promtool(read(url_of(run)))
        assert run.finish() == 0
    finally:
        server.close()


TOKEN = {"JDP_TOKEN": "a secret"}


def test_the_next_leader_serves_the_metrics_of_the_run(jdp_run):
    endpoints = ",".join(f"127.0.0.1:{launcher.free_port()}" for _ in range(2))
    flags = "--nnodes=1:2", f"--rdzv-endpoint={endpoints}", "--metrics-port=0", "--standbys=0"
    first, second = [jdp_run(*flags, f"--node-rank={rank}", **TOKEN) for rank in range(2)]
    first.pids(0, 2)
    scraped(first, jdp_generation=0, jdp_processes=2)
    assert "metrics are at" not in second.output
    first.process.kill()
    second.pids(1, 1)
    found = scraped(second, jdp_generation=1, jdp_processes=1)
    assert recoveries(JDP311=1).items() <= found.items()
    assert second.finish() == 0


def test_a_next_leader_without_the_port_goes_on_without_metrics(jdp_run):
    endpoints = ",".join(f"127.0.0.1:{launcher.free_port()}" for _ in range(2))
    flags = "--nnodes=1:2", f"--rdzv-endpoint={endpoints}", "--standbys=0"
    port = launcher.free_port()
    first = jdp_run(*flags, "--node-rank=0", **TOKEN)
    second = jdp_run(*flags, "--node-rank=1", f"--metrics-port={port}", **TOKEN)
    first.pids(0, 2)
    with socket.create_server(("", port)):
        first.process.kill()
        second.pids(1, 1)
        line = f"no metrics from this host: --metrics-port {port} cannot be used"
        second.until_true(lambda: line in second.output, line)
    assert second.finish() == 0


def test_a_port_in_use_or_a_missing_library_is_an_error_before_any_process_starts(jdp_run):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        run = jdp_run(f"--metrics-port={port}", before="print('started')")
        assert run.wait() == 2
    assert run.output == (
        f"jdp run: --metrics-port {port} cannot be used: Address already in use. Pass a free "
        "port, or 0 for any.\n"
    )
    changes = "import sys; sys.modules['prometheus_client'] = None"
    run = jdp_run("--metrics-port=0", before="print('started')", changes=changes)
    assert run.wait() == 2
    assert "pip install prometheus_client" in run.output and "started" not in run.output


def test_without_the_option_the_library_is_not_imported():
    program = "import sys, jdp.launch.run; sys.exit('prometheus_client' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
