"""Values that differ from rank to rank only because ranks decide differently."""

from collections.abc import Iterable, Mapping

import numpy as np

from jdp.analysis.backward_slice import Node
from jdp.analysis.findings import Deadlock
from jdp.analysis.provenance import Provenance


def decision(back: Provenance, node: Node) -> Node | None:
    """Return the decision that makes a value differ, None if there are other causes.

    The decision is a boolean, and the value would be the same on every rank if the boolean were. If
    that boolean depends on one other boolean alone, the farthest back is returned. None if the
    boolean is an input, such as a mask, or if it is counted.
    """
    found, seen = None, set()
    while node.key() not in seen:
        seen.add(node.key())
        if node.variable.aval.dtype == np.bool_:
            found = node
        elif found is not None:
            return found
        eqn = back.plain(node)
        if eqn is not None and eqn.primitive.name in _COUNTS:
            return None
        before = {each.key(): each for each in back.varying_before(node)}
        if len(before) != 1:
            return found if back.maker(node) is not None else None
        (node,) = before.values()
    return found


_COUNTS = frozenset({"cumsum", "dot_general", "reduce_sum"})


def without_skipped(
    back: Provenance, nodes: Mapping[int, Node], deadlocks: Iterable[Deadlock]
) -> dict[int, Node]:
    """Return the values that differ for another reason than a collective that ranks skip."""
    skipping = [node for each in deadlocks if (node := back.of_predicate(each.eqn))]
    return {i: node for i, node in nodes.items() if not back.is_consequence(node, skipping)}
