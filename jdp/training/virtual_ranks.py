"""Run the program of V virtual ranks on at most V ranks, with the same bits on any number.

The program of a step on V ranks is cut at its collectives. What lies between two of them runs in
regions: *uniform* operations once on each rank, *varying* ones in a loop over the rank's virtual
ranks. Values of virtual ranks are stacked, `[width, ...]`. Sums over ranks add pairs of neighbours,
pairs of pairs and so on, so the order of additions depends on V alone.

XLA must compile a region alike for any number of ranks, because fusion decides about roundings:
- Barriers surround a region. A varying one is the body of a loop whose trip count XLA cannot know.
- Each region computes the constants that it reads.
- jdp merges equal operations, with explicit broadcasts. XLA merges them before it simplifies a
  program of several devices, but after it simplifies one of a single device.
- A division by a broadcast becomes a product: XLA rewrites it or not, by its number of readers.
"""

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jdp import axis, jax_compat, pytrees, rank_state
from jdp.analysis import jaxprs
from jdp.analysis.diagnostics import source_of
from jdp.analysis.marks import LOCAL, mark
from jdp.collectives import call_order, shards
from jdp.collectives.cpu.primitives import SUMMED_DTYPES
from jdp.collectives.native import native
from jdp.collectives.native_shards import COPIED_DTYPES
from jdp.error_codes import with_code
from jdp.reduction.flat_program import FlatOperation, FlatProgram, FlatValue, flatten
from jdp.reduction.local_steps import LocalSteps
from jdp.reduction.optimizer import sharding_of
from jdp.reduction.weighted_sum import weigh
from jdp.step_spec import StepSpec
from jdp.training import shard_layout

_log = logging.getLogger("jdp")
_THREADS = (
    "jdp: XLA splits long matrix products of `%s` among %d threads, as many as this process has "
    "CPUs or devices. Bits are equal only with as many threads. Set NPROC=%d in the environment of "
    "all runs, at least the devices of a process."
)

_CONSTANT, _UNIFORM, _VARYING, _COLLECTIVE = range(4)

_SUMS = frozenset("psum psum_invariant".split())
_UNIFORM_RESULTS = _SUMS | frozenset("all_gather all_gather_invariant pmax pmin".split())
_COLLECTIVES = _UNIFORM_RESULTS | frozenset("all_to_all ppermute reduce_scatter".split())
_READS_RANK = frozenset("axis_index jdp_own_slice".split())
_OF_RANKS = _COLLECTIVES | _READS_RANK
_NAMING = _OF_RANKS | {"jdp_local", "jdp_mark", "jdp_mean", "shard_map"}
# Public functions by a primitive of theirs.
_CALLERS = {"jdp_misfit": "jdp.ragged_all_to_all"} | dict.fromkeys(
    ("jdp_add_rows", "jdp_take_rows"), "jdp.sharded_embedding"
)
_COPIES = frozenset(
    "broadcast_in_dim convert_element_type copy copy_p jdp_mark name pcast pvary reshape "
    "sharding_constraint squeeze transpose".split()
)
_FACTORS_OF_ONE = {"mul": (0, 1), "div": (1,)}  # places of operands
_COMMUTATIVE = frozenset("add add_any and eq max min mul ne or xor".split())
_SYNONYMS = {"add_any": "add"}
_LOOPS = frozenset("cond scan while".split())
_REMAT = "remat2"
_CLOSED = frozenset("compute_on custom_partitioning linear_call remat_opt".split())
_ELEMENTWISE = frozenset(
    "add add_any and atan2 clamp complex div eq ge gt le lt max min mul ne nextafter or pow rem "
    "select_n shift_left shift_right_arithmetic shift_right_logical sub xor".split()
)


def require_fits(spec: StepSpec, mesh: Mesh, state: Any) -> None:
    """Refuse a mesh or a state that cannot have a step's virtual ranks."""
    number, num_ranks = spec.virtual_ranks, mesh.shape[spec.axis_name[0]]
    if number is None:
        return
    state = pytrees.restore(state)
    if num_ranks != mesh.size:
        raise ValueError(
            f"`{spec.name}` has virtual_ranks={number}, but its mesh has further axes, "
            f"{dict(mesh.shape)}, whose sums depend on their sizes. Use a mesh of jdp.init()."
        )
    if num_ranks > number:
        raise ValueError(
            f"`{spec.name}` has virtual_ranks={number}, but the mesh has {num_ranks} ranks, and a "
            f"virtual rank is not split. Use at most {number} ranks, or write "
            f"virtual_ranks={num_ranks}, which trains with other bits."
        )
    if number % num_ranks and any(
        sharding_of(tx) is not None for _, tx in shard_layout.state_nodes(state)
    ):
        raise ValueError(
            f"`{spec.name}` has virtual_ranks={number}, and its state an optimizer of jdp.sharded, "
            f"but {number} shards cannot be divided among {num_ranks} ranks equally. Use a number "
            f"of ranks that divides {number}, or jdp.replicated(tx)."
        )
    if any(isinstance(tx, LocalSteps) for _, tx in shard_layout.state_nodes(state)):
        raise ValueError(
            f"`{spec.name}` has virtual_ranks={number}, and its state parameters of each rank "
            "(jdp.diloco, jdp.local_sgd). Write jdp.replicated(tx)."
        )
    _warn_of_threads(spec, mesh)
    named = jax.tree_util.tree_leaves_with_path(state)
    for is_own, (path, leaf) in zip(rank_state.flags(state), named, strict=True):
        name = spec.argument(0) + jax.tree_util.keystr(path)
        if is_own and number % num_ranks:
            raise ValueError(
                f"`{name}` is jdp.per_rank, and {number} virtual ranks cannot be divided among "
                f"{num_ranks} ranks equally. Use a number of ranks that divides {number}."
            )
        if is_own:
            rank_state.require_dim(name, leaf, number)


def _warn_of_threads(spec: StepSpec, mesh: Mesh) -> None:
    """Warn once that bits may depend on the threads of a process, which only NPROC fixes."""
    num_devices = jax.local_device_count()
    fixed = os.environ.get("NPROC", "")
    is_fixed = fixed.isdecimal() and int(fixed) >= num_devices
    if axis.platform(mesh) != "cpu" or is_fixed or _THREADS in spec.warned:
        return
    spec.warned.add(_THREADS)
    number = max(len(os.sched_getaffinity(0)), num_devices)
    _log.warning(_THREADS, spec.name, number, max(number, spec.virtual_ranks or 1))


