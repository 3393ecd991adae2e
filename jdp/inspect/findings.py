"""What costs a compiled step memory or time, and what to write instead."""

from collections import Counter
from collections.abc import Callable

from jdp.inspect import hlo, state_findings
from jdp.inspect.facts import MIN_BYTES, Facts, parameters, train_states
from jdp.inspect.report import Bucket, Finding, of_bytes, of_s
from jdp.reduction.sharding import sharding_of


def findings_of(facts: Facts) -> list[Finding]:
    """Return what to change in a step, the costliest kinds first."""
    return [finding for look in _LOOKS for finding in look(facts)]


def _reduction_in_loop(facts: Facts) -> list[Finding]:
    found = []
    params = {leaf.size for _, leaf in parameters(facts)}
    for transfer, bucket in zip(facts.transfers, facts.buckets, strict=True):
        sizes = {array.num_elements() for array in transfer.arrays} - {1}
        is_sum = bucket.kind in ("all-reduce", "reduce-scatter")
        # The gradient of one layer in a loop over layers is smaller than the stacked parameter.
        if not is_sum or bucket.runs < 2 or not sizes or not sizes <= params:
            continue
        found.append(
            Finding(
                "reduction-per-micro-batch",
                f"{bucket.kind} of {_shown(bucket)} ({of_bytes(bucket.num_bytes)}) runs "
                f"{bucket.runs} times in a step: it is in a loop{_at(bucket)}.",
                _advice_of_loop(facts),
            )
        )
    return found


def _advice_of_loop(facts: Facts) -> str:
    shardings = [sharding_of(node.tx) for node in train_states(facts)]
    if any(sharding is not None and sharding.stage >= 2 for sharding in shardings):
        return (
            "Stages 2 and 3 do so, to keep only a part of the gradients on each rank. If the "
            "memory allows it, jdp.sharded(tx, stage=1) reduces once in a step."
        )
    return (
        "Add up the gradients in the loop and reduce them once after it: "
        "jdp.value_and_grad(loss_fn, accumulate=k) does, in the place of the loop."
    )


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


def _tail_after_loop(facts: Facts) -> list[Finding]:
    entry = facts.step.program.computations[facts.step.program.entry]
    loops = [i for i, one in enumerate(entry) if one.op == "while"]
    if not loops:
        return []
    behind = {one.name for one in entry[loops[-1] :]}
    tail = [
        bucket
        for transfer, bucket in zip(facts.transfers, facts.buckets, strict=True)
        if transfer.instruction.name in behind
        and transfer.computation == facts.step.program.entry
        and transfer.after_last_matmul
        and bucket.kind in ("all-reduce", "reduce-scatter")
        and bucket.exposed_bytes >= MIN_BYTES
    ]
    sums = ("all-reduce", "reduce-scatter")
    is_late = any(bucket.runs > 1 and bucket.kind in sums for bucket in facts.buckets)
    # On CPUs nothing is hidden; of layers that are reduced in their loop, all but the last are.
    if not tail or is_late or facts.step.where.platform == "cpu":
        return []
    num_bytes, seconds = sum(x.exposed_bytes for x in tail), sum(x.exposed_s for x in tail)
    return [
        Finding(
            "tail-after-loop",
            f"{of_bytes(num_bytes)} of gradients are reduced after the last loop, where no matmul "
            f"hides them: {of_s(seconds)} exposed, predicted.",
            "If the loop is a lax.scan over layers, jdp.scan_layers reduces each layer's gradient "
            "while the next layer's is computed.",
        )
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


_LOOKS: tuple[Callable[[Facts], list[Finding]], ...] = (
    _reduction_in_loop,
    _batch_gather,
    _callback,
    _tail_after_loop,
    state_findings.replicated_optimizer,
    state_findings.wide_wire,
    _not_of_jdp,
    _merged,
    state_findings.padding,
)


def _shown(bucket: Bucket) -> str:
    return ", ".join(bucket.leaves[:3]) + (" ..." if len(bucket.leaves) > 3 else "")


def _at(bucket: Bucket) -> str:
    return f" ({bucket.line})" if bucket.line else ""
