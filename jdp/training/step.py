"""`Step`: a decorated function, and the work around each call of it."""

import dataclasses
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jdp import jax_compat, pytrees
from jdp.analysis.traced import TraceFindings
from jdp.data.sharding import place_batch
from jdp.distributed import fail_fast, failed_run, in_flight, mesh
from jdp.distributed.checks import known_leaves
from jdp.distributed.step_call import StepCall
from jdp.reduction import step_metrics
from jdp.step_spec import StepSpec
from jdp.training import dispatch_cache, parameters, placing
from jdp.training.compiled_step import CompiledStep
from jdp.training.interrupts import SHIELD
from jdp.worker import progress

# The calls of a step after which the state that went in is looked at: one look takes longer.
_LOOKS_FOR_VIEWS = frozenset([2, 3, 10, 30, 100, 300, 1000, 10_000, 100_000])


class Step:
    """A decorated step: places its arguments, then runs the `CompiledStep` of the state's mesh."""

    __name__: str

    def __init__(self, spec: StepSpec):
        functools.update_wrapper(self, spec.fn)
        self.__name__ = spec.name
        self.spec = spec
        self._phase = progress.TRAIN_STEP if spec.returns_state else progress.EVAL_STEP
        self._compiled_steps: dict[tuple, CompiledStep] = {}
        self._returned: dispatch_cache.KnownState | None = None  # the state that was returned last
        self._leaves: list[weakref.ref] = []  # its leaves, over several processes
        self._latest: dispatch_cache.LatestCall | None = None
        self._num_calls = 0
        self._copied: list[weakref.ref] = []  # large further arguments of the second call
        self._holds_others = False  # whether the state has leaves that are not arrays

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step: `(state, metrics)`, or the metrics of an `eval_step`."""
        shielded: list[Any] = []
        try:
            if self.spec.donate:
                SHIELD.begin(shielded)
            state, metrics, _ = self.run(*args, **kwargs)
            for compiled in self._compiled_steps.values():
                if compiled.returns_rows:
                    metrics = step_metrics.unmarked(metrics)
            return (state, metrics) if self.spec.returns_state else metrics
        finally:
            SHIELD.end(shielded)

    def run(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, jax.Array]:
        """Run one step: `(state, metrics, weight)`."""
        latest = self._latest  # read once: another thread may replace it
        if latest and not kwargs and latest.is_like(args) and not jax_compat.is_tracing():
            return self._run(latest.program, args, args, self.spec.returns_state, latest)
        compiled, taken, is_traced, is_returned = self._prepare(args, kwargs)
        if is_traced:
            state, metrics, weight, *_ = compiled(*taken)  # inside a jit or scan of the caller's
            return pytrees.restore(state), metrics, weight
        return self._run(compiled, taken, None if kwargs else args, is_returned, None)

    def _run(
        self,
        compiled: CompiledStep,
        args: tuple,
        given: tuple | None,
        is_returned: bool,
        latest: dispatch_cache.LatestCall | None,
    ) -> tuple[Any, Any, jax.Array]:
        """Run a program on its placed arguments."""
        with self._phase:
            if compiled.arguments is not None:
                self._order_between_processes(compiled.mesh, is_returned)
            in_flight.make_room()
            self._num_calls += 1
            call = StepCall(self.spec, self._num_calls, compiled.called)
            if compiled.arguments is not None:
                call.given = compiled.arguments.checksums(args, self._unknown(args[0], is_returned))
            in_flight.begin_call(call)
            SHIELD.donates(args[0] if self.spec.donate else None)
            try:
                results = compiled(*args, is_returned=is_returned, given=call.given)
                state, metrics, call.weight, call.reports, found = results
            except (RuntimeError, ValueError) as error:
                self._explain(error, compiled, args, call)
                raise
            finally:
                in_flight.end_call()
            call.integer_sums = found.integer_sums
            self._record(compiled, args, given, state, latest)
            in_flight.add(call)
            self._look_at_some_calls(compiled.mesh, args[0], given[2:] if given else ())
        return pytrees.restore(state), metrics, call.weight

    def _explain(
        self, error: Exception, compiled: CompiledStep, args: tuple, call: StepCall
    ) -> None:
        """Raise an error of jdp's for one of JAX's that it explains."""
        if "delete" in str(error):
            placing.require_alive(compiled.spec, args)
        if failed_run.is_failed_run(error):
            raise in_flight.failed(call, pytrees.any_deleted(args[0]), error) from error

    def _record(
        self,
        compiled: CompiledStep,
        args: tuple,
        given: tuple | None,
        state: Any,
        latest: dispatch_cache.LatestCall | None,
    ) -> None:
        """Record how the call lay, for the next one. The arguments are those of `_run`."""
        known = None
        if self.spec.returns_state:
            if latest is not None:
                known = latest.known
                known.is_followed_by(state)
            else:
                self._returned = known = dispatch_cache.KnownState(state, compiled.mesh)
            if compiled.arguments is not None:
                self._leaves[:] = known.leaves
        if latest is None:
            self._latest = None
            if given is not None:
                self._latest = dispatch_cache.record_call(compiled, given, args, state, known)

    def _look_at_some_calls(self, where: Mesh, state: Any, rest: Sequence[Any]) -> None:
        if self._num_calls in _LOOKS_FOR_VIEWS and self.spec.donate:
            placing.log_views(self.spec, where, state)
        if rest and self._num_calls == 2:
            self._copied = [weakref.ref(leaf) for leaf in placing.copied_leaves(where, rest)]
        elif self._copied:
            placing.log_copies(self.spec, where, rest, [leaf() for leaf in self._copied])
            self._copied = []
        if progress.own.is_first_step and self.spec.returns_state:
            with progress.FIRST_STEP:  # others may still compile: as much time as for that
                in_flight.drain()

    def __reduce__(self) -> tuple[type["Step"], tuple[StepSpec]]:
        """Return its options alone: programs and devices are of this process."""
        return Step, (self.spec,)

    def without_donation(self) -> "Step":
        """Return the same step, which does not donate the state that goes in."""
        return Step(dataclasses.replace(self.spec, donate=False))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Trace, prove and lower the step for these arguments: arrays or `ShapeDtypeStruct`s."""
        compiled, args, *_ = self._prepare(args, kwargs)
        return compiled.trace(*args, is_compiled=True).lower()

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Trace and prove the step for these arguments: arrays or `ShapeDtypeStruct`s."""
        return self.trace_on(None, args, kwargs)

    def trace_on(self, where: Mesh | None, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Trace as `trace` does, on a mesh, which a state without arrays does not name."""
        compiled, args, *_ = self._prepare(args, kwargs, where)
        return compiled.trace(*args, is_compiled=True)

    def findings(self, *args: Any, **kwargs: Any) -> TraceFindings:
        """Return the findings of the trace of the step for these arguments."""
        compiled, args, *_ = self._prepare(args, kwargs)
        *_, found = compiled.trace(*args).out_info
        return found

    def _prepare(
        self, args: tuple, kwargs: dict[str, Any], where: Mesh | None = None
    ) -> tuple[CompiledStep, tuple, bool, bool]:
        """Return `(compiled, placed arguments, is_traced, is_returned)`.

        `is_traced`: JAX traces this call. `is_returned`: the state is what the last call of this
        step returned.
        """
        is_traced = jax_compat.is_tracing()
        spec, (given, batch, *rest) = self.bound(args, kwargs)
        state = pytrees.hold(given) if self._holds_others else given
        leaves = jax.tree.leaves(state)
        where = mesh.mesh_of(leaves, spec.axis_name) if where is None else where
        # A state that the last call returned is placed, and no two of its leaves share a buffer.
        is_returned = self._returned is not None and self._returned.are_leaves(leaves)
        is_traced = is_traced or not is_returned and _holds_tracer(leaves)
        if not is_returned:
            placing.require_usable(spec, state)
            held = pytrees.hold(state)
            self._holds_others = held is not state or isinstance(state, pytrees.Held)
            state = placing.place_state(held, where, spec)
            leaves = jax.tree.leaves(state)
        if jax_compat.DELETED_ARRAY_CRASHES:
            placing.require_alive_or_unsorted(spec, [state, batch, *rest])
        try:
            batch = place_batch(batch, where, spec.axis_name)
        except RuntimeError:
            placing.require_alive(spec, [state, batch])
            raise
        except ValueError:
            placing.require_batch(spec, batch, len(rest))
            raise
        rest = [placing.place_rest(spec.argument(i), arg, where) for i, arg in enumerate(rest, 2)]
        # A batch that is split over several ranks is a copy already.
        if spec.donate and (rest or mesh.num_ranks(where, spec.axis_name) == 1):
            batch, *rest = placing.copy_donated([batch, *rest], leaves)
        is_traced = is_traced or _holds_tracer((batch, rest))
        compiled = self._compiled_steps.get((where, is_traced, spec.keywords))
        if compiled is None:
            placing.require_batch(spec, batch, len(rest))  # placed, as an empty one is
            compiled = self._new_compiled(spec, where, given, is_traced)
        return compiled, (state, batch, *rest), is_traced, is_returned

    def _new_compiled(
        self, spec: StepSpec, where: Mesh, state: Any, is_traced: bool
    ) -> CompiledStep:
        fail_fast.hint_at_uncaught()
        floats = parameters.floats_of_equinox(state)
        key = where, is_traced, spec.keywords
        self._compiled_steps[key] = CompiledStep(spec, where, floats, is_traced)
        return self._compiled_steps[key]

    def bound(self, args: tuple, kwargs: dict[str, Any]) -> tuple[StepSpec, tuple]:
        """Return the arguments in order, keyword-only ones last.

        An argument that is left out keeps its default, which is a constant of the program.
        """
        spec = self.spec
        if not kwargs and len(args) in spec.num_positional:
            return spec, args
        try:
            bound = spec.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(self._call_error(error)) from None
        if len(bound.args) < 2:
            raise TypeError(
                f"`{self.__name__}` got {len(args) + len(kwargs)} argument(s), but takes a state "
                "and a batch."
            )
        names = sorted(bound.kwargs)
        keywords = tuple(enumerate(names, len(bound.args)))
        if keywords:
            spec = dataclasses.replace(spec, keywords=keywords)
        return spec, (*bound.args, *(bound.kwargs[name] for name in names))

    def _order_between_processes(self, where: Mesh, is_returned: bool) -> None:
        # Processes match their reductions by the order alone, and a CPU may run steps that do not
        # depend on each other in another order in each process.
        if is_returned and in_flight.latest_spec() in (None, self.spec):
            return
        if where.devices.flat[0].platform == "cpu":
            in_flight.drain()

    def _unknown(self, state: Any, is_returned: bool) -> Sequence[int]:
        """Return the positions of the leaves of a state that no step has returned."""
        known_leaves.keep(self._leaves)
        return () if is_returned else known_leaves.unknown(jax.tree.leaves(state), self._leaves)

    def _call_error(self, error: TypeError) -> str:
        hint = ""
        if next(iter(self.spec.signature.parameters), None) == "self":
            hint = (
                " A decorated method is not bound to its object: decorate the bound one, "
                f"self.{self.__name__} = jdp.train_step(self._{self.__name__}) in __init__."
            )
        elif len(self.spec.signature.parameters) < 2:
            hint = " A step takes a state and a batch: def step(state, batch)."
        elif "too many positional" in str(error):
            state, batch = map(self.spec.argument, range(2))
            hint = (
                f" `{batch}` is one argument, split over the ranks. Call {self.__name__}({state}, "
                f"(x, y)), and begin the step with x, y = {batch}."
            )
        return f"{self.__name__}{self.spec.signature}: {error}.{hint}"


def _holds_tracer(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
