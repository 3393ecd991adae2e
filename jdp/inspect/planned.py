"""The collectives that a traced step asks for, with the names of the leaves that they take."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.interpreters import partial_eval

from jdp.analysis import jaxprs, source_lines
from jdp.analysis.marks import LOCAL
from jdp.collectives import call_order
from jdp.inspect.kernels import Kernel, kernel_of
from jdp.jax_compat import opened, scan_counts

_KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
    call_order.START: "all-reduce",
}
# What leaves every number of an array where it is, or moves it.
_MOVES = frozenset(
    "convert_element_type bitcast_convert_type reshape transpose squeeze expand_dims copy copy_p "
    "pvary pcast jdp_mark sharding_constraint".split()
)


class SentLeaf(NamedTuple):
    """An array that a collective takes.

    Attributes:
      path: its name, such as `grads['w']`; empty if it has none.
      dtype: of it, as HLO writes it.
      num_elements: of this rank's array.
    """

    path: str
    dtype: str
    num_elements: int


@dataclass
class Planned:
    """A collective of a traced step.

    Attributes:
      kind: such as `all-reduce`.
      number: of a native call, else None.
      leaves: the arrays that it takes.
      line: of the author's, such as `train.py:41`, empty if there is none.
      is_of_author: whether the author's code called it, not jdp's.
    """

    kind: str
    number: int | None
    leaves: list[SentLeaf]
    line: str
    is_of_author: bool


class TracedStep(NamedTuple):
    """What the trace of a step says.

    Attributes:
      collectives: those it asks for, in order.
      callbacks: names of the callbacks to the host, each with the author's line.
      kernels: its Pallas kernels.
    """

    collectives: list[Planned]
    callbacks: list[tuple[str, str]]
    kernels: list[Kernel]


def planned(jaxpr: Any, names: Sequence[str]) -> TracedStep:
    """Return the collectives and callbacks of a traced step.

    Args:
      jaxpr: of the step.
      names: of its inputs; processes that compare arguments add one more.
    """
    walk = _PlanWalk()
    body = opened(jaxpr)
    # XLA drops a gather whose result nobody reads, of an array that the step only passes on, say.
    body, _ = partial_eval.dce_jaxpr(body, [True] * len(body.outvars), instantiate=True)
    walk.run(body, dict(zip(body.invars, names, strict=False)))
    return TracedStep(walk.found, walk.callbacks, walk.kernels)


class _PlanWalk:
    def __init__(self) -> None:
        self.found: list[Planned] = []
        self.callbacks: list[tuple[str, str]] = []
        self.kernels: list[Kernel] = []

    def run(self, jaxpr: Any, paths: dict[Any, str]) -> dict[Any, str]:
        """Walk a body, and return the name of each of its variables that has one."""
        before = None
        for eqn in jaxpr.eqns:
            name = _name(eqn)
            # JAX makes one sum for each leaf of a bucket, one after the other.
            is_same, before = before is not None and _is_like(before, eqn), eqn
            if name in _KINDS or name in call_order.NATIVE:
                self._collective(eqn, name, paths, is_same=is_same)
                # What was gathered or summed keeps its name.
                if name != call_order.START:
                    taken = _operands(eqn, name)
                    _pass_on(taken, eqn.outvars[-len(taken) :], paths)
            elif name == call_order.DONE:  # of two tokens and the leaves: a token and the leaves
                _pass_on(eqn.invars[2:], eqn.outvars[1:], paths)
            elif "callback" in name or name in ("debug_print", "outfeed", "infeed"):
                self.callbacks.append((_callback_name(eqn), source_lines.source(eqn)))
            elif name == "pallas_call":
                self.kernels.append(kernel_of(eqn))
            elif not self._bodies(eqn, name, paths):
                self._names(eqn, name, paths)
        return paths

    def _collective(self, eqn: Any, name: str, paths: dict[Any, str], *, is_same: bool) -> None:
        leaves = [
            SentLeaf(_path(atom, paths), _dtype(atom.aval.dtype), int(atom.aval.size))
            for atom in _operands(eqn, name)
        ]
        if not leaves:
            return
        native = name in call_order.NATIVE or name == call_order.START
        if is_same and not native and self.found:
            self.found[-1].leaves.extend(leaves)
            return
        kind = _KINDS.get(name) or name.removeprefix("jdp_").replace("_", "-")
        params = dict(eqn.params["attributes"]) if name == call_order.START else eqn.params
        number = params.get("number", params.get("bucket")) if native else None
        self.found.append(
            Planned(kind, number, leaves, source_lines.source(eqn), source_lines.is_of_author(eqn))
        )

    def _bodies(self, eqn: Any, name: str, paths: dict[Any, str]) -> bool:
        """Walk the bodies of an equation, and return whether it has any."""
        bodies = [opened(body) for body in jaxprs.bodies(eqn)]
        if name == "while":
            cond, body, num_cond, num_body = jaxprs.while_parts(eqn)
            own = _inner(body, eqn.invars[num_cond:], paths)
            self.run(cond, {})
            inner = self.run(body, own)
            _outer(eqn, body, inner, paths)
            return True
        for body in bodies:
            atoms = eqn.invars[1:] if name == "cond" else eqn.invars
            own = _inner(body, atoms, paths) if len(atoms) == len(body.invars) else {}
            if name == "scan":  # what is scanned over is a layer of its array
                num_whole = sum(scan_counts(eqn.params))
                for variable in body.invars[num_whole:]:
                    if variable in own:
                        own[variable] += " of one iteration"
            _outer(eqn, body, self.run(body, own), paths)
        return bool(bodies)

    def _names(self, eqn: Any, name: str, paths: dict[Any, str]) -> None:
        if name == "jdp_mark" and eqn.params["kind"] == LOCAL and eqn.params["path"]:
            paths[eqn.outvars[0]] = f"grads{eqn.params['path']}"
            return
        if name in ("optimization_barrier", "jdp_tied"):
            _pass_on(eqn.invars, eqn.outvars, paths)
            return
        (out, *others), atoms = eqn.outvars or [None], [x for x in eqn.invars if _path(x, paths)]
        if out is None or others or not atoms:
            return
        alike = [atom for atom in atoms if atom.aval.size == out.aval.size]
        is_gradient = [atom for atom in alike if _path(atom, paths).startswith("grads")]
        if is_gradient or name in _MOVES and alike:
            paths[out] = _path((is_gradient or alike)[0], paths)
        elif alike and name in ("mul", "add", "sub", "div", "select_n"):
            # An updated parameter, say; not a value computed from the batch.
            named = [x for x in alike if ".params" in _path(x, paths)]
            if named:
                paths[out] = _path(named[0], paths)
        elif name in ("dynamic_slice", "slice", "squeeze") and ".params" in _path(atoms[0], paths):
            paths[out] = _path(atoms[0], paths)


def _name(eqn: Any) -> str:
    """Return the name of an equation's primitive, or of the call between GPUs that it is."""
    target = str(eqn.params.get("target_name", ""))
    return target if target in (call_order.START, call_order.DONE) else eqn.primitive.name


