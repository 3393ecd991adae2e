"""What makes a value of a step differ from rank to rank, in the words of its author."""

import re
from collections.abc import Mapping, Sequence

from jdp.uniformity import Node, Origin, Provenance

# How something that differs meets what is the same on every rank.
_VERBS = {
    "add": "adds {} to {}",
    "add_any": "adds {} to {}",
    "div": "divides {1} by {0}, or the other way round",
    "dot_general": "multiplies {1} by {0}",
    "mul": "multiplies {1} by {0}",
    "select_n": "chooses by {0} between {1} and something else",
    "sub": "subtracts {} and {} from each other",
}
_COMBINES = "combines {1} with {0}"

# Leaves that are made on the way to the new parameters, not from them.
_ON_THE_WAY = re.compile(r"opt|moment|trace|velocity")


def why(origins: Sequence[Origin], inputs: Sequence[str]) -> str:
    """Return a clause that says where a difference comes in.

    Args:
      origins: of some values that differ for one reason.
      inputs: what the inputs of the shard_map are called.
    """
    origin = origins[0]
    sources = _named(origin.sources, inputs)
    if origin.line:
        same = "the mean gradient" if origin.is_of_gradient else "what all ranks have reduced"
        verb = _VERBS.get(origin.primitive, _COMBINES).format(sources, same)
        return f"{origin.line} {verb}, and the result is not averaged"
    never = "" if any(each.is_reduced for each in origins) else ", and was never averaged"
    return f"it depends on {sources}{never}"


def _named(sources: Sequence[int | str], inputs: Sequence[str]) -> str:
    # At most three inputs, and what else there is.
    rows = sorted({f"`{inputs[each]}`" for each in sources if isinstance(each, int)})
    if len(rows) > 3:
        rows = [*rows[:3], f"{len(rows) - 3} more"]
    others = [each for each in sources if isinstance(each, str)][:2]
    named = [f"{_listed(rows)} (this rank's rows)"] if rows else []
    return _listed(named + others) or "something that is hidden in it"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def without_consequences(back: Provenance, leaves: Mapping[int, str]) -> dict[int, Node]:
    """Leave out every leaf that differs only because others do.

    Args:
      back: the way back from what differs.
      leaves: paths of the leaves that differ, by their position among the outputs.

    Returns:
      What is left, by position.
    """
    nodes = {i: back.of_output(i) for i in leaves}
    causes = [nodes[i] for i, path in leaves.items() if not _ON_THE_WAY.search(path)]
    left = {i: node for i, node in nodes.items() if not back.is_consequence(node, causes)}
    return left or nodes
