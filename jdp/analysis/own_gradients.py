"""Warn of norms of one rank's gradients, and of clipping them, before they are averaged."""

from collections.abc import Iterator
from typing import Any

from jdp.analysis import jaxprs, scales
from jdp.analysis.marks import LOCAL
from jdp.analysis.provenance import Provenance
from jdp.analysis.report import Report
from jdp.analysis.traced import Traced
from jdp.analysis.way_back import Frame, Node
from jdp.analysis.wording import shown
from jdp.error_codes import with_code

# A mean over ranks of one of these is that of the mean, if other operands are equal on all ranks.
_LINEAR = frozenset(
    "add add_any broadcast_in_dim concatenate convert_element_type copy copy_p cumsum div "
    "dot_general dynamic_slice gather jdp_mark mul neg reduce_sum reshape rev select_n slice "
    "squeeze sub transpose".split()
)
_MOVES = frozenset("convert_element_type copy copy_p neg reshape squeeze".split())
_BOUNDS = frozenset("clamp max min".split())
_SCALES = frozenset("add add_any div mul select_n sub".split())
# A warning that begins with it is about a change of gradients, not about a metric.
CLIPPED = "the gradient of this rank's rows is clipped"
# A search ends here without a warning: calls that each call the next twice have 2^depth values.
_MOST_NODES = 10_000


def warnings(report: Report, traced: Traced) -> Iterator[str]:
    """Yield a warning for metrics and updates that bend gradients before they are averaged.

    Args:
      report: of the analysis of the step.
      traced: the step as it was traced.
    """
    axes = frozenset(traced.spec.axis_name)
    local = [each for each in report.marks if each.kind == LOCAL and each.value.axes & axes]
    if not local:
        return
    gradients = _OwnGradients(report.back(axes))
    for each in local:
        gradients.add(each.eqn, each.path)
    yield from _clipped(gradients)
    yield from _measured(gradients, report, traced)


def _clipped(gradients: "_OwnGradients") -> Iterator[str]:
    for line, paths in gradients.clipped().items():
        where = f" at {line}" if line else ""
        yield with_code(
            "JDP131",
            f"{CLIPPED}{where}, or scaled by its own size "
            f"({shown([f'`grads{path}`' for path in paths])}), and averaged over "
            "the ranks afterwards: one device would clip the mean, so the result depends on the "
            "number of ranks. Write jdp.replicated(optax.chain(optax.clip_by_global_norm(1.0), "
            "tx)), or average first: grads = jdp.sync_gradients(grads), and "
            "apply_gradients(grads, synced=True).",
        )


def _measured(gradients: "_OwnGradients", report: Report, traced: Traced) -> Iterator[str]:
    for i, output in scales.metrics(traced).items():
        if report.outputs[i].axes & frozenset(traced.spec.axis_name) and gradients.bent_into(i):
            yield with_code(
                "JDP131",
                f"`{output.path}` is computed from the gradient of this rank's rows, and averaged "
                "over the ranks afterwards: a norm is then larger than that of the mean gradient. "
                "Average first: grads = jdp.sync_gradients(grads), and apply_gradients(grads, "
                "synced=True). Or write jdp.mean_over_ranks(x) around the metric, if the mean of "
                "the ranks' own is meant.",
            )


