"""What costs memory or time, and what to write instead."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdp.reduction.local_steps import LocalSteps
from jdp.reduction.optimizer import MIN_SIZE, sharding_of
from jdp.tools import hlo
from jdp.tools.compiled import StepForDevices
from jdp.tools.hlo_matching import Match
from jdp.tools.memory import Memory, category, state_parts
from jdp.tools.report import Bucket, Finding, of_bytes, of_s
from jdp.tools.transfers import SentArrays
from jdp.training.communication_plan import SentLeaf, in_parameters

# Smaller savings are not worth a change.
MIN_BYTES = 2**16


@dataclass(frozen=True)
class Facts:
    """The facts behind the findings; `buckets` describe the `transfers`."""

    step: StepForDevices
    transfers: Sequence[SentArrays]
    buckets: Sequence[Bucket]
    matches: Sequence[Match]
    memory: Memory


def _train_states(facts: Facts) -> list[Any]:
    nodes = jax.tree.leaves(facts.step.args[0], is_leaf=_has_optimizer)
    return [node for node in nodes if _has_optimizer(node)]


def parameters(facts: Facts) -> list[tuple[str, Any]]:
    """Return the state's parameters, with paths."""
    state = facts.step.args[0]
    parts, named = state_parts(state), jax.tree_util.tree_leaves_with_path(state)
    found = [(jax.tree_util.keystr(path), leaf) for path, leaf in named]
    return [it for it in found if category(f"args[0]{it[0]}", parts) == "parameters"]


def parameters_of(facts: Facts, paths: Iterable[str]) -> dict[str, list[Any]]:
    """Return parameters by gradient: `.params['a']['w']` by `grads['a']['w']`, not `grads['w']`."""
    own = {path: in_parameters(path) for path in paths if path.startswith("grads")}
    found: dict[str, list[Any]] = {path: [] for path in own}
    for name, leaf in parameters(facts):
        ends = [path for path, end in own.items() if name.endswith(end)]
        longest = max((len(own[path]) for path in ends), default=0)
        for path in ends:
            if len(own[path]) == longest:
                found[path].append(leaf)
    return found


def _has_optimizer(node: Any) -> bool:
    # An nnx.Rngs has attributes of any name.
    is_optimizer = isinstance(getattr(node, "tx", None), optax.GradientTransformation)
    return is_optimizer and hasattr(node, "opt_state")


_SUMS = ("all-reduce", "reduce-scatter")
_MIN_S = 1e-6  # a shorter wait is shown as none


class _SummedLeaf(NamedTuple):
    """A gradient summed over the ranks; `bucket` is -1 if it has a name."""

    kind: str
    leaf: SentLeaf
    line: str
    bucket: int


def reduction_in_loop(facts: Facts) -> list[Finding]:
    """Find gradients reduced by each iteration over micro-batches."""
    times: Counter[_SummedLeaf] = Counter()
    for summed, runs in _summed_in_loops(facts):
        times[summed] += runs
    of_paths = parameters_of(facts, (summed.leaf.path for summed in times))
    found: dict[tuple[str, int], list[_SummedLeaf]] = defaultdict(list)
    for summed, runs in times.items():
        num = _runs_of_one_pass(summed.leaf, of_paths.get(summed.leaf.path, ()), facts)
        if num and runs >= 2 * num:
            found[summed.kind, runs // num].append(summed)
    return [
        Finding(
            "reduction-per-micro-batch",
            f"{kind} of {_shown(each)} runs {runs} times in a step: it is in a loop{_at(each)}.",
            _advice_of_loop(facts),
        )
        for (kind, runs), each in found.items()
    ]


def _summed_in_loops(facts: Facts) -> Iterator[tuple[_SummedLeaf, int]]:
    """Yield gradients summed by a loop, and the runs of their collectives."""
    traced = facts.step.traced.collectives
    looped = {leaf.path for each in traced if each.num_loops for leaf in each.operands}
    for i, (bucket, match) in enumerate(zip(facts.buckets, facts.matches, strict=True)):
        for leaf in match.leaves if bucket.kind in _SUMS else ():
            if leaf.path.startswith("grads") and leaf.path in looped:
                yield _SummedLeaf(bucket.kind, leaf, bucket.line, -1), bucket.runs
            elif bucket.runs > 1 and leaf.num_elements > 1 and _is_summed(leaf):
                yield _SummedLeaf(bucket.kind, leaf._replace(path=""), bucket.line, i), bucket.runs


def _is_summed(leaf: SentLeaf) -> bool:
    """Whether a summed leaf is a gradient or unnamed; XLA also gathers by sums."""
    return not leaf.path or leaf.path.startswith("grads")


def _runs_of_one_pass(leaf: SentLeaf, whole: Sequence[Any], facts: Facts) -> int:
    """Return how often a backward pass sums a gradient: once, or for each layer of a loop."""
    if whole:
        return max(1, round(sum(x.size for x in whole) / leaf.num_elements))
    # BatchNorm statistics are as large as its scale, and divide the matrix before it.
    layers = (divmod(x.size, leaf.num_elements) for _, x in parameters(facts))
    return max((num for num, rest in layers if not rest), default=0)


def _shown(summed: list[_SummedLeaf]) -> str:
    leaves = [each.leaf for each in summed]
    names = [leaf.path or f"{leaf.dtype}[{leaf.num_elements}]" for leaf in leaves]
    total = of_bytes(sum(map(_num_bytes, leaves)))
    return f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''} ({total})"


