"""Findings about uniform but suspicious steps."""

from __future__ import annotations

import ast
import functools
import linecache
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdp.analysis import diagnostics, jaxprs, scales
from jdp.analysis.backward_slice import Frame, Node
from jdp.analysis.dataflow import Forward
from jdp.analysis.diagnostics import Traced, shown, source_of
from jdp.analysis.interpreter import move
from jdp.analysis.marks import LOCAL, NARROW_LOSS, OF_MASTERS, SUMMED
from jdp.analysis.provenance import Provenance, Report
from jdp.analysis.rules import RULES, collectives, control_flow
from jdp.analysis.uniformity import find_shard_maps
from jdp.error_codes import with_code


def equal_draws(jaxpr: Any, num_rows: int) -> list[str]:
    """Return the lines that draw numbers for rows from a shared key."""
    step = find_shard_maps(jaxpr)[0]
    lines: dict[str, None] = {}

    def line(around: str, eqn: Any) -> str:
        return source_of(eqn) or around

    def visit(eqn: Any, operands: list[bool], around: str) -> list[bool] | None:
        name = eqn.primitive.name
        if name == "random_bits" and not any(operands) and num_rows in eqn.outvars[0].aval.shape:
            lines[line(around, eqn)] = None
        if name in collectives.RULES and name != "jdp_mark":
            return [name == "axis_index"] * len(eqn.outvars)
        return None

    ins = [bool(jaxprs.spec_axes(spec)) for spec in step.params["in_specs"]]
    if num_rows > 1:
        Forward(any, visit, line).outputs(step.params["jaxpr"], ins, "")
    return [*filter(None, lines)]


class _Gradient(NamedTuple):
    """Facts about gradients of losses with wide parameters.

    Attributes:
      of_rows: whether it depends on the batch, apart from gradients of narrow losses.
      is_wide: whether it depends on a full-precision derivative of the batch.
    """

    of_rows: bool = False
    is_wide: bool = False
    line: str = ""


class _Context(NamedTuple):
    is_transposed: bool = False
    is_narrow: bool = False

    def within(self, eqn: Any) -> _Context:
        names = str(eqn.source_info.name_stack)
        return _Context(
            self.is_transposed or jaxprs.is_transposed(eqn), self.is_narrow or NARROW_LOSS in names
        )


def require_narrow(jaxpr: Any, traced: Traced) -> None:
    """Refuse an update by a loss gradient for full-precision parameters."""
    dtype = traced.found.gather_dtype
    if not dtype:
        return
    found = _wide_gradients(jaxprs.mapped_body(find_shard_maps(jaxpr)[0]), traced)
    if not found:
        return
    line = next(filter(None, found.values()), "")
    raise ValueError(
        f"gather_dtype={dtype} has no effect in a loss of this "
        f"step{f', at {line}' if line else ''}: it saw parameters in full precision, and the "
        f"gradients of {shown([f'`{path}`' for path in found])} come from it. Only "
        f"jdp.value_and_grad casts parameters to {dtype}. Write loss, grads = "
        "jdp.value_and_grad(loss_fn)(state.params, batch) for each loss, with unchanged "
        "state.params, in the step itself and not in its jax.jit, lax.scan or lax.cond. To keep "
        f"jax.value_and_grad, cast in the loss: jax.tree.map(lambda p: p.astype(jnp.{dtype}), "
        "params)."
    )


def _wide_gradients(body: Any, traced: Traced) -> dict[str, str]:
    found: dict[str, str] = {}

    def visit(eqn: Any, operands: list[_Gradient], around: _Context) -> list[_Gradient] | None:
        here = around.within(eqn)
        value = _join(operands)
        if here.is_narrow or (here.is_transposed and _widens(eqn)):
            return [_Gradient()] * len(eqn.outvars)
        if eqn.primitive.name == "jdp_mark" and eqn.params["kind"] == OF_MASTERS and value.is_wide:
            found[f"grads{eqn.params['path']}"] = value.line
        if here.is_transposed and value.of_rows and not jaxprs.bodies(eqn):
            line = value.line or diagnostics.source_of(eqn)
            return [_Gradient(True, True, line)] * len(eqn.outvars)
        return None

    names = [name.split("[")[0].split(".")[0] for name in traced.inputs]
    batch = traced.spec.argument(1)
    ins = [_Gradient()] * (len(body.invars) - len(names))
    ins += [_Gradient(of_rows=name == batch) for name in names]
    Forward(_join, visit, _Context.within).outputs(body, ins, _Context())
    return found


