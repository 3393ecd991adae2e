"""Reads a `jdp plan` command line."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from jdp.tools.plan.schedule import METHODS, Workload, uniform
from jdp.tools.rate import LEAST_GIVEN, MOST_GIVEN

# A forward pass multiplies and adds once per parameter and token, a backward pass twice.
FLOPS_PER_PARAM = 6
# Adam reads and writes a parameter and two numbers, and reads its gradient, all in float32.
_UPDATE_BYTES = 28
_MODEL = "params=7e9,layers=32,tokens=16384"
_MOST_PIECES = 100_000
_KEYS = ("params", "layers", "tokens", "step_s", "micro_batches", "leaves")


class Model(NamedTuple):
    """The model to train; a rank's step has `tokens`, 0 if its seconds, `step_s`, are known."""

    params: float
    layers: int
    tokens: float = 0.0
    step_s: float = 0.0
    micro_batches: int = 1
    leaves: int = 6

    def workload(
        self, known: Mapping[str, float], gather_bytes: float, reduce_bytes: float, bucket: float
    ) -> Workload:
        """Return one rank's work, at assumed rates; `bucket` in bytes."""
        compute_s = self.step_s
        if not compute_s:
            compute_s = FLOPS_PER_PARAM * self.params * self.tokens / known["matmul_flops"]
        forward_s = known["forward_share"] * compute_s
        return Workload(
            leaves=uniform(self.params, self.layers, self.leaves),
            forward_s=forward_s,
            backward_s=compute_s - forward_s,
            update_s=_UPDATE_BYTES * self.params / known["memory_bytes_per_s"],
            micro_batches=self.micro_batches,
            gather_bytes=gather_bytes,
            reduce_bytes=reduce_bytes,
            bucket_bytes=bucket,
        )


def read_model(text: str) -> Model:
    """Read a model such as "params=7e9,layers=32,tokens=16384"."""
    found = _read_numbers(text)
    missing = [name for name in ("params", "layers") if name not in found]
    if missing or ("tokens" in found) == ("step_s" in found):
        raise ValueError(
            f"--model {text} needs params, layers, and either tokens (of a GPU in a step) or "
            f"step_s (seconds of the forward and backward pass of one GPU). Write {_MODEL}."
        )
    _require_few_pieces(text, found)
    model = Model(
        params=found["params"],
        layers=int(found["layers"]),
        tokens=found.get("tokens", 0.0),
        step_s=found.get("step_s", 0.0),
        micro_batches=int(found.get("micro_batches", 1)),
        leaves=int(found.get("leaves", 6)),
    )
    _require_whole_pieces(text, model)
    return model


def _read_numbers(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for word in text.split(","):
        name, _, number = map(str.strip, word.partition("="))
        if name in found:
            raise ValueError(f"--model {text} repeats {name}. Write it once.")
        try:
            found[name] = float(number)
        except ValueError:
            raise ValueError(
                f"--model {text}: {word!r} is not NAME=NUMBER. Write {_MODEL}."
            ) from None
        if name not in _KEYS:
            raise ValueError(
                f"--model {text}: the key {name!r} does not exist. Write some of "
                f"{', '.join(_KEYS)}."
            )
        if name in ("layers", "micro_batches", "leaves"):
            if not 1 <= found[name] <= MOST_GIVEN or found[name] % 1:
                raise ValueError(
                    f"--model {text}: {name}={number} must be a whole number from 1 to "
                    f"{MOST_GIVEN:g}."
                )
        elif not LEAST_GIVEN <= found[name] <= MOST_GIVEN:
            raise ValueError(
                f"--model {text}: {name}={number} must be from {LEAST_GIVEN:g} to {MOST_GIVEN:g}."
            )
    return found


def _require_few_pieces(text: str, found: Mapping[str, float]) -> None:
    counts = [found.get("layers", 1), found.get("leaves", 6), found.get("micro_batches", 1)]
    pieces = math.prod(counts)
    if pieces > _MOST_PIECES:
        layers, leaves, micro_batches = counts
        rest = {"leaves=1": layers * micro_batches, "fewer micro_batches": layers * leaves}
        enough = [word for word, left in rest.items() if left <= _MOST_PIECES]
        advice = enough or [
            "leaves=1 and fewer micro_batches" if layers <= _MOST_PIECES else "fewer layers"
        ]
        raise ValueError(
            f"--model {text}: {layers:.0f} layers x {leaves:.0f} leaves x {micro_batches:.0f} "
            f"micro_batches are {pieces:.3g} pieces of a step; more than {_MOST_PIECES} would "
            f"take minutes to simulate. Write {', or '.join(advice)}."
        )


def _require_whole_pieces(text: str, model: Model) -> None:
    leaves = model.layers * model.leaves
    if model.params < leaves:
        raise ValueError(
            f"--model {text}: params={model.params:g} is too small, because {model.layers} "
            f"layers of {model.leaves} leaves have at least {leaves} parameters. Write all of "
            "them, such as 7e9."
        )
    if 0 < model.tokens < model.micro_batches:
        raise ValueError(
            f"--model {text}: tokens={model.tokens:g} is too small, because "
            f"{model.micro_batches} micro_batches have at least one token each. Write the tokens "
            "of all micro-batches of a GPU."
        )


def read_hosts(text: str) -> list[int]:
    """Read numbers of hosts: "4", "1,2,3", or "1:2048" for the powers of two between.

    >>> read_hosts("1:5"), read_hosts("3,6")
    ([1, 2, 4, 5], [3, 6])
    """
    first, colon, last = text.partition(":")
    words = [word.strip() for word in ([first, last] if colon else text.split(","))]
    known = [word.isdecimal() and float(word) <= MOST_GIVEN for word in words]
    numbers = [int(word) if known else 0 for word, known in zip(words, known, strict=True)]
    if colon and numbers[0] > numbers[1] > 0:
        raise ValueError(f"--hosts {text} ends below its beginning. Write {last}:{first}.")
    if min(numbers) < 1:
        raise ValueError(
            f"--hosts {text} must be a number of hosts from 1 to {MOST_GIVEN:g}. Write 4, 1,2,3, "
            "or 1:2048 for the powers of two between."
        )
    if not colon:
        return sorted(set(numbers))
    low, high = numbers
    powers = {1 << i for i in range(high.bit_length()) if low <= 1 << i <= high}
    return sorted({low, high} | powers)


def read_methods(text: str) -> list[str]:
    """Read names of methods, such as "replicated,stage3"."""
    names = list(dict.fromkeys(map(str.strip, text.split(","))))
    if wrong := [name for name in names if name not in METHODS]:
        raise ValueError(
            f"the method {wrong[0]!r} does not exist. Write some of {','.join(METHODS)}."
        )
    return names
