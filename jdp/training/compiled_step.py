"""`CompiledStep`: one step on one mesh, traced and proved for each set of shapes."""

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jdp import axis, jax_compat, pytrees
from jdp.analysis import program_lines
from jdp.analysis.diagnostics import TraceFindings
from jdp.analysis.step_refusals import Proved
from jdp.collectives import call_order, hazards
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.collectives.xla import combine_options, group_options
from jdp.distributed.checks import arguments, startup
from jdp.distributed.in_flight import CalledProgram
from jdp.distributed.mesh import num_ranks
from jdp.error_codes import with_code
from jdp.reduction import nonfinite, row_weight, step_metrics, weighted_sum
from jdp.reduction.step_context import Choices
from jdp.step_spec import StepSpec
from jdp.training import error_hints, passes
from jdp.training.rank_program import RankOutputs, RankProgram
from jdp.worker import progress
from jdp.worker.build_info import version

# JAX caches no program that compiles faster.
_OPTION = "jax_persistent_cache_min_compile_time_secs"
_NEVER = float("inf")


class _Cache:
    """While it is held as often as released, JAX writes no compiled program, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_held = 0
        self._before: Any = None

    def hold(self) -> None:
        with self._lock:
            if not self._num_held:
                self._before = getattr(jax.config, _OPTION)
                jax.config.update(_OPTION, _NEVER)
            self._num_held += 1

    def release(self) -> None:
        with self._lock:
            self._num_held -= 1
            if not self._num_held:
                jax.config.update(_OPTION, self._before)


_cache = _Cache()


def program_facts(types: Sequence[Any], mesh: Mesh, is_part: bool) -> list[Any]:
    """Return what may make two programs of a step differ, for JSON."""
    devices = [*mesh.devices.flat]
    return [
        [jax.__version__, version(), cpu_runtime.why_missing() is None, is_part],
        [devices[0].platform, devices[0].device_kind, dict(mesh.shape)],
        [device.process_index for device in devices],
        [[str(x.dtype), x.shape] for x in types],
    ]


# A weighted mean is transposed for the gradient of a loss inside a step, which the step then weighs
# in its reduction; around the step no reduction does.
_NO_GRADIENT = (
    "jax.grad, jax.vjp or jax.jacrev differentiates through `{}`, which has a weight=. That "
    "gradient is wrong where the weights of ranks differ. Take the gradient inside the step, or "
    'remove weight= and return the loss `(losses * batch["mask"]).mean() / '
    'jdp.mean_over_ranks(batch["mask"].mean())`. Forward mode, such as jax.jvp, is right.'
)


def _put_together(spec: StepSpec, leaving: RankOutputs, proved: Proved) -> tuple:
    uniform, split = leaving
    metrics = step_metrics.with_uniform(uniform.metrics, uniform.own_metrics, proved.own_metrics)
    metrics = pytrees.put_nodes(metrics, split.rows)
    state = leaving.state()
    if uniform.found.weighed:
        why_not = with_code("JDP125", _NO_GRADIENT.format(spec.name))
        state, metrics = weighted_sum.without_transpose((state, metrics), why_not)
    reports = None if all(each is None for each in split.reports) else split.reports
    return state, metrics, uniform.weight, reports, uniform.found


def pinned(spec: StepSpec, mesh: Mesh, new: Any, old: Any, given: Any) -> Any:
    """Return a new state with the old shardings, so the next call need not compile again."""
    old_tree, (leaves, tree) = jax.tree.structure(old), jax.tree.flatten(new)
    if len(mesh.axis_names) == len(spec.axis_name) or tree != old_tree:
        return new
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(given)]
    found = [
        jax.lax.with_sharding_constraint(leaf, where) if isinstance(where, NamedSharding) else leaf
        for leaf, where in zip(leaves, shardings, strict=True)
    ]
    return jax.tree.unflatten(tree, found)


_log = logging.getLogger("jdp")

# Kept programs, one for each set of shapes.
_MAX_JAXPRS = 8


class _TracedCall(threading.local):
    """A thread's call or trace: the caller's arguments, not tracers, and the next program."""

    args: tuple = ()
    built: passes.Pass | None = None


class CompiledStep:
    """A step over `mesh`, which runs only what `step_refusals` has accepted.

    Args:
      floats: see `parameters.floats_of_equinox`.
      is_part: whether it is traced into a program of the author's, which processes do not compare.

    Attributes:
      jaxprs: the latest traced programs, with the names of their inputs.
      returns_rows: whether a program's metrics hold `jdp.rows`.
      called: what calls keep of it.
      hits: runs an executable on arguments that need no preparation, or raises `CacheMiss`; None
        between processes, which compare each call, and where JAX has no such function.
    """

    def __init__(self, spec: StepSpec, mesh: Mesh, floats: frozenset[str], is_part: bool):
        self.mesh = mesh
        self.spec = spec
        self.hits: Any = None
        self.is_prepared: Callable[[tuple], bool] = lambda args: False
        self.jaxprs: deque[tuple[Any, list[str]]] = deque(maxlen=_MAX_JAXPRS)
        self._traced_programs: deque[startup.TracedProgram] = deque(maxlen=_MAX_JAXPRS)
        self._is_part = is_part
        self.returns_rows = False
        self._first_runs = self.arguments = None
        if mesh.is_multi_process and not is_part:
            self._first_runs = startup.FirstRuns(mesh, spec.name)
            self.arguments = arguments.Arguments(mesh, spec)
        self.called = CalledProgram(
            self.arguments,
            self.jaxprs,
            cpu_runtime.check,
            row_weight.why_invalid,
            nonfinite.why_skipped,
        )
        self._rank_program = RankProgram(
            spec,
            mesh,
            checksum_spec=None if self.arguments is None else self.arguments.spec,
            series=call_order.next_series(spec.name) if is_part else "",
            floats=floats,
        )
        why_xla = call_order.PART_OF_ANOTHER if is_part else None
        if spec.virtual_ranks is not None:
            why_xla = "jdp sums over its virtual ranks."
        self._choices = Choices(why_xla=why_xla, in_place=spec.donate and not is_part)
        self._on_mesh = self._new_on_mesh()
        self._jitted = self._new_jit()
        self._is_tuned = is_part or axis.platform(mesh) != "gpu"
        self._call = _TracedCall()
        self._is_new = True
        self._is_compiling = self._is_uncached = self._holds_cache = False
        self._has_logged = False

    def __call__(
        self, *args: Any, is_returned: bool = False, given: arguments.Given | None = None
    ) -> Any:
        """Return `(state, metrics, weight, reports)`: marked rows, weight summed over ranks."""
        self._begin_call(args)
        try:
            if self._first_runs is None or self.arguments is None or given is None:
                return self._run(*args)
            first = functools.partial(self.arguments.require_equal, given)
            args = (*args, given.checksums)
            return self._first_runs.run(
                self._run, self._traced, args, is_returned=is_returned, first=first
            )
        finally:
            self._end_call(has_compiled=not self._is_part)

    def trace(self, *args: Any, is_compiled: bool = False) -> Any:
        """Trace, and prove that every rank ends with the same state."""
        self._begin_call(args)
        given = () if self.arguments is None else (self.arguments.zeros(args),)
        try:
            return self._traced(*args, *given)
        finally:
            self._end_call(has_compiled=not is_compiled)

    def _run(self, *args: Any) -> Any:
        try:
            if self._is_new:
                self._build_first(args)
            return self._jitted(*args)
        except Exception as error:
            self.clear_fast_path()
            if isinstance(error, ValueError):
                error_hints.add_hint_of_lowering(error, self.spec)
            raise

    def clear_fast_path(self) -> None:
        """After an error, which JAX would remember: calls of these types would stay slow."""
        jax_compat.clear_fast_path(self._jitted)

    def _traced(self, *args: Any) -> Any:
        try:
            if self._is_new:
                self._build_first(args)
            return self._jitted.trace(*args)
        except ValueError as error:
            error_hints.add_hint_of_lowering(error, self.spec)
            raise

    def _begin_call(self, args: tuple) -> None:
        self._call.args = args
        if self._is_uncached:  # found in an earlier trace, which JAX may reuse
            self._hold_cache()

    def _hold_cache(self) -> None:
        self._is_uncached = progress.own.is_uncached = True
        if not self._holds_cache:
            self._holds_cache = True
            _cache.hold()

    def _end_call(self, *, has_compiled: bool) -> None:
        self._call.args, self._call.built = (), None
        if self._holds_cache:
            self._holds_cache = False
            if has_compiled:  # else the caller compiles it, at any time
                _cache.release()
        if self._is_compiling:
            self._is_compiling = False
            progress.compiling_ends()

    def _build_first(self, args: tuple) -> None:
        """Build a program before the trace of `on_mesh`, whose frames JAX would record."""
        self._begin_compiling()
        probed = passes.probe(self._rank_program, self._choices, args, self._call.args)
        self._call.built = self._build(probed)
        self._is_new = False
        if not self._is_tuned:
            self._tune(self._call.built.traced.found)

    def _begin_compiling(self) -> None:
        if not self._is_compiling:
            self._is_compiling = True
            progress.compiling_begins()

    def _build(self, probed: passes.Pass) -> passes.Pass:
        if self.spec.returns_state:
            # These hold the program, but not the arguments.
            types = probed.jaxpr.in_avals[-len(probed.inputs.names) :]  # without captured arrays
            facts_of = functools.partial(program_facts, types, self.mesh, self._is_part)
            lines_of = functools.partial(program_lines.lines_of, probed.jaxpr)
            traced = startup.TracedProgram(self.spec.name, facts_of, lines_of)
            startup.traced.record(traced)
            self._traced_programs.append(traced)
        return passes.build(self._rank_program, probed)

    def _tune(self, found: TraceFindings) -> None:
        self._is_tuned = True
        options = combine_options(found.gradient_bytes)
        options |= group_options(found.group_bytes, num_ranks(self.mesh, self.spec.axis_name))
        self._jitted = self._new_jit(options)

    def _new_jit(self, compiler_options: dict[str, int] | None = None) -> Any:
        donated = 0 if self.spec.donate else ()
        jitted = jax.jit(self._on_mesh, donate_argnums=donated, compiler_options=compiler_options)
        if self.arguments is None and not self._is_part:
            self.hits = jax_compat.with_miss(jitted, self._compile)
        return jitted

    def _compile(self, compile_and_run: Callable[..., Any], args: tuple) -> Any:
        if not self.is_prepared(args):
            raise jax_compat.CacheMiss
        self._begin_call(args)
        try:
            return compile_and_run(*args)
        except ValueError as error:
            error_hints.add_hint_of_lowering(error, self.spec)
            raise
        finally:
            self._end_call(has_compiled=True)

    def _new_on_mesh(self) -> Callable[..., Any]:
        def on_mesh(*args: Any) -> Any:
            if not self._call.args:  # `hits` calls it, as under `jax.disable_jit`
                raise jax_compat.CacheMiss
            if self._first_runs is not None:
                self._first_runs.on_trace()
            built, self._call.built = self._call.built, None
            if built is None:
                # An error of a proof ends this trace: JAX caches no refused program.
                self._begin_compiling()
                probed = passes.probe(self._rank_program, self._choices, args, self._call.args)
                built = self._build(probed)
            self.jaxprs.append((built.jaxpr, built.inputs.names))
            self.called.waits_in_xla = self._waits_in_xla(built.jaxpr)
            self._log_gathers(built.traced.found.gathers)
            leaving = built.program(*passes.given(args, built.inputs.layout))
            if self._loses_order(built.jaxpr):
                leaving = self._uncached(leaving)
            state, *others = _put_together(self.spec, leaving, built.proved)
            self.returns_rows |= step_metrics.has_rows(others[0])
            state = pinned(self.spec, self.mesh, state, args[0], self._call.args[0])
            return state, *others

        on_mesh.__name__ = on_mesh.__qualname__ = self.spec.name
        jax_compat.set_indivisible(on_mesh)
        return on_mesh

    # XLA may add collectives for other axes.
    def _has_other_axes(self) -> bool:
        return num_ranks(self.mesh, self.spec.axis_name) != self.mesh.size

    def _waits_in_xla(self, jaxpr: Any) -> bool:
        if self.spec.virtual_ranks is not None:
            return self.mesh.size > 1
        return self._has_other_axes() or hazards.has_collectives_of_xla(jaxpr)

    def _loses_order(self, jaxpr: Any) -> bool:
        if self.mesh.size == 1 or axis.platform(self.mesh) != "cpu":
            return False
        return self._has_other_axes() or hazards.loses_order(jaxpr)

    def _uncached(self, leaving: RankOutputs) -> RankOutputs:
        self._hold_cache()
        # Another program than an older jdp's in the cache.
        weight = jax.lax.optimization_barrier(leaving.uniform.weight)
        return leaving._replace(uniform=leaving.uniform._replace(weight=weight))

    def _log_gathers(self, gathers: Sequence[str]) -> None:
        if gathers and not self._has_logged:
            self._has_logged = True
            _log.info(
                "the update of `%s` gathers whole arrays on every rank, because its optimizer "
                "reads them whole: %s. The result is exact.",
                self.spec.name,
                "; ".join(gathers),
            )