def _widens(eqn: Any) -> bool:
    if eqn.primitive.name != "convert_element_type":
        return False
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in (before, after)):
        return False
    return jnp.finfo(before).bits < jnp.finfo(after).bits


def _join(values: Sequence[_Gradient]) -> _Gradient:
    return _Gradient(
        any(value.of_rows for value in values),
        any(value.is_wide for value in values),
        next((value.line for value in values if value.line), ""),
    )


# A linear function of a rank's gradients commutes with the mean over ranks; its factors and masks
# depend on no gradient.


# Linear in all operands together. Comparisons are reported, so logic is included.
_LINEAR = frozenset(
    "add add_any and broadcast_in_dim complex concatenate conj cumsum dynamic_slice "
    "dynamic_update_slice fft gather imag jdp_mark jdp_weigh not or pad real reduce_and reduce_or "
    "reduce_sum reduce_window_sum scatter scatter-add scatter-sub select_n stack sub xor".split()
)
# Linear in each operand alone.
_PRODUCTS = frozenset(
    "conv_general_dilated dot_general mul ragged_dot ragged_dot_general scatter-mul".split()
)
# Linear in all operands but the one at this position.
_DIVISORS = {"div": 1, "triangular_solve": 0}
_MOVES_EACH = frozenset(
    "device_put jdp_local jdp_mean jdp_tied jdp_together optimization_barrier".split()
)
_SUMS = frozenset("dot_general reduce_sum".split())
_LOOPS = frozenset("scan while".split())
_UNKNOWN = (
    frozenset(collectives.RULES) - {"jdp_mark"}
    | control_flow.SOURCES
    | jaxprs.JOINED
    | jaxprs.SOURCES
    | frozenset("buffer_callback call_exported debug_callback ffi_call pure_callback".split())
)
NONLINEAR = "is not linear in the gradient of this rank's rows"
# For 2^depth values: equal calls count as one, then others as linear.
_MANY_NODES, _MOST_NODES = 10_000, 200_000


def clip_warnings(report: Report, traced: Traced) -> Iterator[str]:
    """Warn of nonlinear changes of gradients before their mean."""
    axes = frozenset(traced.spec.axis_name)
    local = [each for each in report.marks if each.kind == LOCAL and each.value.axes & axes]
    if not local:
        return
    back = report.back(axes)
    updates = _Linearity(back, shapes={each.eqn.outvars[0].aval.shape for each in local})
    yield from _changed(updates, [(each.path, back.of_mark(each.eqn)) for each in local])
    metrics = _Linearity(back, updates.shapes, among=updates.gradients)
    for i, output in scales.metrics(traced).items():
        if report.outputs[i].axes & axes and metrics.bend(back.of_output(i)):
            yield with_code(
                "JDP131",
                f"`{output.path}` is computed from the gradient of this rank's rows and averaged "
                "over ranks afterwards. Such a norm is larger than the norm of the mean "
                "gradient. Average first: grads = jdp.sync_gradients(grads), and "
                "apply_gradients(grads, synced=True). If you want the mean of the ranks' values, "
                "write jdp.mean_over_ranks(x) around the metric.",
            )


