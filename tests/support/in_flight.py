"""What a compiled program sends while it computes."""

import re

from jdp.tools import hlo
from jdp.tools.timeline import TripCounts


def bytes_in_flight(text):
    """`(hidden, all)`: bytes of whole arrays that are gathered and scattered, while a matmul runs
    or not."""
    computations, entry = hlo.parse(text)
    trip_counts = TripCounts(computations)

    def has_matmul(one):
        if one.op == "dot" or re.search("gemm|matmul", one.rest.split("metadata=")[0]):
            return True
        called = re.search(r"\bcalls=%?([\w.\-]+)", one.rest)
        return bool(called) and any(map(has_matmul, computations.get(called[1], [])))

    def run(name):
        hidden = total = 0
        under_way = {}
        for one in computations[name]:
            kind = one.op.removesuffix("-start")
            if one.op == "while":
                body = run(re.search(r"\bbody=%?([\w.\-]+)", one.rest)[1])
                times = trip_counts.times(one, name)
                hidden += times * body[0]
                total += times * body[1]
            elif kind in ("all-gather", "reduce-scatter"):
                shapes = computations[name].shapes
                sent = sum(hlo.num_bytes(shapes[x]) for x in one.operands())
                sent *= 8 if kind == "all-gather" else 1
                total += sent
                under_way[one.name] = sent
            elif one.op.endswith("-done"):
                under_way.pop(one.operands()[0], None)
            elif has_matmul(one):
                hidden += sum(under_way.values())
                # Those without a start and a done are over before the next operation.
                under_way = dict.fromkeys(under_way, 0)
            if kind == one.op:
                under_way.pop(one.name, None)
        return hidden, total

    return run(entry)
