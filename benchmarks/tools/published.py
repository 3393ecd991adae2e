"""Step times that were published for JAX on H100s, beside those that `jdp explain` predicts.

    python -m benchmarks.tools.published            every run, 15 minutes on 2 idle cores, no GPU
    python -m benchmarks.tools.published --only llama2-7b-8 --whole

Needs JAX's CUDA plugin (`pip install 'jdp[explain-gpu]'`). Each model is compiled at its published
width from shapes alone, with 2 and with 4 layers, and the predicted time of all its layers lies on
the line through both; --whole compiles all layers. Nothing is fitted to the published times. cuDNN
is not needed: attention is JAX's Pallas kernel, which states the operations of a fused attention.
Prints its table and writes it to out/benchmarks/.
"""

import argparse
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jdp
from benchmarks.harness import report
from benchmarks.harness.report import Section
from benchmarks.tools import decoder
from benchmarks.tools.decoder import Decoder
from jdp.tools.explain import explain

_FEW = 2  # layers of the smaller program
_TOOLBOX = "NVIDIA/JAX-Toolbox"
_DGXC = "NVIDIA DGXC Benchmarking 25.01"


class Run(NamedTuple):
    """A published run, in bfloat16.

    Attributes:
      sizes: of the model.
      gpus: number of H100s.
      rows: of each GPU.
      stage: of `jdp.sharded`: 3 for FSDP, 0 for data parallelism.
      step_s: published seconds of a step.
      source: where it was published.
    """

    sizes: Decoder
    gpus: int
    rows: int
    stage: int
    step_s: float
    source: str


_LLAMA2_7B = Decoder(32, 4096, 11008, 32, 32, 32000, 4096, gated=True)
_LLAMA2_70B = Decoder(80, 8192, 28672, 64, 8, 32000, 4096, gated=True, saves="qkv")
# Pax saves nothing where its configuration does not say otherwise (TransformerLmSpmdAdafactor).
# The one of its LLaMA was not seen.
_GPT_5B = Decoder(24, 4096, 16384, 32, 32, 50304, 2048, gated=False, saves="nothing")
RUNS = {
    "llama2-7b-8": Run(_LLAMA2_7B, 8, 2, 3, 0.721, f"{_TOOLBOX}, MaxText"),
    "llama2-7b-16": Run(
        _LLAMA2_7B._replace(saves="nothing"),
        16,
        2,
        3,
        32 / 53.69,
        f"{_TOOLBOX}, Pax, TE, fine-tuning",
    ),
    "llama2-70b-64": Run(_LLAMA2_70B, 64, 2, 3, 6.999, f"{_DGXC}, MaxText"),
    "llama2-70b-256": Run(_LLAMA2_70B, 256, 2, 3, 7.153, f"{_DGXC}, MaxText"),
    "gpt-5b-16": Run(_GPT_5B, 16, 4, 3, 0.634, f"{_DGXC}, Pax"),
    "gpt-5b-32": Run(_GPT_5B, 32, 4, 3, 0.639, f"{_DGXC}, Pax"),
    "gpt-5b-128": Run(_GPT_5B, 128, 4, 3, 0.651, f"{_DGXC}, Pax"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--whole", action="store_true", help="compile all layers: minutes each")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jdp.init(cpu_ranks=1)
    rows = []
    for name in options.only:
        rows.append(_row(name, RUNS[name], is_whole=options.whole))
        print(report.table(_section(rows)), flush=True)
    sections = [_section(rows)]
    report.publish("explained_published", sections, quick=True, hardware="h100", shows=False)


def _row(name: str, run: Run, *, is_whole: bool) -> dict[str, Any]:
    layers = run.sizes.layers
    if is_whole:
        found = _predicted(run, layers)
    else:
        few, more = _predicted(run, _FEW), _predicted(run, 2 * _FEW)
        found = {x: few[x] + (layers / _FEW - 1) * (more[x] - few[x]) for x in few}
    return {
        "section": "explained_published",
        "run": name,
        "source": run.source,
        "gpus": run.gpus,
        "published_s": run.step_s,
        "error": found["predicted_s"] / run.step_s - 1,
        **found,
    }


def _predicted(run: Run, layers: int) -> dict[str, float]:
    """Return the prediction for a run with some number of layers."""
    sizes = run.sizes._replace(layers=layers)
    step, make = decoder.training(sizes, run.stage)
    state = jax.eval_shape(make, decoder.shapes(sizes))
    tokens = jax.ShapeDtypeStruct((run.gpus * run.rows, run.sizes.length), jnp.int32)
    with decoder.stated_costs(run.sizes, run.rows):
        found = explain(step, state, tokens, on=f"{run.gpus}xH100")
    assert not found.unknown, found.unknown
    time = found.time
    return {
        "predicted_s": time.likely_s,
        "low_s": time.low_s,
        "high_s": time.high_s,
        "matmul_s": time.matmul_flops / found.rates["matmul_flops"].value,
        "computing_s": time.computing_s,
        "exposed_s": time.exposed_s,
        "collective_s": sum(bucket.took_s for bucket in found.buckets),
        "teraflops": time.matmul_flops / 1e12,
        "gib": found.memory.total / 2**30,
    }


def _section(rows: list[dict[str, Any]]) -> Section:
    return Section(
        "Published and predicted times of a step on H100s",
        "Predicted from the compiled program alone. Matmuls include those that the backward pass "
        "computes again; what is neither a matmul nor exposed is elementwise work.",
        rows,
        {
            "run": "{run}",
            "source": "{source}",
            "GPUs": "{gpus}",
            "published, s": "{published_s:.3f}",
            "predicted, s": "{predicted_s:.3f}",
            "interval, s": "{low_s:.3f} to {high_s:.3f}",
            "error": "{error:+.0%}",
            "matmuls, s": "{matmul_s:.3f}",
            "TFLOP": "{teraflops:.0f}",
            "computing, s": "{computing_s:.3f}",
            "collectives, s": "{collective_s:.3f}",
            "exposed, s": "{exposed_s:.3f}",
            "memory, GiB": "{gib:.1f}",
        },
    )


if __name__ == "__main__":
    main()
