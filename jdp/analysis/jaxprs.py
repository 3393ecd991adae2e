"""JAX's primitives: their parameters and mesh axes."""

import contextlib
import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from jdp.jax_compat import opened, scan_counts


def manual_axes(eqn: Any) -> frozenset[str]:
    """Return a shard_map's manual axes."""
    return frozenset(eqn.params["newly_manual_axes"])


def spec_axes(spec: PartitionSpec) -> set[Any]:
    """Return the axes along which arrays with this spec differ."""
    found = set(spec.unreduced)
    for entry in spec.partitions:
        found.update(entry if isinstance(entry, tuple) else (entry,))
    return found


def collective_axes(eqn: Any) -> tuple[Any, ...]:
    """Return mesh axis names, or dims under a vmap."""
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def axis_groups(eqn: Any) -> Sequence[Sequence[int]] | None:
    """Return a collective's groups of ranks, None for one group."""
    found = eqn.params.get("axis_index_groups")
    return found if found is not None and len(found) > 1 else None


def named_axes(eqn: Any) -> set[str]:
    """Return all parameter strings that may name an axis."""
    return _strings_in(value for key, value in eqn.params.items() if key != "name")


def _strings_in(values: Any) -> set[str]:
    found = set()
    for value in values:
        if isinstance(value, str):
            found.add(value)
        elif isinstance(value, PartitionSpec):
            found |= spec_axes(value)
        elif isinstance(value, (tuple, list, set, frozenset)):
            found |= _strings_in(value)
    return found


# jdp assumes that kernels read only written memory, and order their writes.
JOINED = frozenset(
    """
    all_reduce_ffs all_reduce_population_count async_copy_scales_to_tmem async_copy_smem_to_tmem
    async_copy_sparse_metadata_to_tmem async_load async_prefetch async_store_smem async_store_tmem
    barrier barrier_arrive barrier_arrive_and_wait barrier_test barrier_wait bitcast commit_group
    commit_smem commit_tmem conv copy_gmem_to_smem copy_smem_to_gmem core_map cudnn_fusion
    custom_fusion debug_barrier debug_barrier_p delay dma_wait einshape_lo elementwise_inline_asm
    elementwise_inline_asm_p emit_pipeline fused_call fusible griddepcontrol_launch_dependents
    griddepcontrol_wait has_memory_space inline_mgpu inline_mgpu_p jaxpr_call layout_cast load
    masked_cummax masked_cummin masked_cumsum masked_load masked_sort masked_swap matmul_acc_lhs
    matmul_lhs_fifo matmul_pop matmul_pop_fifo matmul_push_rhs max_contiguous mgpu_atomic_store mma
    mosaic_gpu_reduce_max mosaic_gpu_reduce_min mosaic_gpu_reduce_prod mosaic_gpu_reduce_sum
    mpmd_map multiple_of num_programs pack pack_elementwise pallas_call parallel_loop pipeline_body
    print_layout program_id program_order query_cluster_cancel reciprocal relayout
    remove_memory_space roll run_scoped scan_count semaphore_wait set_max_registers
    set_max_registers_p stochastic_round store tcgen05_commit_arrive tcgen05_mma trace_value
    try_cluster_cancel unique unpack unpack_elementwise unreachable wait_gmem_to_smem
    wait_load_tmem wait_smem_to_gmem wgmma wgmma_accumulator_deref wgmma_accumulator_deref_p
    wgmma_accumulator_store wgmma_accumulator_store_p wgmma_ref wgmma_wait
    with_memory_space_constraint
    """.split()
)

# Externally written memory, hidden states, and opaque kernels.
SOURCES = frozenset(
    """
    atomic_cas atomic_rmw get_barrier_semaphore get_global mosaic_gpu_p multimem_load_reduce
    multimem_store prng_join prng_random_bits prng_seed prng_split sc_fetch_and_add semaphore_read
    semaphore_signal semaphore_signal_multicast semaphore_signal_parallel thunky.all_gather
    thunky.all_reduce thunky.all_to_all thunky.async_done thunky.async_start thunky.call_jax
    thunky.call_thunky_nested thunky.collective_group thunky.collective_permute thunky.cond
    thunky.copy thunky.custom_call thunky.inline_constant thunky.memset thunky.memzero
    thunky.ptx_kernel thunky.reduce_scatter thunky.while tpu_custom_call
    """.split()
)


