import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.metrics import lines

import jdp
from jdp.distributed import metrics_log


def without_time(found):
    return [{k: v for k, v in line.items() if k != "time"} for line in found]


def test_a_line_holds_the_step_and_the_values(path):
    metrics = {
        "loss": jnp.float32(0.25),
        "half": jnp.bfloat16(1.5),
        "rows": np.int64(2**40),
        "skipped": jnp.array([True]),
        "eval": {"accuracy": 0.5, "per": {"class": np.float64(3)}},
    }
    jdp.log(metrics, np.int32(7), file=path)
    [line] = lines(path)
    assert line.pop("time") > 1.7e9
    assert line == {
        "step": 7,
        "loss": 0.25,
        "half": 1.5,
        "rows": 2**40,
        "skipped": True,
        "eval/accuracy": 0.5,
        "eval/per/class": 3.0,
    }


def test_values_that_json_lacks_are_written_as_text(path):
    jdp.log({"a": jnp.nan, "b": -np.inf, "c": 1 + 2j, "d": np.clongdouble(3)}, 0, file=path)
    [line] = without_time(lines(path))
    assert line == {"step": 0, "a": "nan", "b": "-inf", "c": "(1+2j)", "d": "(3+0j)"}


def test_a_call_does_not_wait_for_the_step(path, make_mesh):
    may_end, has_ended = threading.Event(), threading.Event()

    def wait(x):
        may_end.wait(60)
        has_ended.set()
        return x

    def on_each_rank(x):
        return jax.lax.psum(jax.pure_callback(wait, jax.ShapeDtypeStruct((), x.dtype), x), "data")

    # JAX runs a program of one CPU device before its dispatch returns.
    specs = {"in_specs": P(), "out_specs": P(), "check_vma": False}
    slow = jax.jit(jax.shard_map(on_each_rank, mesh=make_mesh(2), **specs))(np.float32(1.5))
    jdp.log({"loss": slow}, 1, file=path)
    assert not has_ended.is_set()
    may_end.set()
    assert without_time(lines(path)) == [{"step": 1, "loss": 3.0}]


def test_a_repeated_step_is_written_once(path, monkeypatch):
    monkeypatch.setenv("JDP_RESUME", "1")
    handed = []
    for last in 4, 6:  # the second life repeats steps 3 and 4
        for step in range(1 if last == 4 else 3, last + 1):
            jdp.log({"loss": step / 2}, step, file=path, also=lambda *each: handed.append(each))
            if step % 2 == 0:
                jdp.log({"eval": {"loss": step}}, step, file=path)
        metrics_log.end()
    found = without_time(lines(path))
    train = [{"step": step, "loss": step / 2} for step in range(1, 7)]
    assert [line for line in found if "loss" in line] == train
    assert [line["step"] for line in found if "eval/loss" in line] == [2, 4, 6]
    assert handed == [(step, {"loss": step / 2}) for step in range(1, 7)]


def test_steps_of_one_set_of_names_go_up(path):
    for step, loss in ((3, 0.5), (2, 0.25), (3, 0.125), (4, 1.0)):
        jdp.log({"loss": loss}, step, file=path)
    jdp.log({"other": 1.0}, 2, file=path)
    found = [(line["step"], line.get("loss")) for line in lines(path)]
    assert found == [(3, 0.5), (4, 1.0), (2, None)]


def test_a_line_that_a_killed_process_did_not_complete_is_written_again(path):
    path.write_text('{"step": 1, "time": 1.0, "loss": 1.0}\n{"step": 2, "time": 2.0, "lo')
    jdp.log({"loss": 2.0}, 2, file=path)
    assert without_time(lines(path)) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]


def test_the_file_of_an_earlier_run_is_refused_and_kept(path, before_init):
    before = '{"step": 1, "time": 1.0, "loss": 1.0}\n{"step": 200, "time": 2.0, "loss": 2.0}\n'
    path.write_text(before)
    with pytest.raises(ValueError, match="metrics.jsonl.* 200, .* 1.*--resume"):
        jdp.log({"loss": 2.0}, 1, file=path)
    assert path.read_text() == before


