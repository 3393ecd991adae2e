"""Every example runs as a user would run it, and does what it says."""

import difflib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jdp
from jdp.checkpoint import directory
from jdp.tools.profiling import summary

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300
SMALL_MODEL = "--length=64 --dim=32 --depth=1 --batch-size=64".split()


def environment():
    ours = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    return {k: v for k, v in os.environ.items() if k not in ours} | {"PYTHONPATH": str(ROOT)}


def start(example, *flags, folder, **variables):
    # As in pyproject.toml, whose filters only pytest reads.
    cache = "ignore:Error reading persistent compilation cache entry:UserWarning"
    return subprocess.run(
        [sys.executable, "-W", "error", "-W", cache, ROOT / "examples" / example, *flags],
        cwd=folder,
        env={**environment(), **variables},
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
    )


def run(example, *flags, **where):
    ended = start(example, *flags, **where)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def load(example):
    spec = importlib.util.spec_from_file_location(Path(example).stem, ROOT / "examples" / example)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested():
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    examples = [*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*.ipynb")]
    assert all(f'"{path.name}"' in tests for path in examples)


def test_the_overview_names_every_example():
    overview = (ROOT / "examples" / "README.md").read_text()
    paths = (ROOT / "examples").glob("**/*.*")
    files = {path.name for path in paths if path.parent.name[0] not in "._"}  # caches
    assert not [name for name in files - {"README.md"} if f"`{name}`" not in overview]


def test_scanned_layers_learn(tmp_path):
    output = run("scanned_layers.py", folder=tmp_path)
    assert float(re.search(r"after 60 steps: loss ([\d.]+)", output)[1]) < 0.1


@pytest.mark.parametrize(
    "example, flags, says",
    [
        ("tensor_parallel.py", "", r"\(32, 16\) on each"),
        ("tensor_parallel.py", "--stage=3", r"P\('data', 'model'\), \(16, 16\) on each"),
        ("pipeline.py", "--micro-batches=6", "gpipe: 9 ticks .* 33.3% bubble"),
        (
            "pipeline.py",
            "--schedule=interleaved --micro-batches=5",
            "interleaved: 13 ticks .* 23.1% bubble",
        ),
        ("pipeline.py", "--schedule=1f1b --pipe=8", "1f1b: 22 ticks .* 46.7% bubble"),
        ("ring_attention.py", "--seq=8", "8 of 64 tokens"),
        ("mixture_of_experts.py", "--expert=2", "4 of 8 experts"),
        ("mixture_of_experts.py", "--capacity=8", "dropped 0.0000"),
    ],
)
def test_models_that_are_split_equal_one_device(tmp_path, example, flags, says):
    flags = [*flags.split(), "--steps=5", f"--rows={60 if 'micro-batches' in flags else 32}"]
    output = run(example, *flags, folder=tmp_path)  # which ends with an error if they differ
    assert re.search(says, output)
    if "pipeline" in example:
        bubbles = re.search(r"([\d.]+)% bubble\n  by the formula ([\d.]+)%", output)
        assert bubbles[1] == bubbles[2]
    assert float(re.search(r"largest difference .*: ([\d.e-]+)", output)[1]) < 1e-5


@pytest.mark.parametrize("num_actors", [0, 1])
def test_a_learner_counts_the_rows_of_its_actors_and_replaces_a_killed_one(tmp_path, num_actors):
    command = [sys.executable, ROOT / "examples" / "actors.py", "--steps=120"]
    command += [f"--actors={num_actors}", f"--directory={tmp_path}"]
    pipes = {"stdout": subprocess.PIPE, "text": True, "env": environment()}
    with subprocess.Popen(command, **pipes) as learner:
        for _ in range(num_actors):
            first = re.search(r"new actors \[(\d+)\]", learner.stdout.readline())
            os.kill(int(first[1]), signal.SIGKILL)
        output = learner.communicate(timeout=DEADLINE_S)[0]
    assert output.count("has the new actors") == num_actors
    assert "61,440 rows in 120 steps" in output


def test_three_axes_go_on_without_two_of_them_and_back(tmp_path):
    output = run("three_axes.py", "--steps=3", folder=tmp_path)
    assert re.findall(r"from step (\d)", output) == ["0", "3", "6", "0"]
    assert "'up' is P('pipe', 'data', 'model')" in output
    assert float(re.search(r"largest difference .*: ([\d.e-]+)", output)[1]) < 1e-5


def test_the_schedules_of_a_pipeline_are_drawn(tmp_path):
    run("pipeline.py", "--picture=schedules.png", folder=tmp_path)
    assert (tmp_path / "schedules.png").read_bytes().startswith(b"\x89PNG")


def attention_of_ring(example, num_devices, length):
    """`(q, k, v, documents) -> (results, gradients of their sum times 1, 2, ...)`, compiled."""
    mesh = Mesh(jax.devices()[:num_devices], "seq")

    def on_device(q, k, v, documents):
        size = q.shape[2]
        position = jax.lax.axis_index("seq") * size + jnp.arange(size)

        def total(*qkv):
            results = example.ring_attention(*qkv, documents, position)
            return (results * (1 + position[:, None])).sum(), results

        grads, results = jax.grad(total, (0, 1, 2), has_aux=True)(q, k, v)
        return results, *grads

    parts, rows = P(None, None, "seq"), P(None, "seq")
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=(*[parts] * 3, rows), out_specs=parts)
    shapes = [jax.ShapeDtypeStruct((2, 3, length, 5), jnp.float32)] * 3
    return jax.jit(mapped).lower(*shapes, jax.ShapeDtypeStruct((2, length), jnp.int32)).compile()


