"""Differences between JAX versions, and JAX's private names; no other module has any."""

import contextlib
import functools
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval
from jax.sharding import Mesh

# JAX 0.10 transposes `all_gather(to="invarying")` wrongly inside shard_map(check_vma=False).
INVARYING_GATHER_HAS_WRONG_GRADIENT = jax.__version_info__ < (0, 11, 0)

# JAX 0.10 may crash on a donated array, where later versions raise.
DELETED_ARRAY_CRASHES = jax.__version_info__ < (0, 11, 0)

# XLA:CPU copies an in-place operand if a write to one of its slices is fused with the copy. Seen on
# 0.10.2, not on 0.12.0.
CPU_COPIES_SLICES = jax.__version_info__ < (0, 12, 0)

# XLA aborts on axes nested in another order than the mesh's, beside an axis that it sees in no
# shard_map. Seen on 0.11.2 and 0.12.0, not on 0.10.2.
ABORTS_ON_UNORDERED_AXES = jax.__version_info__ >= (0, 11, 0)

# XLA for CPUs removes barriers before it has fused operations.
FUSES_ACROSS_BARRIERS = jax.__version_info__ < (0, 12, 0)

# JAX 0.11.2's compiler crashes on an empty argument of `shard_map` beside others.
CRASHES_ON_EMPTY_ARGUMENTS = jax.__version_info__ == (0, 11, 2)

# `jax.jit(inline=...)`: inline while the caller is traced. Since JAX 0.12 True leaves a function
# to lower.
INLINE_EARLY = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True


try:
    from jax._src import core as _core

    _core.trace_ctx.trace, _core.eval_trace  # noqa: B018
except (ImportError, AttributeError):
    _core: Any = None


def trace_of(x: Any) -> Any:
    """Return a tracer's JAX trace."""
    return getattr(x, "_trace", None)


def batch_traces(x: Any) -> tuple[Any, ...]:
    """Return the traces of the `jax.vmap`s that map a value, innermost first."""
    traces = []
    while isinstance(x, jax.core.Tracer):
        if getattr(x, "batch_dim", None) is not None:
            traces.append(trace_of(x))
        x = getattr(x, "primal", getattr(x, "val", None))
    return tuple(traces)


def shard_map(f: Callable[..., Any], *, mesh: Mesh, **options: Any) -> Any:
    """Return `jax.shard_map(f, ...)` that also accepts zero-size arrays on JAX 0.11.2."""
    if not CRASHES_ON_EMPTY_ARGUMENTS:
        return jax.shard_map(f, mesh=mesh, **options)

    def call(*args: Any) -> Any:
        shapes = [*map(np.shape, jax.tree.leaves(args))]

        def filled(x: Any) -> Any:
            shape = [size or mesh.size for size in np.shape(x)]  # divisible by any axes
            return x if np.size(x) else jnp.zeros(shape, x.dtype)

        def on_device(*args: Any) -> Any:
            leaves, tree = jax.tree.flatten(args)
            for i, shape in enumerate(shapes):
                if 0 in shape:
                    leaves[i] = leaves[i][tuple(slice(0 if size == 0 else None) for size in shape)]
            return f(*jax.tree.unflatten(tree, leaves))

        return jax.shard_map(on_device, mesh=mesh, **options)(*jax.tree.map(filled, args))

    return call


def is_deleted(array: Any) -> bool:
    """Whether any shard was donated: JAX asks the first alone, which stays if NumPy views it."""
    if array.is_deleted():
        return True
    devices = array.sharding.device_set
    if len(devices) == 1 or next(iter(devices)).platform != "cpu":
        return False
    array = getattr(array, "_base_array", array)  # of a key
    arrays = getattr(array, "_arrays", None)  # faster than the public name
    if arrays is None:
        arrays = [shard.data for shard in array.addressable_shards]
    return any(each.is_deleted() for each in arrays)


try:
    from jax._src.array import ArrayImpl

    is_first_deleted: Any = ArrayImpl.is_deleted  # faster than a `methodcaller`
except (ImportError, AttributeError):
    is_first_deleted = is_deleted
_shards_of = operator.attrgetter("_arrays")


def any_deleted(arrays: Sequence[Any]) -> bool:
    """Whether any array or shard was donated; faster than `is_deleted`."""
    try:
        return any(map(is_first_deleted, chain.from_iterable(map(_shards_of, arrays))))
    except (AttributeError, TypeError):  # a key of JAX's, or another JAX
        return any(map(is_deleted, arrays))


def start_copy_to_host(array: jax.Array) -> None:
    """Start a copy to the host, except from CPUs: JAX 0.11.2 would never donate the array."""
    if any(device.platform != "cpu" for device in array.devices()):
        array.copy_to_host_async()