def _changed(updates: _Linearity, gradients: Iterable[tuple[str, Node | None]]) -> Iterator[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for path, node in gradients:
        bend = None if node is None else updates.bend(node)
        if bend is not None:
            where = updates.line(bend)
            paths = found.setdefault((bend.eqn.primitive.name, where), [])
            paths.append(f"`grads{path}`")
    for (name, line), paths in found.items():
        yield with_code(
            "JDP131",
            f"`{name}`{f' at {line}' if line else ''} {NONLINEAR} "
            f"({shown([*dict.fromkeys(paths)])}), which is averaged over the ranks afterwards, "
            "so the result depends on the number of ranks. Move the change into the optimizer, "
            "jdp.replicated(optax.chain(optax.clip_by_global_norm(1.0), tx)), or average first: "
            "grads = jdp.sync_gradients(grads), and apply_gradients(grads, synced=True).",
        )


class _Bend(NamedTuple):
    """A nonlinear operation in the step."""

    position: int
    frame: Frame
    eqn: Any


class _Dependence(NamedTuple):
    """How a value depends on this rank's gradients; `of_rows`: of single rows."""

    depends: bool = False
    bend: _Bend | None = None
    of_rows: bool = False


class _Linearity:
    """Whether values are linear in gradients before the mean over ranks; `among`: their keys."""

    def __init__(
        self, back: Provenance, shapes: set[tuple[int, ...]], among: set[Any] | None = None
    ):
        self._back, self.shapes, self._among = back, shapes, among
        self.gradients: set[Any] = set()
        self._found: dict[Any, _Dependence] = {}
        self._operands: dict[Any, list[Node]] = {}
        self._place = {v: i for i, eqn in enumerate(back.body.eqns) for v in eqn.outvars}
        derived = (i for i, eqn in enumerate(back.body.eqns) if _holds_transposed(eqn))
        self._first = next(derived, len(back.body.eqns))

    def bend(self, node: Node) -> _Bend | None:
        waiting, key = [node], None
        while waiting:
            each = waiting[-1]
            key = self._key(each)
            if key in self._found:
                waiting.pop()
            elif key in self._operands or len(self._found) > _MOST_NODES:
                waiting.pop()
                self._found[key] = self._combined(each, self._operands.get(key, []))
            else:  # loop values met again while they wait count as constants
                self._operands[key] = self._before(each)
                waiting += [x for x in self._operands[key] if self._key(x) not in self._operands]
        return self._found[key].bend

    def line(self, bend: _Bend) -> str:
        return self._back.line(bend.frame, bend.eqn)

    def _key(self, node: Node) -> tuple[Any, ...]:
        return node.key() if len(self._found) < _MANY_NODES else node.shared_key()

    def _before(self, node: Node) -> list[Node]:
        eqn = self._back.maker(node)
        if self._position(node) < self._first or eqn is not None and self._ends(eqn):
            return []
        if eqn is not None and eqn.primitive.name in _MOVES_EACH:
            same = Node(node.frame, eqn.invars[eqn.outvars.index(node.variable)])
            return [same] if self._back.differs(same) else []
        return list(self._back.varying_before(node))

    def _ends(self, eqn: Any) -> bool:
        name = eqn.primitive.name
        return jaxprs.is_transposed(eqn) or name in _UNKNOWN or _tests_for_finite(eqn)

    def _combined(self, node: Node, operands: list[Node]) -> _Dependence:
        eqn = self._back.maker(node)
        if eqn is not None and jaxprs.is_transposed(eqn):
            return self._of_gradient(node)
        found = [self._found.get(self._key(each), _Dependence()) for each in operands]
        bends = [each.bend for each in found if each.bend is not None]
        bend = min(bends, key=lambda each: each.position, default=None)
        depends, of_rows = (any(each[i] for each in found) for i in (0, 2))
        if eqn is not None and eqn.primitive.name in _LOOPS and _holds_transposed(eqn):
            # Its rounds differentiate micro-batches or single rows.
            return self._of_gradient(node) if depends or of_rows else _Dependence()
        if eqn is not None and not node.frame.record.calls(eqn):
            if depends and bend is None and self._bends(node.frame, eqn):
                bend = _Bend(self._position(node), node.frame, eqn)
            if of_rows and eqn.primitive.name in _SUMS and self._has_shape(node):
                depends, of_rows = True, False
        return _Dependence(depends, bend, of_rows)

    def _of_gradient(self, node: Node) -> _Dependence:
        if not self._has_shape(node):
            return _Dependence(of_rows=True)
        if self._among is None:
            self.gradients.add(node.key())
        return _Dependence(depends=self._among is None or node.key() in self._among)

    def _has_shape(self, node: Node) -> bool:
        return node.variable.aval.shape in self.shapes

    def _bends(self, frame: Frame, eqn: Any) -> bool:
        name = eqn.primitive.name
        nodes = [Node(frame, atom) for atom in eqn.invars]
        depending = [
            not jaxprs.is_literal(each.variable)
            and self._found.get(self._key(each), _Dependence()).depends
            for each in nodes
        ]
        if name in _PRODUCTS:
            return sum(depending) > 1
        if name in _DIVISORS:
            return depending[_DIVISORS[name]]
        if name == "convert_element_type":
            before, after = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
            return jnp.issubdtype(before, jnp.inexact) and not jnp.issubdtype(after, jnp.inexact)
        rule = RULES.get(name)
        return name not in _LINEAR | _MOVES_EACH and rule is not None and rule is not move

    def _position(self, node: Node) -> int:
        frame: Frame | None = node.frame
        eqn = None
        while frame is not None and frame.around is not None:
            eqn, frame = frame.eqn, frame.around
        variable = node.variable if eqn is None else eqn.outvars[0] if eqn.outvars else None
        return self._place.get(variable, -1)


def _holds_transposed(eqn: Any) -> bool:
    if jaxprs.is_transposed(eqn):
        return True
    return any(map(_body_is_derived, jaxprs.bodies(eqn)))


@jaxprs.remembered
def _body_is_derived(body: Any) -> bool:
    return any(map(_holds_transposed, body.eqns))


def _tests_for_finite(eqn: Any) -> bool:
    if eqn.primitive.name == "is_finite":
        return True
    if eqn.primitive.name not in ("eq", "ne"):
        return False
    a, b = eqn.invars
    return a is b or any(map(_is_infinite, (a, b)))


def _is_infinite(atom: Any) -> bool:
    is_scalar = jaxprs.is_literal(atom) and not getattr(atom.val, "shape", ())
    return (
        is_scalar
        and jnp.issubdtype(atom.aval.dtype, jnp.floating)
        and bool(abs(atom.val) == jnp.inf)
    )


# Expressions of the number of devices.
_COUNT = re.compile(
    r"jax\.(?:local_)?(?:device|process)_count\(\)"
    r"|len\(jax\.(?:local_)?devices\(\)\)|\w*mesh\.(?:devices\.)?size|\w*mesh\.shape\[[^\]]*\]"
    r"|(?:jax\.)?lax\.(?:axis_size\(|psum\(1, )[^()]*\)"
    r"|(?:os\.)?(?:environ(?:\.get)?|getenv)[\[(].WORLD_SIZE.(?:, \w*\(?[^()]*\)?)?[\])]"
)
_TWICE = (
    "{line} divides {what} by the number of devices, and jdp averages over the ranks, so the "
    "result is divided twice.\n"
    "Remove the division. jdp.sum_over_ranks(x) is the sum."
)


def division_warnings(step: Any, report: Report, traced: Traced) -> Iterator[str]:
    """Yield a warning for means over ranks of values already divided by their number."""
    counts = {jax.device_count(), jax.local_device_count(), jax.process_count()}
    counts = {float(each) for each in (*counts, step.params["mesh"].size) if each > 1}
    inside = jaxprs.equations(jaxprs.mapped_body(step))
    lines = {id(eqn): line for eqn in inside if (line := _divided(eqn, counts))}
    axes = frozenset(traced.spec.axis_name)
    if not lines or any(each.kind == SUMMED for each in report.marks):
        return
    back = report.back(axes)
    local = [each for each in report.marks if each.kind == LOCAL and each.value.axes & axes]
    ends = [("the gradients", [back.of_mark(each.eqn) for each in local])]
    for i, output in scales.metrics(traced).items():
        if report.outputs[i].axes & axes:
            ends.append((f"`{output.path}`", [back.of_output(i)]))
    told: set[str] = set()
    for what, nodes in ends:
        before = [*back.back([*filter(None, nodes)], everything=True)]
        made = [(back.differs(node), eqn) for node in before if (eqn := back.maker(node))]
        if any(eqn.primitive.name in _EXCHANGES for _, eqn in made):
            continue
        # A uniform value, such as a rate, may be divided. A cotangent of 1 is uniform, too.
        divided = [eqn for differs, eqn in made if differs or jaxprs.is_transposed(eqn)]
        found = {lines[id(eqn)] for eqn in divided if id(eqn) in lines} - told
        yield from (_TWICE.format(line=line, what=what) for line in sorted(found))
        told |= found


# With one of these before it, a division may be a mean by hand.
_EXCHANGES = frozenset(collectives.RULES) - {"jdp_mark"}


def _divided(eqn: Any, counts: set[float]) -> str:
    """Return the author's line that divides a value by the number of devices; "" for others."""
    if eqn.primitive.name not in ("div", "mul"):
        return ""
    is_product = eqn.primitive.name == "mul"
    factors = filter(None, map(jaxprs.number, eqn.invars if is_product else eqn.invars[1:]))
    by = [1 / factor if is_product else factor for factor in factors]
    # A number's inverse is rounded.
    if not any(math.isclose(each, count, rel_tol=1e-2) for each in by for count in counts):
        return ""
    frames = () if eqn.source_info.traceback is None else eqn.source_info.traceback.frames
    for frame in frames:
        if diagnostics.whose_file(frame.file_name) == "author":
            source = "".join(linecache.getlines(frame.file_name))
            return source_of(eqn) if frame.line_num in _dividing_lines(source) else ""
    return ""


@functools.lru_cache
def _dividing_lines(source: str) -> frozenset[int]:
    """Return the lines that divide by the number of devices, other than for another divisor."""
    try:
        nodes = [*ast.walk(ast.parse(source))]
    except SyntaxError:  # with commands of a notebook
        return frozenset()
    assigned = [pair for each in nodes if isinstance(each, ast.Assign) for pair in _assigned(each)]
    counts: set[str] = set()
    for _ in range(2):  # also n = int(text)
        counts |= {ast.unparse(name) for name, value in assigned if _is_count(value, counts)}
    inverses = {ast.unparse(name) for name, value in assigned if _is_inverse(value, counts)}
    operations = [each for each in nodes if isinstance(each, ast.BinOp | ast.AugAssign)]
    divisors = [_operands(each)[-1] for each in operations if isinstance(each.op, ast.Div)]
    within = {id(each) for divisor in divisors for each in ast.walk(divisor)}
    found: set[int] = set()
    for each in operations:
        operands, is_found = _operands(each), False
        if isinstance(each.op, ast.Div):
            is_found = _is_count(operands[-1], counts)
        elif isinstance(each.op, ast.Mult):
            is_found = any(_is_inverse(x, counts) or ast.unparse(x) in inverses for x in operands)
        if is_found and id(each) not in within:
            found.update(range(each.lineno, (each.end_lineno or each.lineno) + 1))
    return frozenset(found)


def _operands(operation: ast.BinOp | ast.AugAssign) -> list[ast.expr]:
    if isinstance(operation, ast.AugAssign):
        return [operation.value]
    return [operation.left, operation.right]


def _is_count(value: ast.expr, counts: set[str]) -> bool:
    while isinstance(value, ast.Call) and ast.unparse(value.func) in ("int", "float"):
        value = value.args[0] if value.args else value.func
    text = ast.unparse(value)
    return text in counts or _COUNT.fullmatch(text) is not None


def _is_inverse(value: ast.expr, counts: set[str]) -> bool:
    if not (isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div)):
        return False
    return ast.unparse(value.left) in ("1", "1.0") and _is_count(value.right, counts)


def _assigned(statement: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in statement.targets:
        if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
            yield from zip(target.elts, statement.value.elts, strict=False)
        else:
            yield target, statement.value
