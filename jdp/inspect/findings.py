"""What costs a compiled step memory or time, and what to write instead."""

from collections import Counter
from collections.abc import Callable

from jdp.inspect import hlo, loop_findings, state_findings
from jdp.inspect.finding_inputs import MIN_BYTES, Facts
from jdp.inspect.report import Finding, of_bytes


def findings_of(facts: Facts) -> list[Finding]:
    """Return what to change in a step, the costliest kinds first."""
    return [finding for look in _LOOKS for finding in look(facts)]


def _batch_gather(facts: Facts) -> list[Finding]:
    return [
        Finding(
            "gather-of-the-batch",
            f"`{leaf.path}` is gathered on every rank, {of_bytes(num_bytes)} of "
            f"{facts.step.num_ranks} ranks' rows{f' at {each.line}' if each.line else ''}.",
            "Every rank then computes with the rows of all. Leave the rows where they are, and "
            "gather only what the loss needs of all rows, such as embeddings.",
        )
        for each in facts.step.traced.collectives
        for leaf in each.leaves
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
            "Return what it needs as a metric and handle it in the loop, or leave it out of the "
            "step.",
        )
        for name, line in dict.fromkeys(facts.step.traced.callbacks)
    ]


def _not_of_jdp(facts: Facts) -> list[Finding]:
    own = [bucket for bucket in facts.buckets if bucket.is_of_author]
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
            "jdp neither chooses an algorithm for them nor hides them. Leave them if they belong "
            "to the model, such as statistics of a BatchNorm. Gradients: "
            "state.apply_gradients; metrics: jdp.mean_over_ranks, jdp.sum_over_ranks.",
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
            f"{of_bytes(bucket.num_bytes)}, which begins when the last of them is ready, and which "
            "no matmul hides.",
            "all_reduce=jdp.collectives.split, for GPUs of one host, sends each bucket when it is "
            "ready; larger buckets (bucket_bytes=) are not merged."
            if facts.step.where.num_hosts == 1
            else "Larger buckets (bucket_bytes=) are not merged.",
        )
        for bucket in merged
        if facts.step.where.platform == "gpu"
    ]


def _whole_sums(facts: Facts) -> list[Finding]:
    """Find gradients that XLA sums whole although the step asks for shards of the sum."""
    kinds: dict[str, set[str]] = {}
    for each in facts.step.traced.collectives:
        for leaf in each.leaves:
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
            f"XLA has compiled the reduce-scatter of {shown} as an all-reduce, which moves twice "
            "the bytes.",
            "On TPUs a reduce-scatter needs whole tiles for each rank, of 8 rows of 128: give such "
            "parameters a size that divides by 1024 times the number of ranks, or keep them whole "
            f"by jdp.sharded(..., min_size={largest + 1}).",
        )
    ]


_LOOKS: tuple[Callable[[Facts], list[Finding]], ...] = (
    loop_findings.reduction_in_loop,
    _batch_gather,
    _callback,
    loop_findings.tail_after_loop,
    state_findings.replicated_optimizer,
    state_findings.wide_wire,
    _not_of_jdp,
    _merged,
    _whole_sums,
    state_findings.padding,
)
