"""Which gradients are sent over the ranks, and in which order."""

from collections.abc import Sequence

import jax

from jdp.reduction.scope import Scope


def to_send(
    paths: Sequence[str], step: Scope | None, weight: jax.Array | None, mean: bool
) -> Sequence[int]:
    """Return the positions of the gradients that `scan_layers` has not averaged.

    Args:
      weight: `[]` float, of this rank's rows; None where every rank counts the same.
    """
    if step is None or step.choices.uniform is None:
        return range(len(paths))
    if weight is not step.weight:
        raise ValueError(
            "jdp.sync_gradients(weight=...) got gradients that jdp.scan_layers averaged already, "
            "in the backward pass, by the weight of the step: the weight given here would not "
            "apply to them. Write jdp.train_step(weight=...), or jdp.scan_layers(..., late=False)."
        )
    uniform = step.choices.uniform
    return [i for i, path in enumerate(paths) if not mean or path not in uniform]


def as_ready(paths: Sequence[str], positions: Sequence[int], step: Scope) -> Sequence[int]:
    """Order gradients so that `buckets.plan`, which takes the last first, sends the ready ones."""
    step.split.update(paths)
    ready = step.choices.ready
    if ready is None:
        return positions
    return sorted(positions, key=lambda i: -ready.get(paths[i], 0))
