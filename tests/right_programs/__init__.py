"""Train steps that are right as they stand: jdp must accept each, without a warning."""

from right_programs import (  # noqa: F401 - imported for what they note in the corpus
    arrays,
    equinox_modules,
    flax_linen,
    flax_nnx,
    losses,
    meshes,
    optimizers,
    solvers,
    statistics,
    steps,
    transformations,
)
from right_programs.corpus import PROGRAMS, Program, batch

__all__ = ["PROGRAMS", "Program", "batch"]
