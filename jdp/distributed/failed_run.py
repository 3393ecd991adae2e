"""Explain in a clause why the run of a compiled program failed."""

import re

import jax

_STATUS = re.compile(
    "(CANCELLED|UNKNOWN|INVALID_ARGUMENT|DEADLINE_EXCEEDED|NOT_FOUND|RESOURCE_EXHAUSTED|"
    "FAILED_PRECONDITION|ABORTED|OUT_OF_RANGE|UNIMPLEMENTED|INTERNAL|UNAVAILABLE|DATA_LOSS): "
)
_NO_CPU = re.compile(r"HLO opcode `([\w-]+)` is not supported by XLA:CPU")
_RAISED = re.compile(r'File "([^"]+)", line (\d+), in ')

# XLA's name of a collective -> JAX's name, and the alternative on CPUs.
_ON_CPU = {
    "ragged-all-to-all": (
        "jax.lax.ragged_all_to_all",
        "pad the rows of each rank to one length and write jax.lax.all_to_all",
    ),
    "reduce-scatter": (
        "jax.lax.psum_scatter",
        "write jax.lax.psum, and take this rank's slice at jax.lax.axis_index",
    ),
    "collective-broadcast": (
        "jax.lax.pbroadcast",
        "write jax.lax.all_gather, and take the row of the source",
    ),
}


def is_failed_run(error: Exception) -> bool:
    """Whether XLA raised `error`, because it could not compile or finish a program."""
    # JAX raises a ValueError with XLA's status if a program fails that was compiled ahead of time.
    return isinstance(error, jax.errors.JaxRuntimeError) or bool(_STATUS.match(str(error)))


def reason(error: Exception) -> str:
    """Return the cause in an error of XLA, without its status, the stack and the final full stop.

    >>> reason(RuntimeError("DEADLINE_EXCEEDED: jdp: rank 1: nothing from rank 0 for 30 s."))
    'rank 1: nothing from rank 0 for 30 s'
    """
    text = _STATUS.sub("", str(error).strip(), count=1).strip()
    if unsupported := _NO_CPU.search(text):
        return _not_on_cpu(unsupported[1])
    if "Traceback (most recent call last)" in text:
        return _callback_raised(text)
    first = text.partition("\n")[0].removeprefix("jdp: ").strip()
    return first.rstrip(".") or type(error).__name__


def _not_on_cpu(opcode: str) -> str:
    name, instead = _ON_CPU.get(opcode, (f"the operation {opcode}", "use other operations"))
    return f"XLA cannot run {name} on CPUs, though it may on GPUs and TPUs. On CPUs, {instead}"


def _callback_raised(text: str) -> str:
    raised = text.splitlines()[-1].strip().rstrip(".")
    frames = _RAISED.findall(text)
    where = f" at {frames[-1][0]}:{frames[-1][1]}" if frames else ""
    return f"a callback raised {raised}{where}"
