"""Measures what gradients in 8 bits save between two hosts, and what they cost in the loss.

The hosts are network namespaces of this machine, so it needs root. Linux's `tbf` limits the rate.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import time
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
from jdp.collectives import quantized, xla
from tests.support.namespaces import two_hosts

MiB = 2**20
RATES = {"0.1": "100mbit", "1": "1gbit", "10": "10gbit"}  # Gbit/s
SIZES = (1 * MiB, 4 * MiB, 16 * MiB)  # bytes of float32
CONTESTANTS = {
    "float32": xla,
    "int8": quantized,
    "float8_e4m3fn": functools.partial(quantized, dtype=jnp.float8_e4m3fn),
}
_DEADLINE_S = 900
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
        half = jax.make_array_from_process_local_data(sharding, local[None, ::2].copy())
        calls = {name: (_reduced(mesh, f), whole) for name, f in CONTESTANTS.items()}
        # XLA:CPU widens bfloat16 before it sends: half of the numbers have the same bytes.
        calls["bytes of bfloat16"] = (_reduced(mesh, xla), half)
        times: dict[str, list[float]] = {name: [] for name in calls}
        errors = {}
        for number in range(num_rounds + 1):
            for name, (call, x) in calls.items():
                begin = time.perf_counter()
                total = jax.block_until_ready(call(x))
                if number:  # the first compiles
                    times[name].append(time.perf_counter() - begin)
                got = np.asarray(total.addressable_data(0))[0]
                want = exact if x is whole else exact[::2]
                errors[name] = float(np.abs(got - want).max() / np.abs(want).max())
        for name in calls:
            if errors[name] > (1e-6 if "float32" == name or "bytes" in name else 0.1):
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


def _reduced(mesh: Mesh, all_reduce: Any) -> Any:
    def call(x: jax.Array) -> jax.Array:
        return all_reduce([[x[0]]], ("data",), scale=0.5, mesh=mesh)[0][0][None]

    return jax.jit(
        jax.shard_map(call, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    )


def measure(num_rounds: int) -> list[dict[str, Any]]:
    """Measure at each rate; the rows are those of the slower host."""
    found: list[dict[str, Any]] = []
    with two_hosts() as hosts:
        for rate, limit in RATES.items():
            for i, host in enumerate(hosts):
                limited = ["tc", "qdisc", "replace", "dev", f"wire{i}", "root", "tbf"]
                limited += ["rate", limit, "burst", "256kb", "latency", "50ms"]
                subprocess.run([*host, *limited], check=True)
            answers = _answers(hosts, num_rounds)
            for one, other in zip(*answers, strict=True):
                found.append({"gbit_per_s": rate, **max(one, other, key=lambda row: row["ms"])})
    for row in found:
        same = [it for it in found if (it["gbit_per_s"], it["bytes"]) == _setting(row)]
        wire = next(it["ms"] for it in same if it["contestant"] == "bytes of bfloat16")
        row["faster"] = wire / row["ms"]
    return found


def _setting(row: dict[str, Any]) -> tuple[str, int]:
    return row["gbit_per_s"], row["bytes"]


def _answers(hosts: Any, num_rounds: int) -> list[list[dict[str, Any]]]:
    command = [sys.executable, "-m", "benchmarks.all_reduce.slow_links", f"--rounds={num_rounds}"]
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


def losses(num_steps: int) -> list[dict[str, Any]]:
    """Train the model of `examples/language_model.py`, smaller, on 4 virtual ranks."""
    text, held_out = language_model.read_sources()
    rows = language_model.windows(text, _LENGTH)["text"]
    unseen = language_model.windows(held_out[: 512 * _LENGTH], _LENGTH)["text"].astype(int)
    ways: dict[str, dict[str, Any]] = {name: {"all_reduce": f} for name, f in CONTESTANTS.items()}
    ways["bfloat16"] = {"reduce_dtype": jnp.bfloat16}
    found: list[dict[str, Any]] = []
    for name, options in ways.items():
        bits = [_trained(rows, unseen, seed, num_steps, options) for seed in SEEDS]
        found.append({"contestant": name, "bits": float(np.mean(bits)), "seeds": bits})
    for row in found:
        pairs = zip(row["seeds"], found[0]["seeds"], strict=True)
        differences = [one - exact for one, exact in pairs]
        row["difference"] = float(np.mean(differences))
        row["low"], row["high"] = min(differences), max(differences)
    return found


def _trained(rows: Any, unseen: Any, seed: int, num_steps: int, options: Any) -> float:
    """Return the bits per unseen byte."""
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

    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, num_steps // 10, num_steps)
    state = jdp.TrainState.create(params, jdp.replicated(optax.adamw(schedule), **options))
    for batch in jdp.batches(rows, 32, num_steps=num_steps, seed=seed):
        state, _ = step(state, batch)
    jdp.check_replicas(state)
    return float(jax.jit(loss_fn)(state.params, unseen)) / np.log(2)


def main() -> None:
    """Measure, or run as one of the two hosts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=400, help="of each training")
    options = parser.parse_args()
    rank = os.environ.get("JDP_SLOW_LINK_RANK")
    if rank is not None:
        jax.distributed.initialize("10.83.0.1:8499", num_processes=2, process_id=int(rank))
        print(json.dumps(rows_of_host(jdp.init(), options.rounds)))
        return
    section = report.Section(
        "All-reduce between two hosts with a slow link",
        "Medians of the slower host. `faster`: than a float32 sum of half of the numbers, which "
        "sends the bytes of bfloat16. `error`: the largest, as a part of the largest sum.",
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
    jdp.init(cpu_ranks=4)
    report.publish("slow_links", [section, _section_of_losses(options.steps)])


def _section_of_losses(num_steps: int) -> report.Section:
    return report.Section(
        "Bits per unseen byte of a language model",
        f"Means of {len(SEEDS)} seeds after {num_steps} steps of AdamW on 4 ranks, 200,000 "
        "parameters. `difference`: from float32 with the same seed, mean, least and largest.",
        losses(num_steps),
        {
            "sent as": "{contestant}",
            "bits": "{bits:.4f}",
            "difference": "{difference:+.4f}",
            "least": "{low:+.4f}",
            "largest": "{high:+.4f}",
        },
    )


if __name__ == "__main__":
    main()
