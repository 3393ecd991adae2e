"""`jdp.debug`: runs a step operation by operation, to find where NaN or infinity begins."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.interpreters import partial_eval
from jax.sharding import NamedSharding, PartitionSpec

from jdp import jax_compat, pytrees
from jdp.analysis import diagnostics, jaxprs
from jdp.analysis.marks import LOCAL, MICRO_BATCH
from jdp.distributed.placement import copy_to
from jdp.training.step import Step, require_step

__all__ = ["first_nonfinite"]


@dataclass(frozen=True)
class FirstNonfinite:
    """The first NaN or infinity of a step that reaches its results.

    Attributes:
      kind: "NaN" or "infinity".
      operation: name of the primitive, such as "log"; empty if an argument has the value already.
      name: path of that argument, such as `batch['x']`, else empty.
      line: the author's line, such as "train.py:41", or empty.
      is_backward: whether the operation computes a gradient.
      type: dtype and shape of the value on a rank, such as "float32[4, 8]".
      ranks: the ranks whose value has it.
      rows: their rows of the batch, if the first dim is as long as a rank's rows; else None. A
        parameter may have that length, too.
      rounds: of the loops around the operation, outermost first, from 0.
      infinity: of a NaN: the infinity among the operands, or None.
    """

    kind: str
    operation: str
    name: str
    line: str
    is_backward: bool
    type: str
    ranks: tuple[int, ...]
    rows: tuple[int, ...] | None
    rounds: tuple[int, ...]
    infinity: "FirstNonfinite | None" = None

    def __str__(self) -> str:
        where = f" at {self.line}" if self.line else ""
        what = f"`{self.operation}`{where}" if self.operation else f"the argument `{self.name}`"
        rounds = "".join(f", round {number} of a loop" for number in self.rounds)
        backward = ", in the backward pass" if self.is_backward else ""
        rows = "" if self.rows is None else f", rows {_listed(self.rows)} of the batch"
        text = f"The first {self.kind} is in {what}{backward}{rounds}: {self.type} on rank "
        text += f"{_listed(self.ranks)}{rows}."
        before = "" if self.infinity is None else f"\nAn operand has infinity. {self.infinity}"
        return text + before


def first_nonfinite(step: Step, /, *args: Any, **keywords: Any) -> FirstNonfinite | None:
    """Run one step operation by operation, and find where NaN or infinity begins.

    Only values count that reach the new state, a gradient or a metric: a mask of -inf before a
    softmax does not, nor a gradient of a rank with weight 0. Reduction order and fusion differ from
    the compiled step. Several processes must all call it, with the arguments of the same step. Each
    then holds the whole arguments, and one number is exchanged for each operation.

    Args:
      step: a function decorated with `jdp.train_step` or `jdp.eval_step`.
      *args: the arguments of a call of the step: a state, a global batch, and others. None is
        donated.
      **keywords: arguments of that call by keyword.

    Returns:
      The operation, its line, ranks and rows, to print; None if all are finite. A primitive with a
      hidden body, such as a kernel, is one operation. So is a `shard_map` in a `shard_map`, or
      with collectives over the data axis.

    Raises:
      TypeError: `step` is not decorated.
      ValueError: an argument was donated, or as from the first call of the step.

    >>> import jax, jax.numpy as jnp, optax, jdp
    >>> mesh = jdp.init(cpu_ranks=2)
    >>> state = jdp.TrainState.create({"w": jnp.ones(())}, jdp.replicated(optax.sgd(0.1)))
    >>> @jdp.train_step
    ... def step(state, batch):
    ...     loss, grads = jax.value_and_grad(lambda p: jnp.log(p["w"] * batch).mean())(state.params)
    ...     return state.apply_gradients(grads), {"loss": loss}
    >>> found = jdp.debug.first_nonfinite(step, state, jnp.array([1.0, 2.0, 3.0, 0.0]))
    >>> found.kind, found.operation, found.ranks, found.rows
    ('infinity', 'log', (1,), (3,))
    """
    require_step("first_nonfinite", step)
    spec, given = step.bound(args, keywords)
    pytrees.require_alive("the arguments", given, "Pass the state that was returned last.")
    (state, *others), named = spec.by_keyword(given)

    def run(state: Any, others: Any, named: Any) -> Any:
        return jax.tree.leaves(pytrees.hold(step(pytrees.restore(state), *others, **named)))

    held = pytrees.hold(state)
    program = jax.make_jaxpr(run)(held, others, named)
    # The step's own outputs, such as a rank's loss, do not count.
    needed = [True] * len(program.out_avals)
    body, _ = partial_eval.dce_jaxpr(program.jaxpr, needed, instantiate=True)
    program = program.replace(jaxpr=body)
    paths = [path for i, arg in enumerate([held, *given[1:]]) for path in spec.paths(i, arg)]
    rows = {jnp.shape(leaf)[0] for leaf in jax.tree.leaves(others[0])}
    leaves, tree = jax.tree.flatten((held, others, named))
    leaves = [*map(_on_one_device, leaves)]
    _, others, _ = tree.unflatten(leaves)
    of_part = spec.weight_fn if spec.virtual_ranks is None else None

    def weights(num_ranks: int) -> Any:
        def part(x: Any) -> Any:
            return jnp.reshape(x, (num_ranks, -1, *jnp.shape(x)[1:]))

        assert of_part is not None
        return jax.vmap(of_part)(jax.tree.map(part, others[0]))

    # First without the ranks of weight 0, whose gradients do not count.
    for weigh in [None] if of_part is None else [weights, None]:
        evaluator = _Evaluator(max(rows, default=0), spec.axis_name, weigh)
        evaluator.counts_gradients = weigh is not None or of_part is None
        evaluator.enter(program, leaves, paths)
        first = _first(*(event for value in evaluator.reached for event in (value.nan, value.inf)))
        if first is not None:
            return first.found
    return None


def _on_one_device(x: Any) -> Any:
    x = jnp.asarray(_whole(x))
    return jax.device_put(x, x.addressable_shards[0].device)


def _whole(x: Any) -> Any:
    """Return an array of this process; all processes call it."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return x
    if x.is_fully_replicated:
        return x.addressable_data(0)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _whole(jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return multihost_utils.process_allgather(x, tiled=True)


def _on_host(x: Any) -> np.ndarray:
    return np.asarray(_whole(x))


class _Event(NamedTuple):
    """Where NaN or infinity begins; `number` is its place in the program's order."""

    number: int
    found: FirstNonfinite


class _RankValues(NamedTuple):
    """An array of all ranks, `[ranks, ...]`, split over them, and its events.

    In a `shard_map` over further axes: of all devices, those of a rank together.
    """

    x: Any
    nan: _Event | None = None
    inf: _Event | None = None


_Run = Callable[..., Sequence[Any]]
# The further axes over which each operand and result of an operation varies.
_Types = tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]
_SUMMED = frozenset("psum pmax pmin reduce_scatter psum_invariant".split())


