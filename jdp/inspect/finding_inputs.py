"""What the findings about a compiled step look at."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from jdp.inspect.compiled import StepForDevices
from jdp.inspect.hlo_matching import Match
from jdp.inspect.leaf_names import in_parameters
from jdp.inspect.memory import Memory
from jdp.inspect.report import Bucket
from jdp.inspect.state_parts import category, parts_of
from jdp.inspect.transfers import SentArrays

# What is smaller is not worth a change.
MIN_BYTES = 2**16


@dataclass(frozen=True)
class Facts:
    """What the findings look at.

    Attributes:
      step: the compiled step.
      transfers: its collectives.
      buckets: the same, described.
      matches: their leaves by name.
      memory: of one rank.
    """

    step: StepForDevices
    transfers: Sequence[SentArrays]
    buckets: Sequence[Bucket]
    matches: Sequence[Match]
    memory: Memory


def train_states(facts: Facts) -> list[Any]:
    """Return the nodes of the state that have an optimizer and its state."""
    nodes = jax.tree.leaves(facts.step.args[0], is_leaf=_has_optimizer)
    return [node for node in nodes if _has_optimizer(node)]


def parameters(facts: Facts) -> list[tuple[str, Any]]:
    """Return the parameters in the state, each with its path."""
    state = facts.step.args[0]
    parts, named = parts_of(state), jax.tree_util.tree_leaves_with_path(state)
    found = [(jax.tree_util.keystr(path), leaf) for path, leaf in named]
    return [it for it in found if category(f"args[0]{it[0]}", parts) == "parameters"]


def parameters_of(facts: Facts, paths: Iterable[str]) -> dict[str, list[Any]]:
    """Return the parameters that gradients are of, by the path of the gradient.

    `.params['a']['w']` is of `grads['a']['w']`, not of `grads['w']`.
    """
    own = {path: in_parameters(path) for path in paths if path.startswith("grads")}
    found: dict[str, list[Any]] = {path: [] for path in own}
    for name, leaf in parameters(facts):
        ends = [path for path, end in own.items() if name.endswith(end)]
        longest = max((len(own[path]) for path in ends), default=0)
        for path in ends:
            if len(own[path]) == longest:
                found[path].append(leaf)
    return found


def _has_optimizer(node: Any) -> bool:
    # An nnx.Rngs has attributes of every name.
    is_optimizer = isinstance(getattr(node, "tx", None), optax.GradientTransformation)
    return is_optimizer and hasattr(node, "opt_state")