class VirtualBlocks(NamedTuple):
    """Which virtual ranks a rank computes: a block of neighbours, at most `width`."""

    num_virtual: int
    num_ranks: int

    @property
    def width(self) -> int:
        """The largest number of virtual ranks of a rank."""
        return -(-self.num_virtual // self.num_ranks)

    @property
    def is_even(self) -> bool:
        """Whether all ranks have equally many."""
        return self.num_virtual % self.num_ranks == 0

    def starts(self) -> np.ndarray:
        """Return the first virtual rank of each rank, and the number of all, `[ranks + 1]` int."""
        return np.arange(self.num_ranks + 1) * self.num_virtual // self.num_ranks

    def slots(self) -> np.ndarray:
        """Return the place of each virtual rank among `[ranks * width]`, `[virtual]` int."""
        starts = self.starts()
        rank = np.searchsorted(starts, np.arange(self.num_virtual), side="right") - 1
        return rank * self.width + np.arange(self.num_virtual) - starts[rank]

    def slots_of(self, num_nodes: int) -> Sequence[int]:
        """Return the places of so many nodes of the sums over all ranks, in order."""
        return range(num_nodes) if self.is_even else [*self.slots()]


class _RankContext(NamedTuple):
    """What the regions of a traced program share."""

    axis_name: str
    blocks: VirtualBlocks
    mesh: Mesh
    start: jax.Array  # this rank's first virtual rank, int32 []
    count: jax.Array  # the number of them, int32 [], unknown to XLA
    latest: list[Any]  # results of the latest collective

    def after(self, values: Sequence[Any]) -> list[Any]:
        """Return the operands of a collective that waits for the latest one."""
        return lax.optimization_barrier([*values, *self.latest])[: len(values)]

    def follow(self, results: Sequence[Any]) -> None:
        """Record a collective: XLA may run independent ones in any order on each rank."""
        self.latest[:] = results[:1]


def traced_mesh(spec: StepSpec, mesh: Mesh) -> Any:
    """Return the mesh for which a step is traced."""
    if spec.virtual_ranks in (None, 1):  # one virtual rank is a rank
        return mesh
    return AbstractMesh((spec.virtual_ranks,), spec.axis_name, axis_types=(AxisType.Auto,))


def sending_mesh(spec: StepSpec, mesh: Mesh) -> Mesh:
    """Return the mesh of traced collectives; virtual ranks are in no process."""
    if traced_mesh(spec, mesh) is mesh:
        return mesh
    return Mesh(mesh.devices.flat[:1].reshape([1] * mesh.devices.ndim), mesh.axis_names)


def mapped(traced: Any, mesh: Mesh, axis_name: str, why_xla: str | None) -> Callable[..., Any]:
    """Return a program, traced with one `shard_map` over the virtual ranks, for a mesh.

    `why_xla` says why it must not make native calls, or is None.
    """
    flat, out_tree = flatten(traced.jaxpr), jax.tree.structure(traced.out_avals)
    names = jaxprs.primitive_names(traced.jaxpr)
    if not names.isdisjoint(call_order.NATIVE):
        call_order.require("virtual_ranks= sums over virtual ranks, which are no ranks of its own.")
    lines = jaxprs.placed_equations(traced.jaxpr, "", lambda line, eqn: source_of(eqn) or line)
    for eqn, line in lines:
        if axis_name in jaxprs.named_axes(eqn) and eqn.primitive.name not in _NAMING:
            name = _CALLERS.get(eqn.primitive.name, eqn.primitive.name)
            _refuse(eqn, f"calls `{name}`, which has no form for virtual ranks", line)
    if _needs_xla(traced.jaxpr):
        why_xla = why_xla or "the step has collectives in loops, or sends types of JAX's own."

    def run(*args: Any) -> Any:
        with call_order.entered(why_not=why_xla, as_xla=True):
            return evaluated(*args)

    def evaluated(*args: Any) -> Any:
        env = _environment(flat, jax.tree.leaves(args))
        for operation in flat.operations:
            operands = [env[each] for each in operation.ins]
            if operation.eqn.primitive.name == "shard_map":
                results = _on_ranks(operation.eqn, operands, mesh, axis_name)
            else:
                results = operation.run(operands)
            env.update(zip(operation.outs, results, strict=True))
        return out_tree.unflatten([env[each] for each in flat.outs])

    return run


def _needs_xla(jaxpr: Any) -> bool:
    eqns = [*jaxprs.equations(jaxpr)]
    sent = [x.aval for eqn in eqns if eqn.primitive.name in _COLLECTIVES for x in eqn.invars]
    loops = [eqn for eqn in eqns if eqn.primitive.name in _LOOPS]
    return any(x.dtype.name not in COPIED_DTYPES for x in sent) or any(
        _has_collective(body) for eqn in loops for body in jaxprs.bodies(eqn)
    )


def _on_ranks(eqn: Any, operands: Sequence[Any], mesh: Mesh, axis_name: str) -> list[Any]:
    """Run a `shard_map` over virtual ranks on the ranks of a mesh."""
    blocks = VirtualBlocks(eqn.params["mesh"].shape[axis_name], mesh.shape[axis_name])
    in_dims = [_dim(spec) for spec in eqn.params["in_specs"]]
    out_dims = [_dim(spec) for spec in eqn.params["out_specs"]]
    program = _canonical(eqn.params["jaxpr"])
    # Those of a rank, such as the checksum of its process's arguments.
    are_of_rank = [
        dim is not None and x.shape[dim] != atom.aval.shape[dim]
        for x, atom, dim in zip(operands, eqn.invars, in_dims, strict=True)
    ]

    def on_rank(*values: Any) -> list[Any]:
        rank = lax.axis_index(axis_name)
        starts = jnp.asarray(blocks.starts(), jnp.int32)
        count = jnp.int32(blocks.width) if blocks.is_even else starts[rank + 1] - starts[rank]
        count = lax.optimization_barrier(count)
        ranks = _RankContext(axis_name, blocks, mesh, starts[rank], count, [])
        stacked = [
            value if dim is None else _entering(value, dim, is_of_rank, ranks)
            for value, dim, is_of_rank in zip(values, in_dims, are_of_rank, strict=True)
        ]
        flags = [dim is not None for dim in in_dims]
        results, are_varying = _Regions(program, flags).run(ranks, stacked)
        outs = zip(results, are_varying, out_dims, strict=True)
        return [_leaving(value, flag, dim, ranks) for value, flag, dim in outs]

    def spec(dim: int | None, is_split: bool) -> PartitionSpec:
        is_whole = dim is None or not is_split
        return PartitionSpec() if is_whole else PartitionSpec(*[None] * dim, axis_name)

    # XLA would move blocks of uneven size by sums, which lose the sign of zeros.
    splits = [blocks.is_even or is_of_rank for is_of_rank in are_of_rank]
    return jax_compat.shard_map(
        on_rank,
        mesh=mesh,
        in_specs=tuple(map(spec, in_dims, splits)),
        out_specs=[spec(dim, blocks.is_even) for dim in out_dims],
        axis_names={axis_name},
        check_vma=False,
    )(*operands)


def _dim(spec: PartitionSpec) -> int | None:
    """Return the dim that is split over the ranks, or None."""
    return next((i for i, part in enumerate(spec) if part), None)


def _entering(x: jax.Array, dim: int, is_of_rank: bool, ranks: _RankContext) -> jax.Array:
    """Return the stack of this rank's blocks of a dim."""
    blocks = ranks.blocks
    if is_of_rank:
        return jnp.repeat(_cut(x, dim, 1), blocks.width, axis=0)
    if blocks.is_even:
        return _cut(x, dim, blocks.width)
    mine = jnp.minimum(ranks.start + jnp.arange(blocks.width), blocks.num_virtual - 1)
    return jnp.take(_cut(x, dim, blocks.num_virtual), mine, axis=0)


def _cut(x: jax.Array, dim: int, num: int) -> jax.Array:
    size = x.shape[dim] // num
    return jnp.moveaxis(x.reshape(*x.shape[:dim], num, size, *x.shape[dim + 1 :]), dim, 0)


def _joined(parts: jax.Array, dim: int) -> jax.Array:
    """Invert `_cut`."""
    x = jnp.moveaxis(parts, 0, dim)
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])