class _Evaluator:
    """Runs a step's program on its mesh, an operation at a time.

    Args:
      weigh: returns the weight of each rank on `axis_name`, for their number; None: all run.

    Attributes:
      reached: the values that count: gradients, terms of sums over ranks, and results.
      counts_gradients: whether gradients of one rank count.
    """

    def __init__(self, num_rows: int, axis_name: tuple[str, ...], weigh: Any):
        self.reached: list[_RankValues] = []
        self.counts_gradients = True
        self._num_rows, self._axis_name, self._weigh = num_rows, axis_name, weigh
        self._mesh: Any = None
        self._axes: dict[str, int] = {}
        self._further: dict[str, int] = {}  # of a shard_map around this operation
        self._is_typed = False
        self._numbers = itertools.count()
        self._calls: list[Any] = []
        self._rounds: list[tuple[int, int]] = []  # number and length of a loop
        self._compiled: dict[Any, Any] = {}
        self._active = np.ones(1, bool)  # the ranks that run this branch or round

    def enter(self, program: Any, leaves: Sequence[Any], paths: Sequence[str]) -> None:
        """Run a program up to its `shard_map`, and that for all ranks."""
        body = jaxprs.opened(program)
        env = dict(jaxprs.constants(program)) | dict(zip(body.invars, leaves, strict=True))
        names = dict(zip(body.invars, paths, strict=True))
        for eqn in body.eqns:
            operands = [x.val if jaxprs.is_literal(x) else env[x] for x in eqn.invars]
            inner = jaxprs.called(eqn)
            given = ["" if jaxprs.is_literal(x) else names.get(x, "") for x in eqn.invars]
            if eqn.primitive.name == "shard_map":
                return self._enter_ranks(eqn, operands, given)
            if inner is not None and "shard_map" in jaxprs.primitive_names(inner):
                return self.enter(inner, operands, given)
            env.update(zip(eqn.outvars, jax_compat.bind(eqn, operands), strict=True))

    def _enter_ranks(self, eqn: Any, operands: Sequence[Any], names: Sequence[str]) -> None:
        self._mesh, manual = eqn.params["mesh"], jaxprs.manual_axes(eqn)
        self._axes = {x: self._mesh.shape[x] for x in self._mesh.axis_names if x in manual}
        self._active = np.ones(math.prod(self._axes.values()), bool)
        specs = eqn.params["in_specs"]
        blocks = [_blocks(x, self._axes, spec) for x, spec in zip(operands, specs, strict=True)]
        if self._weigh is not None:
            weights = self._weigh(math.prod(self._axes[name] for name in self._axis_name))
            own = _blocks(weights, self._axes, PartitionSpec(self._axis_name))
            self._active = np.asarray(own != 0).reshape(-1)
        ins = [self._given(x, name) for x, name in zip(blocks, names, strict=True)]
        self.reached += self._run(eqn.params["jaxpr"], ins)

    def _given(self, blocks: Any, name: str) -> _RankValues:
        (value,) = self._call(
            None, lambda x: [x], [_RankValues(blocks)], name or "a captured array"
        )
        return value

    def _run(self, program: Any, ins: Sequence[_RankValues]) -> list[_RankValues]:
        body = jaxprs.opened(program)
        env = {x: self._given(self._stacked(value), "") for x, value in jaxprs.constants(program)}
        env |= dict(zip(body.invars, ins, strict=True))

        def read(atom: Any) -> _RankValues:
            return _RankValues(self._stacked(atom.val)) if jaxprs.is_literal(atom) else env[atom]

        for eqn in body.eqns:
            operands = [*map(read, eqn.invars)]
            is_gradient = self.counts_gradients and eqn.params.get("kind") == LOCAL
            is_sum = eqn.primitive.name in _SUMMED
            if is_gradient or is_sum and {*self._axis_name} & {*jaxprs.collective_axes(eqn)}:
                self.reached += operands
            env.update(zip(eqn.outvars, self._operation(eqn, operands), strict=True))
        return [*map(read, body.outvars)]

    def _stacked(self, x: Any) -> Any:
        return jnp.stack([jnp.asarray(x)] * len(self._active))

    def _operation(self, eqn: Any, ins: Sequence[_RankValues]) -> list[_RankValues]:
        def run(*operands: Any) -> list[Any]:
            if "donated_invars" not in eqn.params:
                return jax_compat.bind(eqn, operands)
            return jax_compat.bind(eqn, operands, donated_invars=(False,) * len(operands))

        avals = [x.aval for x in eqn.invars], [x.aval for x in eqn.outvars]
        outs = self._call(_key(eqn), run, ins, eqn, self._types(*avals))
        if not _has_news(outs, ins):
            return outs
        self._calls.append(eqn)
        inner = self._inside(eqn, ins)
        self._calls.pop()
        # Fused operations may give another result than single ones.
        return [_with_events(*pair) for pair in zip(outs, inner or outs, strict=True)]

    def _types(self, operands: Sequence[Any], results: Sequence[Any]) -> _Types | None:
        if not self._is_typed:
            return None
        operands, results = (
            tuple(
                tuple(x for x in self._further if x in aval.manual_axis_type.varying)
                for aval in avals
            )
            for avals in (operands, results)
        )
        return operands, results

    def _call(
        self,
        key: Any,
        run: _Run,
        ins: Sequence[_RankValues],
        what: Any,
        types: _Types | None = None,
    ) -> list[_RankValues]:
        """Run one rank's function on all ranks; `what` is its equation or name."""
        key = (key, types, *((x.shape, x.dtype) for x, *_ in ins)) if key else None
        mapped = self._compiled.get(key) or self._mapped(run, types)
        if key:
            self._compiled[key] = mapped
        outs, flags = mapped(*(value.x for value in ins))
        pairs = zip(outs, map(_on_host, flags), strict=True)
        return [self._noted(x, bad, ins, what) for x, bad in pairs]

    def _mapped(self, run: _Run, types: _Types | None) -> Callable[..., Any]:
        on_devices = _on_devices(run, self._further, types)

        def on_rank(*operands: Any) -> Any:
            outs = on_devices(*operands)
            return outs, [jax.vmap(_flags)(x) for x in outs]

        spec = PartitionSpec(tuple(self._axes))
        options: Any = {"in_specs": spec, "out_specs": spec, "axis_names": {*self._axes}}
        mapped = jax.shard_map(on_rank, mesh=self._mesh, check_vma=False, **options)
        where = NamedSharding(self._mesh, spec)
        jitted, put = jax.jit(mapped), copy_to if self._mesh.is_multi_process else jax.device_put
        return lambda *operands: jax.block_until_ready(jitted(*(put(x, where) for x in operands)))

    def _program(self, program: Any, ins: Sequence[_RankValues]) -> list[_RankValues]:
        """Run a body as a whole, and by operations only if NaN or infinity appears in it."""
        run, types = jax.extend.core.jaxpr_as_fun(program), (program.in_avals, program.out_avals)
        outs = self._call(id(program), run, ins, self._calls[-1], self._types(*types))
        return self._run(program, ins) if _has_news(outs, ins) else outs

    def _inside(self, eqn: Any, ins: Sequence[_RankValues]) -> list[_RankValues] | None:
        if eqn.primitive.name == "cond":
            return self._branches(eqn, ins)
        if eqn.primitive.name == "scan":
            return self._scan(eqn, ins)
        if eqn.primitive.name == "while":
            return self._while(eqn, ins)
        if eqn.primitive.name == "shard_map":
            return None if self._further else self._further_axes(eqn, ins)
        inner = jaxprs.called(eqn)
        return None if inner is None else self._run(inner, ins)

    def _further_axes(self, eqn: Any, ins: Sequence[_RankValues]) -> list[_RankValues] | None:
        """Run a `shard_map` over further axes on each device, for its events."""
        before, manual = self._active, jaxprs.manual_axes(eqn)
        body, is_typed = eqn.params["jaxpr"], eqn.params["check_vma"]
        if is_typed and any(jaxprs.named_axes(x) - manual for x in jaxprs.equations(body)):
            return None  # types of operands have no data axes here
        self._further = {x: size for x, size in self._mesh.shape.items() if x in manual}
        self._is_typed = is_typed
        self._active = np.repeat(before, math.prod(self._further.values()))
        given = [
            value._replace(
                x=jnp.concatenate([_blocks(x, self._further, spec) for x in _whole(value.x)])
            )
            for value, spec in zip(ins, eqn.params["in_specs"], strict=True)
        ]
        outs = self._run(body, given)
        self._further, self._is_typed, self._active = {}, False, before
        return outs

    def _branches(self, eqn: Any, ins: Sequence[_RankValues]) -> list[_RankValues]:
        branches, before = eqn.params["branches"], self._active
        chosen = np.clip(_on_host(ins[0].x), 0, len(branches) - 1)
        found = [_RankValues(None) for _ in eqn.outvars]
        for i, branch in enumerate(branches):
            self._active = before & (chosen == i)
            if self._active.any():
                outs = self._run(branch, ins[1:])
                found = [_earlier(*pair) for pair in zip(found, outs, strict=True)]
        self._active = before
        return found

    def _scan(self, eqn: Any, ins: Sequence[_RankValues]) -> list[_RankValues]:
        _, num_constants, num_carry = jaxprs.scan_parts(eqn)
        length, start = eqn.params["length"], num_constants + num_carry
        constants, carry, xs = ins[:num_constants], ins[num_constants:start], ins[start:]
        stacked = [_RankValues(None) for _ in eqn.outvars[num_carry:]]
        for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
            at = jnp.full(len(self._active), i)
            rows = [self._call("row", _row, [value, _RankValues(at)], eqn)[0] for value in xs]
            self._rounds.append((i, length))
            outs = self._program(eqn.params["jaxpr"], [*constants, *carry, *rows])
            self._rounds.pop()
            carry = outs[:num_carry]
            stacked = [_earlier(*pair) for pair in zip(stacked, outs[num_carry:], strict=True)]
        return [*carry, *stacked]

    def _while(self, eqn: Any, ins: Sequence[_RankValues]) -> list[_RankValues]:
        _, _, num_cond, num_body = jaxprs.while_parts(eqn)
        of_cond, of_body = ins[:num_cond], ins[num_cond : num_cond + num_body]
        carry, before = ins[num_cond + num_body :], self._active
        for i in itertools.count():
            (goes_on,) = self._program(eqn.params["cond_jaxpr"], [*of_cond, *carry])
            self._active = self._active & _on_host(goes_on.x)
            if not self._active.any():
                break
            self._rounds.append((i, 0))
            outs = self._program(eqn.params["body_jaxpr"], [*of_body, *carry])
            self._rounds.pop()
            pairs = zip(carry, outs, strict=True)  # a loop ends earlier on some ranks
            carry = [self._call("where", _where, [goes_on, *pair], eqn)[0] for pair in pairs]
        self._active = before
        return [*carry]

    def _noted(
        self, x: Any, flags: np.ndarray, ins: Sequence[_RankValues], what: Any
    ) -> _RankValues:
        """Return a value with its events: those of the operands, or new ones."""
        is_bad = (flags & self._active[:, None]).any(0)
        if not is_bad.any():
            return _RankValues(x)
        before = _first(*(each.inf for each in ins))
        known = _first(*(each.nan for each in ins)), before
        events = [
            found or _Event(next(self._numbers), self._described(kind, x, what, before))
            if bad
            else None
            for kind, bad, found in zip(("NaN", "infinity"), is_bad, known, strict=True)
        ]
        return _RankValues(x, *events)

    def _described(self, kind: str, x: Any, what: Any, before: _Event | None) -> FirstNonfinite:
        values = _on_host(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
        flags = np.isnan(values) if kind == "NaN" else np.isinf(values)
        flags = flags.reshape(*flags.shape[:2], -1).any(-1) if flags.ndim > 1 else flags[:, None]
        flags &= self._active[:, None]
        flags = flags.reshape(-1, math.prod(self._further.values()), flags.shape[1]).any(1)
        is_argument = isinstance(what, str)
        calls = [] if is_argument else [what, *reversed(self._calls)]
        return FirstNonfinite(
            kind=kind,
            operation="" if is_argument else what.primitive.name,
            name=what if is_argument else "",
            line=next(filter(None, map(diagnostics.source_of, calls)), ""),
            is_backward=any(map(jaxprs.is_transposed, calls)),
            type=f"{x.dtype}{[*x.shape[1:]]}",
            ranks=tuple(np.flatnonzero(flags.any(1)).tolist()),
            rows=self._rows(flags) if x.ndim > 1 else None,
            rounds=tuple(number for number, _ in self._rounds),
            infinity=before.found if before and kind == "NaN" else None,
        )

    def _rows(self, flags: np.ndarray) -> tuple[int, ...] | None:
        """Return the batch's rows with a flag; a micro-batch has consecutive rows."""
        of_rank, start = self._num_rows // len(flags), 0
        size = flags.shape[1]
        if self._rounds and any(each.params.get("name") == MICRO_BATCH for each in self._calls):
            number, length = self._rounds[0]
            start, size = number * size, size * length
        if size != of_rank:
            return None
        return tuple(int(rank * of_rank + start + i) for rank, i in np.argwhere(flags))


def _blocks(x: Any, axes: dict[str, int], spec: Any) -> Any:
    """Return the blocks of an array on all devices of `axes`, `[devices, ...]`."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    blocks = []
    for place in itertools.product(*map(range, axes.values())):
        block, at = x, dict(zip(axes, place, strict=True))
        for dim, entry in enumerate(entries):
            number, parts = 0, 1
            for name in entry:
                if name in axes:
                    number = number * axes[name] + at[name]
                    parts *= axes[name]
            size = block.shape[dim] // parts
            block = lax.slice_in_dim(block, number * size, (number + 1) * size, axis=dim)
        blocks.append(block)
    return jnp.stack(blocks)


def _on_devices(run: _Run, axes: dict[str, int], types: _Types | None) -> _Run:
    """Return `run` of one device for all devices of a rank: `[devices, ...]`."""
    if not axes:
        return lambda *operands: [x[None] for x in run(*(x[0] for x in operands))]

    def spec_of(varying: tuple[str, ...]) -> PartitionSpec:
        return PartitionSpec(varying) if varying else PartitionSpec()

    def take(x: Any, varying: tuple[str, ...]) -> Any:
        x = x.reshape(*axes.values(), *x.shape[1:])
        x = x[tuple(slice(None) if name in varying else 0 for name in axes)]
        return x.reshape(-1, *x.shape[len(varying) :]) if varying else x

    def spread(x: Any, varying: tuple[str, ...]) -> Any:
        of_one = x.shape[bool(varying) :]
        x = x.reshape(*(size if name in varying else 1 for name, size in axes.items()), *of_one)
        return jnp.broadcast_to(x, (*axes.values(), *of_one)).reshape(-1, *of_one)

    def on_devices(*operands: Any) -> list[Any]:
        every = tuple(axes)
        ins, results = types or ((every,) * len(operands), None)

        def on_device(*operands: Any) -> list[Any]:
            outs = run(*(x[0] if own else x for x, own in zip(operands, ins, strict=True)))
            of_outs = results or (every,) * len(outs)
            return [x[None] if own else x for x, own in zip(outs, of_outs, strict=True)]

        outs = jax.shard_map(
            on_device,
            axis_names=set(axes),
            in_specs=tuple(map(spec_of, ins)),
            out_specs=spec_of(every) if results is None else [*map(spec_of, results)],
            check_vma=types is not None,
        )(*map(take, operands, ins))
        return [*map(spread, outs, results or (every,) * len(outs))]

    return on_devices


def _flags(x: Any) -> jax.Array:
    """Whether an array has NaN, and infinity: `[2]` bool."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros(2, bool)
    return jnp.stack([jnp.isnan(x).any(), jnp.isinf(x).any()])


def _row(x: Any, i: Any) -> list[Any]:
    return [lax.dynamic_index_in_dim(x, i, keepdims=False)]


def _where(goes_on: Any, old: Any, new: Any) -> list[Any]:
    return [jnp.where(goes_on, new, old)]


def _key(eqn: Any) -> Any:
    """Return what equal operations have in common."""
    key = eqn.primitive, tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
    try:
        hash(key)
    except TypeError:
        return id(eqn)
    return key


def _has_news(outs: Sequence[_RankValues], ins: Sequence[_RankValues]) -> bool:
    known = [event for value in ins for event in value[1:]]
    return any(event is not None and event not in known for out in outs for event in out[1:])


def _with_events(value: _RankValues, inner: _RankValues) -> _RankValues:
    nan, inf = value.nan and (inner.nan or value.nan), value.inf and (inner.inf or value.inf)
    return _RankValues(value.x, nan, inf)


def _earlier(one: _RankValues, other: _RankValues) -> _RankValues:
    return _RankValues(one.x, _first(one.nan, other.nan), _first(one.inf, other.inf))


def _first(*events: _Event | None) -> _Event | None:
    return min(filter(None, events), default=None, key=lambda event: event.number)


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
