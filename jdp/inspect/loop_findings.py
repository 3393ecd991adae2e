"""Findings about the reductions in a loop of a step, and after one."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from jdp.inspect import hlo
from jdp.inspect.finding_inputs import MIN_BYTES, Facts, parameters, parameters_of, train_states
from jdp.inspect.planned import SentLeaf
from jdp.inspect.report import Finding, of_bytes, of_s
from jdp.reduction.sharding import sharding_of

_SUMS = ("all-reduce", "reduce-scatter")
_MIN_S = 1e-6  # a shorter wait is shown as none


class _SummedLeaf(NamedTuple):
    """A gradient that is summed over the ranks.

    Attributes:
      kind: of the collective.
      leaf: of one rank.
      line: the author's line that it comes from, empty if there is none.
      bucket: number of the collective, if the leaf has no name; else -1.
    """

    kind: str
    leaf: SentLeaf
    line: str
    bucket: int


def reduction_in_loop(facts: Facts) -> list[Finding]:
    """Find gradients that a loop over micro-batches reduces in each iteration."""
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
    """Yield each gradient that a loop of the traced step sums, and how often a collective runs.

    XLA has no loop of two micro-batches any more, but a collective for each.
    """
    traced = facts.step.traced.collectives
    looped = {leaf.path for each in traced if each.num_loops for leaf in each.leaves}
    for i, (bucket, match) in enumerate(zip(facts.buckets, facts.matches, strict=True)):
        for leaf in match.leaves if bucket.kind in _SUMS else ():
            if leaf.path.startswith("grads") and leaf.path in looped:
                yield _SummedLeaf(bucket.kind, leaf, bucket.line, -1), bucket.runs
            elif bucket.runs > 1 and leaf.num_elements > 1 and _is_summed(leaf):
                yield _SummedLeaf(bucket.kind, leaf._replace(path=""), bucket.line, i), bucket.runs


def _is_summed(leaf: SentLeaf) -> bool:
    """Whether a leaf of a sum is a gradient or has no name; XLA also gathers by sums."""
    return not leaf.path or leaf.path.startswith("grads")


def _runs_of_one_pass(leaf: SentLeaf, whole: Sequence[Any], facts: Facts) -> int:
    """Return how often one backward pass sums a gradient: once, or for each layer of a loop."""
    if whole:
        return max(1, round(sum(x.size for x in whole) / leaf.num_elements))
    # Statistics of a BatchNorm are as large as its scale, and divide the matrix before it.
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
    shardings = [sharding_of(node.tx) for node in train_states(facts)]
    if any(sharding is not None and sharding.stage >= 2 for sharding in shardings):
        return (
            "Stages 2 and 3 do so, to keep only a part of the gradients on each rank. If the "
            "memory allows it, jdp.sharded(tx, stage=1) reduces once in a step."
        )
    sums = ""
    if facts.step.where.platform != "cpu":
        sums = (
            " In a loop of your own write lax.psum for lax.pmean, and divide behind it: XLA moves "
            "a sum out of the loop, and leaves a mean in it."
        )
    return (
        "Add up the gradients in the loop and reduce them once after it: "
        f"jdp.value_and_grad(loss_fn, accumulate=k) does, in the place of the loop.{sums}"
    )


def tail_after_loop(facts: Facts) -> list[Finding]:
    """Find gradients that are reduced after a loop over layers, where nothing hides them."""
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
    # On CPUs nothing is hidden; of layers that are reduced in their loop, all but the last are.
    if not tail or seconds < _MIN_S or is_in_loop or facts.step.where.platform == "cpu":
        return []
    late = "(..., late=True)" if facts.step.where.platform == "tpu" else ""
    return [
        Finding(
            "tail-after-loop",
            f"{of_bytes(sum(tail))} of gradients are reduced after the last loop, where no matmul "
            f"hides them: {of_s(seconds)} exposed, predicted.",
            f"If the loop is a lax.scan over layers, jdp.scan_layers{late} reduces each layer's "
            "gradient while the next layer's is computed; in micro-batches at stages 2 and 3 only.",
        )
    ]


def _is_stacked(leaf: SentLeaf, scanned: Collection[str]) -> bool:
    """Whether a gradient is, or without a name may be, of layers that a loop takes one by one."""
    own = leaf.path.removeprefix("grads")
    return leaf.num_elements > 1 and any(
        ".params" in name and name.endswith(own) for name in scanned
    )
