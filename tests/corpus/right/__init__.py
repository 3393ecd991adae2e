"""Train steps that are right as they stand: jdp must accept each, without a warning."""

from corpus.right import (  # noqa: F401 - imported for what they note in the corpus
    arrays,
    between_ranks,
    control_flow,
    derivatives,
    equinox_modules,
    flax_linen,
    flax_nnx,
    gradients,
    loops,
    losses,
    meshes,
    optimizers,
    own_rules,
    parameters,
    refs,
    scaled,
    solvers,
    states,
    statistics,
    undivided,
    updates,
)
from corpus.right.corpus import LOSSES, PROGRAMS, Program, batch

__all__ = ["LOSSES", "PROGRAMS", "Program", "batch"]