def _leaving(x: jax.Array, is_varying: bool, dim: int | None, ranks: _RankContext) -> jax.Array:
    if dim is None:
        return x[0] if is_varying else x  # proved equal on all virtual ranks
    blocks = ranks.blocks
    x = x if is_varying else _repeated(x, ranks)
    if not blocks.is_even:
        (x,) = _gathered([x], ranks)
    return _joined(x, dim)


def _canonical(program: Any) -> FlatProgram:
    """Flatten a program, with explicit broadcasts and each operation once."""
    flat = flatten(program, _opened)
    same: dict[FlatValue, FlatValue] = {}
    origins: dict[FlatValue, FlatValue] = {}
    known: dict[Any, Any] = {}
    operations = []
    for operation in flat.operations:
        ins = tuple(_first(same.get(each, each), known) for each in operation.ins)
        operation = operation._replace(ins=ins)
        if (origin := _returned(operation)) is not None:
            origins[operation.outs[0]] = origins.get(origin, origin)
        if jaxprs.acts(operation.eqn):
            operations.append(operation)
            continue
        read = [origins.get(each, each) for each in ins]
        name = operation.eqn.primitive.name
        if name in _COMMUTATIVE:
            read.sort(key=id)
        key = _SYNONYMS.get(name, name), _hashable(operation.eqn.params), *read
        if key in known:
            same.update(zip(operation.outs, known[key], strict=True))
        else:
            known[key] = operation.outs
            operations.append(operation)
    outs = [same.get(each, each) for each in flat.outs]
    return flat._replace(operations=operations, outs=outs)


def _opened(eqn: Any) -> Any | None:
    """Return the program of a call inside its caller, or an expansion."""
    if (expansion := _EXPANSIONS.get(eqn.primitive.name)) is not None:
        return _expanded(expansion, eqn)
    if eqn.primitive.name not in jaxprs.CALLS - _CLOSED:
        return None
    inner = jaxprs.called(eqn)
    return None if eqn.primitive.name == _REMAT and not _has_collective(inner) else inner


def _expanded(expansion: Callable[..., Any], eqn: Any) -> Any:
    """Return the program of an operation that JAX lowers to several, whose parts may be equal."""
    avals = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
    return jax.make_jaxpr(functools.partial(expansion, **eqn.params))(*avals)


def _power(x: jax.Array, *, y: int) -> jax.Array:
    if y < 0:
        return 1 / _power(x, y=-y)
    if y < 2:
        return x if y else jnp.ones_like(x)
    even = _power(x * x, y=y // 2)
    return even * x if y % 2 else even


_EXPANSIONS: dict[str, Callable[..., Any]] = {
    "integer_pow": _power,
    "jdp_weigh": weigh,
    "one_minus_square": lambda x: (1 + x) * (1 - x),
    "square": functools.partial(_power, y=2),
}


def _has_collective(program: Any) -> bool:
    return not jaxprs.primitive_names(program).isdisjoint(_COLLECTIVES)


def _first(value: FlatValue, known: dict[Any, Any]) -> FlatValue:
    """Return the first of equal constants; JAX holds them in several types."""
    constant, aval = value.constant, value.aval
    if constant is None or _is_key(aval):
        return value
    is_here = not isinstance(constant, jax.core.Tracer) and (
        not isinstance(constant, jax.Array) or constant.is_fully_addressable
    )
    bits = np.asarray(constant, aval.dtype).tobytes() if is_here else id(constant)
    return known.setdefault((aval.dtype, aval.shape, bits), value)


def _returned(operation: FlatOperation) -> FlatValue | None:
    """Return the operand that an operation returns unchanged, or None."""
    eqn, ins, name = operation.eqn, operation.ins, operation.eqn.primitive.name
    if len(operation.outs) != 1:
        return None
    if name in _COPIES:
        is_barrier, order = eqn.params.get("kind") == LOCAL, eqn.params.get("permutation", ())
        given = None if is_barrier or [*order] != sorted(order) else ins[0]
    else:
        ones = _FACTORS_OF_ONE.get(name, ())
        given = next((ins[1 - i] for i in ones if _is_one(ins[i].constant)), None)
    alike = given is not None and (given.aval.shape, given.aval.dtype)
    out = operation.outs[0].aval
    return given if alike == (out.shape, out.dtype) else None


def _is_one(constant: Any) -> bool:
    return constant is not None and np.ndim(constant) == 0 and bool(constant == 1)


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _hashable(each)) for key, each in sorted(value.items()))
    if isinstance(value, tuple | list):
        return tuple(map(_hashable, value))
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _environment(program: FlatProgram, ins: Sequence[Any]) -> dict[FlatValue, Any]:
    env = {each: each.constant for each in program.constants}
    return env | dict(zip(program.ins, ins, strict=True))


