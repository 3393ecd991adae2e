"""Compares the loss and the bytes of local steps with those of synchronous ones, at equal tokens.

As in the DiLoCo paper, all begin at parameters from synchronous steps.

    jdp run --nproc-per-node 4 -m benchmarks.step.local_steps          a language model, three seeds
    jdp run --nproc-per-node 4 -m benchmarks.step.local_steps --quick  few steps

Prints its table and writes it to benchmarks/results/, that of a quick run to out/benchmarks/.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import jdp
from benchmarks.harness import report
from benchmarks.harness.report import Section
from examples import elastic_language_model as model

LENGTH, DIM, DEPTH = 64, 64, 4
BATCH_ROWS, HELD_OUT, RATE = 32, 1024, 2e-3
STEPS, EVERY = 1000, 30


def main() -> None:
    quick = report.parser(__doc__).parse_args().quick
    jdp.init()
    section = measure(num_steps=60 if quick else STEPS, num_seeds=1 if quick else 3)
    if jax.process_index() == 0:
        report.publish("local_steps", [section], quick=quick)


def measure(*, num_steps: int, num_seeds: int) -> Section:
    """Train with each optimizer and seed."""
    inner = optax.adam(optax.cosine_decay_schedule(RATE, num_steps))
    eight, four = (functools.partial(jdp.collectives.quantized, dtype=x) for x in ("int8", "int4"))
    diloco = functools.partial(jdp.diloco, inner, every=EVERY)
    optimizers = {
        "replicated": (1, jdp.replicated(inner)),
        f"diloco, every={EVERY}, 8 bits": (EVERY, diloco(all_reduce=eight)),
        "4 bits": (EVERY, diloco(all_reduce=four)),
        "8 bits, streaming": (EVERY, diloco(streaming=True, all_reduce=eight)),
        "4 bits, streaming": (EVERY, diloco(streaming=True, all_reduce=four)),
    }
    found: dict[str, list[Result]] = {name: [] for name in optimizers}
    for seed in range(num_seeds):
        rng = np.random.default_rng(seed)
        params = jax.tree.map(rng.permutation, model.new_params(LENGTH, DIM, DEPTH))
        first = _trained(params, jdp.replicated(optax.adam(RATE)), num_steps, 2 * seed)
        for name, (every, tx) in optimizers.items():
            found[name].append(_trained(first.params, tx, num_steps, 2 * seed + 1, every))
    return Section(
        "Local steps",
        f"A decoder ({DEPTH} layers of width {DIM}) on {BATCH_ROWS} rows of {LENGTH} bytes of "
        f"Python sources in each step, over {jax.device_count()} processes: {num_steps:,} "
        f"synchronous steps of Adam at {RATE:g}, then {num_steps:,} of each optimizer with a "
        "cosine from there to 0. "
        f"Bits for each of {HELD_OUT * LENGTH:,} bytes of other rows; the ratio is to `replicated` "
        "with the same seed. Sent: what one rank sends in a step, as a mean and at most, if an "
        "all-reduce sends each byte twice (by a ring), another collective once.",
        [_row(name, results, found["replicated"]) for name, results in found.items()],
        {
            "optimizer": "{optimizer}",
            "bits for each byte": "{bits:.4f}",
            "ratio": "{ratio:.4f}",
            "of single seeds": "{low:.4f} to {high:.4f}",
            "sent, KiB": "{kib:,.1f}",
            "at most": "{most_kib:,.1f}",
            "times fewer": "{fewer:.1f}",
            "seeds": "{seeds}",
        },
    )


class Result(NamedTuple):
    """The parameters, bits for each byte of other rows, and sent bytes: mean and most of a step."""

    params: Any
    bits: float
    num_bytes: float
    most_bytes: float


def _row(name: str, results: list[Result], synchronous: list[Result]) -> dict[str, Any]:
    pairs = zip(results, synchronous, strict=True)
    ratios = [result.bits / beside.bits for result, beside in pairs]
    return {
        "section": "local_steps",
        "optimizer": name,
        "bits": float(np.mean([result.bits for result in results])),
        "ratio": float(np.mean(ratios)),
        "low": min(ratios),
        "high": max(ratios),
        "kib": results[0].num_bytes / 1024,
        "most_kib": results[0].most_bytes / 1024,
        "fewer": synchronous[0].num_bytes / results[0].num_bytes,
        "seeds": len(results),
    }


@jdp.train_step
def train(state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p, text: model.bits(p, text).mean())(
        state.params, batch
    )
    return state.apply_gradients(grads), {"bits": loss}


@jdp.eval_step
def measure_bits(params: Any, text: Any) -> Any:
    return {"bits": model.bits(params, text).mean()}


def _trained(params: Any, tx: Any, num_steps: int, seed: int, every: int = 1) -> Result:
    text = model.read_rows(LENGTH)
    held_out, text = text[::37][:HELD_OUT], np.delete(text, np.s_[::37], axis=0)
    state = jdp.TrainState.create(params, tx)
    for batch in jdp.batches(text, BATCH_ROWS, num_steps=num_steps, seed=seed):
        state, _ = train(state, batch)
    sent, mean_over = [], []
    for each in train.communication_plan(state, batch):
        times = (2 if each.kind == "all-reduce" else 1) * (1 - 1 / jax.device_count())
        sent.append(times * each.num_bytes)
        mean_over.append(every if each.is_conditional else 1)
    others = jdp.batches(held_out, HELD_OUT, num_steps=1, shuffle=False)
    found = jdp.evaluate(measure_bits, state.params, others)
    mean = sum(num_bytes / steps for num_bytes, steps in zip(sent, mean_over, strict=True))
    return Result(jax.device_get(state.params), float(found["bits"]), mean, sum(sent))


if __name__ == "__main__":
    main()
