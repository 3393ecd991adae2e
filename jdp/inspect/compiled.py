"""A step, compiled for some devices and never run."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jdp.distributed import mesh as meshes
from jdp.inspect import call_arguments, planned
from jdp.inspect.hlo import HloProgram
from jdp.inspect.planned import TracedStep
from jdp.inspect.targets import TargetDevices, target
from jdp.step_spec import StepSpec
from jdp.training.step import Step


class StepForDevices(NamedTuple):
    """A step that was compiled for some devices.

    Attributes:
      spec: the step.
      where: the devices.
      num_ranks: number of ranks.
      args: its arguments: shapes on the devices.
      traced: what its trace says.
      compiled: the compiled step.
      program: the same, read from its text.
    """

    spec: StepSpec
    where: TargetDevices
    num_ranks: int
    args: tuple
    traced: TracedStep
    compiled: Any
    program: HloProgram


class TooLargeError(ValueError):
    """Raised where XLA does not compile a step, since a device has too little memory for it."""


def devices_of(
    step: Step, args: tuple, keywords: dict[str, Any], on: str | Mesh | None
) -> tuple[TargetDevices, int]:
    """Return the devices that a step is to be compiled for, and the number of ranks."""
    if not isinstance(step, Step):
        raise TypeError(
            f"got {getattr(step, '__name__', step)!r}, which is not a step. Decorate it with "
            "jdp.train_step."
        )
    spec, args = step.bound(args, keywords)
    if on is None:
        on = meshes.mesh_of(jax.tree.leaves(args[0]), spec.axis_name)
    where = target(on, spec.axis_name)
    return where, meshes.num_ranks(where.mesh, spec.axis_name)


def compile_step(
    step: Step, args: tuple, keywords: dict[str, Any], on: str | Mesh | None
) -> StepForDevices:
    """Compile a step for devices that need not be here."""
    where, num_ranks = devices_of(step, args, keywords, on)
    spec, args = step.bound(args, keywords)
    shapes = call_arguments.shapes_on(where.mesh, spec, args)
    traced = step.trace_on(where.mesh, *spec.by_keyword(shapes))
    names = [path for i, arg in enumerate(shapes) for path in spec.paths(i, arg)]
    try:
        with _own_names():
            compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise TooLargeError(
            f"`{spec.name}` takes more memory than a device of {where.name} has: "
            f"{str(error).splitlines()[0]} Take fewer rows or micro-batches "
            "(jdp.find_batch_size), or shard the state (jdp.sharded)."
        ) from error
    return StepForDevices(
        spec=spec,
        where=where,
        num_ranks=num_ranks,
        args=shapes,
        traced=planned.planned(traced.jaxpr, names),
        compiled=compiled,
        program=HloProgram(compiled.as_text()),
    )


@contextlib.contextmanager
def _own_names() -> Iterator[None]:
    """Take no program from JAX's compilation cache that has other names and source lines."""
    option = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        yield
    finally:
        jax.config.update(option, before)
