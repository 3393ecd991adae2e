"""The names of the arrays in a traced step: of its parameters, and of their gradients."""

from collections.abc import Sequence
from typing import Any

from jdp.analysis import jaxprs
from jdp.analysis.marks import LOCAL

Paths = dict[Any, str]  # the name of each variable that has one

# Operations that keep every number of an array, perhaps in another place.
_MOVES = frozenset(
    "convert_element_type bitcast_convert_type reshape transpose squeeze expand_dims "
    "broadcast_in_dim copy copy_p pvary pcast jdp_mark sharding_constraint".split()
)
# Operations that put the gradients of layers together.
_STACKS = ("dynamic_update_slice", "concatenate")
# Operations that keep the places of the vectors in a vector.
_SCALES = ("mul", "div", "convert_element_type")
_SLICES = ("dynamic_slice", "slice", "squeeze", "jdp_own_slice")
OF_LAYER = " of one iteration"


def in_parameters(path: str) -> str:
    """Return the path of a gradient within its parameters.

    >>> in_parameters("grads['w'] of one iteration")
    "['w']"
    """
    return path.removeprefix("grads").removesuffix(OF_LAYER)


def update_of(path: str) -> str:
    """Return the name of what updates the parameter of a gradient.

    >>> update_of("grads['w']"), update_of("grads")
    ("the update of ['w']", 'the update of the parameters')
    """
    return f"the update of {path.removeprefix('grads') or 'the parameters'}"


class LeafNames:
    """Names results of equations by their operands.

    The gradient of a layer has no name where a loop over layers reduces it: it gets a stand-in, and
    its name when a parameter is updated with it. Gradients that are packed into one vector get one
    each, by which they are known when the sum is split.
    """

    def __init__(self) -> None:
        self._found: dict[str, str] = {}  # by stand-in
        self._stacked = set[str]()  # stand-ins of layers
        self._num_stand_ins = 0
        self._packed: dict[Any, list[Any]] = {}  # the vectors in each vector
        self._parts: dict[str, list[tuple[str, int]]] = {}  # by the stand-in of a vector

    def sent(self, atom: Any, paths: Paths) -> str:
        """Return the name of a gradient that is reduced, a stand-in where it has none."""
        if found := path(atom, paths):
            return found
        stand_in = self._stand_in()
        if not jaxprs.is_literal(atom) and atom in self._packed:
            self._parts[stand_in] = [
                (path(x, paths) or self._stand_in(), int(x.aval.size)) for x in self._packed[atom]
            ]
        return stand_in

    def parts(self, name: str, size: int) -> list[tuple[str, int]]:
        """Return the names and sizes of the gradients in a vector; in an array there is one."""
        return self._parts.get(name, [(name, size)])

    def _stand_in(self) -> str:
        self._num_stand_ins += 1
        return f"?{self._num_stand_ins}"

    def final(self, path: str) -> str:
        """Return a name, for a stand-in the one that was found, empty if there is none."""
        seen = set[str]()
        while path.startswith("?") and path not in seen:
            seen.add(path)
            path = self._found.get(path, "")
        return "" if path.startswith("?") else path

    def is_of_layer(self, path: str) -> bool:
        """Whether a name is the stand-in of a gradient that is put together with other layers'."""
        return path in self._stacked

    def name(self, eqn: Any, name: str, paths: Paths) -> None:
        """Name the results of an equation without bodies."""
        if name == "jdp_mark" and eqn.params["kind"] == LOCAL:
            found = f"grads{eqn.params['path']}"
            self._resolve([path(eqn.invars[0], paths)], found)
            paths[eqn.outvars[0]] = found
            return
        if name in ("optimization_barrier", "jdp_tied"):
            pass_on(eqn.invars, eqn.outvars, paths)
            return
        self._follow_vectors(eqn, name, paths)
        (out, *others), atoms = eqn.outvars or [None], [x for x in eqn.invars if path(x, paths)]
        if out is None or others or not atoms:
            return
        alike = [path(x, paths) for x in atoms if x.aval.size == out.aval.size]
        unknown = [each for each in alike if each.startswith("?")]
        gradients = [each for each in alike if each.startswith("grads")] + unknown
        # An updated parameter, say; not a value computed from the batch.
        params = [each for each in alike if ".params" in each]
        is_update = name in ("mul", "add", "sub", "div", "select_n") and params
        if is_update:
            self._resolve(unknown, f"grads{params[0].rpartition('.params')[2]}")
        if name in _STACKS:
            self._stack(out, [path(x, paths) for x in atoms], paths)
        elif gradients or name in _MOVES and alike:
            paths[out] = (gradients or alike)[0]
        elif is_update:
            paths[out] = params[0]
        elif name in _SLICES and (".params" in (taken := path(atoms[0], paths)) or taken[0] == "?"):
            paths[out] = taken
        elif name == "jdp_own_slice" and path(atoms[0], paths).startswith("grads"):
            paths[out] = path(atoms[0], paths)

    def _follow_vectors(self, eqn: Any, name: str, paths: Paths) -> None:
        """Record what a vector is packed of, and name what the sum of one is split into."""
        atoms = [x for x in eqn.invars if not jaxprs.is_literal(x)]
        if name == "concatenate" and eqn.outvars[0].aval.ndim == 1:
            self._packed[eqn.outvars[0]] = atoms
        elif name in _SCALES:
            for x in atoms:
                if x in self._packed:
                    self._packed[eqn.outvars[0]] = self._packed[x]
        elif name == "split" and atoms and (parts := self._parts.get(path(atoms[0], paths))):
            if [size for _, size in parts] == [out.aval.size for out in eqn.outvars]:
                paths |= {out: each for out, (each, _) in zip(eqn.outvars, parts, strict=True)}

    def _stack(self, out: Any, names: Sequence[str], paths: Paths) -> None:
        unknown = [each for each in names if each.startswith("?")]
        if unknown:
            paths.setdefault(out, unknown[0])
            self._resolve(unknown[1:], unknown[0])
            self._stacked.update(unknown)

    def _resolve(self, names: Sequence[str], found: str) -> None:
        """Record the name of stand-ins, if it is their first one."""
        for each in names:
            if each.startswith("?") and each != found:
                self._found.setdefault(each, found)


def path(atom: Any, paths: Paths) -> str:
    """Return the name of a variable, empty if it has none, as a literal."""
    return "" if jaxprs.is_literal(atom) else paths.get(atom, "")


def pass_on(atoms: Sequence[Any], results: Sequence[Any], paths: Paths) -> None:
    """Name results by what they are made of, one by one."""
    pairs = zip(atoms, results, strict=False)
    paths |= {out: path(atom, paths) for atom, out in pairs if path(atom, paths)}


def inner(body: Any, atoms: Sequence[Any], paths: Paths) -> Paths:
    """Return the names of the inputs of a body, by its operands."""
    pairs = zip(body.invars, atoms, strict=False)
    return {own: path(outer, paths) for own, outer in pairs if path(outer, paths)}


def outer(eqn: Any, body: Any, own: Paths, paths: Paths) -> None:
    """Name the results of an equation as they are named in its body."""
    if len(body.outvars) == len(eqn.outvars):
        pairs = zip(body.outvars, eqn.outvars, strict=True)
        paths |= {out: path(atom, own) for atom, out in pairs if path(atom, own)}