@pytest.mark.parametrize(
    "before",
    [
        "step,loss\n1,0.5\n", '{"step": 1e999}\n', "[" * 100_000 + "\n", "\n", "\0\n", "NaN\n",
        '{"step": 1.5}\n', '{"step": "1"}\n', '{"step": true}\n', '{"step": -1}\n', "[1]\n",
        f'{{"step": {10**30}}}\n', f'{{"step": {"9" * 5000}}}\n',
        '{"step": 1, "loss": 1.0}\n{"step": 2, "\xff": 1.0}\n',
    ],
    ids=["a table", "infinity", "deep", "empty", "zero", "NaN", "half a step", "a text", "a bool",
         "negative", "a list", "huge", "of 5000 digits", "no UTF-8"],
)  # fmt: skip
def test_a_file_of_something_else_is_refused_and_kept(path, before):
    path.write_bytes(before := before.encode("latin-1"))
    number = 2 if b"\xff" in before else 1
    with pytest.raises(ValueError, match=f"line {number} of .*metrics.jsonl"):
        jdp.log({"loss": 2.0}, 2, file=path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "metrics, step, error, match",
    [
        ({"a": {"b": jnp.ones(3)}}, 1, ValueError, r"a/b.*\(3,\)"),
        ({"name": "text"}, 1, TypeError, "name.*<U4"),
        ({"none": None}, 1, TypeError, "none.*object"),
        ({"a": {"b": -(2**200)}}, 1, ValueError, "'a/b'.*201 bits.*float"),
        ({"step": 1.0}, 1, ValueError, "'step'"),
        ({"a/b": 1, "a": {"b": 2}}, 1, ValueError, "'a/b'"),
        ({"loss": 1.0}, -1, ValueError, "step.*-1"),
        ({"loss": 1.0}, 1.5, TypeError, "step.*1.5"),
        ({"loss": 1.0}, 2**63 - 1, ValueError, "step.*9223372036854775807"),
        (np.float32(1.5), 1, TypeError, r"float32.*jdp.log\(\{"),
        (None, 1, TypeError, r"NoneType.*jdp.log\(\{"),
        ({"a": {"b": [[1], [2, 3]]}}, 1, ValueError, "'a/b'"),
        ({"took": np.timedelta64(3, "s")}, 1, TypeError, "'took'.*timedelta"),
    ],
)
def test_refuses_and_writes_nothing(path, metrics, step, error, match):
    with pytest.raises(error, match=match):
        jdp.log(metrics, step, file=path)
    assert not path.exists()


def test_names_a_metric_that_is_traced(path):
    with pytest.raises(TypeError, match="'loss'.*Return it"):
        jax.jit(lambda x: jdp.log({"loss": x}, 1, file=path))(1.0)
    assert not path.exists()


def test_names_a_metric_that_was_donated(path):
    gone = jnp.ones(())
    gone.delete()
    with pytest.raises(ValueError, match="'loss'"):
        jdp.log({"loss": gone}, 1, file=path)


def test_a_writer_of_tensorboard_gets_each_scalar(path):
    class Writer:
        def __init__(self):
            self.found = []

        def add_scalar(self, *each):
            self.found.append(each)

    writer = Writer()
    jdp.log({"loss": jnp.float32(0.5), "eval": {"rows": 3}}, 4, file=path, also=writer)
    metrics_log.flush()
    assert writer.found == [("loss", 0.5, 4), ("eval/rows", 3, 4)]
    with pytest.raises(TypeError, match="add_scalar"):
        jdp.log({"loss": 1.0}, 5, file=path, also=3)


def full(step, values):
    raise OSError(28, "No space left on device")


def test_the_error_of_a_tracker_is_raised_by_the_next_call_and_names_it(path):
    jdp.log({"loss": 1.0}, 1, file=path, also=full)
    metrics_log.write_all()
    assert all(each.flush_trackers(9.0) for each in metrics_log._open.files.values())
    with pytest.raises(RuntimeError, match="also=full failed at step 1: OSError.*No space"):
        jdp.log({"loss": 1.0}, 2, file=path)
    assert [line["step"] for line in lines(path)] == [1]


class Buffered:
    """A writer that holds what it got until it is flushed, as TensorBoard's does."""

    def __init__(self, error=None):
        self.held, self.written, self._error = [], [], error

    def add_scalar(self, *each):
        self.held.append(each)

    def flush(self):
        if self._error:
            raise self._error
        self.written, self.held = self.written + self.held, []


