"""Texts for collectives that some ranks may skip while the others wait for them."""

from collections.abc import Iterator, Sequence

from jdp.analysis.explanation import since
from jdp.analysis.report import Report
from jdp.analysis.wording import spelled
from jdp.error_codes import with_code


def refusals(report: Report, inputs: Sequence[str], uniform: str) -> Iterator[str]:
    """Yield a text for every collective that some ranks may skip.

    Args:
      inputs: names of the inputs of the shard_map, in order.
    """
    for found in report.deadlocks:
        at = f" at {found.source}" if found.source else ""
        under = f"runs under a `{found.control}` whose predicate may differ from rank to rank"
        if found.is_compilers:
            yield with_code(
                "JDP104",
                f"`{found.primitive}`{at} {under}, and the mesh axis {spelled(found.axes)} is left "
                "to the compiler: if it splits the operand, XLA exchanges parts between all "
                "devices there, and ranks that skip it leave the others waiting forever. Make "
                f"the predicate the same first, `{uniform}`, or compute both cases and write "
                "jnp.where(predicate, a, b).",
            )
            continue
        back = report.back(found.under)
        node = back.of_predicate(found.eqn)
        reason = "" if node is None else since(back.origin(node), inputs)
        yield with_code(
            "JDP103",
            f"`{found.primitive}`{at} over {spelled(found.axes)} {under}{reason}; ranks that skip "
            "it leave the others waiting forever. Make the predicate the same first, for instance "
            f"`{uniform}`.",
        )