class _Regions:
    """A program cut into stages, each a uniform region, a varying one, and collectives.

    Attributes:
      varying: the values that differ between virtual ranks.
      are_varying: whether each output does.
    """

    def __init__(self, program: FlatProgram, flags: Sequence[bool]) -> None:
        self._program = program
        self.varying = {each for each, flag in zip(program.ins, flags, strict=True) if flag}
        self._constant: dict[FlatValue, FlatOperation] = {}
        self._kinds = [self._kind(operation) for operation in program.operations]
        self._readers: dict[FlatValue, int] = {}
        self._paths = _gradient_paths(program.operations)
        self._stages = self._scheduled()
        self.are_varying = [each in self.varying for each in program.outs]

    def run(self, ranks: _RankContext, ins: Sequence[Any]) -> tuple[list[Any], list[bool]]:
        """Return the outputs, and which of them are stacked."""
        program = self._program
        env = _environment(program, ins)
        for stage in self._stages:
            by_kind = [[each for kind, each in stage if kind == wanted] for wanted in range(4)]
            self._run_uniform(by_kind[_UNIFORM], env, ranks)
            self._run_varying(by_kind[_VARYING], env, ranks)
            self._run_collectives(by_kind[_COLLECTIVE], env, ranks)
        self._compute([self._constant[x] for x in program.outs if x in self._constant], env, ranks)
        return [env[each] for each in program.outs], self.are_varying

    def _kind(self, operation: FlatOperation) -> int:
        eqn, ins, outs = operation.eqn, operation.ins, operation.outs
        name = eqn.primitive.name
        if name in _COLLECTIVES:
            if name not in _UNIFORM_RESULTS:
                self.varying.update(outs)
            return _COLLECTIVE
        bodies = jaxprs.bodies(eqn)
        if name in _LOOPS and any(map(_has_collective, bodies)):
            flags = _CollectiveLoop(eqn, [each in self.varying for each in ins]).are_varying
            self.varying.update(out for out, flag in zip(outs, flags, strict=True) if flag)
            return _COLLECTIVE
        names = {name}.union(*map(jaxprs.primitive_names, bodies))
        if bodies and name not in _LOOPS | {_REMAT} and not names.isdisjoint(_OF_RANKS):
            _refuse(eqn, f"reads ranks in `{name}`")
        if not names.isdisjoint(_READS_RANK) or not self.varying.isdisjoint(ins):
            self.varying.update(outs)
            return _VARYING
        is_constant = all(x.constant is not None or x in self._constant for x in ins)
        if is_constant and not jaxprs.acts(eqn):
            self._constant.update(dict.fromkeys(outs, operation))
            return _CONSTANT
        return _UNIFORM

    def _scheduled(self) -> list[list[tuple[int, FlatOperation]]]:
        """Return the operations of each stage, each as late as possible: it saves residuals."""
        ready: dict[FlatValue, int] = {}
        for kind, operation in zip(self._kinds, self._program.operations, strict=True):
            stage = max((ready.get(each, 0) for each in operation.ins), default=0)
            ready.update(dict.fromkeys(operation.outs, stage + (kind == _COLLECTIVE)))
        last = max((ready.get(each, 0) for each in self._program.outs), default=0)
        due = dict.fromkeys(self._program.outs, last)
        stages: list[list[tuple[int, FlatOperation]]] = [[] for _ in range(last + 1)]
        pairs = zip(self._kinds, self._program.operations, strict=True)
        for kind, operation in reversed([*pairs]):
            stage = min((due.get(each, last) for each in operation.outs), default=last)
            stage = max(stage - (kind == _COLLECTIVE), 0)
            for each in operation.ins:
                due[each] = min(due.get(each, last), stage)
                self._readers[each] = self._readers.get(each, 0) + 1
            stages[stage].insert(0, (kind, operation))
        return stages

    def _run_uniform(
        self, operations: list[FlatOperation], env: dict[FlatValue, Any], ranks: _RankContext
    ) -> None:
        if not operations:
            return
        region = _Region(self._compute, operations, *self._boundary(operations), ranks)
        values = [env[x] for x in region.ins]
        if jax_compat.FUSES_ACROSS_BARRIERS:
            env.update(region.results(region.in_branch(values)))
        else:
            env.update(region.results(region.run(ranks.start, *values)))

    def _run_varying(
        self, operations: list[FlatOperation], env: dict[FlatValue, Any], ranks: _RankContext
    ) -> None:
        if not operations:
            return
        region = _Region(self._compute, operations, *self._boundary(operations), ranks)
        width = ranks.blocks.width
        # XLA would replace a stack of one by its element, and fuse differently.
        num_more = int(width == 1)
        given = {x: _lengthened(env[x], num_more) for x in region.ins if x in self.varying}

        def results(i: Any) -> list[Any]:
            values = [_element(given[x], i) if x in given else env[x] for x in region.ins]
            return region.run(ranks.start + i, *values)

        def body(i: Any, stacks: list[Any]) -> list[Any]:
            pairs = zip(stacks, results(i), strict=True)
            return [lax.dynamic_update_index_in_dim(stack, x, i, 0) for stack, x in pairs]

        if width == 1 and not jax_compat.FUSES_ACROSS_BARRIERS:  # without copies into stacks
            found = lax.fori_loop(0, ranks.count, lambda i, _: results(i), region.zeros())
            env.update((x, y[None]) for x, y in region.results(found).items())
            return
        stacks = [jnp.broadcast_to(x, (width + num_more, *x.shape)) for x in region.zeros()]
        stacks = lax.fori_loop(0, ranks.count, body, stacks)
        env.update(region.results([x[:width] for x in stacks]))

    def _boundary(
        self, operations: Sequence[FlatOperation]
    ) -> tuple[list[FlatValue], list[FlatValue]]:
        """Return the values that enter a region, and those that others read."""
        made = {out for operation in operations for out in operation.outs}
        read = [each for operation in operations for each in operation.ins]
        entering = dict.fromkeys(
            x for x in read if x not in made and x.constant is None and x not in self._constant
        )
        inside: dict[FlatValue, int] = {}
        for each in read:
            inside[each] = inside.get(each, 0) + 1
        leaving = {*self._program.outs}
        outs = [x for x in made if x in leaving or self._readers.get(x, 0) > inside.get(x, 0)]
        order = {out: i for i, out in enumerate(o for op in operations for o in op.outs)}
        return [*entering], sorted(outs, key=order.__getitem__)

    def _compute(
        self,
        operations: Sequence[FlatOperation],
        env: dict[FlatValue, Any],
        ranks: _RankContext,
        local: "_Local | None" = None,
    ) -> None:
        """Compute operations, and the constants that they read."""
        local = _Local(None, {}) if local is None else local
        for operation in operations:
            needed = [self._constant[x] for x in operation.ins if x in self._constant]
            self._compute([x for x in needed if x.outs[0] not in env], env, ranks, local)
            operands = [x.constant if x.constant is not None else env[x] for x in operation.ins]
            env.update(zip(operation.outs, local.run(operation, operands), strict=True))

    def _run_collectives(
        self, operations: list[FlatOperation], env: dict[FlatValue, Any], ranks: _RankContext
    ) -> None:
        read = dict.fromkeys(each for operation in operations for each in operation.ins)
        self._compute([self._constant[x] for x in read if x in self._constant], env, ranks)
        sums = [each for each in operations if each.eqn.primitive.name in _SUMS]
        scatters = [each for each in operations if each.eqn.primitive.name == "reduce_scatter"]
        loops = [each for each in operations if each.eqn.primitive.name in _LOOPS]
        of_known_form = {id(each) for each in (*sums, *scatters, *loops)}
        others = [each for each in operations if id(each) not in of_known_form]
        for operation in (*sums, *scatters, *others):
            _require_all_ranks(operation.eqn, ranks)
        summed = [x for operation in sums for x in operation.ins]
        paths = [self._paths.get(x, "") for x in summed]
        totals = _totals([self._stack(env, x, ranks) for x in summed], ranks, paths)
        env.update(zip([x for each in sums for x in each.outs], totals, strict=True))
        stacks = [self._stack(env, each.ins[0], ranks) for each in scatters]
        results = _scattered([each.eqn for each in scatters], stacks, ranks)
        env.update(zip([x for each in scatters for x in each.outs], results, strict=True))
        exchanges = [each for each in others if _can_exchange(each.eqn, ranks)]
        stacks = [self._stack(env, each.ins[0], ranks) for each in exchanges]
        results = _all_to_all([each.eqn for each in exchanges], stacks, ranks)
        env.update(zip([x for each in exchanges for x in each.outs], results, strict=True))
        others = [each for each in others if each not in exchanges]
        read = [x for each in others for x in each.ins]
        gathered = iter(_gathered([self._stack(env, x, ranks) for x in read], ranks))
        for operation in others:
            results = _exchanged(operation, [next(gathered) for _ in operation.ins], ranks)
            env.update(zip(operation.outs, results, strict=True))
        for operation in loops:
            operands = [env[x] if x.constant is None else x.constant for x in operation.ins]
            flags = [x in self.varying for x in operation.ins]
            loop = _CollectiveLoop(operation.eqn, flags)
            results = loop.run(ranks.after(operands), flags, ranks)
            ranks.follow(results)
            env.update(zip(operation.outs, results, strict=True))

    def _stack(self, env: dict[FlatValue, Any], x: FlatValue, ranks: _RankContext) -> jax.Array:
        value = env[x] if x.constant is None else x.constant
        return value if x in self.varying else _repeated(value, ranks)


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