class _OwnGradients:
    """The gradients of a step before they are averaged, as the author may have scaled them."""

    def __init__(self, back: Provenance):
        self._back = back
        # Each value that is a gradient, also before a factor or a bound was applied to it.
        self._known: set[tuple[Any, ...]] = set()
        # The path of a gradient, with the values that scale it and with the lines that bound it.
        self._factors: list[tuple[str, Node, str]] = []
        self._bounds: dict[str, dict[str, None]] = {}
        self._first = len(back.body.eqns)
        self._place = {v: i for i, eqn in enumerate(back.body.eqns) for v in eqn.outvars}

    def add(self, eqn: Any, path: str) -> None:
        """Add the gradient that a mark `eqn` is about."""
        node = self._back.of_mark(eqn)
        waiting = [] if node is None else [node]
        while waiting:
            each = waiting.pop()
            if each.key() not in self._known and self._back.differs(each):
                self._known.add(each.key())
                self._first = min(self._first, self._position(each))
                waiting += self._unscaled(each, path)

    def clipped(self) -> dict[str, list[str]]:
        """Return the gradients that are clipped by themselves, by the line that does it."""
        found = {line: list(paths) for line, paths in self._bounds.items()}
        for path, factor, line in self._factors:
            if path not in found.get(line, ()) and self._reaches(factor, bends=False):
                found.setdefault(line, []).append(path)
        return found

    def bent_into(self, i: int) -> bool:
        """Whether an output of the step is a function of gradients that is not linear."""
        return self._reaches(self._back.of_output(i), bends=True)

    def _unscaled(self, node: Node, path: str) -> list[Node]:
        """Return the gradients that a gradient was computed from by the author, not by JAX."""
        back, (frame, variable) = self._back, node
        eqn = back.maker(node)
        if eqn is None:
            is_called = frame.eqn is not None and frame.eqn.primitive.name in jaxprs.CALLS
            return [*back.varying_before(node)] if is_called else []
        if frame.record.calls(eqn):
            return [*back.varying_before(node)] if eqn.primitive.name in jaxprs.CALLS else []
        name = eqn.primitive.name
        if jaxprs.is_transposed(eqn) or name not in _MOVES | _BOUNDS | _SCALES:
            return []
        operands = [Node(frame, atom) for atom in eqn.invars]
        factors = [each for each in operands if self._is_factor(each, variable)]
        if name == "select_n":
            operands = operands[1:]
        rest = [each for each in operands if each not in factors and back.differs(each)]
        line = back.line(frame, eqn)
        self._factors += [(path, each, line) for each in factors if back.differs(each)]
        if name in _BOUNDS and len(rest) == 1:
            self._bounds.setdefault(line, {})[path] = None
        return rest if len(rest) == 1 or name == "select_n" else []

    def _is_factor(self, node: Node, variable: Any) -> bool:
        """Whether an operand of what made `variable` is one number for all of its elements."""
        if jaxprs.is_literal(node.variable) or not variable.aval.shape:
            return False
        eqn = self._back.plain(node)
        if eqn is not None and eqn.primitive.name == "broadcast_in_dim":
            return not eqn.invars[0].aval.shape
        return not node.variable.aval.shape

    def _reaches(self, node: Node, *, bends: bool) -> bool:
        """Whether a value depends on a gradient before its mean; `bends`: by more than a sum."""
        seen: set[Any] = set()
        waiting = [(node, not bends)]
        while waiting and len(seen) < _MOST_NODES:
            each, is_bent = waiting.pop()
            key = each.key(), is_bent
            if key in seen or not self._back.differs(each):
                continue
            seen.add(key)
            if each.key() in self._known:
                if is_bent:
                    return True
                continue
            if self._position(each) < self._first:
                continue  # computed before any gradient
            bent = is_bent or self._bends(each)
            waiting += [(before, bent) for before in self._back.varying_before(each)]
        return False

    def _bends(self, node: Node) -> bool:
        eqn = self._back.plain(node)
        if eqn is None:
            return False
        name = eqn.primitive.name
        if name not in _LINEAR:
            return True
        differing = [self._back.differs(Node(node.frame, atom)) for atom in eqn.invars]
        if name in ("mul", "dot_general"):
            return sum(differing) > 1
        return name in ("div", "select_n") and differing[1 if name == "div" else 0]

    def _position(self, node: Node) -> int:
        """Return the place in the step of the equation that computed a value, or contains it."""
        frame: Frame | None = node.frame
        eqn = None
        while frame is not None and frame.around is not None:
            eqn, frame = frame.eqn, frame.around
        variable = node.variable if eqn is None else eqn.outvars[0] if eqn.outvars else None
        return self._place.get(variable, -1)
