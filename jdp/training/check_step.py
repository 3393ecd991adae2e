"""`check_step`: the same step on one rank and on all, compared."""

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp import axis, pytrees
from jdp.analysis.lints import NONLINEAR, equal_draws
from jdp.axis import AxisName
from jdp.distributed import mesh
from jdp.reduction.micro_batches import num_rows
from jdp.reduction.optimizer import Sharded, has_optimizer
from jdp.training import host_constants
from jdp.training.step import Step, require_step
from jdp.validation import int_at_least


@dataclass(frozen=True)
class LeafDifference:
    """The difference of one leaf between one rank and n.

    Attributes:
      path: such as `state.params['w']` or `metrics['loss']`.
      difference: largest absolute difference between one rank and any of n.
      allowed: largest difference that rounding explains.
      change_one: largest absolute change by the steps on one rank; of a metric its value.
      change_all: the same on n ranks, on the most different rank.
      rank: the most different rank of n; None if all n agree.
    """

    path: str
    difference: float
    allowed: float
    change_one: float
    change_all: float
    rank: int | None = None


@dataclass(frozen=True)
class StepDifference:
    """The result of `check_step`: every leaf, the worst first, and the likely cause if any.

    Attributes:
      leaves: of the state.
      cause: the likely cause, or None.
      num_ranks: compared with one; the devices along a further axis, if that was compared alone.
      metrics: leaves of the metrics, the worst first.
      num_steps: number of steps run.
      gathers: arrays that the update of a `jdp.sharded` optimizer gathers whole, as strings.
      owned: matrices that the update computes on one rank each, a string per kind.
    """

    leaves: list[LeafDifference]
    cause: str | None
    num_ranks: int
    metrics: list[LeafDifference] = field(default_factory=list)
    num_steps: int = 1
    gathers: tuple[str, ...] = ()
    owned: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = [*self.leaves[:5], *self.metrics[:5]]
        width = max((len(leaf.path) for leaf in shown), default=4)
        lines = [
            f"{'leaf':{width}}  difference    allowed  change on 1 rank  on {self.num_ranks} ranks"
        ]
        for leaf in shown:
            lines.append(
                f"{leaf.path:{width}}  {leaf.difference:10.2e} {leaf.allowed:10.2e}"
                f"  {leaf.change_one:16.6g}  {leaf.change_all:.6g}"
            )
        for kind, leaves in (("leaves", self.leaves), ("metrics", self.metrics)):
            if len(leaves) > 5:
                lines.append(f"... and {len(leaves) - 5} {kind} that are closer")
        lines += [f"gathered whole on every rank: {text}" for text in self.gathers]
        lines += [f"matrices computed by one rank each: {text}" for text in self.owned]
        return "\n".join(lines)


def compare(
    name: str,
    start: Any,
    one: Any,
    many: Any,
    tolerance: float,
    *,
    num_steps: int = 1,
    digits: float = 0.0,
    digits_of_change: float = 0.0,
) -> list[LeafDifference]:
    """Compare two trees leaf by leaf, on every device."""
    named = jax.tree_util.tree_leaves_with_path(one)
    olds = [0.0] * len(named) if start is None else jax.tree.leaves(start)
    found = []
    for (path, leaf), other, old in zip(named, jax.tree.leaves(many), olds, strict=True):
        a, old = _numbers(leaf), _numbers(old)
        largest = float(np.abs(a[np.isfinite(a)]).max(initial=0))
        copies = _copies(other)
        allowed = num_steps * tolerance * (1 + largest)
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not _differ(copies):
            # Few digits explain a difference from one rank, but not between ranks.
            eps = 2 * max(digits, float(jnp.finfo(leaf.dtype).eps))
            by_digits = eps * (1 + largest) if start is None else num_steps * eps * largest
            by_change = 2 * num_steps * digits_of_change * _largest(np.abs(a - old))
            allowed = max(allowed, by_digits, by_change)
        apart = [_apart(a[index], part) for index, part in copies]
        worst = int(np.argmax(apart)) if apart else 0
        index, part = copies[worst]
        old = old[index] if old.ndim else old
        found.append(
            LeafDifference(
                path=f"{name}{jax.tree_util.keystr(path)}",
                difference=apart[worst],
                allowed=allowed,
                change_one=_largest(a[index] - old),
                change_all=_largest(part - old),
                rank=worst if _differ(copies) else None,
            )
        )
    return sorted(found, key=lambda leaf: leaf.allowed / max(leaf.difference, 1e-300))