def _pass_on(atoms: Sequence[Any], results: Sequence[Any], paths: dict[Any, str]) -> None:
    pairs = zip(atoms, results, strict=False)
    paths |= {out: _path(atom, paths) for atom, out in pairs if _path(atom, paths)}


def _is_like(one: Any, other: Any) -> bool:
    """Whether one line of code made two equations of the same collective."""
    is_collective = one.primitive.name in _KINDS and one.primitive is other.primitive
    return is_collective and one.source_info.traceback == other.source_info.traceback


def _operands(eqn: Any, name: str) -> list[Any]:
    atoms = list(eqn.invars)
    if name in call_order.NATIVE:
        return atoms[call_order.TOKEN + 1 :]
    return atoms[1:] if name == call_order.START else atoms


def _inner(body: Any, atoms: Sequence[Any], paths: dict[Any, str]) -> dict[Any, str]:
    pairs = zip(body.invars, atoms, strict=False)
    return {inner: _path(outer, paths) for inner, outer in pairs if _path(outer, paths)}


def _outer(eqn: Any, body: Any, inner: dict[Any, str], paths: dict[Any, str]) -> None:
    if len(body.outvars) == len(eqn.outvars):
        pairs = zip(body.outvars, eqn.outvars, strict=True)
        paths |= {out: _path(atom, inner) for atom, out in pairs if _path(atom, inner)}


def _path(atom: Any, paths: dict[Any, str]) -> str:
    return "" if jaxprs.is_literal(atom) else paths.get(atom, "")


def _callback_name(eqn: Any) -> str:
    found = str(eqn.params.get("callback", eqn.primitive.name))
    return eqn.primitive.name if len(found) > 60 or "object at" in found else found


def _dtype(dtype: Any) -> str:
    name = getattr(dtype, "name", str(dtype))
    short = {"bfloat16": "bf16", "bool": "pred"}
    for long, first in (("float", "f"), ("uint", "u"), ("int", "s"), ("complex", "c")):
        if name.startswith(long):
            return first + name.removeprefix(long)
    return short.get(name, name)
