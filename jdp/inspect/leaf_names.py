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
_SLICES = ("dynamic_slice", "slice", "squeeze", "jdp_own_slice")
OF_LAYER = " of one iteration"


def in_parameters(path: str) -> str:
    """Return the path of a gradient within its parameters.

    >>> in_parameters("grads['w'] of one iteration")
    "['w']"
    """
    return path.removeprefix("grads").removesuffix(OF_LAYER)


class LeafNames:
    """Names results of equations by their operands.

    The gradient of a layer has no name where a loop over layers reduces it: it gets a stand-in, and
    its name when a parameter is updated with it.
    """

    def __init__(self) -> None:
        self._found: dict[str, str] = {}  # by stand-in
        self._num_stand_ins = 0

    def stand_in(self) -> str:
        """Return a name for a gradient whose parameter is not known yet."""
        self._num_stand_ins += 1
        return f"?{self._num_stand_ins}"

    def final(self, path: str) -> str:
        """Return a name, for a stand-in the one that was found, empty if there is none."""
        seen = set[str]()
        while path.startswith("?") and path not in seen:
            seen.add(path)
            path = self._found.get(path, "")
        return "" if path.startswith("?") else path

    def name(self, eqn: Any, name: str, paths: Paths) -> None:
        """Name the results of an equation without bodies.

        Args:
          eqn: the equation.
          name: of its primitive.
          paths: names of the variables around it.
        """
        if name == "jdp_mark" and eqn.params["kind"] == LOCAL and eqn.params["path"]:
            paths[eqn.outvars[0]] = f"grads{eqn.params['path']}"
            return
        if name in ("optimization_barrier", "jdp_tied"):
            pass_on(eqn.invars, eqn.outvars, paths)
            return
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
            for each in unknown:
                self._found.setdefault(each, f"grads{params[0].rpartition('.params')[2]}")
        if name in _STACKS:
            self._stack(out, [path(x, paths) for x in atoms], paths)
        elif gradients or name in _MOVES and alike:
            paths[out] = (gradients or alike)[0]
        elif is_update:
            paths[out] = params[0]
        elif name in _SLICES and (".params" in (taken := path(atoms[0], paths)) or taken[0] == "?"):
            paths[out] = taken

    def _stack(self, out: Any, names: Sequence[str], paths: Paths) -> None:
        unknown = [each for each in names if each.startswith("?")]
        for each in unknown:
            paths.setdefault(out, each)
            if each != unknown[0]:
                self._found.setdefault(each, unknown[0])


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