def opened(jaxpr: Any) -> Any:
    """Return the jaxpr without JAX 0.10's wrapper."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def set_dead_code_rule(
    primitive: Any, rule: Callable[[Sequence[bool], Any], tuple[list[bool], Any]]
) -> None:
    """Set JAX's dead-code rule of a primitive."""

    def with_all_arguments(*args: Any) -> Any:
        # Later versions than 0.10 pass the used operands between the two.
        return rule(args[0], args[-1])

    partial_eval.dce_rules[primitive] = with_all_arguments


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and of carried values."""
    if "ft_in" in params:  # from JAX 0.11
        constants, carry, _ = params["ft_in"].unpack()
        return len(list(constants)), len(list(carry))
    return params["num_consts"], params["num_carry"]


class CacheMiss(Exception):  # noqa: N818 - a signal, not an error
    """A call without an executable, or whose arguments JAX must place."""


def with_miss(jitted: Any, may_compile: Callable[[Callable[..., Any], tuple], Any]) -> Any:
    """Return a function that runs the executables of `jitted` without Python, if JAX has one.

    For a new kind of call it returns `may_compile(compile_and_run, args)`. JAX never caches a call
    that raised an error.
    """
    try:
        facts = jitted.__getstate__()
        compile_and_run = facts["cache_miss"]

        def cache_miss(*args: Any) -> Any:
            return may_compile(compile_and_run, args)

        kind: Any = type(jitted)
        found = kind.__new__(kind)
        found.__setstate__({**facts, "cache_miss": cache_miss})
        found._fun = jitted._fun  # named in errors of jax_debug_nans
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        return None
    return found


def set_indivisible(fn: Any) -> None:
    """Keep jax_debug_nans from calling a function by single operations: JAX names the function."""
    fn._apply_primitive = True


def clear_fast_path(jitted: Any) -> None:
    """Let JAX decide again which calls of `jitted` run without Python. It traces nothing anew."""
    clear = getattr(jitted, "_clear_cache", None)
    if clear is not None:
        clear()


def is_tracing() -> bool:
    """Whether JAX traces the calling code, even without a tracer in it."""
    if _core is not None:  # faster than the public name
        return _core.trace_ctx.trace is not _core.eval_trace
    return jax.extend.core.get_opaque_trace_state() != _outside_of_traces()


@functools.cache
def _outside_of_traces() -> Any:
    with ThreadPoolExecutor(1) as new_thread:  # traces nothing
        return new_thread.submit(jax.extend.core.get_opaque_trace_state).result()


def joined_processes() -> Any:
    """Return JAX's state of joined processes, if this JAX has it."""
    try:
        from jax._src import distributed

        return distributed.global_state
    except (ImportError, AttributeError):
        return None


def is_profiling() -> bool:
    """Whether JAX's profiler runs; False if this JAX does not tell."""
    return _profile_session() is not None


def stop_profiler() -> None:
    """Write the profile and stop the profiler, even if the write fails."""
    try:
        jax.profiler.stop_trace()
    finally:
        if is_profiling():  # JAX 0.10 keeps the session after a failed write
            from jax._src import profiler

            profiler._profile_state.reset()


def _profile_session() -> Any:
    try:
        from jax._src import profiler

        state = profiler._profile_state
    except (ImportError, AttributeError):
        return None
    return getattr(state, "session", None) or getattr(state, "profile_session", None)


def compiled_texts(names: Container[str]) -> list[tuple[str, str]]:
    """Return name and text of the compiled programs with these names."""
    from jax.extend.backend import get_backend

    modules = [each for one in get_backend().live_executables() for each in one.hlo_modules()]
    return [(each.name, each.to_string()) for each in modules if each.name in names]


def bind(
    eqn: Any,
    operands: Sequence[Any],
    calls: Sequence[Any] = (),
    *,
    at_caller: bool = False,
    **changes: Any,
) -> list[Any]:
    """Run an equation with its names, source line and `changes`."""
    params = {**eqn.primitive.get_bind_params(eqn.params), **changes}
    with placed(eqn, calls, at_caller):
        outs = eqn.primitive.bind(*operands, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


@contextlib.contextmanager
def placed(eqn: Any, calls: Sequence[Any] = (), at_caller: bool = False) -> Iterator[None]:
    """Trace the body under an equation's names and source line."""
    from jax._src import source_info_util

    names = source_info_util.current_name_stack()
    for each in (*calls, eqn):
        names += each.source_info.name_stack
    line = None if at_caller else eqn.source_info.traceback
    context = source_info_util.user_context(line, name_stack=names)
    with context, eqn.ctx.manager:
        yield