# Primitives that run one body once on their operands.
CALLS = frozenset(
    "call closed_call compute_on composite custom_jvp_call custom_partitioning custom_vjp_call "
    "custom_vmap_call eval_jaxpr jit linear_call remat2 remat_opt xla_metadata_call".split()
)
_Place = TypeVar("_Place")
_Found = TypeVar("_Found")
_CALLED = ("jaxpr", "call_jaxpr", "call", "callee", "fwd_jaxpr")


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter is a jaxpr."""
    return hasattr(opened(value), "eqns")


def bodies(eqn: Any) -> list[Any]:
    """Return all jaxprs in an equation's parameters."""
    values = eqn.params.values()
    # C builds the set: few of a step's thousands of equations have a body.
    return [] if {*map(type, values)} <= _PLAIN else _jaxprs_in(values)


def remembered(fn: Callable[[Any], _Found]) -> Callable[[Any], _Found]:
    """Cache results as long as the jaxpr, which they must not reference."""
    known: weakref.WeakKeyDictionary[Any, _Found] = weakref.WeakKeyDictionary()

    @functools.wraps(fn)
    def remembering(jaxpr: Any) -> _Found:
        if (found := known.get(jaxpr)) is None:
            found = known[jaxpr] = fn(jaxpr)
        return found

    return remembering


def with_bodies(jaxpr: Any) -> tuple[Any, ...]:
    """Return a jaxpr and all bodies in it, each once."""
    jaxpr = opened(jaxpr)
    return jaxpr, *_nested(jaxpr)[0]


def bodies_by_equation(jaxpr: Any) -> dict[int, list[Any]]:
    """Return each equation's bodies by id."""
    return _nested(opened(jaxpr))[1]


@remembered
def _nested(jaxpr: Any) -> tuple[tuple[Any, ...], dict[int, list[Any]]]:
    found: dict[int, Any] = {}
    by_equation, left = {}, [jaxpr]
    while left:
        body = left.pop()
        if id(body) not in found:
            found[id(body)] = body
            for eqn in body.eqns:
                if eqn.params and (inner := bodies(eqn)):
                    by_equation[id(eqn)] = inner
                    left += inner
    return tuple(found.values())[1:], by_equation


def primitive_names(jaxpr: Any) -> frozenset[str]:
    """Return all primitives' names, also in bodies."""
    return _primitive_names(opened(jaxpr))


@remembered
def _primitive_names(jaxpr: Any) -> frozenset[str]:
    return frozenset(eqn.primitive.name for body in with_bodies(jaxpr) for eqn in body.eqns)


def equations(jaxpr: Any, *, mapped: bool = True) -> list[Any]:
    """Return all equations in order, each body once."""

    def enter(place: bool, eqn: Any) -> bool | None:
        return place if mapped or eqn.primitive.name != "shard_map" else None

    return [eqn for eqn, _ in placed_equations(jaxpr, True, enter)]


def placed_equations(
    jaxpr: Any, place: _Place, enter: Callable[[_Place, Any], _Place | None]
) -> list[tuple[Any, _Place]]:
    """Return `equations` with places; `enter` returns the bodies' place, or None to skip them."""
    found: list[tuple[Any, _Place]] = []
    inner = bodies_by_equation(jaxpr)
    seen = set()

    def add(jaxpr: Any, place: _Place) -> None:
        if (id(jaxpr), place) in seen:
            return
        seen.add((id(jaxpr), place))
        for eqn in jaxpr.eqns:
            found.append((eqn, place))
            for body in inner.get(id(eqn), ()):
                inside = enter(place, eqn)
                if inside is not None:
                    add(body, inside)

    add(opened(jaxpr), place)
    return found


_PLAIN: set[type] = set()