class _Region:
    """Operations between collectives, which XLA compiles alike for any number of ranks."""

    def __init__(
        self,
        compute: Callable[..., None],
        operations: Sequence[FlatOperation],
        ins: list[FlatValue],
        outs: list[FlatValue],
        ranks: _RankContext,
    ) -> None:
        self.ins, self.outs = ins, outs
        self._compute, self._operations, self._ranks = compute, operations, ranks
        self._key_kinds: dict[FlatValue, Any] = {}  # keys leave as their data

    def run(self, virtual_rank: Any, *values: Any) -> list[Any]:
        """Return the results for one virtual rank; any is right for uniform operations."""
        virtual_rank, *entered = lax.optimization_barrier([virtual_rank, *values])
        inner = dict(zip(self.ins, entered, strict=True))
        self._compute(self._operations, inner, self._ranks, _Local(virtual_rank, {}))
        found = [inner[x] for x in self.outs]
        for x, value in zip(self.outs, found, strict=True):
            if _is_key(value):
                self._key_kinds[x] = jax.random.key_impl(value)
        return lax.optimization_barrier(
            [jax.random.key_data(value) if _is_key(value) else value for value in found]
        )

    def in_branch(self, values: Sequence[Any]) -> list[Any]:
        """Return the results of a branch that XLA cannot open."""
        taken = functools.partial(self.run, self._ranks.start)
        return lax.cond(self._ranks.count > 0, taken, lambda *_: self.zeros(), *values)

    def zeros(self) -> list[jax.Array]:
        """Return zeros like the results."""
        return [_zeros(x.aval) for x in self.outs]

    def results(self, values: Sequence[Any]) -> dict[FlatValue, Any]:
        """Return the values that leave, and keys as keys."""
        found = dict(zip(self.outs, values, strict=True))
        kinds = self._key_kinds
        return found | {x: jax.random.wrap_key_data(found[x], impl=kinds[x]) for x in kinds}


def _zeros(aval: Any) -> jax.Array:
    described = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    data = jax.eval_shape(jax.random.key_data, described) if _is_key(aval) else described
    return jnp.zeros(data.shape, data.dtype)


def _lengthened(stack: jax.Array, num: int) -> jax.Array:
    return jnp.concatenate([stack, *[stack[:1]] * num]) if num else stack