def _num_bytes(leaf: SentLeaf) -> int:
    return hlo.num_bytes(f"{leaf.dtype}[{leaf.num_elements}]")


def _at(summed: list[_SummedLeaf]) -> str:
    lines = list(dict.fromkeys(each.line for each in summed if each.line))
    return f" ({', '.join(lines[:3])})" if lines else ""


def _advice_of_loop(facts: Facts) -> str:
    shardings = [sharding_of(node.tx) for node in _train_states(facts)]
    if any(sharding is not None and sharding.stage >= 2 for sharding in shardings):
        return (
            "Stages 2 and 3 do so, to keep only a part of the gradients on each rank. If memory "
            "allows, jdp.sharded(tx, stage=1) reduces once per step."
        )
    sums = ""
    if facts.step.where.platform != "cpu":
        sums = (
            " In your own loop write lax.psum instead of lax.pmean, and divide after it: XLA "
            "moves a sum out of the loop, but not a mean."
        )
    return (
        "Sum the gradients in the loop and reduce them once after it: "
        f"jdp.value_and_grad(loss_fn, accumulate=k) replaces the loop.{sums}"
    )


def tail_after_loop(facts: Facts) -> list[Finding]:
    """Find exposed reductions after a loop over layers."""
    program = facts.step.program
    entry = program.computations[program.entry]
    loops = [i for i, one in enumerate(entry) if one.op == "while"]
    if not loops:
        return []
    behind = {one.name for one in entry[loops[-1] :]}
    late = [
        (bucket, match.leaves)
        for transfer, bucket, match in zip(
            facts.transfers, facts.buckets, facts.matches, strict=True
        )
        if transfer.instruction.name in behind
        and transfer.computation == program.entry
        and transfer.after_last_matmul
        and bucket.kind in _SUMS
    ]
    scanned = facts.step.traced.scanned
    tail = [
        bucket.exposed_bytes
        for bucket, leaves in late
        if bucket.exposed_bytes >= MIN_BYTES and any(_is_stacked(leaf, scanned) for leaf in leaves)
    ]
    # A small sum behind a large one waits for it.
    seconds = sum(bucket.exposed_s for bucket, _ in late)
    is_in_loop = any(bucket.runs > 1 and bucket.kind in _SUMS for bucket in facts.buckets)
    # CPUs hide nothing; a loop that reduces its layers hides all but the last.
    if not tail or seconds < _MIN_S or is_in_loop or facts.step.where.platform == "cpu":
        return []
    late = "(..., late=True)" if facts.step.where.platform == "tpu" else ""
    return [
        Finding(
            "tail-after-loop",
            f"{of_bytes(sum(tail))} of gradients are reduced after the last loop, where no matmul "
            f"hides them: {of_s(seconds)} exposed, predicted.",
            f"If the loop is a lax.scan over layers, jdp.scan_layers{late} reduces each layer's "
            "gradient while it computes the next layer's; in micro-batches at stages 2 and 3 "
            "only.",
        )
    ]


