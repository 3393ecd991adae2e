"""Two passes over a step: `probe` traces and proves it, `build` chooses what runs."""

import itertools
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp import axis, pytrees
from jdp.analysis import line_of, lints, step_refusals
from jdp.analysis.diagnostics import WEIGHT, NamedTree, Output, Traced
from jdp.analysis.step_refusals import Proved
from jdp.collectives import call_order, hazards
from jdp.data.dataset import find_mask
from jdp.reduction import rank_trace
from jdp.reduction.bucket_order import order_of_gradients
from jdp.reduction.scanned_layers import late_choices
from jdp.reduction.step_context import Choices
from jdp.step_spec import StepSpec
from jdp.training import virtual_ranks
from jdp.training.rank_program import RankOutputs, RankProgram, SplitInputs
from jdp.training.shard_layout import OWN, StateLayout, parted


class Inputs(NamedTuple):
    """The inputs of the programs of a step.

    Attributes:
      args: of `RankProgram.mapped`.
      shard_axes: mesh axes of the state's shards.
      names: of the leaves of `args`, in order.
      mask: index in `names` of the batch's padding mask.
    """

    args: tuple
    layout: StateLayout
    shard_axes: tuple[str, ...]
    names: list[str]
    mask: int | None


class Pass(NamedTuple):
    """A program of a step (`RankProgram.mapped`), and its proof."""

    inputs: Inputs
    choices: Choices
    program: Any
    jaxpr: Any
    traced: Traced
    proved: Proved


def given(args: tuple, layout: StateLayout) -> tuple:
    """Return the arguments of `RankProgram.mapped`."""
    state, batch, *rest = args
    uniform, *parts = layout.parted(jax.tree.leaves(pytrees.hold(state)))
    return (uniform, SplitInputs(batch, parts), *rest)


def probe(rank_program: RankProgram, choices: Choices, args: tuple, called: tuple) -> Pass:
    """Trace and prove a step here, on other platforms and on more ranks; `args` may be tracers."""
    inputs = _inputs(rank_program, args, called)
    program = _mapped(rank_program, inputs, choices)
    jaxpr, traced = _result(rank_program, inputs, _trace(rank_program, program, inputs))
    proved = _prove(rank_program, inputs, jaxpr, traced)
    lints.require_narrow(jaxpr, traced)
    return Pass(inputs, choices, program, jaxpr, traced, proved)


def build(rank_program: RankProgram, probed: Pass) -> Pass:
    """Return the program that runs: the probe's, or a better one."""
    built = _built(rank_program, probed)
    spec, mesh = rank_program.spec, rank_program.mesh
    if spec.virtual_ranks in (None, 1):
        return built
    traced = built.program.trace(*built.inputs.args)
    why_xla = call_order.PART_OF_ANOTHER if rank_program.series else None
    return built._replace(program=virtual_ranks.mapped(traced, mesh, spec.axis_name[0], why_xla))


def _built(rank_program: RankProgram, probed: Pass) -> Pass:
    uniform, jaxpr = probed.proved.gradients, probed.jaxpr
    is_ordered = bool(probed.traced.found.split)
    choices, why_xla = _choose(probed.choices, jaxpr)
    if uniform is None and not is_ordered and choices == probed.choices:
        call_order.require(why_xla)
        return probed
    choices = choices._replace(
        uniform=uniform, ready=order_of_gradients(jaxpr) if is_ordered else None
    )
    program, jaxpr, traced = _traced(rank_program, choices, probed.inputs)
    chosen, why_xla = _choose(choices, jaxpr)
    if chosen != choices:  # the omitted reductions had ordered some calls
        choices = chosen
        program, jaxpr, traced = _traced(rank_program, choices, probed.inputs)
        why_xla = _why_xla(jaxpr)
    again = step_refusals.proved if None in late_choices(jaxpr) else step_refusals.check
    proved = again(jaxpr, traced)
    call_order.require(why_xla)
    return Pass(probed.inputs, choices, program, jaxpr, traced, proved)


def _choose(choices: Choices, jaxpr: Any) -> tuple[Choices, str | None]:
    """Return how a program's native calls must run, and why it must not make any."""
    why_not = _why_xla(jaxpr)
    why_xla = choices.why_xla or why_not
    is_beside = not why_xla and (choices.beside_xla or hazards.runs_beside(jaxpr))
    in_place = choices.in_place and not hazards.is_read_later(jaxpr)
    return choices._replace(why_xla=why_xla, beside_xla=is_beside, in_place=in_place), why_not


def _why_xla(jaxpr: Any) -> str | None:
    return hazards.why_unordered(jaxpr) or hazards.why_not_beside(jaxpr)


