"""`Step`: a decorated function, and the work around each call of it."""

# `signal` makes enums, in more time than all else here takes.
import _signal  # pyrefly: ignore[missing-import]
import dataclasses
import functools
import operator
import re
import signal
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jdp import axis, jax_compat, pytrees
from jdp.analysis.diagnostics import TraceFindings
from jdp.axis import AxisName
from jdp.data.sharding import place_batch
from jdp.distributed import fail_fast, in_flight, mesh
from jdp.distributed.checks import state as state_check
from jdp.distributed.in_flight import StepCall
from jdp.reduction import step_metrics
from jdp.step_spec import StepSpec
from jdp.training import parameters, placing
from jdp.training.communication_plan import PlannedCollective, planned
from jdp.training.compiled_step import CompiledStep
from jdp.validation import int_at_least
from jdp.worker import progress

_flatten = jax.tree_util.tree_flatten  # without the frame of `jax.tree.flatten`


class KnownState:
    """A state that a step takes as it is, by weak references to its leaves.

    Containers may be new, as after `replace`, and a leaf in a dict may be exchanged, so leaves are
    compared. If another thread calls the step, each may find the other's state, and prepare its
    own. `leaves` is None where JAX refuses what is wrong with a state.

    Args:
      is_callers: whether the caller may donate it to another step.
    """

    __slots__ = ("_may_be_deleted", "leaves")

    def __init__(self, state: Any, *, is_callers: bool = False) -> None:
        # The shards of a new state take longer to make than a step to call.
        self._may_be_deleted = is_callers or jax_compat.DELETED_ARRAY_CRASHES
        self.leaves: list[weakref.ref] | None = None
        self.is_followed_by(state)

    def is_followed_by(self, state: Any) -> None:
        """Record that the step has returned another state."""
        self.leaves = [*map(weakref.ref, jax.tree.leaves(state))]

    def are_leaves(self, leaves: Sequence[Any]) -> bool:
        """Whether these are the leaves of this state, all alive."""
        if self.leaves is None or not state_check.are_known(self.leaves, leaves):
            return False
        return not (self._may_be_deleted and jax_compat.any_deleted(leaves))


class LatestCall:
    """A call of a step whose arguments needed no placing; `known` is the state of the next call."""

    __slots__ = ("_is_alone", "_places", "_tree", "known", "program")

    def __init__(self, program: Any, known: KnownState, rest: tuple) -> None:
        self.program, self.known, spec = program, known, program.spec
        # On one device JAX refuses deleted leaves, and aliased ones if it donates them, and deletes
        # none. On several it may delete shards, and asks the first one alone.
        is_refused = program.hits is not None and not jax_compat.DELETED_ARRAY_CRASHES
        is_one = program.mesh.size == 1 and (spec.donate or not spec.returns_state)
        self._is_alone = is_refused and is_one
        leaves, self._tree = jax.tree.flatten(rest)
        self._places = [_place(leaf) for leaf in leaves]

    def is_like(self, args: tuple) -> bool:
        """Whether another call needs no preparation, unless JAX finds other kinds of arrays."""
        if not args:
            return False
        if self._is_alone and len(args) == 2:
            return True
        leaves = _flatten(args[0])[0]
        if not (self._is_alone or self.known.are_leaves(leaves)):
            return False
        if not _are_apart(leaves, args):
            return False
        # JAX compares shardings, too: others miss its cache.
        return self.program.hits is not None or self._lies_as_this(args[1:])

    def is_followed_by(self, state: Any) -> None:
        """Record the returned state."""
        if self._is_alone:
            self.known.leaves = None
        else:
            self.known.is_followed_by(state)

    def _lies_as_this(self, rest: tuple) -> bool:
        leaves, tree = _flatten(rest)
        if tree != self._tree:
            return False
        for leaf, (kind, shape, sharding, committed) in zip(leaves, self._places, strict=True):
            if not (
                type(leaf) is kind
                and leaf.shape == shape
                and (leaf.sharding is sharding or leaf.sharding == sharding)
                and leaf.committed == committed
            ):
                return False
        return True