def _is_stacked(leaf: SentLeaf, scanned: Collection[str]) -> bool:
    """Whether a gradient is, or unnamed may be, of layers in a loop."""
    own = leaf.path.removeprefix("grads")
    return leaf.num_elements > 1 and any(
        ".params" in name and name.endswith(own) for name in scanned
    )


def wide_wire(facts: Facts) -> list[Finding]:
    """Find 16-bit parameters with gradients sent in 32 bits."""
    sent = [
        leaf
        for each in facts.step.traced.collectives
        for leaf in each.operands
        if each.kind in ("all-reduce", "reduce-scatter")
    ]
    of_paths = parameters_of(facts, (leaf.path for leaf in sent))
    wide = [
        leaf
        for leaf in sent
        if leaf.dtype == "f32" and any(map(_is_narrow, of_paths.get(leaf.path, ())))
    ]
    num_bytes = sum(4 * leaf.num_elements for leaf in wide)
    if not wide or num_bytes < MIN_BYTES:
        return []
    return [
        Finding(
            "wide-wire",
            f"{len(wide)} gradients of parameters of 16 bits are sent as float32, "
            f"{of_bytes(num_bytes)} in a step, such as `{wide[0].path}`.",
            "jdp.replicated(tx, reduce_dtype=jnp.bfloat16) halves it and rounds sums to 8 bits.",
        )
    ]