def _prove(rank_program: RankProgram, inputs: Inputs, jaxpr: Any, traced: Traced) -> Proved:
    """Check the program, and those of other platforms and more ranks, for one verdict."""
    choices = late_choices(jaxpr)
    if not choices:
        return step_refusals.check(jaxpr, traced)
    # None: layers that reduce late on more ranks do not on this one, which proves no case.
    here = None if None in choices else next(iter(choices))
    jaxprs = {here: jaxpr}
    proved = {}
    for late in (True,) if choices == {None} else (False, True):  # in this order everywhere,
        if late not in jaxprs:  # for the same text
            other = Choices(why_xla=call_order.PART_OF_ANOTHER, late=late)
            program = _mapped(rank_program, inputs, other)
            jaxprs[late] = _trace(rank_program, program, inputs).jaxpr
        proved[late] = step_refusals.check(jaxprs[late], traced)
    return proved[here] if here in proved else step_refusals.proved(jaxpr, traced)


def _inputs(rank_program: RankProgram, args: tuple, called: tuple) -> Inputs:
    spec = rank_program.spec
    state, traced_batch, *rest = args
    _, layout, shard_axes = parted(
        called[0], virtual_ranks.traced_mesh(spec, rank_program.mesh), spec.axis_name
    )
    uniform, *parts = layout.parted(jax.tree.leaves(pytrees.hold(state)))
    names, *names_of_parts = layout.parted(spec.paths(0, state))
    mask = find_mask(called[1])
    masks = [len(names) + i for i, leaf in enumerate(jax.tree.leaves(called[1])) if leaf is mask]
    names += [*spec.paths(1, traced_batch), *itertools.chain.from_iterable(names_of_parts)]
    names += itertools.chain.from_iterable(spec.paths(i, arg) for i, arg in enumerate(rest, 2))
    # Types are enough: JAX would also read each array's sharding and layout.
    uniform, parts = jax.tree.map(jax.typeof, (uniform, parts))
    if spec.virtual_ranks is not None and rank_program.checksum_spec is not None:
        *rest, checksums = rest
        shapes = [(spec.virtual_ranks, *each.shape[1:]) for each in checksums]
        rest.append(tuple(jax.ShapeDtypeStruct(shape, np.uint32) for shape in shapes))
    given_types = uniform, SplitInputs(traced_batch, parts), *rest
    return Inputs(given_types, layout, shard_axes, names, masks[0] if masks else None)


def _mapped(rank_program: RankProgram, inputs: Inputs, choices: Choices) -> Any:
    return rank_program.mapped(inputs.layout, inputs.shard_axes, len(inputs.args), choices)


def _traced(rank_program: RankProgram, choices: Choices, inputs: Inputs) -> tuple[Any, Any, Traced]:
    program = _mapped(rank_program, inputs, choices)
    return program, *_result(rank_program, inputs, _trace(rank_program, program, inputs))


def _trace(rank_program: RankProgram, program: Any, inputs: Inputs) -> Any:
    try:
        return program.trace(*inputs.args)
    except rank_trace.MeshNeededError as error:
        spec, line = rank_program.spec, line_of(error.__cause__ or error)
        if spec.virtual_ranks not in (None, 1):
            raise ValueError(
                f"`{spec.name}` has a PartitionSpec without a mesh{f' at {line}' if line else ''}, "
                "and virtual ranks have no mesh of devices.\n"
                "Remove it: a rank sees its own rows and whole parameters."
            ) from error
    return program.trace(*inputs.args)


def _result(rank_program: RankProgram, inputs: Inputs, traced: Any) -> tuple[Any, Traced]:
    leaving = traced.out_avals
    described = Traced(
        spec=rank_program.spec,
        platform=axis.platform(rank_program.mesh),
        inputs=inputs.names,
        mask=inputs.mask,
        outputs=_outputs(rank_program.spec, leaving),
        found=leaving.uniform.found,
    )
    return traced.jaxpr, described


def _outputs(spec: StepSpec, leaving: RankOutputs) -> list[Output]:
    uniform, split = leaving
    layout, state = uniform.layout, leaving.state()
    tree, leaves = NamedTree(f"new {spec.argument(0)}", state), jax.tree.leaves(state)
    states = [
        Output(tree, i, "rows" if group == OWN else "state", leaf)
        for i, (leaf, group) in enumerate(zip(leaves, layout.groups, strict=True))
    ]
    arrays, *parts = layout.parted(states)
    return [
        *arrays,
        *_described("metrics", "metric", uniform.metrics),
        *_described(WEIGHT, "metric", uniform.weight),
        *_described("metrics", "own", uniform.own_metrics),
        *_described("rows", "rows", (split.rows, split.reports)),
        *itertools.chain.from_iterable(parts),
    ]


def _described(name: str, kind: str, leaves: Any) -> list[Output]:
    tree = NamedTree(name, leaves)
    return [Output(tree, i, kind, leaf) for i, leaf in enumerate(jax.tree.leaves(leaves))]
