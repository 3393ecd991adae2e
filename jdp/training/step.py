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
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.data.sharding import place_batch
from jdp.distributed import failed_run, in_flight, mesh
from jdp.distributed.checks import arguments, known_leaves
from jdp.distributed.step_call import StepCall
from jdp.reduction import reported, row_weight
from jdp.step_spec import StepSpec
from jdp.training import latest_call, parameters, placing
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
        self._returned: list[weakref.ref] = []  # the leaves of the state that was returned last
        self._latest: latest_call.LatestCall | None = None
        self._num_calls = 0
        self._copied: list[weakref.ref] = []  # large further arguments of the second call
        self._holds_others = False  # whether the state has leaves that are not arrays

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step: `(state, metrics)`, or the metrics of an `eval_step`."""
        handler = SHIELD.begin() if self.spec.donate else None
        try:
            state, metrics, _ = self.run(*args, **kwargs)
            if any(compiled.returns_rows for compiled in self._compiled_steps.values()):
                metrics = reported.unmarked(metrics)
            return (state, metrics) if self.spec.returns_state else metrics
        finally:
            SHIELD.end(handler)

    def run(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, jax.Array]:
        """Run one step: `(state, metrics, weight)`.

        Returns:
          The state, None for an `eval_step`; the metrics, with `jdp.rows` still marked; and the
          weight of the global batch: `[]` float32, its rows where nothing weighs them.
        """
        given = args
        compiled, args, is_traced, is_returned, like = self._prepare(args, kwargs)
        if is_traced:
            state, metrics, weight, *_ = compiled(*args)  # inside a jit or scan of the caller's
            return pytrees.restore(state), metrics, weight
        checksums = None
        with self._phase:
            if not is_returned or in_flight.latest_spec() not in (None, self.spec):
                _order_between_processes(compiled.mesh)
            in_flight.make_room()
            self._num_calls += 1
            if compiled.arguments is not None:
                checksums = compiled.arguments.of(args, self._unknown(args[0], is_returned))
            call = self._call(compiled, checksums)
            in_flight.begin_call(call)
            SHIELD.donates(args[0] if self.spec.donate else None)
            try:
                results = compiled(*args, is_returned=is_returned, given=checksums)
                state, metrics, weight, reports, found = results
            except (RuntimeError, ValueError) as error:
                if "delete" in str(error):
                    placing.require_alive(compiled.spec, args)
                if not failed_run.is_failed_run(error):
                    raise
                raise in_flight.failed(call, pytrees.any_deleted(args[0]), error) from error
            finally:
                in_flight.end_call()
            self._returned[:] = returned = [*map(weakref.ref, jax.tree.leaves(state))]
            if like is not None:
                self._latest = like.after(returned)
            else:
                self._latest = None if kwargs else latest_call.of(compiled, given, args, state)
            in_flight.add(
                call.dispatched(weight, reports, found.integer_sums, compiled.waits_in_xla)
            )
            self._look_at_some_calls(compiled.mesh, args[0], given[2:])
        return pytrees.restore(state), metrics, weight

    def _look_at_some_calls(self, where: Mesh, state: Any, rest: Sequence[Any]) -> None:
        if self.spec.donate and self._num_calls in _LOOKS_FOR_VIEWS:
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
        """Trace as `trace` does, on a mesh, which a state without arrays does not name.

        Args:
          where: the mesh. Default: that of the state.
          args: the arguments.
          kwargs: those by keyword.
        """
        compiled, args, *_ = self._prepare(args, kwargs, where)
        return compiled.trace(*args, is_compiled=True)

    def findings(self, *args: Any, **kwargs: Any) -> TraceFindings:
        """Return the findings of the trace of the step for these arguments."""
        compiled, args, *_ = self._prepare(args, kwargs)
        *_, found = compiled.trace(*args).out_info
        return found

    def _prepare(
        self, args: tuple, kwargs: dict[str, Any], where: Mesh | None = None
    ) -> tuple[CompiledStep, tuple, bool, bool, latest_call.LatestCall | None]:
        """Return `(compiled, placed arguments, is_traced, is_returned, like)`.

        `is_traced`: JAX traces this call. `is_returned`: the state is what the last call of this
        step returned. `like`: the last call, if this one is like it.
        """
        is_traced = jax_compat.is_tracing()
        latest = self._latest  # read once: another thread may replace it
        if latest and not (is_traced or kwargs or where) and latest.is_like(args):
            return latest.program, args, False, self.spec.returns_state, latest
        spec, (given, batch, *rest) = self.bound(args, kwargs)
        state = pytrees.hold(given) if self._holds_others else given
        leaves = jax.tree.leaves(state)
        where = mesh.mesh_of(leaves, spec.axis_name) if where is None else where
        # A state that the last call returned is placed, and no two of its leaves share a buffer.
        is_returned = known_leaves.are(self._returned, leaves)
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
        return compiled, (state, batch, *rest), is_traced, is_returned, None

    def _new_compiled(
        self, spec: StepSpec, where: Mesh, state: Any, is_traced: bool
    ) -> CompiledStep:
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

    def _call(self, compiled: CompiledStep, given: arguments.Given | None) -> StepCall:
        return StepCall(
            spec=self.spec,
            number=self._num_calls,
            arguments=compiled.arguments,
            given=given,
            check=cpu_runtime.check,
            why_invalid=row_weight.why_invalid,
            jaxprs=compiled.jaxprs,
        )

    def _unknown(self, state: Any, is_returned: bool) -> Sequence[int]:
        """Return the positions of the leaves of a state that no step has returned."""
        known_leaves.keep(self._returned)
        return () if is_returned else known_leaves.unknown(jax.tree.leaves(state), self._returned)

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


def _order_between_processes(where: Mesh) -> None:
    # Processes match their reductions by the order alone, and a CPU may run steps that do not
    # depend on each other in another order in each process.
    if where.is_multi_process and where.devices.flat[0].platform == "cpu":
        in_flight.drain()


def _holds_tracer(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
