"""One step function on one mesh: traced once for each shape, proved, then run."""

import contextlib
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp import axis, jax_compat, pytrees, rank_state
from jdp.analysis import step_refusals, traced
from jdp.collectives import call_order
from jdp.collectives.xla import combine_options
from jdp.data.padding import find_mask
from jdp.distributed.checks import arguments, checksums, startup
from jdp.distributed.in_flight import RankReports
from jdp.reduction import metrics, step_context
from jdp.reduction.overlap import wait_order
from jdp.reduction.overlap.ready_order import order_of_gradients
from jdp.reduction.scanned_layers import late_choices
from jdp.training import outer_gradient, unknown_value
from jdp.worker import progress


class Program:
    """A step over `mesh`, which runs only what `step_refusals` has accepted.

    Args:
      fn: `fn(state, batch, *rest) -> (state, metrics)`; without `returns_state` `-> metrics`.
      mesh: where it runs.
      axis_name: axes of the mesh that split the batch; further axes are left to the compiler.
      weight_fn: weighs a rank's rows, or None.
      returns_state: whether a new state comes back.
      donate: whether the state's buffers are reused.
      told: warnings that the author has had for the step; new ones are added.
      is_part: whether it is traced into a larger program of the author's; that one is not
        compared between processes.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        axis_name: tuple[str, ...],
        *,
        weight_fn: Callable[[Any], Any] | None,
        returns_state: bool,
        donate: bool,
        told: set[str] | None = None,
        is_part: bool = False,
    ):
        self.mesh = mesh
        self._fn = fn
        self._name = getattr(fn, "__name__", "step")  # functools.partial has none
        self._axis_name = axis_name
        self._weight_fn = weight_fn
        self._returns_state = returns_state
        self._donate = donate
        self._told = set() if told is None else told
        self._why_xla = call_order.PART_OF_ANOTHER if is_part else None
        self._is_part = is_part
        self._series = call_order.next_series(self._name) if is_part else ""
        self._on_mesh = self._new_on_mesh()
        self._jitted = self._new_jit()
        self._is_tuned = False
        # While a step is traced: what goes in, as it is outside, and what was found to leave.
        self._args: tuple = ()
        self._is_compiling = False
        self._outputs: list[traced.Output] = []
        self._marked: frozenset[str] = frozenset()
        self._split: frozenset[str] = frozenset()
        self._weighed: frozenset[str] = frozenset()
        self._gradient_bytes = 0
        # Of a program of the author's, jdp does not see when it runs.
        is_compared = mesh.is_multi_process and not is_part
        self._first_runs = self.arguments = None
        if is_compared:
            self._first_runs = startup.FirstRuns(mesh, self._name)
            self.arguments = arguments.Arguments(mesh, axis_name, self._argument)

    def __call__(
        self, *args: Any, follows: bool = False, given: arguments.Given | None = None
    ) -> Any:
        """Return `(state, metrics, weight, reports)`: rows still marked, weight summed over ranks.

        Args:
          *args: of the step.
          follows: whether the state is what the last call returned.
          given: on a mesh of several processes, what `arguments.of` made of `args`.
        """
        self._args = args
        try:
            if self._first_runs is None or self.arguments is None or given is None:
                return self._run(*args)
            first, args = (
                functools.partial(self.arguments.require_equal, given),
                (*args, given.checksums),
            )
            return self._first_runs.run(self._run, self._traced, args, follows=follows, first=first)
        finally:
            self._end_call()

    def trace(self, *args: Any) -> Any:
        """Trace for the shapes of `args` and prove that every rank ends with the same state."""
        self._args = args
        given = () if self.arguments is None else (self.arguments.zeros(args),)
        try:
            return self._traced(*args, *given)
        finally:
            self._end_call()

    def _run(self, *args: Any) -> Any:
        if not self._is_tuned:
            self._tune()
        return self._jitted(*args)

    def _traced(self, *args: Any) -> Any:
        if not self._is_tuned:
            self._tune()
        return self._jitted.trace(*args)

    def _end_call(self) -> None:
        self._args = ()
        if self._is_compiling:
            self._is_compiling = False
            progress.compiling_ends()

    def _tune(self) -> None:
        """Tell XLA how to merge what it reduces: of the first shapes, which may not be the last."""
        self._is_tuned = True
        if self._is_part or self.mesh.devices.flat[0].platform != "gpu":
            return
        self._jitted.trace(*self._args)  # of the same function, so that JAX traces it once
        self._jitted = self._new_jit(combine_options(self._gradient_bytes))

    def _new_jit(self, compiler_options: dict[str, int] | None = None) -> Any:
        donated = 0 if self._donate else ()
        return jax.jit(self._on_mesh, donate_argnums=donated, compiler_options=compiler_options)

    def _new_on_mesh(self) -> Callable[..., Any]:
        def on_mesh(*args: Any) -> Any:
            if self._first_runs is not None:
                self._first_runs.on_trace()
            # Only a call that traces comes here, and it then compiles.
            if not self._is_compiling:
                self._is_compiling = True
                progress.compiling_begins()
            # Proved while it is traced, so that JAX never caches a program that was refused; in a
            # jit of its own, which has a jaxpr before the outer trace ends.
            inputs = _own_beside_batch(*args)
            mapped = self._new_mapped(len(args), self._why_xla)
            jaxpr = mapped.trace(*inputs).jaxpr
            proved = self._prove(jaxpr, args)
            unordered = call_order.why_unordered(jaxpr)
            if proved.gradients is not None or self._split or unordered:
                # What is sent, and in which order, shows in the program alone.
                ready = order_of_gradients(jaxpr) if self._split else None
                why_xla = self._why_xla or unordered
                mapped = self._new_mapped(len(args), why_xla, uniform=proved.gradients, ready=ready)
                jaxpr = mapped.trace(*inputs).jaxpr
                is_other = None in late_choices(jaxpr)
                again = step_refusals.proved if is_other else step_refusals.check
                proved = again(jaxpr, self._describe(args))
                call_order.require(jaxpr)
            same, split = mapped(*inputs)
            reported = metrics.with_own(same.metrics, same.own_metrics, proved.own_metrics)
            reported = pytrees.put_nodes(reported, split.rows)
            state = pytrees.hold(pytrees.put_nodes(pytrees.restore(same.state), split.own))
            if self._weighed:
                state, reported = outer_gradient.refuse((state, reported), self._name)
            return (
                self._keep_layout(args[0], state),
                reported,
                same.weight,
                split.reports,
            )

        on_mesh.__name__ = on_mesh.__qualname__ = self._name
        return on_mesh

    def _prove(self, jaxpr: Any, args: tuple) -> step_refusals.Proved:
        """Check the program, and those of other platforms and of more ranks, for one verdict."""
        traced, choices = self._describe(args), late_choices(jaxpr)
        if not choices:
            return step_refusals.check(jaxpr, traced)
        # None: layers that reduce late on more ranks do not on this one, which proves nothing.
        here = None if None in choices else next(iter(choices))
        programs = {here: jaxpr}
        proved = {}
        for late in (True,) if choices == {None} else (False, True):  # in this order everywhere,
            if late not in programs:  # for the same text
                mapped = self._new_mapped(len(args), call_order.PART_OF_ANOTHER, late=late)
                programs[late] = mapped.trace(*_own_beside_batch(*args)).jaxpr
            proved[late] = step_refusals.check(programs[late], traced)
        return proved[here] if here in proved else step_refusals.proved(jaxpr, traced)

    def _new_mapped(self, num_args: int, why_xla: str | None = None, **found: Any) -> Any:
        on_rank = functools.partial(self._on_rank, why_xla, found)
        specs = [P(), P(self._axis_name), *(P() for _ in range(num_args - 2))]
        if self.arguments is not None:
            specs[-1] = self.arguments.spec
        return jax.jit(
            jax.shard_map(
                wait_order.update_between(on_rank) if found.get("ready") else on_rank,
                mesh=self.mesh,
                in_specs=tuple(specs),
                out_specs=_Leaving(P(), P(self._axis_name)),
                axis_names=set(self._axis_name),
                check_vma=False,  # The analysis proves what JAX's types get wrong here.
            ),
            inline=jax_compat.INLINE_EARLY,
        )

    def _on_rank(
        self, why_xla: str | None, found: dict[str, Any], state: Any, split: "_Split", *rest: Any
    ) -> "_Leaving":
        batch, own = split
        state = pytrees.put_nodes(pytrees.restore(state), own)
        given: Any = ()
        if self.arguments is not None:
            rest, given = rest[:-1], rest[-1]
        entered = step_context.entered(
            self._axis_name, batch, self._weight_fn, mesh=self.mesh, **found
        )
        order = call_order.entered(why_not=why_xla, series=self._series)
        with self._explaining(state), order, entered as step:
            new_state, reported = self._pair(self._fn(state, batch, *rest))
            reported, rows = metrics.take_rows(reported)
            metrics.require_numbers(reported)
            raw = metrics.float_scalars(reported)
            if self.arguments is None:
                reported, differs = metrics.averaged(reported, self._axis_name), None
            else:
                pieces = checksums.pieces(rest, given)
                reported, sums = metrics.averaged_and_summed(reported, self._axis_name, pieces)
                differs = checksums.differ(pieces, sums, axis.size(self._axis_name))
            weight = step.total
            if weight is None:
                weight = jnp.float32((step.num_rows or 0) * axis.size(self._axis_name))
        reports = RankReports(differs, None if step.given is None else step.given.reshape(1))
        new_state, own = rank_state.take(jax.tree.map(_strong, new_state))
        whole = pytrees.hold(pytrees.put_nodes(new_state, own))
        same = _Same(pytrees.hold(new_state), reported, weight, raw)
        leaving = _Leaving(same, _SplitOutputs(rows, reports, own))
        if step.late is not None:  # a program of other platforms
            return leaving
        new_leaves = _outputs(f"new {self._argument(0)}", "state", whole)
        is_own = rank_state.flags(whole)
        self._marked, self._split = frozenset(step.marked), frozenset(step.split)
        self._weighed = frozenset(step.weighed)
        self._gradient_bytes = sum(reduction.num_bytes for reduction in step.reductions)
        self._outputs = [
            *itertools.compress(new_leaves, map(operator.not_, is_own)),
            *_outputs("metrics", "metric", reported),
            traced.Output(traced.WEIGHT, (), "metric", jax.typeof(weight)),
            *_outputs("metrics", "own", raw),
            *_outputs("rows", "rows", (rows, reports)),
            *(replace(x, kind="rows") for x in itertools.compress(new_leaves, is_own)),
        ]
        return leaving

    @contextlib.contextmanager
    def _explaining(self, state: Any) -> Iterator[None]:
        """Raise an error of jdp's where the author's functions ask for a value of an argument."""
        try:
            yield
        except TypeError as error:
            own = [*itertools.compress(self._names(0, state), rank_state.flags(state))]
            text = unknown_value.explained(error, self._name, self._argument, own)
            if text is None:
                raise
            raise TypeError(text) from error

    def _pair(self, returned: Any) -> tuple[Any, Any]:
        if not self._returns_state:
            return None, returned
        if isinstance(returned, tuple) and len(returned) == 2:
            return returned
        kind = type(returned).__name__
        raise TypeError(
            f"`{getattr(self._fn, '__name__', 'step')}` returned a {kind}, but a train step "
            "returns `(state, metrics)`. Write `return state, {}` where there is nothing to report."
        )

    def _describe(self, args: tuple) -> traced.Traced:
        batch = self._args[1]
        mask = find_mask(batch)
        state_names, batch_names, *rest_names = map(self._names, range(len(args)), args)
        is_own = rank_state.flags(args[0])
        uniform = [*itertools.compress(state_names, map(operator.not_, is_own))]
        masks = [len(uniform) + i for i, x in enumerate(jax.tree.leaves(batch)) if x is mask]
        own = itertools.compress(state_names, is_own)
        return traced.Traced(
            name=self._name,
            axis_name=self._axis_name,
            inputs=[*uniform, *batch_names, *own, *itertools.chain(*rest_names)],
            outputs=self._outputs,
            marked=self._marked,
            mask=masks[0] if masks else None,
            differentiates=self._returns_state,
            platform=axis.platform(self.mesh),
            weighed=self._weighed,
            told=self._told,
        )

    def _names(self, i: int, arg: Any) -> list[str]:
        name, leaves = self._argument(i), jax.tree_util.tree_leaves_with_path(arg)
        return [name + jax.tree_util.keystr(path) for path, _ in leaves]

    def _argument(self, i: int) -> str:
        names = list(inspect.signature(self._fn).parameters)
        return names[i] if i < len(names) else f"argument {i}"

    def _keep_layout(self, old: Any, new: Any) -> Any:
        # On a mesh with further axes the compiler chooses how the new state is split over them.
        # Another layout than the old one's would compile the next call again.
        old_tree, (leaves, tree) = jax.tree.structure(old), jax.tree.flatten(new)
        if len(self.mesh.axis_names) == len(self._axis_name) or tree != old_tree:
            return new
        layout = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(self._args[0])]
        pinned = [
            jax.lax.with_sharding_constraint(leaf, where)
            if isinstance(where, NamedSharding)
            else leaf
            for leaf, where in zip(leaves, layout, strict=True)
        ]
        return jax.tree.unflatten(tree, pinned)


class _Same(NamedTuple):
    """What leaves a step the same on every rank, as the analysis proves."""

    state: Any  # without arrays of `per_rank`
    metrics: Any  # averaged, and without their rows
    weight: jax.Array  # of the global batch
    own_metrics: list[jax.Array]  # float scalars of this rank, before they were averaged


class _SplitOutputs(NamedTuple):
    """What leaves a step split over the ranks."""

    rows: list[jax.Array]
    reports: RankReports
    own: list[jax.Array]  # arrays of `per_rank`


class _Leaving(NamedTuple):
    """What leaves a step, in the order in which `step_refusals` reads it."""

    same: Any
    split: Any


class _Split(NamedTuple):
    """The arguments that are split over the ranks; errors of JAX call them by these names."""

    batch: Any
    own: list[Any]  # arrays of `per_rank`


def _own_beside_batch(state: Any, batch: Any, *rest: Any) -> tuple:
    """Return the arguments as the ranks take them: arrays of `per_rank` are split as rows are."""
    if not any(rank_state.flags(state)):
        return state, _Split(batch, []), *rest
    state, own = rank_state.take(pytrees.restore(state))
    return pytrees.hold(state), _Split(batch, own), *rest


def _strong(leaf: Any) -> Any:
    # A weak type that leaves where a strong one entered would compile the next call again.
    if isinstance(leaf, jax.Array) and leaf.weak_type:
        return jax.lax.convert_element_type(leaf, leaf.dtype)
    return leaf


def _outputs(name: str, kind: str, tree: Any) -> list[traced.Output]:
    return [
        traced.Output(name, path, kind, jax.typeof(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