def record_call(
    program: Any, given: tuple, taken: tuple, returned: Any, known: KnownState | None
) -> LatestCall | None:
    """Return the record of a call; None if an argument had to be placed."""
    placed = slice(0 if returned is None else 1, None)  # a returned state is in place
    leaves = jax.tree.leaves(given[placed])
    if not _are_taken(leaves, jax.tree.leaves(taken[placed])):
        return None
    state = given[0] if returned is None else returned
    if all(getattr(leaf.sharding, "mesh", None) != program.mesh for leaf in jax.tree.leaves(state)):
        return None
    known = KnownState(state, is_callers=True) if known is None else known
    return LatestCall(program, known, given[1:])


def _are_apart(state: Sequence[Any], args: tuple) -> bool:
    """Whether further arguments are alive, no leaves of the state and no arrays of the host."""
    try:
        batch, *rest = args[1:]
        leaves = _flatten((batch, rest))[0]
        asked = leaves if jax_compat.DELETED_ARRAY_CRASHES else _flatten(rest)[0]
        if asked and jax_compat.any_deleted(asked):
            return False
    except (AttributeError, TypeError, ValueError):  # not arrays, or with an error of their own
        return False
    if not {*map(id, leaves)}.isdisjoint(map(id, state)):
        return False
    return not any(isinstance(leaf, np.ndarray) for leaf in leaves)  # the caller may write into it


def _are_taken(given: Sequence[Any], taken: Sequence[Any]) -> bool:
    is_same = len(given) == len(taken) and all(map(operator.is_, given, taken))
    return is_same and all(isinstance(leaf, jax.Array) for leaf in given)


def _place(array: Any) -> tuple:
    return type(array), array.shape, array.sharding, array.committed


# Seconds after which the caller has stored the returned state.
_DELAY_S = 0.02
_SIGINT = int(signal.SIGINT)
_MAIN = threading.main_thread().ident or 0
_getsignal, _get_ident = _signal.getsignal, threading.get_ident


class Shield:
    """Delays an interrupt of a call until it has returned: the donated state would be lost."""

    def __init__(self) -> None:
        self._handler: Any = None  # the author's
        self._donated: Any = None
        self._is_due = False
        self._shielding = self._handle  # one object, so that `is` compares it

    # An interrupt between any two lines must leave a handler that works.
    def begin(self, shielded: list[Any]) -> None:
        """Handle interrupts until `end` with the same empty list."""
        handler = _getsignal(_SIGINT)
        # In another step's trace, without a handler, or in another thread.
        if handler is self._shielding or not callable(handler) or _get_ident() != _MAIN:
            return
        if self._is_due:
            self._interrupt()
        self._handler = handler
        shielded.append(handler)  # first: an interrupt may raise once the handler is set
        _signal.signal(_SIGINT, self._shielding)

    def end(self, shielded: list[Any]) -> None:
        """Leave interrupts to the author's handler again."""
        if shielded:
            self._donated = None
            _signal.signal(_SIGINT, shielded[0])
            if self._is_due:
                threading.Timer(_DELAY_S, self._interrupt).start()

    def donates(self, state: Any) -> None:
        """Record donated arrays, if an interrupt would lose them."""
        if _get_ident() == _MAIN:
            self._donated = state

    def _handle(self, number: int, frame: Any) -> None:
        if pytrees.any_deleted(self._donated):
            self._is_due = True
        else:
            self._handler(number, frame)

    def _interrupt(self) -> None:
        if self._is_due:  # the timer and the next call may both come here
            self._is_due = False
            signal.pthread_kill(_MAIN, signal.SIGINT)


SHIELD = Shield()


# What JAX says before it runs, of arrays that are donated twice, donated and read, or gone, and of
# keys of a dict that it cannot sort.
_UNPREPARED = re.compile("INVALID_ARGUMENT.*donate|has been deleted|Comparator raised")

# Calls after which to examine the input state, which takes longer than a step.
_LOOKS_FOR_VIEWS = frozenset([2, 3, 10, 30, 100, 300, 1000, 10_000, 100_000])