def _element(stack: jax.Array, i: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(stack, i, 0, keepdims=False)


def _repeated(x: Any, ranks: _RankContext) -> jax.Array:
    return jnp.broadcast_to(x, (ranks.blocks.width, *jnp.shape(x)))


class _Local(NamedTuple):
    """What the operations of one region share.

    Attributes:
      virtual_rank: int32 []; None for constants and conditions of loops.
      broadcasts: (id of an array, shape, dims) -> itself and its broadcast.
    """

    virtual_rank: jax.Array | None
    broadcasts: dict[Any, tuple[Any, jax.Array]]

    def run(self, operation: FlatOperation, operands: Sequence[Any]) -> list[Any]:
        """Run an operation without a collective."""
        eqn = operation.eqn
        name = eqn.primitive.name
        if name == "axis_index":
            return [self.virtual_rank]
        if name == "jdp_own_slice":
            return [_own_slice(operands[0], self.virtual_rank, **eqn.params)]
        if name in _LOOPS:
            return _controlled(eqn, operands, self._evaluate)
        if name == _REMAT:
            if eqn.params["prevent_cse"]:  # as JAX lowers it
                operands = lax.optimization_barrier([*operands])
            return self._evaluate(eqn.params["jaxpr"], operands)
        shape = eqn.outvars[0].aval.shape if eqn.outvars else ()
        if name == "broadcast_in_dim" and isinstance(operands[0], jax.core.Tracer):
            return [self._broadcast(operands[0], shape, eqn.params["broadcast_dimensions"])]
        if name == "conv_general_dilated":
            return [_convolved(operation, *operands)]
        if name in _ELEMENTWISE:
            operands = [self._broadcast(x, shape) for x in operands]
        if name == "div" and (divisor := self._reciprocal(operands[1])) is not None:
            return [operands[0] * divisor]
        return operation.run(operands)

    def _reciprocal(self, x: Any) -> Any:
        """Return 1 / x for a broadcast, else None."""
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return None
        for (_, shape, dims), (source, broadcast) in [*self.broadcasts.items()]:
            if broadcast is x:
                key = id(source), "reciprocal", ()
                if key not in self.broadcasts:
                    self.broadcasts[key] = source, jnp.ones((), x.dtype) / source
                return self._broadcast(self.broadcasts[key][1], shape, dims)
        return None

    def _broadcast(self, x: Any, shape: tuple[int, ...], dims: Sequence[int] | None = None) -> Any:
        """Return one broadcast for all that need it, except of a constant."""
        if jnp.shape(x) == shape or not isinstance(x, jax.core.Tracer):
            return x
        dims = tuple(range(len(jnp.shape(x))) if dims is None else dims)
        key = id(x), shape, dims
        if key not in self.broadcasts:
            self.broadcasts[key] = x, lax.broadcast_in_dim(x, shape, dims)
        return self.broadcasts[key][1]

    def _evaluate(self, program: Any, ins: Sequence[Any]) -> list[Any]:
        flat, inner = _canonical(program), self._replace(broadcasts={})
        env = _environment(flat, ins)
        for each in flat.operations:
            results = inner.run(each, [env[x] for x in each.ins])
            env.update(zip(each.outs, results, strict=True))
        return [env[x] for x in flat.outs]


def _own_slice(x: jax.Array, virtual_rank: Any, *, dim: int, size: int, **_: Any) -> jax.Array:
    length = x.shape[dim] // size
    return lax.dynamic_slice_in_dim(x, virtual_rank * length, length, dim)


def _convolved(operation: FlatOperation, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolve with features last: XLA for CPUs rewrites others so, but not in a loop."""
    of_x, of_kernel, of_y = operation.eqn.params["dimension_numbers"]
    last = len(of_x) - 1
    spatial = range(1, last)
    dims = (0, last, *spatial), (last, last - 1, *range(last - 1)), (0, last, *spatial)
    x = lax.transpose(x, (of_x[0], *of_x[2:], of_x[1]))
    kernel = lax.transpose(kernel, (*of_kernel[2:], of_kernel[1], of_kernel[0]))
    changes = {"dimension_numbers": lax.ConvDimensionNumbers(*dims)}
    (y,) = jax_compat.bind(operation.eqn, [x, kernel], operation.calls, **changes)
    return lax.transpose(y, np.argsort((of_y[0], *of_y[2:], of_y[1])))


_Evaluate = Callable[[Any, Sequence[Any]], list[Any]]


def _controlled(eqn: Any, operands: Sequence[Any], evaluate: _Evaluate) -> list[Any]:
    """Run a loop or branches, with `evaluate(program, ins)` for its bodies."""
    params = eqn.params
    if eqn.primitive.name == "cond":
        index, *ins = operands
        branches = [
            functools.partial(lambda branch, *ins: evaluate(branch, ins), branch)
            for branch in params["branches"]
        ]
        return lax.switch(index, branches, *ins)
    if eqn.primitive.name == "while":
        _, _, num_cond, num_body = jaxprs.while_parts(eqn)
        of_cond, of_body = operands[:num_cond], operands[num_cond : num_cond + num_body]
        return lax.while_loop(
            lambda carry: evaluate(params["cond_jaxpr"], [*of_cond, *carry])[0],
            lambda carry: evaluate(params["body_jaxpr"], [*of_body, *carry]),
            [*operands[num_cond + num_body :]],
        )
    _, num_constants, num_carry = jaxprs.scan_parts(eqn)
    constants = operands[:num_constants]

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = evaluate(params["jaxpr"], [*constants, *carry, *xs])
        return outs[:num_carry], outs[num_carry:]

    carry = [*operands[num_constants : num_constants + num_carry]]
    xs = [*operands[num_constants + num_carry :]]
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(body, carry, xs, **options)
    return [*carry, *ys]


class _CollectiveLoop:
    """A loop, or branches, with collectives in a body.

    Attributes:
      flags: whether each operand of a body varies.
      are_varying: whether each result does.
    """

    def __init__(self, eqn: Any, flags: list[bool]) -> None:
        self._eqn = eqn
        name, params = eqn.primitive.name, eqn.params
        if name == "cond":
            self._num_before, self._num_carry = 1, 0
            programs = params["branches"]
            self._refuse_if(flags[0], "branches on a value that differs between ranks")
        elif name == "while":
            *_, num_cond, num_body = jaxprs.while_parts(eqn)
            self._num_before, self._num_carry = num_cond, len(flags) - num_cond - num_body
            self._first = num_body
            programs = [params["body_jaxpr"]]
            self._refuse_if(any(flags[:num_cond]), "loops until a value that differs between ranks")
        else:
            _, num_constants, self._num_carry = jaxprs.scan_parts(eqn)
            self._num_before, self._first = 0, num_constants
            programs = [params["jaxpr"]]
        self.flags = flags[self._num_before :]
        while True:
            self._regions = [_Regions(_canonical(each), self.flags) for each in programs]
            found = [each.are_varying for each in self._regions]
            self.are_varying = [*map(any, zip(*found, strict=True))]
            if not self._num_carry:
                break
            carried = slice(self._first, self._first + self._num_carry)
            wanted = [a or b for a, b in zip(self.flags[carried], self.are_varying, strict=False)]
            if wanted == self.flags[carried]:
                self.are_varying[: self._num_carry] = wanted
                break
            self.flags[carried] = wanted
        if name == "while":
            decides = _Regions(_canonical(params["cond_jaxpr"]), self._flags_of_condition(flags))
            self._refuse_if(any(decides.are_varying), "loops until a value differs between ranks")

    def _flags_of_condition(self, flags: list[bool]) -> list[bool]:
        return [*flags[: self._num_before], *self.flags[self._first :]]

    def _refuse_if(self, is_wrong: bool, why: str) -> None:
        if is_wrong:
            _refuse(self._eqn, f"reduces over ranks where it {why}")

    def run(self, operands: Sequence[Any], flags: Sequence[bool], ranks: _RankContext) -> list[Any]:
        """Return the results, stacked where they vary."""
        name = self._eqn.primitive.name
        is_scan = name == "scan"
        first_x = self._num_before + (self._first + self._num_carry if is_scan else len(flags))
        given = []
        for i, (x, flag) in enumerate(zip(operands, flags, strict=True)):
            wanted = i >= self._num_before and self.flags[i - self._num_before]
            if wanted and not flag:
                x = _repeated(x, ranks)
            given.append(jnp.moveaxis(x, 0, 1) if wanted and i >= first_x else x)

        def evaluate(program: Any, ins: Sequence[Any]) -> list[Any]:
            if name == "while" and program is self._eqn.params["cond_jaxpr"]:
                return _Local(None, {})._evaluate(program, ins)
            regions = self._regions[self._index(program)]
            outs, are_varying = regions.run(ranks._replace(latest=[]), ins)
            wanted = zip(outs, are_varying, self.are_varying, strict=True)
            return [x if is_one == flag else _repeated(x, ranks) for x, is_one, flag in wanted]

        results = _controlled(self._eqn, given, evaluate)
        if not is_scan:
            return results
        ys = zip(results[self._num_carry :], self.are_varying[self._num_carry :], strict=True)
        moved = [jnp.moveaxis(y, 1, 0) if flag else y for y, flag in ys]
        return [*results[: self._num_carry], *moved]

    def _index(self, program: Any) -> int:
        branches = self._eqn.params.get("branches", ())
        return next((i for i, each in enumerate(branches) if each is program), 0)


def _refuse(eqn: Any, what: str, line: str = "") -> None:
    line = source_of(eqn) or line
    where = f"{line} " if line else "the step "
    raise ValueError(
        with_code(
            "JDP218",
            f"{where}{what}, so the bits of a step with virtual_ranks= would depend on the number "
            "of ranks. Reduce over all ranks of the data axis, outside such code.",
        )
    )


def _require_all_ranks(eqn: Any, ranks: _RankContext) -> None:
    axes = jaxprs.collective_axes(eqn)
    if axes != (ranks.axis_name,) or eqn.params.get("axis_index_groups") is not None:
        _refuse(eqn, f"reduces over {axes} or groups of ranks")


def _gathered(stacks: Sequence[jax.Array], ranks: _RankContext) -> list[jax.Array]:
    """Return the stacks `[virtual, ...]` of all virtual ranks."""
    blocks, found = ranks.blocks, [*stacks]
    if blocks.num_ranks > 1:
        found = ranks.after(found)
        for dtype in dict.fromkeys(x.dtype for x in found):
            places = [i for i, x in enumerate(found) if x.dtype == dtype]
            of_ranks = _all_gather([found[i] for i in places], ranks)
            for i, x in zip(places, of_ranks, strict=True):
                found[i] = x
    return found if blocks.is_even else [x[blocks.slots()] for x in found]


def _all_gather(stacks: Sequence[jax.Array], ranks: _RankContext) -> list[jax.Array]:
    """Concatenate the stacks of one dtype of all ranks."""
    names = (ranks.axis_name,)
    (found,) = shards.all_gather([stacks], [[0] * len(stacks)], names, mesh=ranks.mesh)
    ranks.follow(found)
    return found


def _can_exchange(eqn: Any, ranks: _RankContext) -> bool:
    blocks, is_exchange = ranks.blocks, eqn.primitive.name == "all_to_all"
    return is_exchange and blocks.num_ranks > 1 and blocks.is_even


def _all_to_all(
    eqns: Sequence[Any], stacks: Sequence[jax.Array], ranks: _RankContext
) -> list[jax.Array]:
    """Exchange parts of stacks `[width, ...]` between all virtual ranks."""
    num, width, names = ranks.blocks.num_virtual, ranks.blocks.width, (ranks.axis_name,)
    found = [*stacks]
    dims = [(eqn.params["split_axis"], eqn.params["concat_axis"]) for eqn in eqns]
    cuts = [_cut(x, 1 + split, num) for x, (split, _) in zip(stacks, dims, strict=True)]
    for dtype in dict.fromkeys(x.dtype for x in stacks):
        places = [i for i, x in enumerate(stacks) if x.dtype == dtype]
        # [width, parts for all virtual ranks] -> [virtual ranks, their parts for this rank's]
        rows = [jnp.moveaxis(cuts[i], 0, 1) for i in places]
        rows = ranks.after([x.reshape(width, x[0].size) for x in rows])
        (mine,) = shards.all_to_all([rows], [[(1, 0)] * len(rows)], names, mesh=ranks.mesh)
        ranks.follow(mine)
        for i, x in zip(places, mine, strict=True):
            found[i] = _joined(x.reshape(num, width, *cuts[i].shape[2:]), 1 + dims[i][1])
    return found


def _exchanged(
    operation: FlatOperation, stacks: Sequence[jax.Array], ranks: _RankContext
) -> list[jax.Array]:
    """Run a collective other than a sum on the values of all virtual ranks."""
    blocks, name, size = ranks.blocks, operation.eqn.primitive.name, ranks.blocks.num_virtual
    if name == "ppermute":
        return [_permuted(x, operation.eqn.params["perm"], ranks) for x in stacks]
    run = jax.vmap(
        lambda *operands: operation.run(operands), axis_name=ranks.axis_name, axis_size=size
    )
    results = run(*stacks)
    if name in _UNIFORM_RESULTS:
        return [x[0] for x in results]
    mine = jnp.minimum(ranks.start + jnp.arange(blocks.width), size - 1)
    return [jnp.take(x, mine, axis=0) for x in results]


def _permuted(x: jax.Array, pairs: Sequence[tuple[int, int]], ranks: _RankContext) -> jax.Array:
    """Return the values that this rank's virtual ranks receive, zeros without a sender."""
    sources = np.full(ranks.blocks.num_virtual, -1)
    for source, target in pairs:
        sources[target] = source
    mine = jnp.minimum(ranks.start + jnp.arange(ranks.blocks.width), len(sources) - 1)
    wanted = jnp.asarray(sources)[mine]
    sent = jnp.take(x, jnp.maximum(wanted, 0), axis=0)
    if len(pairs) == len(sources):
        return sent
    return jnp.where(wanted.reshape(-1, *[1] * (x.ndim - 1)) >= 0, sent, jnp.zeros((), x.dtype))


def _gradient_paths(operations: Sequence[FlatOperation]) -> dict[FlatValue, str]:
    """Return the paths of gradients, for the plan of communication."""
    paths: dict[FlatValue, str] = {}
    for eqn, ins, outs, _ in operations:
        if eqn.primitive.name == "jdp_mark" and eqn.params["kind"] == LOCAL:
            paths[outs[0]] = eqn.params["path"]
        elif len(outs) == 1 and (found := [paths[x] for x in ins if x in paths]):
            paths[outs[0]] = found[0]
    return paths


def _totals(
    stacks: Sequence[jax.Array], ranks: _RankContext, paths: Sequence[str] = ()
) -> list[jax.Array]:
    """Sum stacks `[width, ...]` over all virtual ranks, by a binary tree."""
    blocks = ranks.blocks
    # A power of two that divides `width`: whole subtrees of this rank.
    size = blocks.width & -blocks.width if blocks.is_even else 1
    nodes = [_of_subtrees(_wide(x), size) for x in stacks]
    if blocks.num_ranks == 1:
        totals = [_tree([*x]) for x in nodes]
    else:
        totals = _totals_of_ranks(nodes, ranks, paths or [""] * len(nodes))
    return [lax.convert_element_type(x, like.dtype) for x, like in zip(totals, stacks, strict=True)]


def _wide(x: jax.Array) -> jax.Array:
    # XLA keeps intermediate sums of 16 bits in 32, where it fuses them.
    is_short = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return lax.convert_element_type(x, jnp.float32) if is_short else x


def _totals_of_ranks(
    nodes: Sequence[jax.Array], ranks: _RankContext, paths: Sequence[str]
) -> list[jax.Array]:
    """Sum nodes `[nodes, ...]` of each rank: each rank sums a part of each leaf, in order."""
    blocks, found = ranks.blocks, [x[0] for x in nodes]  # of empty leaves these are the sums
    names = (ranks.axis_name,)
    is_native = shards.is_native(names, ranks.mesh)
    # A native sum adds the nodes of ranks as this tree does.
    has_one_each = is_native and blocks.is_even and all(len(x) == 1 for x in nodes)
    for dtype in dict.fromkeys(x.dtype for x in nodes if x.size):
        places = [i for i, x in enumerate(nodes) if x.dtype == dtype and x.size]
        if has_one_each and dtype.name in SUMMED_DTYPES:
            own = _marked([found[i] for i in places], names, [paths[i] for i in places])
            (totals,) = native([own], names, mesh=ranks.mesh)
            for i, total in zip(places, totals, strict=True):
                found[i] = total
            continue
        rows = [nodes[i].reshape(len(nodes[i]), -1) for i in places]
        sizes = [x.shape[1] for x in rows]
        rows = rows if is_native else [jnp.concatenate(rows, axis=1)]
        padded = [_padded(x, blocks.num_ranks) for x in rows]
        sums = _sums_of_parts(padded, ranks, [paths[i] for i in places] if is_native else [])
        totals = _all_gather(sums, ranks)
        if not is_native:
            totals = jnp.split(totals[0][: sum(sizes)], np.cumsum(sizes)[:-1])
        for i, size, total in zip(places, sizes, totals, strict=True):
            found[i] = total[:size].reshape(nodes[i].shape[1:])
    return found


def _sums_of_parts(
    rows: Sequence[jax.Array], ranks: _RankContext, paths: Sequence[str] = ()
) -> list[jax.Array]:
    """Sum this rank's part of rows `[nodes, size]`, whose size divides by the ranks."""
    names = (ranks.axis_name,)
    rows = _marked(ranks.after(rows), names, paths)
    (mine,) = shards.all_to_all([rows], [[(1, 0)] * len(rows)], names, mesh=ranks.mesh)
    return [_tree([x[i] for i in ranks.blocks.slots_of(len(x))]) for x in mine]


def _marked(
    values: Sequence[jax.Array], names: tuple[str, ...], paths: Sequence[str]
) -> list[jax.Array]:
    """Mark gradients for the plan of communication."""
    marked = [
        mark(x, kind=LOCAL, path=path, axes=names) if path else x
        for x, path in zip(values, paths, strict=False)
    ]
    return [*marked, *values[len(marked) :]]


def _scattered(
    eqns: Sequence[Any], stacks: Sequence[jax.Array], ranks: _RankContext
) -> list[jax.Array]:
    """Sum stacks `[width, ...]` over all virtual ranks; return each one's block of a dim."""
    blocks = ranks.blocks
    dims = [eqn.params["scatter_dimension"] for eqn in eqns]
    if blocks.num_ranks > 1 and blocks.is_even:
        nodes = [_of_subtrees(_wide(x), blocks.width & -blocks.width) for x in stacks]
        found = _scattered_nodes(nodes, dims, ranks)
    else:
        mine = jnp.minimum(ranks.start + jnp.arange(blocks.width), blocks.num_virtual - 1)
        totals = _totals(stacks, ranks)
        found = [
            jnp.take(_cut(x, dim, blocks.num_virtual), mine, axis=0)
            for x, dim in zip(totals, dims, strict=True)
        ]
    results = zip(eqns, stacks, dims, found, strict=True)
    return [
        (x if eqn.params["tiled"] else jnp.squeeze(x, dim + 1)).astype(stack.dtype)
        for eqn, stack, dim, x in results
    ]


def _scattered_nodes(
    nodes: Sequence[jax.Array], dims: Sequence[int], ranks: _RankContext
) -> list[jax.Array]:
    """Return this rank's blocks `[width, ...]` of the sums of nodes `[nodes, ...]`."""
    blocks, names, found = ranks.blocks, (ranks.axis_name,), [*nodes]
    is_native = shards.is_native(names, ranks.mesh)
    for dtype in dict.fromkeys(x.dtype for x in nodes):
        places = [i for i, x in enumerate(nodes) if x.dtype == dtype]
        if is_native and dtype.name in SUMMED_DTYPES and all(len(nodes[i]) == 1 for i in places):
            own, cut = [nodes[i][0] for i in places], [dims[i] for i in places]
            (sums,) = shards.reduce_scatter([own], [cut], names, mesh=ranks.mesh)
            for i, total in zip(places, sums, strict=True):
                found[i] = _cut(total, dims[i], blocks.width)
            continue
        cuts = [jnp.moveaxis(_cut(nodes[i], 1 + dims[i], blocks.num_virtual), 0, 1) for i in places]
        rows = [x.reshape(len(x), blocks.num_ranks, -1) for x in cuts]
        sizes = [x.shape[2] for x in rows]
        joined = jnp.concatenate(rows, axis=2)
        (total,) = _sums_of_parts([joined.reshape(len(joined), -1)], ranks)
        ranks.follow([total])
        parts = jnp.split(total, np.cumsum(sizes)[:-1])
        for i, part, x in zip(places, parts, cuts, strict=True):
            found[i] = part.reshape(blocks.width, *x.shape[2:])
    return found


def _padded(x: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple)))


def _of_subtrees(stack: jax.Array, size: int) -> jax.Array:
    cut = stack.reshape(len(stack) // size, size, *stack.shape[1:])
    return _tree([cut[:, i] for i in range(size)])


def _tree(values: list[jax.Array]) -> jax.Array:
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [*(a + b for a, b in pairs), *values[len(values) // 2 * 2 :]]
    return values[0]