def digits_of(state: Any) -> float:
    """Return the relative rounding of 16-bit leaves, or 0."""
    dtypes = {jnp.result_type(leaf) for leaf in jax.tree.leaves(state)}
    infos = [jnp.finfo(dtype) for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
    return max((float(info.eps) for info in infos if info.bits == 16), default=0.0)


def digits_of_wire(state: Any) -> float:
    """Return the relative rounding of what optimizers communicate, or 0."""
    nodes = jax.tree.leaves(state, is_leaf=has_optimizer)
    found = [node.tx for node in nodes if has_optimizer(node)]
    dtypes = [tx.reduce_dtype for tx in found]
    dtypes += [tx.sharding.gather_dtype for tx in found if isinstance(tx, Sharded)]
    return max((float(jnp.finfo(dtype).eps) for dtype in dtypes if dtype is not None), default=0.0)


def _copies(leaf: jax.Array) -> list[tuple[Any, np.ndarray]]:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    by_device = {shard.device: shard for shard in leaf.addressable_shards}
    return [(shard.index, _numbers(shard.data)) for shard in by_device.values()]


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    difference = np.abs(a - b)
    equal = (a == b) | (np.isnan(a) & np.isnan(b))  # also infinities
    return float(np.where(equal, 0, np.nan_to_num(difference, nan=np.inf)).max(initial=0))


def _differ(copies: list[tuple[Any, np.ndarray]]) -> bool:
    first: dict[str, np.ndarray] = {}
    return any(_apart(first.setdefault(repr(index), part), part) > 0 for index, part in copies)


def _largest(change: np.ndarray) -> float:
    if not change.size:
        return 0.0
    largest = change.flat[np.abs(change).argmax()]
    return float(abs(largest) if np.iscomplexobj(change) else largest)


def beyond(leaves: list[LeafDifference]) -> list[LeafDifference]:
    """Return the leaves with more difference than rounding explains."""
    return [leaf for leaf in leaves if not leaf.difference <= leaf.allowed]


def _numbers(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    is_complex = jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating)
    return np.asarray(leaf, np.complex128 if is_complex else np.float64)


def _likely_cause(
    found: StepDifference,
    program: str,
    named: str,
    equal_draws: Sequence[str] = (),
    warned: Collection[str] = (),
) -> str:
    leaves = beyond(found.leaves)
    causes, prefix = (_CAUSES, "") if leaves else (_CAUSES_OF_METRICS, _METRIC)
    wrong = leaves or beyond(found.metrics)[:1]
    evidence = _Evidence(found, wrong, program, named, equal_draws, warned)
    leaf, text = next((leaf, text) for find, text in causes if (leaf := find(evidence)))
    lines = ", ".join(equal_draws)
    return (prefix + text).format(leaf=leaf, num_ranks=found.num_ranks, lines=lines)


@dataclass(frozen=True)
class _Evidence:
    """The evidence for a cause; `wrong`: the state's too different leaves, or one metric."""

    found: StepDifference
    wrong: list[LeafDifference]
    program: str
    named: str
    equal_draws: Sequence[str]
    warned: Collection[str]

    def worst_if(self, applies: bool) -> LeafDifference | None:
        return self.wrong[0] if applies else None


def _drifted(evidence: _Evidence) -> LeafDifference | None:
    return next((leaf for leaf in evidence.wrong if leaf.rank is not None), None)


def _are_n_times_smaller(evidence: _Evidence) -> LeafDifference | None:
    return _have_ratio(evidence, 1 / evidence.found.num_ranks)


def _are_n_times_larger(evidence: _Evidence) -> LeafDifference | None:
    return _have_ratio(evidence, evidence.found.num_ranks)


def _have_ratio(evidence: _Evidence, ratio: float) -> LeafDifference | None:
    ratios = [leaf.change_all / leaf.change_one for leaf in evidence.wrong if leaf.change_one]
    return evidence.worst_if(bool(ratios) and np.allclose(ratios, ratio, rtol=1e-2))


def _have_few_digits(evidence: _Evidence) -> LeafDifference | None:
    are_small = all(leaf.difference < 0.05 * abs(leaf.change_one) for leaf in evidence.wrong)
    return evidence.worst_if(are_small and bool(re.search(r"[x<]b?f16>", evidence.program)))


_STATISTICS = re.compile(
    r"batch_stats|running_|moving_|(mean|var)_ema|(\['|\.)(mean|var)('\]|$|\b)"
)


def _statistics(evidence: _Evidence) -> LeafDifference | None:
    return next((leaf for leaf in evidence.wrong if _STATISTICS.search(leaf.path)), None)


def _reduced_statistics(evidence: _Evidence) -> LeafDifference | None:
    """Find statistics of a layer that sums over ranks and is differentiated."""
    for leaf in evidence.wrong:
        for layer in re.findall(r"\w+", leaf.path)[-2:-1] if _STATISTICS.search(leaf.path) else ():
            if re.search(rf'"transpose\([^"]*/{layer}/psum', evidence.named):
                return leaf
    return None


def _are_scaled_by_size(evidence: _Evidence) -> LeafDifference | None:
    """Find parameters of an optimizer like Adam with equal gradients."""
    scales = re.search(r"stablehlo\.(r?sqrt|sign)\b", evidence.program)
    are_params = all("params" in leaf.path for leaf in evidence.wrong)
    kept = [leaf for leaf in evidence.found.leaves if "opt_state" in leaf.path]
    kept = [leaf for leaf in kept if not leaf.change_one.is_integer()]  # a count
    largest = max((abs(leaf.change_one) for leaf in kept), default=0.0)
    agree = largest > 0 and all(leaf.difference <= 1e-5 * largest for leaf in kept)
    return evidence.worst_if(bool(scales) and are_params and agree)


def _are_random(evidence: _Evidence) -> LeafDifference | None:
    return evidence.worst_if(bool(re.search("threefry|rng_bit_generator", evidence.program)))


def _draw_alike(evidence: _Evidence) -> LeafDifference | None:
    return evidence.worst_if(bool(evidence.equal_draws))


def _are_changed(evidence: _Evidence) -> LeafDifference | None:
    return evidence.worst_if(any(NONLINEAR in warning for warning in evidence.warned))


def _any(evidence: _Evidence) -> LeafDifference | None:
    return evidence.wrong[0]


_FEW_DIGITS = (
    "The differences are small; bfloat16 or float16 arithmetic may explain them. Compare in "
    "float32 or with a larger tolerance=."
)
_DRAWN_ALIKE = (
    "{lines} draws random numbers from a key that all ranks share, so every rank draws the same "
    "ones for its rows. Draw from state.key or jax.random.fold_in(key, "
    "jax.lax.axis_index('data')), and run check_step with a constant instead."
)
_RANDOM = (
    "The step draws random numbers (dropout, noise) from state.key, which differs on each rank. "
    "Compare without them or with state.shared_key."
)

# (finder of the leaf to name, cause); the first that applies counts.
_Causes = list[tuple[Callable[[_Evidence], LeafDifference | None], str]]
_CAUSES: _Causes = [
    (
        _drifted,
        "The {num_ranks} ranks hold different values of `{leaf.path}`, rank {leaf.rank} the "
        "furthest from one. Look for impure callbacks and non-deterministic kernels.",
    ),
    (
        _are_n_times_smaller,
        "Every change is {num_ranks} times smaller. The loss is summed over rows, and gradients "
        "are averaged over ranks: write .mean(), not .sum(). Or the step divides by the number "
        "of devices: delete that division.",
    ),
    (
        _are_n_times_larger,
        "Every change is {num_ranks} times larger. A gradient is summed over ranks instead of "
        "averaged: look for lax.psum in the step, or replicated(mean=False).",
    ),
    (_have_few_digits, _FEW_DIGITS),
    (
        _reduced_statistics,
        "Batch statistics differ (`{leaf.path}`). The layer averages them over ranks with equal "
        "weight, although mask= leaves ranks different numbers of rows. Remove mask=, or pass "
        "means over all rows that count: jdp.sum_over_ranks(sum) / jdp.sum_over_ranks(count).",
    ),
    (
        _statistics,
        "Batch statistics differ (`{leaf.path}`) because each rank normalises with its own rows. "
        "Pass axis_name= to the layer, or accept the difference, as in torch without "
        "SyncBatchNorm.",
    ),
    (
        _are_scaled_by_size,
        "The gradients agree, but `{leaf.path}` differs. The optimizer divides a gradient by its "
        "own size, as Adam does, so rounding decides the update of a gradient near 0. Compare "
        "with optax.sgd.",
    ),
    (_draw_alike, _DRAWN_ALIKE),
    (_are_random, _RANDOM),
    (
        _are_changed,
        "The changes have no common ratio. Each rank applies a nonlinear function, such as "
        "clipping, to its own gradient before the mean. Apply it inside "
        "jdp.replicated(optax.chain(optax.clip_by_global_norm(1.0), ...)), or after grads = "
        "jdp.sync_gradients(grads), with apply_gradients(grads, synced=True).",
    ),
    (
        _any,
        "The loss is not a mean over rows: a masked mean without weight=, a norm of the whole "
        "batch, statistics of a rank's own rows. Or each rank changes its gradient before the "
        "mean, for example by clipping.",
    ),
]
_METRIC = (
    "`{leaf.path}` is {leaf.change_one:.6g} on one rank and {leaf.change_all:.6g} on {num_ranks}. "
)
_CAUSES_OF_METRICS: _Causes = [
    (
        _are_n_times_smaller,
        "It is a sum over rows, and float scalars are averaged over ranks: write "
        "jdp.sum_over_ranks(x).",
    ),
    (_are_n_times_larger, "It is a mean that was summed over ranks: write jdp.mean_over_ranks(x)."),
    (_have_few_digits, _FEW_DIGITS),
    (_draw_alike, _DRAWN_ALIKE),
    (_are_random, _RANDOM),
    (
        _any,
        "Float scalars are averaged over ranks, and that mean is not the value of the whole "
        "batch. For a gradient norm, write grads = jdp.sync_gradients(grads) first, then "
        "apply_gradients(grads, synced=True); for a maximum, jdp.max_over_ranks(x); for a ratio "
        "or masked mean, jdp.sum_over_ranks of both parts, or weight=; for one value per row, "
        "jdp.rows(x).",
    ),
]


_CHANGING = (
    "A constant, such as np.random or the time, changes from trace to trace: {lines}. The "
    "compiled step repeats the constant of its trace. Use jax.random with state.key, or pass the "
    "value as an argument."
)


_OF_FURTHER_AXIS = (
    "Inside a shard_map over {axis!r}, a psum of a loss that is whole on each device counts it "
    "{num} times, and a pmean of partial sums is {num} times too small. A step that needs this "
    "axis, such as one that takes `stages[0]` as its device's stage, cannot be compared so: leave "
    "{axis!r} out of check_step(..., axes=)."
)


def check_step(
    step: Step,
    /,
    *args: Any,
    tolerance: float = 1e-5,
    num_steps: int = 2,
    axes: AxisName | None = None,
    **keywords: Any,
) -> StepDifference:
    """Run steps on one rank with the whole batch, and on all ranks, and compare the results.

    The uniformity analysis cannot see a wrong scale: a loss summed instead of averaged, batch
    statistics of a rank's own rows, a local masked mean, a norm of local gradients among the
    metrics. This function compares every leaf of the state on every rank, and every metric, with
    that of one rank. Use plain SGD: Adam hides a wrong scale. The arguments stay unchanged.

    Along each further axis of the mesh it compares one device with all, where a `psum` in place of
    a `pmean` has the wrong scale, too.

    Args:
      step: a function decorated with `jdp.train_step`.
      *args: a call's arguments: the state to start from, whose mesh gives the ranks, a global
        batch, and further arguments.
      tolerance: largest difference after one step, > 0, relative to 1 + the leaf's largest value.
        It grows k times after k steps, and by the rounding of 16-bit leaves, `gather_dtype` and
        `reduce_dtype`.
      num_steps: number of steps, all with this batch, >= 1.
      axes: names of axes of the mesh along which to compare; default: all of them.
      **keywords: arguments of that call by keyword. Pass one named `tolerance`, `num_steps` or
        `axes` by position, or in a `functools.partial`.

    Returns:
      The differences after the last step, which are also printed.

    Raises:
      ValueError: a leaf or a metric differs by more than `tolerance` (the error names the worst and
        the likely cause). Or several processes share the mesh, `axes` has other names than the
        mesh or one device, the step does not run without an axis, or an argument was donated.
      TypeError: `num_steps` is not an integer.

    >>> import jax, jax.numpy as jnp, optax, jdp
    >>> mesh = jdp.init(cpu_ranks=2)
    >>> state = jdp.TrainState.create({"w": jnp.ones(())}, jdp.replicated(optax.sgd(0.5)))
    >>> @jdp.train_step
    ... def step(state, batch):
    ...     grads = jax.grad(lambda params: jnp.sum(params["w"] * batch))(state.params)
    ...     return state.apply_gradients(grads), {}
    >>> jdp.check_step(step, state, jnp.arange(4.0))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: ... The loss is summed over rows, and gradients are averaged over ranks...
    """
    why = "It compares the states that train steps return."
    require_step("check_step", step, ["jdp.train_step"], why)
    spec, given = step.bound(args, keywords)
    (state, *others), keywords = spec.by_keyword(given)
    _require_alive({"state": state, "batch": others[0], "rest": others[1:], **keywords})
    ranks = mesh.mesh_of(jax.tree.leaves(state), step.spec.axis_name)
    is_of_data, further = _compared_axes(ranks, step.spec.axis_name, axes)
    num_steps = int_at_least("num_steps", num_steps, least=1)
    step = step.without_donation()
    start, others, keywords = _on_host((pytrees.hold(state), others, keywords))
    findings, wire = step.findings(_on(start, ranks), *others, **keywords), digits_of_wire(state)

    def run(where: Mesh, along: str = "") -> Iterator[tuple[Any, Any]]:
        after, is_one = _on(start, where), where is not ranks and not along
        for _ in range(num_steps):
            try:
                with _of_one_device() if is_one else contextlib.nullcontext():
                    after, metrics = step(after, *others, **keywords)
            except Exception as error:
                if not along:
                    raise
                raise ValueError(
                    f"`{step.__name__}` does not run on one device along {along!r}: "
                    f"{str(error).partition(chr(10))[0]} If it needs this axis, or names the mesh "
                    f"itself, leave {along!r} out of check_step(..., axes=)."
                ) from error
            yield pytrees.hold(after), metrics

    def compared(one: Iterator[tuple[Any, Any]], num: int) -> StepDifference:
        found = StepDifference([], None, num)
        for number, pair in enumerate(zip(one, run(ranks), strict=True), 1):
            states, reported = zip(*pair, strict=True)
            limits: dict[str, Any] = {"tolerance": tolerance, "num_steps": number}
            digits = max(digits_of(states[0]), wire)
            found = StepDifference(
                compare("state", start, *states, digits_of_change=wire, **limits),
                cause=None,
                num_ranks=num,
                metrics=compare("metrics", None, *reported, digits=digits, **limits),
                num_steps=number,
                gathers=findings.gathers,
                owned=findings.owned,
            )
            if beyond(found.leaves) or beyond(found.metrics):
                break
        return found

    result = None
    if is_of_data:
        one = _first(ranks, step.spec.axis_name)
        result = found = compared(run(one), mesh.num_ranks(ranks, step.spec.axis_name))
        if beyond(found.leaves) or beyond(found.metrics):
            result = _explained(found, step, (_on(start, ranks), *others), keywords)
        print(result)
        _require_equal(step, result, "ranks")
    for name in further:
        found = compared(run(_first(ranks, (name,)), name), ranks.shape[name])
        is_wrong = bool(beyond(found.leaves) or beyond(found.metrics))
        if is_wrong or result is None:
            print(found)
        if is_wrong:
            cause = _OF_FURTHER_AXIS.format(axis=name, num=found.num_ranks)
            _require_equal(step, replace(found, cause=cause), f"devices along {name!r}")
        result = found if result is None else result
    assert result is not None
    return result


@contextlib.contextmanager
def _of_one_device() -> Iterator[None]:
    """Let the author's function find one device."""
    before = jax.device_count
    jax.device_count = lambda backend=None: 1
    try:
        yield
    finally:
        jax.device_count = before


def _require_alive(given: dict[str, Any]) -> None:
    for name, tree in given.items():
        pytrees.require_alive(
            name, tree, "Pass a state that is not donated, or a copy made before."
        )


def _compared_axes(
    ranks: Mesh, of_data: tuple[str, ...], axes: AxisName | None
) -> tuple[bool, list[str]]:
    """Return whether to compare along the data axis, and along which others."""
    if jax.process_count() > 1:
        raise ValueError(
            f"check_step needs all ranks in one process; {jax.process_count()} processes share "
            "this mesh. Use virtual devices in one process: jdp.init(cpu_ranks=4)."
        )
    names = ranks.axis_names if axes is None else axis.names(axes)
    if unknown := set(names) - set(ranks.axis_names):
        raise ValueError(
            f"axes={axes!r} has {sorted(unknown)}, and the mesh of the state has the axes "
            f"{[*ranks.axis_names]}. Name those along which to compare."
        )
    is_of_data = mesh.num_ranks(ranks, of_data) > 1 and not set(of_data).isdisjoint(names)
    further = [name for name in names if name not in of_data and ranks.shape[name] > 1]
    if not (is_of_data or further):
        raise ValueError(
            "check_step needs at least 2 ranks; this mesh has 1. Create virtual CPU ranks: "
            "jdp.init(cpu_ranks=4)."
        )
    return is_of_data, further


def _explained(
    found: StepDifference, step: Step, args: tuple, keywords: dict[str, Any]
) -> StepDifference:
    if lines := host_constants.changing(step, args, keywords):
        return replace(found, cause=_CHANGING.format(lines=", ".join(lines)))
    traced = step.trace(*args, **keywords)
    lowered = traced.lower()
    draws = equal_draws(traced.jaxpr, num_rows(args[1]) // found.num_ranks)
    named = str(lowered.as_text(debug_info=True))
    cause = _likely_cause(found, str(lowered.as_text()), named, draws, step.spec.warned)
    return replace(found, cause=cause)


def _require_equal(step: Step, found: StepDifference, what: str) -> None:
    if found.cause is None:
        return
    worst = (beyond(found.leaves) or beyond(found.metrics))[0]
    after = "" if found.num_steps == 1 else f" after {found.num_steps} steps"
    raise ValueError(
        f"`{step.__name__}` computes another result on {found.num_ranks} {what} than on one: "
        f"`{worst.path}` differs by {worst.difference:.2e}{after}; rounding explains at most "
        f"{worst.allowed:.2e}. {found.cause}"
    )


def _on_host(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_get(x) if isinstance(x, jax.Array) else x, tree)


def _on(start: Any, where: Mesh) -> Any:
    sharding = NamedSharding(where, PartitionSpec())
    return pytrees.restore(jax.device_put(start, sharding, may_alias=False))


def _first(ranks: Mesh, axes: tuple[str, ...]) -> Mesh:
    corner = tuple(slice(0, 1) if name in axes else slice(None) for name in ranks.axis_names)
    return Mesh(ranks.devices[corner], ranks.axis_names, axis_types=ranks.axis_types)
