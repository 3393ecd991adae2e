"""Explain in words where a difference between ranks comes from."""

from collections.abc import Sequence

from jdp.analysis.provenance import Origin

# The verb for the operation that combines a differing value {0} with an equal one {1}.
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
# Ends the explanation of a value that nothing has reduced on its way.
NEVER_AVERAGED = "was never averaged"


def since(origin: Origin, inputs: Sequence[str]) -> str:
    """Return `why` for one value, as a clause that follows a comma.

    Args:
      inputs: names of the inputs of the shard_map, in order.
    """
    return f", since {why([origin], inputs)}"


def why(origins: Sequence[Origin], inputs: Sequence[str]) -> str:
    """Return a clause that explains why values differ that share one reason.

    Args:
      inputs: names of the inputs of the shard_map, in order.
    """
    origin = origins[0]
    sources = _named(origin.sources, inputs)
    if origin.line:
        same = "the mean gradient" if origin.is_of_gradient else "what all ranks have reduced"
        verb = _VERBS.get(origin.primitive, _COMBINES).format(sources, same)
        return f"{origin.line} {verb}, and the result is not averaged"
    if any(each.is_reduced for each in origins):
        return f"it depends on {sources}"
    return f"it depends on {sources}, and {NEVER_AVERAGED}"


def _named(sources: Sequence[int | str], inputs: Sequence[str]) -> str:
    # At most three inputs and two other sources.
    rows = sorted({f"`{inputs[each]}`" for each in sources if isinstance(each, int)})
    if len(rows) > 3:
        rows = [*rows[:3], f"{len(rows) - 3} more"]
    others = [each for each in sources if isinstance(each, str)][:2]
    named = [f"{_listed(rows)} (this rank's rows)"] if rows else []
    return _listed(named + others) or "something that is hidden in it"


def _listed(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