def _is_narrow(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize == 2


def replicated_optimizer(facts: Facts) -> list[Finding]:
    """Find optimizer state whole on every rank."""
    saved = 0
    for node in _train_states(facts):
        if sharding_of(node.tx) is not None or isinstance(node.tx, LocalSteps):
            continue
        for leaf in jax.tree.leaves(node.opt_state):
            size, itemsize = leaf.size, leaf.dtype.itemsize  # also of random keys
            if size >= MIN_SIZE and any(dim % facts.step.num_ranks == 0 for dim in leaf.shape):
                saved += size * itemsize * (facts.step.num_ranks - 1) // facts.step.num_ranks
    if facts.step.num_ranks == 1 or saved < MIN_BYTES:
        return []
    return [
        Finding(
            "replicated-optimizer-state",
            f"every rank keeps the whole optimizer state, "
            f"{of_bytes(facts.memory.optimizer_state)}.",
            "jdp.sharded(tx, stage=1) instead of jdp.replicated(tx) keeps a part on each rank: "
            f"{of_bytes(saved)} less on each of {facts.step.num_ranks} ranks.",
            saved,
        )
    ]


def padding(facts: Facts) -> list[Finding]:
    """Find arguments with padded tiles."""
    arrays = [*facts.step.program.parameters.items()]
    padded = sum(array.padded_bytes() for _, array in arrays)
    plain = sum(array.num_bytes() for _, array in arrays)
    if padded - plain < MIN_BYTES or padded < 1.1 * plain:
        return []
    name, worst = max(arrays, key=lambda item: item[1].padded_bytes() - item[1].num_bytes())
    return [
        Finding(
            "padding",
            f"arguments take {of_bytes(padded)} instead of {of_bytes(plain)}: this device pads "
            f"tiles, most of all those of `{name}` {list(worst.dims)}.",
            "Make the last two dims multiples of the tile, 8 x 128 for float32, or merge small "
            "dims.",
            padded - plain,
        )
    ]


def findings_of(facts: Facts) -> list[Finding]:
    """Return what to change, the costliest kinds first."""
    return [finding for look in _LOOKS for finding in look(facts)]


def _batch_gather(facts: Facts) -> list[Finding]:
    return [
        Finding(
            "gather-of-the-batch",
            f"`{leaf.path}` is gathered on every rank, {of_bytes(num_bytes)} of "
            f"{facts.step.num_ranks} ranks' rows{f' at {each.line}' if each.line else ''}.",
            "Every rank then computes with the rows of all. Keep the rows on their ranks, and "
            "gather only what the loss needs of all rows, such as embeddings.",
        )
        for each in facts.step.traced.collectives
        for leaf in each.operands
        if each.kind == "all-gather" and leaf.path.startswith(facts.step.spec.argument(1))
        for num_bytes in [
            leaf.num_elements * facts.step.num_ranks * hlo.num_bytes(f"{leaf.dtype}[]")
        ]
    ]


def _callback(facts: Facts) -> list[Finding]:
    return [
        Finding(
            "host-callback",
            f"the step calls the host, {name}{f' at {line}' if line else ''}, and every rank waits "
            "for Python.",
            "Return its input as a metric and handle it in the loop, or remove it from the step.",
        )
        for name, line in dict.fromkeys(facts.step.traced.callbacks)
    ]


def _not_of_jdp(facts: Facts) -> list[Finding]:
    # Those along further axes belong to the model.
    data = {*facts.step.spec.axis_name}
    own = [
        bucket
        for bucket in facts.buckets
        if bucket.is_of_author and not (bucket.axes and data.isdisjoint(bucket.axes))
    ]
    if not own:
        return []
    lines = [line for line in dict.fromkeys(bucket.line for bucket in own) if line]
    shown = ", ".join(lines[:3]) + (f" and {len(lines) - 3} more lines" if len(lines) > 3 else "")
    kinds = Counter(bucket.kind for bucket in own)
    counts = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    num_bytes = sum(bucket.num_bytes for bucket in own)
    return [
        Finding(
            "foreign-collective",
            f"jdp did not ask for these collectives: {counts}, {of_bytes(num_bytes)} in all"
            f"{f' ({shown})' if shown else ''}.",
            "jdp neither chooses an algorithm for them nor hides them. Keep them if they belong "
            "to the model, such as statistics of a BatchNorm. Gradients: state.apply_gradients; "
            "metrics: jdp.mean_over_ranks, jdp.sum_over_ranks.",
        )
    ]


def _merged(facts: Facts) -> list[Finding]:
    merged = [
        bucket
        for bucket in facts.buckets
        if bucket.num_merged > 1 and bucket.exposed_bytes >= MIN_BYTES
    ]
    return [
        Finding(
            "merged-buckets",
            f"XLA merged {bucket.num_merged} collectives into one {bucket.kind} of "
            f"{of_bytes(bucket.num_bytes)}, which begins when the last of them is ready, so no "
            "matmul hides it.",
            "all_reduce=jdp.collectives.split, for GPUs of one host, sends each bucket when it is "
            "ready; larger buckets (bucket_bytes=) are not merged."
            if facts.step.where.num_hosts == 1
            else "Larger buckets (bucket_bytes=) are not merged.",
        )
        for bucket in merged
        if facts.step.where.platform == "gpu"
    ]


def _whole_sums(facts: Facts) -> list[Finding]:
    """Find gradients summed whole by XLA although the step asks for shards."""
    kinds: dict[str, set[str]] = {}
    for each in facts.step.traced.collectives:
        for leaf in each.operands:
            kinds.setdefault(leaf.path, set()).add(each.kind)
    found = [
        leaf
        for bucket, match in zip(facts.buckets, facts.matches, strict=True)
        for leaf in match.leaves
        if bucket.kind == "all-reduce"
        and leaf.path
        and kinds.get(leaf.path, set()) & {"all-reduce", "reduce-scatter"} == {"reduce-scatter"}
        if leaf.num_elements * hlo.num_bytes(f"{leaf.dtype}[]") >= MIN_BYTES
    ]
    if not found:
        return []
    names = [f"`{leaf.path}`" for leaf in found]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    largest = max(leaf.num_elements for leaf in found)
    return [
        Finding(
            "whole-sum",
            f"XLA compiled the reduce-scatter of {shown} as an all-reduce, which moves twice the "
            "bytes.",
            "On TPUs a reduce-scatter needs whole tiles for each rank, of 8 rows of 128. Use "
            "parameter sizes divisible by 1024 times the number of ranks, or keep them whole: "
            f"jdp.sharded(..., min_size={largest + 1}).",
        )
    ]


_LOOKS: tuple[Callable[[Facts], list[Finding]], ...] = (
    reduction_in_loop,
    _batch_gather,
    _callback,
    tail_after_loop,
    replicated_optimizer,
    wide_wire,
    _not_of_jdp,
    _merged,
    _whole_sums,
    padding,
)