@pytest.mark.parametrize("num_devices", [1, 3, 8])
def test_the_ring_has_the_values_and_gradients_of_full_attention(num_devices):
    example, draw = load("ring_attention.py"), np.random.default_rng(0)
    qkv = [draw.normal(size=(2, 3, 48, 5)).astype("f") for _ in range(3)]
    documents = draw.integers(0, 2, (2, 48)).cumsum(1).astype("i") // 5
    position = np.arange(48)

    def total(*qkv):
        results = example.full_attention(*qkv, documents, position)
        return (results * (1 + position[:, None])).sum(), results

    grads, results = jax.grad(total, (0, 1, 2), has_aux=True)(*qkv)
    found = attention_of_ring(example, num_devices, 48)(*qkv, documents)
    for got, want in zip(found, (results, *grads), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_the_memory_of_a_longer_ring_does_not_grow():
    example = load("ring_attention.py")
    rings = [attention_of_ring(example, n, 64 * n).memory_analysis() for n in (2, 8)]
    assert rings[0].temp_size_in_bytes == rings[1].temp_size_in_bytes


def test_crowded_experts_drop_tokens(tmp_path):
    output = run("mixture_of_experts.py", "--steps=3", "--capacity=1", folder=tmp_path)
    assert 0 < float(re.search(r"dropped ([\d.]+)", output)[1]) < 0.5


def test_digits_is_learnt_alike_on_four_ranks_and_on_one(tmp_path):
    output = run("digits.py", folder=tmp_path)
    accuracy = re.search(r"ranks: 4, test accuracy: ([\d.]+)% of 397 rows", output)
    difference = re.search(r"ranks: 1, largest difference of a parameter: (\S+)", output)
    assert float(accuracy[1]) >= 97 and float(difference[1]) <= 1e-5
    epochs = re.findall(r"^(epoch +\d+  loss [\d.]+  accuracy +[\d.]+%)", output, re.MULTILINE)
    assert len(epochs) == 40 and epochs[:20] == epochs[20:]
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_the_cnn_stops_early_and_keeps_its_best_state(tmp_path):
    output = run("cnn.py", "--patience=2", folder=tmp_path)
    losses = [float(x) for x in re.findall(r"^epoch +\d+  loss ([\d.]+)", output, re.MULTILINE)]
    best, last = map(int, re.search(r"best: epoch (\d+) of (\d+)", output).groups())
    assert last == len(losses) == best + 2 < 40
    assert min(losses) == losses[best - 1]
    assert float(re.search(r"ranks: 4, test accuracy: ([\d.]+)% of 300", output)[1]) >= 97


@pytest.mark.skipif(
    None in map(importlib.util.find_spec, ("g2p_en", "misaki")), reason="needs g2p-en and misaki"
)
def test_lora_trains_and_saves_a_fiftieth_of_the_numbers(tmp_path):
    output = run("lora.py", "--steps=60", folder=tmp_path)
    line = r"^(.+): (\S+) numbers trained, (\S+)% -> (\S+)% of 997 words .* (\S+) bytes of"
    lora, full = re.findall(line, output, re.MULTILINE)
    trained, saved = [[int(x[i].replace(",", "")) for x in (lora, full)] for i in (1, 4)]
    assert trained == [17_704, 834_890] and saved[0] < saved[1] / 30
    assert lora[2] == full[2] and all(float(x[3]) > float(x[2]) + 10 for x in (lora, full))


def test_pmap_after_has_the_state_of_pmap_before(tmp_path):
    counted = {"before": 384, "after": 397}
    states = []
    for name, num_rows in counted.items():
        output = run(f"pmap_{name}.py", folder=tmp_path)
        assert re.search(rf"epoch 3 .* accuracy 9\d.* of {num_rows}$", output, re.MULTILINE)
        saved = (tmp_path / f"pmap_{name}.msgpack").read_bytes()
        states.append(serialization.msgpack_restore(saved))
    # With one rank the bits are equal; with several XLA compiles each program in its own way.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *states)


def test_coming_from_shows_the_difference_of_the_two():
    page = (ROOT / "docs" / "coming_from.md").read_text()
    (shown,) = re.findall(r"^```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names = ("pmap_before.py", "pmap_after.py")
    texts = [(ROOT / "examples" / name).read_text().splitlines() for name in names]
    lines = difflib.unified_diff(texts[0], texts[1], names[0], names[1], n=0, lineterm="")
    assert shown.splitlines() == [*lines], "put this diff there, with n=0 lines around"


def test_digits_fails_if_it_misses_its_target(tmp_path):
    # On a number of ranks that does not divide the usual batch.
    ended = start("digits.py", "--ranks=3", "--epochs=1", folder=tmp_path)
    assert ended.returncode == 1 and "expected at least 97%" in ended.stderr
    assert "ranks: 3, test accuracy" in ended.stdout


@pytest.mark.thorough  # the elastic one is this model, and outlives a process
def test_language_model_goes_on_with_the_same_bits_after_an_interruption(tmp_path):
    small = (*SMALL_MODEL, "--steps=60", "--every=60")
    whole = run("language_model.py", *small, "--checkpoints=whole", folder=tmp_path)
    run("language_model.py", *small, "--checkpoints=parts", "--stop-after=25", folder=tmp_path)
    assert latest_checkpoint(tmp_path / "parts")[0] == 25 * 64
    resumed = run("language_model.py", *small, "--checkpoints=parts", "--resume", folder=tmp_path)
    bits = [float(re.search(r"step 60, held out: ([\d.]+)", x)[1]) for x in (whole, resumed)]
    assert bits[0] == bits[1] < 6
    position, arrays = latest_checkpoint(tmp_path / "whole")
    resumed_position, resumed_arrays = latest_checkpoint(tmp_path / "parts")
    assert position == resumed_position == 60 * 64
    jax.tree.map(np.testing.assert_array_equal, resumed_arrays, arrays)

    # Begun at stage 3, and continued at stage 1: the same training, but for the order of sums.
    split = (*small, "--checkpoints=split")
    run("language_model.py", *split, "--stage=3", "--stop-after=25", folder=tmp_path)
    resumed = run("language_model.py", *split, "--stage=1", "--resume", folder=tmp_path)
    found = float(re.search(r"step 60, held out: ([\d.]+)", resumed)[1])
    assert abs(found - bits[0]) < 0.01


def latest_checkpoint(path):
    """Return the position and the arrays of the latest checkpoint in a folder."""
    folder = directory.Folder(path)
    return folder.facts(folder.checkpoints()[0])["position"], jdp.load(path)


def test_language_model_counts_every_held_out_byte_once(mesh):
    example = load("language_model.py")
    jdp.init(mesh)
    text = np.frombuffer(b"a text of a prime number of bytes: 43, not 42", np.uint8)[:43]
    model = example.Decoder(8, 32, 1, nnx.Rngs(0))
    _, test = example.new_steps(*nnx.split(model)[:1], accumulate=1)
    params = nnx.split(model)[1]
    state = jdp.TrainState.create(params, jdp.replicated(optax.sgd(0.1)), model_state=params)
    found = example.measure(test, state, example.windows(text, 8), 24)

    bits = []
    for begin in range(0, 43, 8):
        known = np.concatenate([[0], text])[begin : begin + 8][: 43 - begin]
        log_probs = jax.nn.log_softmax(model(jnp.asarray(known)[None]))[0]
        bits += [-log_probs[i, byte] / np.log(2) for i, byte in enumerate(text[begin : begin + 8])]
    assert found["bytes"] == len(bits) == 43
    np.testing.assert_allclose(found["bits"], np.mean(bits), rtol=1e-6)


def test_gan_covers_all_modes(tmp_path):
    assert "modes covered: 8 of 8" in run("gan.py", folder=tmp_path)


def test_recommendation_has_equal_losses_and_a_quarter_of_the_state_on_four_ranks(tmp_path):
    output = run("recommendation.py", "--users=8000", "--steps=30", folder=tmp_path)
    lines = re.findall(r"ranks: (\d), loss: (\S+) -> (\S+), each holds (\S+) bytes", output)
    (n, *losses, held), (_, *losses_of_one, held_by_one) = lines
    assert losses == losses_of_one and float(losses[1]) < 0.6 < float(losses[0])
    held, held_by_one = (int(each.replace(",", "")) for each in (held, held_by_one))
    assert n == "4" and held_by_one / 4 <= held < held_by_one / 4 + 100  # and a few scalars
    assert float(re.search(r"difference of a loss: (\S+)", output)[1]) <= 1e-5


@pytest.mark.parametrize(("flags", "num_ranks"), [((), 4), (("--ranks=0",), 3)])
def test_own_loops_agree_with_one_rank(tmp_path, flags, num_ranks):
    output = run("own_loop.py", *flags, folder=tmp_path, JAX_NUM_CPU_DEVICES="3")
    found = re.findall(rf"ranks: {num_ranks}, (\S+) .* a parameter: (\S+)", output)
    assert [name for name, _ in found] == ["shard_map", "shard_map(check_vma=False)", "pmap"]
    assert all(float(difference) <= 1e-5 for _, difference in found)


@pytest.mark.xdist_group("processes")
def test_profiled_names_the_process_whose_loader_is_slow(tmp_path):
    command = [sys.executable, "-m", "jdp", "run", "--nproc-per-node", "2"]
    script = [ROOT / "examples" / "profiled.py", "--steps=6", "--first=2", "--wait-ms=1000"]
    subprocess.run(
        command + script, cwd=tmp_path, env=environment(), timeout=DEADLINE_S, check=True
    )
    found = summary.summarize(tmp_path / "profile")
    assert {each.process for each in found.ranks[:2]} == {1} and len(found.ranks) == 4
    assert all(each.mean()[0] > 0 for each in found.ranks[:2]) and not found.notes


def test_elastic_language_model_outlives_a_process_and_saves_at_sigterm(tmp_path):
    flags = "--length=16 --dim=16 --depth=1 --steps=1000000".split()
    launched = subprocess.Popen(
        [sys.executable, "-m", "jdp", "run", "--nproc-per-node=2", "--log-dir=logs"]
        + [ROOT / "examples" / "elastic_language_model.py", *flags],
        cwd=tmp_path,
        env={**environment(), "JAX_NUM_CPU_DEVICES": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with launched:
        try:
            events = tmp_path / "logs" / "events.jsonl"
            until("ready", events)  # Standbys wait.
            pid = until("first_step", events)["pid"]
            shown = ""
            while "step 20:" not in shown:  # steps are committed
                shown += launched.stdout.readline()
            os.kill(pid, signal.SIGKILL)
            assert "killed by SIGKILL" in until("recovered", events)["cause"]
            launched.terminate()
            launched.wait(DEADLINE_S)
        finally:
            launched.kill()
            output = shown + launched.stdout.read()
    begins = re.findall(r"one of 2 ranks, begins after step (\d+)", output)
    saved = re.search(r"step (\d+) is saved in", output)
    assert launched.returncode == 75 and len(begins) == 2 and saved, output
    assert int(begins[0]) == 0 < int(begins[1]) < int(saved[1]), output


def until(event, events):
    """Wait for the first event of that name, and give its facts."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        lines = events.read_text().split("\n")[:-1] if events.exists() else []
        found = [json.loads(line) for line in lines]
        if found and found[-1]["event"] == "over":
            break
        for facts in found:
            if facts["event"] == event:
                return facts
        time.sleep(0.02)
    raise AssertionError(f"no event {event!r}")