def test_flush_brings_every_line_to_a_tracker_and_what_it_holds_to_the_disk(path, make_mesh):
    writer = Buffered()
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 2_000_000, lambda i, x: x * 0.999 + 1, x))
    for step in range(5):
        jdp.log({"loss": slow(jnp.float32(step))}, step, file=path, also=writer)
    jdp.log.flush()
    assert [step for _, _, step in writer.written] == [0, 1, 2, 3, 4] and not writer.held


def test_flush_raises_the_error_of_a_tracker_once(path):
    jdp.log({"loss": 1.0}, 1, file=path, also=Buffered(ValueError("no such run")))
    with pytest.raises(ValueError, match="no such run"):
        jdp.log.flush()
    jdp.log({"loss": 1.0}, 2, file=path, also=full)
    with pytest.raises(ValueError, match="no such run"):
        jdp.log.flush()


def test_a_signal_to_save_flushes_trackers_before_the_process_ends(path, tmp_path):
    writer = Buffered()
    with pytest.raises(SystemExit), jdp.Checkpointer(tmp_path / "run") as checkpointer:
        state = checkpointer.restore({"x": jnp.ones(3)})
        jdp.log({"loss": 1.0}, 1, file=path, also=writer)
        signal.raise_signal(signal.SIGUSR1)
        checkpointer.step(state)
    assert writer.written == [("loss", 1.0, 1)]


def write_from_here(path):
    jdp.log({"process": float(jax.process_index()), "loss": jnp.float32(2)}, 1, file=path)
    metrics_log.flush()
    return jax.process_index()


def test_process_0_writes(processes, tmp_path):
    assert processes(2).run(write_from_here, tmp_path / "metrics.jsonl") == [0, 1]
    [line] = lines(tmp_path / "metrics.jsonl")
    assert line["process"] == 0.0


KILLED = """
import os, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, optax
import jdp
folder = Path(__file__).parent
jdp.init()

@jdp.train_step
def step(state, batch):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w - 1) ** 2))(state.params)
    return state.apply_gradients(grads), {"loss": loss}

x = np.random.default_rng(0).integers(-2, 3, (40, 4)).astype("float32")
batches = jdp.batches({"x": x}, 8, num_steps=30)
state = jdp.TrainState.create(jnp.zeros(4), jdp.replicated(optax.sgd(0.125)))
with jdp.Checkpointer(folder / sys.argv[1], commit_every=4) as checkpointer:
    state = checkpointer.restore(state, batches)
    for batch in batches:
        state, metrics = step(state, batch)
        jdp.log(metrics, checkpointer.steps + 1, file=folder / f"{sys.argv[1]}.jsonl")
        checkpointer.step(state, batches)
        if sys.argv[1] == "killed" and checkpointer.steps in (10, 24):
            checkpointer._session._commits.wait()  # of step 24, behind which the run goes on
            mark = folder / f"killed at {checkpointer.steps}"
            if jax.process_index() == 0 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_a_run_whose_logging_process_is_killed_twice_has_the_lines_of_a_run_without(jdp_run):
    found = {}
    for name in "whole", "killed":
        run = jdp_run(
            *("--nproc-per-node=2", "--standbys=0"),
            **{"script": KILLED, "before": name, "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"},
        )
        assert run.wait() == 0, run.output
        found[name] = without_time(lines(run.folder / f"{name}.jsonl"))
    assert [line["step"] for line in found["whole"]] == [*range(1, 31)]
    assert found["killed"] == found["whole"]
    assert len([*run.folder.glob("killed at *")]) == 2


def test_the_lines_before_an_error_are_written(jdp_run):
    script = """
import jdp, jax.numpy as jnp
from pathlib import Path
jdp.init()
for step in range(50):
    jdp.log({"loss": jnp.float32(step)}, step, file=Path(__file__).parent / "metrics.jsonl")
raise ValueError("at last")
"""
    run = jdp_run("--standbys=0", script=script)
    assert run.wait() == 1, run.output
    assert [line["loss"] for line in lines(run.folder / "metrics.jsonl")] == [*range(50)]


def test_a_step_that_is_logged_again_in_one_run_is_said_once(path, caplog):
    for _ in range(2):  # epochs whose steps are counted anew
        for step in range(3):
            jdp.log({"loss": 1.0}, step, file=path)
        jdp.log({"epoch_loss": 1.0}, 0, file=path)
    assert len(lines(path)) == 4
    [record] = caplog.records
    assert "step 0 are not written" in record.getMessage() and "up to step 2" in record.getMessage()
