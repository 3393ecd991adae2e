"""The order of finished and sent gradients."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jdp.analysis import find_shard_maps, jaxprs
from jdp.reduction.step_context import Scope

_HEAVY = frozenset(
    "conv_general_dilated custom_linear_solve dot_general ffi_call scan while".split()
)


def order_of_gradients(jaxpr: Any) -> dict[str, int]:
    """Number gradients by the last matmul or loop before them."""
    body = _timed(jaxprs.mapped_body(find_shard_maps(jaxpr)[0]), {})
    return {path: ready.heavy for path, ready in body.marks.items()}


class _Ready(NamedTuple):
    """A value's last heavy operation, else a bit per body input before it."""

    heavy: int = 0
    inputs: int = 0


class _Timed(NamedTuple):
    """When a body's results and marked gradients are ready."""

    outs: list[_Ready]
    marks: dict[str, _Ready]
    num_heavy: int


def _timed(body: Any, known: dict[int, _Timed]) -> _Timed:
    # Functions that call each other twice have 2^depth calls.
    if id(body) not in known:
        known[id(body)] = _walk(body, known)
    return known[id(body)]


def _walk(body: Any, known: dict[int, _Timed]) -> _Timed:
    ready = {variable: _Ready(0, 1 << i) for i, variable in enumerate(body.invars)}
    marks: dict[str, _Ready] = {}
    num_heavy = 0

    def readiness(atom: Any) -> _Ready:
        return _Ready() if jaxprs.is_literal(atom) else ready.get(atom, _Ready())

    for eqn in body.eqns:
        operands = [readiness(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        inner = jaxprs.called_body(eqn) if name in jaxprs.CALLS else None
        if inner is not None:
            call = _timed(inner, known)
            outs = [_from_outside(each, operands, num_heavy) for each in call.outs]
            for path, each in call.marks.items():
                marks[path] = _from_outside(each, operands, num_heavy)
            num_heavy += call.num_heavy
        elif _is_heavy(eqn):
            num_heavy += 1
            outs = [_Ready(num_heavy)] * len(eqn.outvars)
        else:
            outs = [_last(operands)] * len(eqn.outvars)
        if name == "jdp_mark" and eqn.params["kind"] == "local":
            marks[eqn.params["path"]] = outs[0]
        ready.update(zip(eqn.outvars, outs, strict=True))
    return _Timed([readiness(atom) for atom in body.outvars], marks, num_heavy)


def _from_outside(ready: _Ready, operands: Sequence[_Ready], num_before: int) -> _Ready:
    if ready.heavy:
        return _Ready(num_before + ready.heavy)
    return _last([each for i, each in enumerate(operands) if ready.inputs >> i & 1])


def _last(operands: Sequence[_Ready]) -> _Ready:
    heavy, inputs = 0, 0
    for each in operands:
        heavy = max(heavy, each.heavy)
        inputs |= each.inputs
    return _Ready(heavy) if heavy else _Ready(0, inputs)


def _is_heavy(eqn: Any) -> bool:
    if eqn.primitive.name in _HEAVY:
        return True
    inner = (each for body in jaxprs.bodies(eqn) for each in jaxprs.equations(body))
    return any(each.primitive.name in _HEAVY for each in inner)


def to_send(
    paths: Sequence[str], step: Scope | None, weight: jax.Array | None, mean: bool
) -> Sequence[int]:
    """Return the positions of gradients without a `scan_layers` mean."""
    if step is None or step.choices.uniform is None:
        return range(len(paths))
    if weight is not step.weight:
        raise ValueError(
            "jdp.sync_gradients(weight=...) got gradients already averaged by jdp.scan_layers, "
            "with the weight of the step. Another weight would not apply to them. Write "
            "jdp.train_step(weight=...), or jdp.scan_layers(..., late=False)."
        )
    uniform = step.choices.uniform
    return [i for i, path in enumerate(paths) if not mean or path not in uniform]


def as_ready(paths: Sequence[str], positions: Sequence[int], step: Scope) -> Sequence[int]:
    """Order gradients for `buckets.plan`, which starts with the last."""
    step.split.update(paths)
    ready = step.choices.ready
    if ready is None:
        return positions
    return sorted(positions, key=lambda i: -ready.get(paths[i], 0))