def _jaxprs_in(values: Collection[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if type(value) in _PLAIN:
            continue
        if type(value) is tuple or isinstance(value, (tuple, list)):
            found += [] if {*map(type, value)} <= _PLAIN else _jaxprs_in(value)
        elif is_jaxpr(value):
            found.append(opened(value))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            # a Pallas kernel's choice of blocks
            fields = dataclasses.fields(value)
            found += _jaxprs_in([getattr(value, each.name, None) for each in fields])
        elif not hasattr(value, "jaxpr"):  # the attribute may be None here, and a jaxpr elsewhere
            _PLAIN.add(type(value))
    return found


def called(eqn: Any) -> Any | None:
    """Return a call's program with its constants."""
    for name in _CALLED:
        program = eqn.params.get(name)
        if program is not None and is_jaxpr(program):
            body = opened(program)
            fits = len(body.invars) == len(eqn.invars) and len(body.outvars) == len(eqn.outvars)
            return program if fits else None
    return None


def called_body(eqn: Any) -> Any | None:
    """Return a call's body, None if inputs or outputs do not match."""
    program = called(eqn)
    return None if program is None else opened(program)


def constants(program: Any) -> list[tuple[Any, Any]]:
    """Return the constants' variables and values."""
    return list(zip(opened(program).constvars, getattr(program, "consts", ()), strict=True))


def is_literal(atom: Any) -> bool:
    """Whether an operand is a literal."""
    return type(atom) is Literal


def number(atom: Any) -> float | None:
    """Return a literal's number if 0 or invertible, else None."""
    if type(atom) is not Literal or getattr(atom.val, "shape", ()):
        return None
    try:
        number = float(atom.val)
    except (TypeError, ValueError):
        return None
    is_invertible = math.isfinite(number) and (number == 0 or math.isfinite(1 / number))
    return number if is_invertible else None


def captured_numbers(jaxpr: Any) -> dict[Any, float]:
    """Return the scalars captured as arrays by a program."""
    found = {}
    for variable, value in constants(jaxpr):
        # Other processes may have the shards.
        if not variable.aval.shape and getattr(value, "is_fully_addressable", True):
            with contextlib.suppress(TypeError, ValueError, RuntimeError):  # traced, or deleted
                found[variable] = float(value)
    return found


def is_transposed(eqn: Any) -> bool:
    """Whether an equation computes a cotangent, by its JAX name."""
    return "transpose(" in str(eqn.source_info.name_stack)


def is_ref(variable: Any) -> bool:
    """Whether a variable is a `jax.Ref`."""
    return hasattr(variable.aval, "inner_aval")


def acts(eqn: Any) -> bool:
    """Whether an equation has more effects than naming an axis."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def while_parts(eqn: Any) -> tuple[Any, Any, int, int]:
    """Return a while loop's condition, body, and their constant counts."""
    p = eqn.params
    return opened(p["cond_jaxpr"]), opened(p["body_jaxpr"]), p["cond_nconsts"], p["body_nconsts"]


def scan_parts(eqn: Any) -> tuple[Any, int, int]:
    """Return a scan's body, and its numbers of constants and carries."""
    return opened(eqn.params["jaxpr"]), *scan_counts(eqn.params)


def branches(eqn: Any) -> list[Any]:
    """Return a cond's branches."""
    return [opened(branch) for branch in eqn.params["branches"]]


def solver_parts(eqn: Any) -> tuple[tuple[Any, int], tuple[Any, int], int]:
    """Return `solve` and `matvec` with constant positions, and the rhs's."""
    jaxprs, lengths = eqn.params["jaxprs"], eqn.params["const_lengths"]
    before_solve = lengths.matvec + lengths.vecmat
    return (opened(jaxprs.solve), before_solve), (opened(jaxprs.matvec), 0), sum(lengths)


def mapped_body(eqn: Any) -> Any:
    """Return a shard_map's body."""
    return opened(eqn.params["jaxpr"])


def hides_a_function(eqn: Any) -> bool:
    """Whether an equation holds a Python function, not a jaxpr."""
    return any(callable(value) and not isinstance(value, type) for value in eqn.params.values())
