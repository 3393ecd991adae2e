"""The collectives that a traced step asks for, with the names of the leaves that they take."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.interpreters import partial_eval

from jdp.analysis import jaxprs, source_lines
from jdp.collectives import call_order
from jdp.inspect import leaf_names
from jdp.inspect.kernels import Kernel, kernel_of
from jdp.inspect.leaf_names import OF_LAYER, LeafNames, Paths
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
      num_loops: how many loops are around it.
    """

    kind: str
    number: int | None
    leaves: list[SentLeaf]
    line: str
    is_of_author: bool
    num_loops: int


class TracedStep(NamedTuple):
    """What the trace of a step says.

    Attributes:
      collectives: those it asks for, in order.
      callbacks: names of the callbacks to the host, each with the author's line.
      kernels: its Pallas kernels.
      scanned: names of the arrays that a loop takes layer by layer.
    """

    collectives: list[Planned]
    callbacks: list[tuple[str, str]]
    kernels: list[Kernel]
    scanned: set[str]


def planned(jaxpr: Any, names: Sequence[str]) -> TracedStep:
    """Return the collectives and callbacks of a traced step."""
    walk = _PlanWalk()
    body = opened(jaxpr)
    # XLA drops a gather whose result nobody reads, of an array that the step only passes on, say.
    body, _ = partial_eval.dce_jaxpr(body, [True] * len(body.outvars), instantiate=True)
    walk.run(body, dict(zip(body.invars, names, strict=False)))
    return TracedStep(walk.collectives(), walk.callbacks, walk.kernels, walk.scanned)


class _PlanWalk:
    def __init__(self) -> None:
        self._found: list[Planned] = []
        self.callbacks: list[tuple[str, str]] = []
        self.kernels: list[Kernel] = []
        self.scanned: set[str] = set()
        self._num_loops = 0  # around the equations that it is at
        self._num_transposed = 0  # equations of a backward pass around them
        self._names = LeafNames()

    def run(self, jaxpr: Any, paths: Paths) -> Paths:
        """Walk a body, and return the name of each of its variables that has one."""
        before = None
        for eqn in jaxpr.eqns:
            name = _name(eqn)
            # JAX makes one sum for each leaf of a bucket, one after the other.
            is_same, before = before is not None and _is_like(before, eqn), eqn
            if name in _KINDS or name in call_order.NATIVE:
                self._collective(eqn, name, paths, is_same=is_same)
            elif name == call_order.DONE:  # of two tokens and the leaves: a token and the leaves
                leaf_names.pass_on(eqn.invars[2:], eqn.outvars[1:], paths)
            elif "callback" in name or name in ("debug_print", "outfeed", "infeed"):
                self.callbacks.append((_callback_name(eqn), source_lines.source(eqn)))
            elif name == "pallas_call":
                self.kernels.append(kernel_of(eqn))
            else:
                is_loop, is_transposed = name in ("scan", "while"), jaxprs.is_transposed(eqn)
                self._num_loops += is_loop
                self._num_transposed += is_transposed
                if not self._bodies(eqn, name, paths):
                    self._names.name(eqn, name, paths)
                self._num_loops -= is_loop
                self._num_transposed -= is_transposed
        return paths

    def collectives(self) -> list[Planned]:
        """Return the collectives that were found, with the names that are known in the end."""
        for each in self._found:
            is_sum = each.kind in ("all-reduce", "reduce-scatter")
            for i, leaf in enumerate(each.leaves):
                path = self._names.final(leaf.path)
                is_of_one = each.num_loops or self._names.is_of_layer(leaf.path)
                if is_sum and is_of_one and path != leaf.path and path:
                    path += OF_LAYER
                each.leaves[i] = leaf._replace(path=path)
        return self._found

    def _collective(self, eqn: Any, name: str, paths: Paths, *, is_same: bool) -> None:
        atoms = _operands(eqn, name)
        if not atoms:
            return
        kind = _KINDS.get(name) or name.removeprefix("jdp_").replace("_", "-")
        is_of_author = source_lines.is_of_author(eqn)
        is_backward = self._num_transposed > 0 or jaxprs.is_transposed(eqn)
        is_of_gradients = kind == "reduce-scatter" or kind == "all-reduce" and is_backward
        name_of = self._names.sent if is_of_gradients and not is_of_author else leaf_names.path
        named = [name_of(atom, paths) for atom in atoms]
        leaves = [
            SentLeaf(path, _dtype(atom.aval.dtype), size)
            for atom, whole in zip(atoms, named, strict=True)
            for path, size in self._names.parts(whole, int(atom.aval.size))
        ]
        # What was gathered or summed keeps its name; a call between GPUs returns it behind it.
        results = atoms if name == call_order.START else eqn.outvars[-len(atoms) :]
        paths |= {x: path for x, path in zip(results, named, strict=False) if path}
        native = name in call_order.NATIVE or name == call_order.START
        if is_same and not native and self._found:
            self._found[-1].leaves.extend(leaves)
            return
        params = dict(eqn.params["attributes"]) if name == call_order.START else eqn.params
        number = params.get("number", params.get("bucket")) if native else None
        self._found.append(
            Planned(kind, number, leaves, source_lines.source(eqn), is_of_author, self._num_loops)
        )

    def _bodies(self, eqn: Any, name: str, paths: Paths) -> bool:
        """Walk the bodies of an equation, and return whether it has any."""
        bodies = [opened(body) for body in jaxprs.bodies(eqn)]
        if name == "while":
            cond, body, num_cond, num_body = jaxprs.while_parts(eqn)
            own = leaf_names.inner(body, eqn.invars[num_cond:], paths)
            self.run(cond, {})
            inner = self.run(body, own)
            leaf_names.outer(eqn, body, inner, paths)
            return True
        for body in bodies:
            atoms = eqn.invars[1:] if name == "cond" else eqn.invars
            own = leaf_names.inner(body, atoms, paths) if len(atoms) == len(body.invars) else {}
            if name == "scan":  # what is scanned over is a layer of its array
                num_whole = sum(scan_counts(eqn.params))
                for variable in body.invars[num_whole:]:
                    if variable in own:
                        self.scanned.add(own[variable])
                        own[variable] += OF_LAYER
            leaf_names.outer(eqn, body, self.run(body, own), paths)
        return bool(bodies)


def _name(eqn: Any) -> str:
    """Return the name of an equation's primitive, or of the call between GPUs that it is."""
    target = str(eqn.params.get("target_name", ""))
    return target if target in (call_order.START, call_order.DONE) else eqn.primitive.name


def _is_like(one: Any, other: Any) -> bool:
    """Whether one line of code made two equations of the same collective."""
    is_collective = one.primitive.name in _KINDS and one.primitive is other.primitive
    return is_collective and one.source_info.traceback == other.source_info.traceback


def _operands(eqn: Any, name: str) -> list[Any]:
    atoms = list(eqn.invars)
    if name in call_order.NATIVE:
        return atoms[call_order.TOKEN + 1 :]
    return atoms[1:] if name == call_order.START else atoms


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
