"""`train_step` and `eval_step`: run a function of one rank on every rank of the mesh."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp import axis, jax_compat, pytrees
from jdp.axis import AxisName
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.data.sharding import place_batch
from jdp.distributed import failed_run, in_flight, mesh, placement
from jdp.distributed.checks import arguments, known_leaves
from jdp.distributed.step_call import StepCall
from jdp.reduction import metrics, row_weight
from jdp.step_spec import StepSpec
from jdp.training.compiled_step import Program
from jdp.worker import progress


def train_step(
    fn: Callable[..., Any] | None = None,
    *,
    axis_name: AxisName = "data",
    weight: Callable[[Any], Any] | None = None,
    donate: bool = True,
) -> Any:
    """Run a training step on every rank of the mesh, each on its own rows of the batch.

    Inside, write plain JAX. Before a step runs for the first time, its traced program is
    proved to leave the same state on every rank, with no gradient reduced twice and no rank
    waiting for another; a program of which that is not true is refused. Several processes also
    compare theirs, with the arrays that they capture and the arguments, before anything is sent or
    donated, and in each later call `rest` and what was changed in the state since the last; a step
    inside a `jax.jit` of your own is proved, and not compared.

    Args:
      fn: `fn(state, batch, *rest) -> (state, metrics)`. `state`: any pytree, the same on every
        rank. `batch`: a tree of arrays, split over ranks on their first dim. `rest`: the same on
        every rank (a key, a temperature, a teacher's parameters). `metrics`: a tree; float
        scalars are averaged over ranks, see also `jdp.sum_over_ranks` and `jdp.rows`.
      axis_name: the data axis of the mesh: a name, or a tuple of names.
      weight: `weight(batch) -> []`, how much this rank's rows count, for instance
        `lambda batch: batch["mask"].sum()`. Gradients, accumulation, metrics and
        `jdp.mean_over_ranks` are then sum(w * x) / sum(w); weight 0 contributes nothing, even NaN.
        Finite and >= 0: a constant that is not is refused, other values are an error soon after.
        A `lax.psum` or `lax.all_gather` that is differentiated is refused: JAX transposes it
        without weights.
      donate: reuse the memory of the state that goes in for the one that comes out.

    Returns:
      `step(state, batch, *rest) -> (state, metrics)`, which takes global batches and returns
      without waiting for the devices. `step.lower(...)` gives the program.

    Raises:
      ValueError: from the first call with new shapes, if the program is not the same training
        on every rank, or another one on another process; if rows do not divide by the ranks; if a
        buffer was donated before.
      RuntimeError: if a step failed while it ran, an earlier one got another `rest` or changed
        state on another process (on every process, naming the leaf), or a weight was negative, NaN
        or infinite (naming the rank).
      TypeError: if the value of an argument is asked for while the step is traced, as `if` does.

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
    return _decorated(fn, axis_name, weight, donate=donate, returns_state=True)


def eval_step(
    fn: Callable[..., Any] | None = None,
    *,
    axis_name: AxisName = "data",
    weight: Callable[[Any], Any] | None = None,
) -> Any:
    """Run an evaluation step on every rank of the mesh, each on its own rows of the batch.

    Args:
      fn: `fn(state, batch, *rest) -> metrics`, as for `train_step`; nothing is donated.
      axis_name: the data axis of the mesh: a name, or a tuple of names.
      weight: `weight(batch) -> []`, how much this rank's rows count.

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
    return _decorated(fn, axis_name, weight, donate=False, returns_state=False)


def _decorated(fn: Any, axis_name: AxisName, weight: Any, **options: Any) -> Any:
    def decorate(fn: Callable[..., Any]) -> Step:
        return Step(StepSpec(fn, axis.names(axis_name), weight, **options))

    if weight is not None and not callable(weight):
        raise TypeError(
            f"weight= must be a function of the batch, got {weight!r}. For example "
            'weight=lambda batch: batch["mask"].sum().'
        )
    return decorate if fn is None else decorate(fn)


class Step:
    """A decorated step: places its arguments, then runs the `Program` of the state's mesh."""

    __name__: str

    def __init__(self, spec: StepSpec):
        functools.update_wrapper(self, spec.fn)
        self.__name__ = spec.name
        self.spec = spec
        self._phase = progress.TRAIN_STEP if spec.returns_state else progress.EVAL_STEP
        self._programs: dict[tuple[Mesh, bool], Program] = {}
        self._returned: list[weakref.ref] = []  # the leaves of the state that was returned last
        self._num_calls = 0
        self._holds_others = False  # whether the state has leaves that are not arrays

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step: `(state, metrics)`, or the metrics of an `eval_step`."""
        state, reported, _ = self.run(*args, **kwargs)
        reported = metrics.unmarked(reported)
        return (state, reported) if self.spec.returns_state else reported

    def run(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, jax.Array]:
        """Run one step: `(state, metrics, weight)`.

        Returns:
          The state, None for an `eval_step`; the metrics, with `jdp.rows` still marked; and the
          weight of the global batch: `[]` float32, its rows where nothing weighs them.
        """
        program, args, is_traced, is_returned = self._prepare(args, kwargs)
        if is_traced:
            state, reported, weight, *_ = program(*args)  # inside a jit or scan of the caller's
            return pytrees.restore(state), reported, weight
        given = None
        with self._phase:
            if not is_returned or in_flight.latest_spec() not in (None, self.spec):
                _order_between_processes(program.mesh)
            in_flight.make_room()
            self._num_calls += 1
            if program.arguments is not None:
                given = program.arguments.of(args, self._unknown(args[0], is_returned))
            call = self._call(program, given)
            in_flight.begin_call(call)
            try:
                returned = program(*args, is_returned=is_returned, given=given)
                state, reported, weight, reports, _ = returned
            except (RuntimeError, ValueError) as error:
                if "delete" in str(error):
                    self._require_alive(*args)
                if not failed_run.is_failed_run(error):
                    raise
                raise in_flight.failed(call, pytrees.any_deleted(args[0]), error) from error
            finally:
                in_flight.end_call()
            self._returned[:] = map(weakref.ref, jax.tree.leaves(state))
            in_flight.add(call._replace(reports=reports, weight=weight))
            if progress.is_first_step() and self.spec.returns_state:
                _wait_for_first_step()
        return pytrees.restore(state), reported, weight

    def without_donation(self) -> "Step":
        """Return the same step, which does not donate the state that goes in."""
        return Step(dataclasses.replace(self.spec, donate=False))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Trace, prove and lower the step for these arguments: arrays or `ShapeDtypeStruct`s."""
        program, args, *_ = self._prepare(args, kwargs)
        return program.trace(*args).lower()

    def _prepare(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Program, tuple, bool, bool]:
        """Return `(program, placed arguments, is_traced, is_returned)`.

        `is_traced`: an argument is a tracer, of a `jit` around this call. `is_returned`: the state
        is what the last call of this step returned.
        """
        try:
            bound = self.spec.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(self._call_error(error)) from None
        bound.apply_defaults()
        if by_keyword := sorted({*kwargs} & {*bound.kwargs}):
            raise TypeError(
                f"`{self.__name__}` takes {by_keyword} by keyword only, but a step gets all "
                "arguments by position: the state, the batch, then those that are the same on "
                "every rank. Remove the `*` from its definition, or bind them with "
                "functools.partial."
            )
        args = bound.args
        if len(args) < 2:
            raise TypeError(
                f"`{self.__name__}` got {len(args)} argument(s), but takes a state and a batch."
            )
        state, batch, *rest = args
        if self._holds_others:
            state = pytrees.hold(state)
        leaves = jax.tree.leaves(state)
        where = mesh.mesh_of(leaves, self.spec.axis_name)
        # A state that the last call returned is placed, and no two of its leaves share a buffer.
        is_returned = known_leaves.are(self._returned, leaves)
        is_traced = not is_returned and _holds_tracer(leaves)
        if not is_returned:
            state = self._admit(state, where)
        if jax_compat.DELETED_ARRAY_CRASHES and pytrees.any_deleted((state, batch, rest)):
            self._require_alive(state, batch, *rest)
        try:
            batch = place_batch(batch, where, self.spec.axis_name)
        except RuntimeError:
            self._require_alive(state, batch)
            raise
        rest = [_place_rest(arg, where) for arg in rest]
        # A batch that is split over several ranks is a copy already.
        if self.spec.donate and (rest or mesh.num_ranks(where, self.spec.axis_name) == 1):
            batch, *rest = _unshared([batch, *rest], jax.tree.leaves(state))
        is_traced = is_traced or _holds_tracer((batch, rest))
        program = self._programs.get((where, is_traced))
        if program is None:
            program = self._programs[where, is_traced] = Program(
                self.spec, where, is_part=is_traced
            )
        return program, (state, batch, *rest), is_traced, is_returned

    def _call(self, program: Program, given: arguments.Given | None) -> StepCall:
        return StepCall(
            spec=self.spec,
            number=self._num_calls,
            arguments=program.arguments,
            given=given,
            check=cpu_runtime.check,
            why_invalid=row_weight.why_invalid,
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
        return f"{self.__name__}{self.spec.signature}: {error}.{hint}"

    def _admit(self, state: Any, where: Mesh) -> Any:
        """Place a state that did not come from this step, and copy what is aliased in it."""
        self._require_alive(state)
        held = pytrees.hold(state)
        self._holds_others = held is not state or isinstance(state, pytrees.Held)
        state = placement.placed(held, self.spec.axis_name, where)
        if not self.spec.donate:
            return state
        leaves, treedef = jax.tree.flatten(state)
        seen: set[Any] = set()
        for i, leaf in enumerate(leaves):
            buffer = _buffer(leaf)
            if buffer in seen:  # Donated twice it would crash JAX 0.10.
                leaves[i] = jnp.copy(leaf)
            seen.add(buffer)
        return jax.tree.unflatten(treedef, leaves)

    def _require_alive(self, *args: Any) -> None:
        for i, arg in enumerate(args):
            pytrees.require_alive(self.spec.argument(i), arg, _GO_ON)


_GO_ON = (
    "Go on with the state that the step returned, give a copy (jax.tree.map(jnp.copy, ...)), or "
    "decorate with donate=False."
)


def _order_between_processes(where: Mesh) -> None:
    # Processes match their reductions by the order alone, and a CPU may run steps that do not
    # depend on each other in another order in each process.
    if where.is_multi_process and where.devices.flat[0].platform == "cpu":
        in_flight.drain()


def _wait_for_first_step() -> None:
    # The other processes may still compile, so this wait is allowed as much time as compiling.
    with progress.FIRST_STEP:
        in_flight.drain()


def _holds_tracer(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _place_rest(arg: Any, where: Mesh) -> Any:
    # An array committed to one device would not go together with the mesh; JAX itself copies
    # everything else to where it is needed.
    def place(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf.copy()  # the caller may write into it while the step runs
        if isinstance(leaf, str):
            raise TypeError(
                f"a further argument of a step holds the text {leaf!r}, but a compiled program "
                "takes only arrays and numbers. Close over it, in a decorated function for each "
                "value."
            )
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            return leaf
        if len(leaf.sharding.device_set) == 1 and leaf.committed and where.size > 1:
            if where.is_multi_process:  # where device_put would have all processes compare it
                return placement.copy_to(leaf, NamedSharding(where, PartitionSpec()))
            return jax.device_put(leaf, NamedSharding(where, PartitionSpec()))
        return leaf

    return jax.tree.map(place, arg)


def _unshared(args: list[Any], donated: list[Any]) -> list[Any]:
    """Copy the leaves of other arguments that are leaves of the state, which is donated."""
    ids = {id(leaf) for leaf in donated if isinstance(leaf, jax.Array)}
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if id(leaf) in ids else leaf, args)


def _buffer(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or not leaf.size:
        return id(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        leaf = jax.random.key_data(leaf)
    return leaf.addressable_shards[0].data.unsafe_buffer_pointer()
