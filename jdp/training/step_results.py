"""The results of a step, put together from those of its ranks."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jdp import pytrees
from jdp.analysis.step_refusals import Proved
from jdp.error_codes import with_code
from jdp.reduction import step_metrics, weighted_sum
from jdp.step_spec import StepSpec
from jdp.training.rank_program import RankOutputs

# Inside a step the transpose of a weighted mean is made for the gradient of a loss, which the step
# weighs once more when it reduces it. Around the step nothing does.
_NO_GRADIENT = (
    "jax.grad, jax.vjp or jax.jacrev goes through the whole of `{}`, which has a weight=: that "
    "gradient would be wrong where ranks weigh differently. Take the gradient inside the step, or "
    "leave out weight= and return the loss "
    '`(losses * batch["mask"]).mean() / jdp.mean_over_ranks(batch["mask"].mean())`. Forward mode, '
    "such as jax.jvp, is right."
)


def put_together(spec: StepSpec, leaving: RankOutputs, proved: Proved) -> tuple:
    """Return `(state, metrics, weight, reports, found)`."""
    uniform, split = leaving
    metrics = step_metrics.with_uniform(uniform.metrics, uniform.own_metrics, proved.own_metrics)
    metrics = pytrees.put_nodes(metrics, split.rows)
    state = leaving.state()
    if uniform.found.weighed:
        why_not = with_code("JDP125", _NO_GRADIENT.format(spec.name))
        state, metrics = weighted_sum.without_transpose((state, metrics), why_not)
    return state, metrics, uniform.weight, split.reports, uniform.found


def pinned(spec: StepSpec, mesh: Mesh, new: Any, old: Any, given: Any) -> Any:
    """Return a new state whose arrays are split as those of the old one are.

    On a mesh with further axes the compiler chooses how the new state is split over them. If that
    were not as the old state is split, the next call would compile again.
    """
    old_tree, (leaves, tree) = jax.tree.structure(old), jax.tree.flatten(new)
    if len(mesh.axis_names) == len(spec.axis_name) or tree != old_tree:
        return new
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(given)]
    found = [
        jax.lax.with_sharding_constraint(leaf, where) if isinstance(where, NamedSharding) else leaf
        for leaf, where in zip(leaves, shardings, strict=True)
    ]
    return jax.tree.unflatten(tree, found)
