"""Measures what gradients in 8 bits save between two hosts: time of a sum, time to a fixed loss.

The hosts are network namespaces of this machine, so it needs root. Linux's `tbf` limits the rate.
"""

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from benchmarks.harness import report
from examples import language_model
from jdp.collectives import quantized
from tests.support.namespaces import two_hosts

MiB = 2**20
RATES = {"0.1": "100mbit", "1": "1gbit", "10": "10gbit"}  # Gbit/s
SIZES = (1 * MiB, 4 * MiB, 16 * MiB)  # bytes of float32
CONTESTANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"reduce_dtype": jnp.bfloat16},
    "float8_e4m3fn": {"all_reduce": functools.partial(quantized, dtype=jnp.float8_e4m3fn)},
    "int8": {"all_reduce": quantized},
    "int4": {"all_reduce": functools.partial(quantized, dtype=jnp.int4)},
}
# The largest error, as a part of the largest sum.
_MOST = {"float32": 1e-6, "bfloat16": 0.01, "float8_e4m3fn": 0.1, "int8": 0.02, "int4": 0.3}
_DEADLINE_S = 900
_EVERY, _BITS = 20, 3.4  # steps between evaluations
_LENGTH = 64
SEEDS = (0, 1, 2)


def rows_of_host(mesh: Mesh, num_rounds: int) -> list[dict[str, Any]]:
    """Time all contestants between the two processes, alternately; check each sum."""
    found = []
    for num_bytes in SIZES:
        local = np.random.default_rng(jax.process_index()).normal(size=num_bytes // 4)
        local = local.astype(np.float32)
        each = [np.random.default_rng(i).normal(size=num_bytes // 4) for i in range(2)]
        exact = (each[0].astype(np.float32) + each[1].astype(np.float32)) / 2
        sharding = NamedSharding(mesh, P("data"))
        whole = jax.make_array_from_process_local_data(sharding, local[None])
        calls = {name: _reduced(mesh, **options) for name, options in CONTESTANTS.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        errors = {}
        for number in range(num_rounds + 1):
            for name, call in calls.items():
                begin = time.perf_counter()
                total = jax.block_until_ready(call(whole))
                if number:  # the first compiles
                    times[name].append(time.perf_counter() - begin)
                got = np.asarray(total.addressable_data(0))[0]
                errors[name] = float(np.abs(got - exact).max() / np.abs(exact).max())
        for name in calls:
            if errors[name] > _MOST[name]:
                raise RuntimeError(f"{name}: the sum is off by {errors[name]:.2g} of the largest.")
            found.append(
                {
                    "bytes": num_bytes,
                    "contestant": name,
                    "ms": float(np.median(times[name])) * 1e3,
                    "error": errors[name],
                }
            )
    return found


def _reduced(mesh: Mesh, **options: Any) -> Any:
    def call(x: jax.Array) -> jax.Array:
        return jdp.sync_gradients(x, mesh=mesh, **options)

    return jax.jit(
        jax.shard_map(call, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    )


def measure(num_rounds: int) -> list[dict[str, Any]]:
    """Measure at each rate; the rows are those of the slower host."""
    found: list[dict[str, Any]] = []
    for rate, answers in _at_each_rate(f"--rounds={num_rounds}"):
        for one, other in zip(*answers, strict=True):
            found.append({"gbit_per_s": rate, **max(one, other, key=lambda row: row["ms"])})
    for row in found:
        same = [it for it in found if (it["gbit_per_s"], it["bytes"]) == _setting(row)]
        wire = next(it["ms"] for it in same if it["contestant"] == "bfloat16")
        row["faster"] = wire / row["ms"]
    return found


def _setting(row: dict[str, Any]) -> tuple[str, int]:
    return row["gbit_per_s"], row["bytes"]


def _at_each_rate(*options: str) -> Iterator[tuple[str, list[Any]]]:
    """Run this program on both hosts at each rate; yield the rate and their answers."""
    with two_hosts() as hosts:
        for rate, limit in RATES.items():
            for i, host in enumerate(hosts):
                limited = ["tc", "qdisc", "replace", "dev", f"wire{i}", "root", "tbf"]
                limited += ["rate", limit, "burst", "256kb", "latency", "50ms"]
                subprocess.run([*host, *limited], check=True)
            yield rate, _answers(hosts, options)


def _answers(hosts: Any, options: Sequence[str]) -> list[Any]:
    command = [sys.executable, "-m", "benchmarks.all_reduce.slow_links", *options]
    started = [
        subprocess.Popen(
            [*host, *command],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "JDP_SLOW_LINK_RANK": str(i)},
        )
        for i, host in enumerate(hosts)
    ]
    try:
        outputs = [process.communicate(timeout=_DEADLINE_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [json.loads(text.splitlines()[-1]) for text in outputs]


def trainings(num_steps: int) -> list[list[dict[str, Any]]]:
    """Train each way, `[ways][seeds]`; return times and bits per unseen byte, and whether equal."""
    text, held_out = language_model.read_sources()
    rows = language_model.windows(text, _LENGTH)["text"]
    unseen = language_model.windows(held_out[: 512 * _LENGTH], _LENGTH)["text"].astype(int)
    return [
        [_trained(rows, unseen, seed, num_steps, options) for seed in SEEDS]
        for options in CONTESTANTS.values()
    ]


def _trained(rows: Any, unseen: Any, seed: int, num_steps: int, options: Any) -> dict[str, Any]:
    """Train the model of `examples/language_model.py`, smaller; time steps, not evaluations."""
    decoder = language_model.Decoder(_LENGTH, 64, 2, nnx.Rngs(seed))
    graphdef, params = nnx.split(decoder)

    def loss_fn(params: Any, text: jax.Array) -> jax.Array:
        text = text.astype(int)
        logits = nnx.merge(graphdef, params)(text[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    @jdp.train_step
    def step(state: jdp.TrainState, text: jax.Array) -> Any:
        loss, grads = jdp.value_and_grad(loss_fn)(state.params, text)
        return state.apply_gradients(grads), {"loss": loss}

    def bits(state: Any) -> float:
        own = jax.tree.map(lambda x: x.addressable_data(0), state.params)
        return float(measure(own, unseen)) / np.log(2)

    measure = jax.jit(loss_fn)
    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, num_steps // 10, num_steps)
    tx = jdp.replicated(optax.adamw(schedule), **options)
    state = jdp.TrainState.create(params, tx)
    spent, begin, found = 0.0, 0.0, []
    for n, batch in enumerate(jdp.batches(rows, 32, num_steps=num_steps, seed=seed)):
        if n == 1:  # the first step compiles
            begin = time.perf_counter()
        state, _ = step(state, batch)
        if n and n % _EVERY == 0 or n == num_steps - 1:
            jax.block_until_ready(state)
            spent += time.perf_counter() - begin
            found.append((spent, bits(state)))
            begin = time.perf_counter()
    jdp.check_replicas(state)
    return {"curve": found}


def times_to_loss(num_steps: int) -> list[dict[str, Any]]:
    """Train between the hosts at each rate; return seconds until the bits reach a fixed number."""
    found: list[dict[str, Any]] = []
    for rate, answers in _at_each_rate(f"--steps={num_steps}", "--train"):
        for name, own, other in zip(CONTESTANTS, *answers, strict=True):
            pairs = [[run["curve"] for run in runs] for runs in zip(own, other, strict=True)]
            seconds = [max(_until(_BITS, curve) for curve in curves) for curves in pairs]
            found.append(
                {
                    "gbit_per_s": rate,
                    "contestant": name,
                    "s": float(np.median(seconds)),
                    "seconds": seconds,
                    "bits": float(np.mean([run["curve"][-1][1] for run in own])),
                }
            )
    for row in found:
        (peer,) = (
            it
            for it in found
            if it["gbit_per_s"] == row["gbit_per_s"] and it["contestant"] == "bfloat16"
        )
        ratios = np.array(peer["seconds"]) / np.array(row["seconds"])
        row["faster"], row["low"], row["high"] = np.median(ratios), ratios.min(), ratios.max()
    return found


def _until(bits: float, curve: Any) -> float:
    """Return the seconds until a curve of (seconds, bits) falls to `bits`, between its points."""
    for (begin, before), (end, after) in itertools.pairwise(curve):
        if after <= bits:
            return begin + (end - begin) * (before - bits) / (before - after)
    raise RuntimeError(f"a training ends with {curve[-1][1]:.4f} bits, not {bits}.")


def main() -> None:
    """Measure, or run as one of the two hosts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=400, help="of each training")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rank = os.environ.get("JDP_SLOW_LINK_RANK")
    if rank is not None:
        jax.distributed.initialize("10.83.0.1:8499", num_processes=2, process_id=int(rank))
        mesh = jdp.init()
        answer = trainings(options.steps) if options.train else rows_of_host(mesh, options.rounds)
        print(json.dumps(answer))
        return
    section = report.Section(
        "All-reduce between two hosts with a slow link",
        "Medians of the slower host. `faster`: than bfloat16, `reduce_dtype=`. `error`: the "
        "largest, as a part of the largest sum.",
        measure(options.rounds),
        {
            "Gbit/s": "{gbit_per_s}",
            "bytes": "{bytes}",
            "sent as": "{contestant}",
            "ms": "{ms:.1f}",
            "faster": "{faster:.2f}",
            "error": "{error:.1e}",
        },
    )
    report.publish("slow_links", [section, _section_of_trainings(options.steps)])


def _section_of_trainings(num_steps: int) -> report.Section:
    return report.Section(
        "Time to a fixed loss",
        f"A language model of 119,000 parameters in 15 arrays, {num_steps} steps of AdamW on both "
        f"hosts, {len(SEEDS)} seeds: seconds until it needs {_BITS} bits for each of 32,768 unseen "
        "bytes, without evaluations, the median; how much faster than bfloat16, with the least and "
        "the largest of the seeds; and bits after the last step, the mean.",
        times_to_loss(num_steps),
        {
            "Gbit/s": "{gbit_per_s}",
            "sent as": "{contestant}",
            "s": "{s:.2f}",
            "faster": "{faster:.2f}",
            "of single seeds": "{low:.2f} to {high:.2f}",
            "bits at the end": "{bits:.4f}",
        },
    )


if __name__ == "__main__":
    main()
