"""Train steps that are not the same training on every rank, and right ones that look like them."""

from corpus.wrong import (  # noqa: F401 - imported for what they note in the corpus
    bent,
    changed,
    choices,
    deadlocks,
    forgotten,
    kept,
    libraries,
    loops,
    meshes,
    optimizers,
    reduced_twice,
    refs,
    reports,
    rules,
    scaled,
    sources,
)
from corpus.wrong.corpus import BENT, KINDS, RIGHT, TWICE, WRONG, Program

__all__ = ["BENT", "KINDS", "RIGHT", "TWICE", "WRONG", "Program"]