class Step:
    """A decorated step: places its arguments, then runs a `CompiledStep`."""

    __name__: str

    def __init__(self, spec: StepSpec):
        functools.update_wrapper(self, spec.fn)
        self.__name__ = spec.name
        self.spec = spec
        self._phase = progress.TRAIN_STEP if spec.returns_state else progress.EVAL_STEP
        self._compiled_steps: dict[tuple, CompiledStep] = {}
        self._returned: KnownState | None = None
        self._leaves: list[weakref.ref] = []  # of it, over several processes
        self._latest: LatestCall | None = None
        self._num_calls = 0
        self._copied: list[weakref.ref] = []  # large arguments of the second call
        self._holds_others = False  # the state has leaves that are not arrays

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
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

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind a method of a pytree, as of a `flax.struct.PyTreeNode`, to its object: the state."""
        is_state = instance is not None and not jax.tree_util.all_leaves([instance])
        return types.MethodType(self, instance) if is_state else self

    def run(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, jax.Array]:
        """Run one step: `(state, metrics, weight)`."""
        latest = self._latest  # once: another thread may replace it
        if latest and not kwargs and latest.is_like(args) and not jax_compat.is_tracing():
            try:
                return self._run(latest.program, args, args, self.spec.returns_state, latest)
            except jax_compat.CacheMiss:
                self._num_calls -= 1
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
        latest: LatestCall | None,
    ) -> tuple[Any, Any, jax.Array]:
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
                if latest is not None and compiled.hits is not None:
                    results = compiled.hits(*args)
                else:
                    results = compiled(*args, is_returned=is_returned, given=call.given)
                state, metrics, call.weight, call.reports, found = results
            except jax_compat.CacheMiss:
                raise
            except Exception as error:
                if latest is not None and _UNPREPARED.search(str(error)):
                    raise jax_compat.CacheMiss from None
                compiled.clear_fast_path()
                if isinstance(error, RuntimeError | ValueError):
                    self._explain(error, compiled, args, call)
                raise
            finally:
                in_flight.end_call()
            call.integer_sums, call.skips = found.integer_sums, found.skips
            self._record(compiled, args, given, state, latest)
            in_flight.add(call)
            self._look_at_some_calls(compiled.mesh, args[0], given[2:] if given else ())
        return pytrees.restore(state), metrics, call.weight

    def _explain(
        self, error: Exception, compiled: CompiledStep, args: tuple, call: StepCall
    ) -> None:
        if "delete" in str(error):
            placing.require_alive(compiled.spec, args)
        if in_flight.is_failed_run(error):
            raise in_flight.failed(call, pytrees.any_deleted(args[0]), error) from error

    def _record(
        self,
        compiled: CompiledStep,
        args: tuple,
        given: tuple | None,
        state: Any,
        latest: LatestCall | None,
    ) -> None:
        """Record a call for the next one."""
        known = None
        if self.spec.returns_state:
            if latest is not None:
                known = latest.known
                latest.is_followed_by(state)
            else:
                self._returned = known = KnownState(state)
            if compiled.arguments is not None:
                self._leaves[:] = known.leaves or ()
        if latest is None:
            self._latest = None
            if given is not None:
                self._latest = record_call(compiled, given, args, state, known)

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
                in_flight.settle()  # an error now would lose the new state

    def __reduce__(self) -> tuple[type["Step"], tuple[StepSpec]]:
        return Step, (self.spec,)

    def without_donation(self) -> "Step":
        """Return the same step without donation."""
        return Step(dataclasses.replace(self.spec, donate=False))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Trace, prove and lower the step for arrays or `ShapeDtypeStruct`s."""
        compiled, args, *_ = self._prepare(args, kwargs)
        return compiled.trace(*args, is_compiled=True).lower()

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Trace and prove the step for arrays or `ShapeDtypeStruct`s."""
        return self.trace_on(None, args, kwargs)

    def trace_on(self, where: Mesh | None, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Trace on a mesh, which a state without arrays does not determine."""
        compiled, args, *_ = self._prepare(args, kwargs, where)
        return compiled.trace(*args, is_compiled=True)

    def communication_plan(self, *args: Any, **kwargs: Any) -> tuple[PlannedCollective, ...]:
        """Return the collectives that the step asks for, without compiling or running it.

        `jdp.explain` shows what the compiler makes of them, and their times.

        Args:
          *args: of the step: a state, a global batch and others, arrays or `ShapeDtypeStruct`s.
          **kwargs: keyword arguments of the step.

        Returns:
          For each collective its kind, algorithm, arrays, bytes, dtype and line, in program order.

        Raises:
          ValueError: as from the first call, if the step is refused.

        >>> import jax, jax.numpy as jnp, optax, jdp
        >>> mesh = jdp.init(cpu_ranks=2)
        >>> tx = jdp.replicated(optax.sgd(0.1), all_reduce=jdp.collectives.xla)
        >>> state = jdp.TrainState.create({"w": jnp.zeros((8, 2))}, tx)
        >>> @jdp.train_step
        ... def step(state, batch):
        ...     grads = jax.grad(lambda p: jnp.mean((batch @ p["w"]) ** 2))(state.params)
        ...     return state.apply_gradients(grads), {}
        >>> plan = step.communication_plan(state, jnp.ones((4, 8)))
        >>> [(each.kind, each.num_bytes, each.leaves[0].path) for each in plan]
        [('all-reduce', 64, "grads['w']")]
        """
        spec, (state, *rest) = self.bound(args, kwargs)
        given = (pytrees.hold(state), *rest)
        names = [path for i, arg in enumerate(given) for path in spec.paths(i, arg)]
        return tuple(planned(self.trace(*args, **kwargs).jaxpr, names).collectives)

    def findings(self, *args: Any, **kwargs: Any) -> TraceFindings:
        """Return the findings of the step's trace."""
        compiled, args, *_ = self._prepare(args, kwargs)
        *_, found = compiled.trace(*args).out_info
        return found

    def _prepare(
        self, args: tuple, kwargs: dict[str, Any], where: Mesh | None = None
    ) -> tuple[CompiledStep, tuple, bool, bool]:
        """Return `(compiled, placed arguments, is_traced, is_returned)`.

        `is_traced`: JAX traces this call. `is_returned`: this step's last call returned the state.
        """
        is_traced = jax_compat.is_tracing()
        spec, (given, batch, *rest) = self.bound(args, kwargs)
        if is_traced and {*spec.axis_name} & {*axis.enclosing_mesh().manual_axes}:
            raise TypeError(
                f"`{spec.name}` is called on a rank, by another step or in a shard_map, and would "
                "split the rows again. Call an undecorated function with its body."
            )
        state = pytrees.hold(given) if self._holds_others else given
        leaves = jax.tree.leaves(state)
        where = mesh.mesh_of(leaves, spec.axis_name) if where is None else where
        # Such a state is placed, and no two of its leaves share a buffer.
        is_returned = self._returned is not None and self._returned.are_leaves(leaves)
        is_traced = is_traced or not is_returned and _holds_tracer(leaves)
        if not is_returned:
            placing.require_usable(spec, state)
            held = pytrees.hold(state)
            self._holds_others = held is not state or isinstance(state, pytrees.Held)
            state = placing.place_state(held, where, spec)
            leaves = jax.tree.leaves(state)
        placing.require_alive_or_unsorted(spec, [(), batch, *rest])
        try:
            batch = place_batch(batch, where, spec.axis_name, spec.virtual_ranks)
        except ValueError:
            placing.require_batch(spec, batch, len(rest))
            raise
        rest = [placing.place_rest(spec.argument(i), arg, where) for i, arg in enumerate(rest, 2)]
        if spec.donate:
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
        self._compiled_steps[key] = compiled = CompiledStep(spec, where, floats, is_traced)
        compiled.is_prepared = functools.partial(self._is_prepared, compiled)
        return compiled

    def _is_prepared(self, compiled: CompiledStep, args: tuple) -> bool:
        """Whether a program takes these arguments as they are."""
        prepared, taken, is_traced, _ = self._prepare(args, {})
        leaves, taken_leaves = jax.tree.leaves(args), jax.tree.leaves(taken)
        return prepared is compiled and not is_traced and _are_taken(leaves, taken_leaves)

    def bound(self, args: tuple, kwargs: dict[str, Any]) -> tuple[StepSpec, tuple]:
        """Return the arguments in order, keyword-only ones last; omitted ones are defaults."""
        spec = self.spec
        if not kwargs and len(args) in spec.num_positional:
            return spec, args
        try:
            bound = spec.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(self._call_error(error)) from None
        if len(bound.args) < 2:
            raise TypeError(
                f"`{self.__name__}` needs 2 arguments, a state and a batch; got "
                f"{len(args) + len(kwargs)}."
            )
        names = sorted(bound.kwargs)
        keywords = tuple(enumerate(names, len(bound.args)))
        if keywords:
            spec = dataclasses.replace(spec, keywords=keywords)
        return spec, (*bound.args, *(bound.kwargs[name] for name in names))

    def _order_between_processes(self, where: Mesh, is_returned: bool) -> None:
        # Processes match reductions only by order, and a CPU may reorder independent steps.
        if is_returned and in_flight.latest_spec() in (None, self.spec):
            return
        if where.devices.flat[0].platform == "cpu":
            in_flight.drain()

    def _unknown(self, state: Any, is_returned: bool) -> Sequence[int]:
        """Return the indices of leaves that no step has returned."""
        state_check.keep_known(self._leaves)
        return (
            () if is_returned else state_check.unknown_leaves(jax.tree.leaves(state), self._leaves)
        )

    def _call_error(self, error: TypeError) -> str:
        hint = ""
        if next(iter(self.spec.signature.parameters), None) == "self":
            hint = (
                " Only a method of a pytree has its object as the state. Decorate the bound method "
                f"of another: self.{self.__name__} = jdp.train_step(self._{self.__name__}) in "
                "__init__."
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


def train_step(
    fn: Callable[..., Any] | None = None,
    *,
    axis_name: AxisName = "data",
    weight: Callable[[Any], Any] | None = None,
    donate: bool = True,
    virtual_ranks: int | None = None,
) -> Any:
    """Run a training step on every rank of the mesh, each on its own rows of the batch.

    Inside, write plain JAX. Before a step first runs, jdp proves three facts of its traced program:
    it leaves the same state on every rank, reduces no gradient twice, and lets no rank wait for
    another forever. jdp refuses any other program. Several processes also compare their programs,
    captured arrays and arguments before they communicate or donate, and in each later call `rest`
    and changed state. A step inside your own `jax.jit` is proved, and not compared.

    Args:
      fn: `fn(state, batch, *rest) -> (state, metrics)`. `state`: any pytree, the same on every
        rank; of a method, its object. `batch`: a tree of arrays, sharded over ranks on their first
        dim. `rest`: the same on every rank (a key, a temperature, a teacher's parameters), by
        position or keyword; an omitted one keeps its default, as a part of the program. `metrics`:
        a tree; float scalars are averaged over ranks, see also `jdp.sum_over_ranks` and `jdp.rows`.
      axis_name: the data axis of the mesh: a name, or a tuple of names.
      weight: `weight(batch) -> []`, how much this rank's rows count, for instance `lambda batch:
        batch["mask"].sum()`. Gradients, accumulation, metrics and `jdp.mean_over_ranks` are then
        sum(w * x) / sum(w); weight 0 contributes 0, even with NaN. Finite and >= 0: an invalid
        constant is refused, other invalid values are an error soon after. A differentiated
        `lax.psum` or `lax.all_gather` is refused: JAX transposes it without weights.
      virtual_ranks: trace the step for so many ranks, >= 1, and run it on at most as many, with
        equal bits of state and metrics on any number of them (CPUs). Rows of the batch, keys,
        weights and statistics belong to virtual ranks. `jdp.sharded` needs ranks that divide them.
      donate: reuse the memory of the input state for the returned one. Ctrl-C is then delayed until
        the call has returned the new state.

    Returns:
      `step(state, batch, *rest) -> (state, metrics)`, which takes global batches and returns
      without waiting for the devices. `step.lower(...)` gives the program.

    Raises:
      ValueError: from the first call with new shapes, if the program is not the same training on
        every rank, or differs between processes; if rows do not divide by the ranks; if a buffer
        was donated before.
      RuntimeError: a step failed while it ran; an earlier one got other `rest` or changed state on
        another process (on every process, naming the leaf); or a weight was negative, NaN or
        infinite (naming the rank).
      TypeError: the value of an argument is needed while the step is traced, as by `if`.

    >>> import jax, jax.numpy as jnp, optax, jdp
    >>> mesh = jdp.init(cpu_ranks=2)
    >>> state = jdp.TrainState.create({"w": jnp.zeros(())}, jdp.replicated(optax.sgd(0.1)))
    >>> @jdp.train_step
    ... def step(state, batch):
    ...     loss_fn = lambda params: jnp.mean((params["w"] - batch) ** 2)
    ...     loss, grads = jax.value_and_grad(loss_fn)(state.params)
    ...     return state.apply_gradients(grads), {"loss": loss}
    >>> state, metrics = step(state, jnp.array([1.0, 2.0, 3.0, 6.0]))
    >>> float(state.params["w"]), float(metrics["loss"])
    (0.6000000238418579, 12.5)
    """
    options = {"num_virtual": virtual_ranks, "donate": donate, "returns_state": True}
    return _decorated(fn, axis_name, weight, **options)


def eval_step(
    fn: Callable[..., Any] | None = None,
    *,
    axis_name: AxisName = "data",
    weight: Callable[[Any], Any] | None = None,
    virtual_ranks: int | None = None,
) -> Any:
    """Run an evaluation step on every rank of the mesh, each on its own rows of the batch.

    Args:
      fn: `fn(state, batch, *rest) -> metrics`, as for `train_step`, without donation.
      axis_name: the data axis of the mesh: a name, or a tuple of names.
      weight: `weight(batch) -> []`, how much this rank's rows count.
      virtual_ranks: as for `train_step`.

    Returns:
      `step(state, batch, *rest) -> metrics`; `jdp.evaluate` runs it over a whole set.

    Raises:
      ValueError: as from `train_step`.

    >>> import jax.numpy as jnp, jdp
    >>> mesh = jdp.init(cpu_ranks=2)
    >>> @jdp.eval_step
    ... def measure(params, batch):
    ...     return {"mean": batch.mean() * params, "doubled": jdp.rows(2 * batch)}
    >>> metrics = measure(jnp.float32(10.0), jnp.arange(4.0))
    >>> float(metrics["mean"]), metrics["doubled"].tolist()
    (15.0, [0.0, 2.0, 4.0, 6.0])
    """
    options = {"num_virtual": virtual_ranks, "donate": False, "returns_state": False}
    return _decorated(fn, axis_name, weight, **options)


def require_step(
    tool: str,
    step: Any,
    decorators: Sequence[str] = ("jdp.train_step", "jdp.eval_step"),
    why: str = "Only a decorated function runs on ranks.",
) -> None:
    """Refuse what is not decorated with one of `decorators`, for a tool that takes a step."""
    method = getattr(step, "__func__", None)
    if isinstance(method, Step):
        name = f"{type(step.__self__).__name__}.{method.spec.name}"
        raise TypeError(
            f"{tool} got the method of an object, which holds a step and its state. Pass both, the "
            f"state as an argument: {name}, then the object."
        )
    if not isinstance(step, Step) or step.spec.decorator not in decorators:
        raise TypeError(
            f"{tool} got {getattr(step, '__name__', step)!r}, which is not decorated with "
            f"{' or '.join(decorators)}. {why} Write @{decorators[0]} above its definition."
        )


def _decorated(
    fn: Any, axis_name: AxisName, weight: Any, *, num_virtual: int | None, **options: Any
) -> Any:
    if num_virtual is not None:
        options["virtual_ranks"] = int_at_least("virtual_ranks", num_virtual, least=1)
        if len(axis.names(axis_name)) > 1:
            raise ValueError(
                f"virtual_ranks= takes one data axis, got axis_name={axis_name!r}. Make a mesh "
                'with one: mesh = jdp.init(), and axis_name="data".'
            )

    def decorate(fn: Callable[..., Any]) -> Step:
        return Step(StepSpec(fn, axis.names(axis_name), weight, **options))

    if weight is not None and not callable(weight):
        raise TypeError(
            f"weight= must be a function of the batch, got {weight!r}. For example weight=lambda "
            'batch: batch["mask"].sum().'
        )
    if fn is None:
        return decorate
    if isinstance(fn, Step):
        raise TypeError(
            f"`{fn.__name__}` is already decorated with jdp.train_step or jdp.eval_step. Remove "
            "one of the decorators; to call another step, call its undecorated function."
        )
    if not callable(fn):
        raise TypeError(
            f"the decorator got {fn!r}, which is not a function. Write @jdp.train_step above def "
            'step(state, batch); pass options by name, as in @jdp.train_step(axis_name="data").'
        )
    return decorate(fn)
