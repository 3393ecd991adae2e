"""Counts the matmuls and collectives of one device in one run of a compiled program."""

import re
from collections import Counter
from dataclasses import dataclass, field

from jdp.collectives import call_order
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.tools.hlo import COLLECTIVES, Instruction, dot_flops, num_bytes, parse
from jdp.tools.timeline import TripCounts

_CALLED = re.compile(r"\b(?:calls|to_apply|body)=%?([\w.\-]+)")


@dataclass
class Counts:
    """The operations of one device in one run.

    Attributes:
      flops: floating-point operations of its matmuls; 2 for a multiplication and addition.
      calls: how often each kind of collective runs.
      sent_bytes: bytes that the device puts into each kind of collective.
      hidden_bytes: those of the sent bytes that are in flight while a matmul runs.
    """

    flops: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    hidden_bytes: int = 0

    def add(self, other: "Counts", times: int = 1) -> None:
        self.flops += times * other.flops
        self.hidden_bytes += times * other.hidden_bytes
        for kind in other.calls:
            self.calls[kind] += times * other.calls[kind]
            self.sent_bytes[kind] += times * other.sent_bytes[kind]


def count(text: str) -> Counts:
    """Count the operations in `compiled.as_text()`; the body of a loop counts once per iteration.

    XLA's own `compiled.cost_analysis()` counts the body of a loop once, and all of a program
    that accumulates is in a loop.

    Args:
      text: the optimised program of one device.

    Raises:
      ValueError: where a number would be a guess: a loop of unknown length, a branch, a
        convolution, or a matmul hidden in a library call.
    """
    computations, entry = parse(text)
    return _count(computations, TripCounts(computations), entry, {})


def _count(
    computations: dict, trip_counts: TripCounts, name: str, done: dict[str, Counts]
) -> Counts:
    if name not in done:
        total, under_way = Counts(), {}
        shapes = computations[name].shapes
        for one in computations[name]:  # in the order in which they run
            if one.op.endswith("-done"):
                sent_bytes, is_hidden = under_way.pop(one.operands()[0], (0, False))
                total.hidden_bytes += sent_bytes * is_hidden
                continue
            found = _count_one(one, shapes)
            for called in _CALLED.findall(one.rest):
                times = trip_counts.times(one, name)
                found.add(_count(computations, trip_counts, called, done), times)
            total.add(found)
            if found.flops:
                under_way = {start: (sent, True) for start, (sent, _) in under_way.items()}
            if one.op.endswith("-start"):
                under_way[one.name] = found.sent_bytes.total(), False
        done[name] = total
    return done[name]


def _count_one(one: Instruction, shapes: dict[str, str]) -> Counts:
    _require_countable(one)
    found, kind = Counts(), one.op.removesuffix("-start")
    if one.op == "dot":
        found.flops = dot_flops(one, shapes)
    if kind in COLLECTIVES:
        found.calls[kind] = 1
        found.sent_bytes[kind] = sum(num_bytes(shapes[x]) for x in one.operands())
    if f'custom_call_target="{cpu_runtime.TARGET}"' in one.rest:
        found.calls["all-reduce"] = 1
        leaves = one.operands()[call_order.TOKEN + 1 :]
        found.sent_bytes["all-reduce"] = sum(num_bytes(shapes[x]) for x in leaves)
    return found


def _require_countable(one: Instruction) -> None:
    target = re.search(r'custom_call_target="([^"]*)"', one.rest)
    hidden = target and re.search("gemm|matmul|conv|dot", target[1], re.IGNORECASE)
    if hidden or one.op in ("conditional", "convolution"):
        raise ValueError(f"{one.op} {target[1] if target else one.name} is not counted here.")
