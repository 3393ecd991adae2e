"""The collectives that a traced step asks for: `step.communication_plan`."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from jdp.analysis import diagnostics, jaxprs
from jdp.analysis.marks import ALL_REDUCED, LOCAL, OUTER
from jdp.collectives import call_order, split_rows
from jdp.jax_compat import opened, scan_counts

Paths = dict[Any, str]  # variable -> name
Parts = list[tuple[str, int]]  # names and sizes of the arrays in one

# Operations that keep all numbers of an array, in any place.
_MOVES = frozenset(
    "convert_element_type bitcast_convert_type reshape transpose squeeze expand_dims "
    "broadcast_in_dim copy copy_p pvary pcast jdp_mark sharding_constraint".split()
)
# Operations that join the gradients of layers.
_STACKS = ("dynamic_update_slice", "concatenate")
_SLICES = ("dynamic_slice", "slice", "squeeze", "jdp_own_slice")
OF_LAYER = " of one iteration"


def in_parameters(path: str) -> str:
    """Return the path of a gradient within its parameters.

    >>> in_parameters("grads['w'] of one iteration")
    "['w']"
    """
    return path.removeprefix("grads").removesuffix(OF_LAYER)


def update_of(path: str) -> str:
    """Return the name of the update of a gradient's parameter.

    >>> update_of("grads['w']"), update_of("grads")
    ("the update of ['w']", 'the update of the parameters')
    """
    return f"the update of {path.removeprefix('grads') or 'the parameters'}"


class LeafNames:
    """Names results of equations by their operands.

    A layer's gradient, reduced in a loop, is unnamed: it gets a stand-in, and its name when it
    updates a parameter. Packed arrays get stand-ins until they are split.
    """

    def __init__(self) -> None:
        self._found: dict[str, str] = {}  # by stand-in
        self._stacked = set[str]()
        self._num_stand_ins = 0
        self._packed: dict[Any, Parts] = {}
        self._parts: dict[str, Parts] = {}  # by a packed array's stand-in

    def sent(
        self, atom: Any, paths: Paths, *, is_of_gradients: bool, is_exchanged: bool = False
    ) -> str:
        """Return an array's name, or a stand-in of a reduced gradient or a packed array."""
        found, packed = leaf_path(atom, paths), self._packed_in(atom, paths)
        if is_exchanged and not packed:  # its parts become smaller
            packed = [(found, int(atom.aval.size))]
        if not packed and (found or not is_of_gradients):
            return found
        stand_in = self._stand_in()
        if packed:
            self._parts[stand_in] = [
                (path or self._stand_in() * is_of_gradients, size) for path, size in packed
            ]
        return stand_in

    def parts(self, name: str, size: int) -> Parts:
        """Return names and sizes of the arrays in one of this size."""
        parts = self._parts.get(name)
        return (parts and _resized(parts, size)) or [(name, size)]

    def _packed_in(self, atom: Any, paths: Paths) -> Parts | None:
        if jaxprs.is_literal(atom):
            return None
        parts = self._packed.get(atom) or self._parts.get(leaf_path(atom, paths))
        return parts and _resized(parts, int(atom.aval.size))

    def _stand_in(self) -> str:
        self._num_stand_ins += 1
        return f"?{self._num_stand_ins}"

    def final(self, path: str) -> str:
        """Return a stand-in's final name, or empty."""
        seen = set[str]()
        while path.startswith("?") and path not in seen:
            seen.add(path)
            path = self._found.get(path, "")
        return "" if path.startswith("?") else path

    def is_of_layer(self, path: str) -> bool:
        """Whether a name stands in for a layer's gradient."""
        return path in self._stacked

    def name(self, eqn: Any, name: str, paths: Paths) -> None:
        """Name the results of an equation without bodies."""
        if name == "jdp_mark" and eqn.params["kind"] == LOCAL:
            found = f"grads{eqn.params['path']}"
            self._resolve([leaf_path(eqn.invars[0], paths)], found)
            paths[eqn.outvars[0]] = found
            return
        if name == "jdp_mark" and eqn.params["kind"] == OUTER:
            paths[eqn.outvars[0]] = f"the outer gradient of {eqn.params['path'] or 'params'}"
            return
        if name in ("optimization_barrier", "jdp_tied"):
            pass_on(eqn.invars, eqn.outvars, paths)
            return
        self._follow_vectors(eqn, name, paths)
        (out, *others), atoms = (
            eqn.outvars or [None],
            [x for x in eqn.invars if leaf_path(x, paths)],
        )
        if out is None or others or not atoms:
            return
        alike = [leaf_path(x, paths) for x in atoms if x.aval.size == out.aval.size]
        unknown = [each for each in alike if each.startswith("?")]
        gradients = [each for each in alike if each.startswith("grads")] + unknown
        # Such as an updated parameter, not a value of the batch.
        params = [each for each in alike if ".params" in each]
        is_update = name in ("mul", "add", "sub", "div", "select_n") and params
        if is_update:
            self._resolve(unknown, f"grads{params[0].rpartition('.params')[2]}")
        if name in _STACKS:
            self._stack(out, [leaf_path(x, paths) for x in atoms], paths)
        elif gradients or name in _MOVES and alike:
            paths[out] = (gradients or alike)[0]
        elif is_update:
            paths[out] = params[0]
        elif out in paths:
            return
        elif name in _SLICES and (
            ".params" in (taken := leaf_path(atoms[0], paths)) or taken[0] == "?"
        ):
            paths[out] = taken
        elif name == "pad" or (
            name == "jdp_own_slice" and leaf_path(atoms[0], paths).startswith("grads")
        ):
            paths[out] = leaf_path(atoms[0], paths)

    def _follow_vectors(self, eqn: Any, name: str, paths: Paths) -> None:
        """Follow a packed array's parts through operations, and name what is split."""
        if name == "concatenate" and len(eqn.invars) > 1:
            sizes = [(leaf_path(x, paths), int(x.aval.size)) for x in eqn.invars]
            named = zip(eqn.invars, sizes, strict=True)
            parts = [part for x, own in named for part in self._packed_in(x, paths) or [own]]
            if any(path and not path.startswith("?") for path, _ in parts):
                paths[eqn.outvars[0]] = self._stand_in()
                self._parts[paths[eqn.outvars[0]]] = parts
            elif eqn.outvars[0].aval.ndim == 1 or not any(path for path, _ in parts):
                self._packed[eqn.outvars[0]] = parts
            return
        known = [parts for x in eqn.invars if (parts := self._packed_in(x, paths))]
        if not known:
            return
        if name == "split":
            if [size for _, size in known[0]] == [out.aval.size for out in eqn.outvars]:
                each = zip(eqn.outvars, known[0], strict=True)
                paths |= {out: path for out, (path, _) in each if path}
        elif len(eqn.outvars) == 1:
            out, size = eqn.outvars[0], int(eqn.outvars[0].aval.size)
            if name == "slice" and (first := _first(known[0], size)):
                paths[out] = self._stand_in()
                self._parts[paths[out]] = first
            elif parts := _resized(known[0], size):
                self._packed[out] = parts
                if len(parts) == 1 and parts[0][0]:
                    paths[out] = parts[0][0]

    def _stack(self, out: Any, names: Sequence[str], paths: Paths) -> None:
        unknown = [each for each in names if each.startswith("?")]
        if unknown:
            paths.setdefault(out, unknown[0])
            self._resolve(unknown[1:], unknown[0])
            self._stacked.update(unknown)

    def _resolve(self, names: Sequence[str], found: str) -> None:
        for each in names:
            if each.startswith("?") and each != found:
                self._found.setdefault(each, found)


def _resized(parts: Parts, size: int) -> Parts | None:
    """Return the parts of an array of another size, or None if they do not divide evenly."""
    total = sum(num for _, num in parts)
    if size == total:
        return parts
    scaled = [(path, num * size // total) for path, num in parts]
    return scaled if size and all(num * size % total == 0 for _, num in parts) else None


def _first(parts: Parts, size: int) -> Parts | None:
    """Return the parts before the scales of quantized numbers."""
    ends = itertools.accumulate(num for _, num in parts[:-1])
    return next((parts[:i] for i, end in enumerate(ends, 1) if end == size), None)


def leaf_path(atom: Any, paths: Paths) -> str:
    """Return a variable's name, or empty."""
    return "" if jaxprs.is_literal(atom) else paths.get(atom, "")


def pass_on(atoms: Sequence[Any], results: Sequence[Any], paths: Paths) -> None:
    """Name results by their operands, one by one."""
    pairs = zip(atoms, results, strict=False)
    paths |= {out: leaf_path(atom, paths) for atom, out in pairs if leaf_path(atom, paths)}


def inner_names(body: Any, atoms: Sequence[Any], paths: Paths) -> Paths:
    """Return the names of a body's inputs."""
    pairs = zip(body.invars, atoms, strict=False)
    return {own: leaf_path(outer, paths) for own, outer in pairs if leaf_path(outer, paths)}


def outer_names(eqn: Any, body: Any, own: Paths, paths: Paths) -> None:
    """Name an equation's results as in its body."""
    if len(body.outvars) == len(eqn.outvars):
        pairs = zip(body.outvars, eqn.outvars, strict=True)
        paths |= {out: leaf_path(atom, own) for atom, out in pairs if leaf_path(atom, own)}


_KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
    call_order.START: "all-reduce",
}


_EXCHANGES: dict[str, Any] = {
    "jdp_take_rows": split_rows.exchange_and_take,
    "jdp_add_rows": split_rows.exchange_and_add,
}


class _ExchangeCalls:
    """Records the calls of an exchange of rows: kind, arrays, whether in a loop."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.found: dict[str, tuple[str, Sequence[Any], bool]] = {}  # by name

    def gathered(self, token: Any, x: Any, name: str) -> tuple[Any, Any]:
        self.found[name] = "all-gather", [x], False
        return token, jnp.concatenate([x] * self.num_ranks)

    def sent(
        self, token: Any, leaves: Sequence[Any], split: int, joined: int, name: str
    ) -> tuple[Any, list[Any]]:
        self.found[name] = "all-to-all", leaves, "rounds" in self.found
        parts = [jnp.split(x, self.num_ranks, split) for x in leaves]
        return token, [jnp.concatenate(each, joined) for each in parts]


class SentLeaf(NamedTuple):
    """An array of a collective.

    Attributes:
      path: such as "grads['w']", "grads['w'] of one iteration" of a loop, "state.params['w']" or
        "the update of ['w']"; empty for others, such as the loss and the metrics.
      dtype: as XLA writes it, such as "f32".
      num_elements: of the whole array on one rank, >= 0.
    """

    path: str
    dtype: str
    num_elements: int

    @property
    def num_bytes(self) -> int:
        """Bytes on one rank; a type of 4 bits takes half a byte."""
        bits = 8 if self.dtype == "pred" else int(_BITS.findall(self.dtype)[0])
        return (self.num_elements * bits + 7) // 8


_BITS = re.compile(r"^[a-z]+(\d+)")


@dataclass
class PlannedCollective:
    """A collective that a step asks for. XLA may merge those of kind "xla" with others.

    Attributes:
      kind: "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "ragged-all-to-all" or
        "collective-permute".
      algorithm: "native" for the compiled kernels of jdp, "xla" for collectives of XLA.
      leaves: the whole arrays: a sum's operands, a gather's results.
      line: of the author's code, such as "train.py:41"; empty if none.
      is_of_author: whether the author's code calls it, not jdp.
      num_loops: the loops around it, over micro-batches or layers.
      number: of a native call in the step, else None.
      operands: from the program: shards, and overwritten arrays.
      is_conditional: whether a `lax.cond` may skip it, as between outer updates of `jdp.diloco`.
    """

    kind: str
    algorithm: str
    leaves: list[SentLeaf]
    line: str
    is_of_author: bool
    num_loops: int
    number: int | None
    operands: list[SentLeaf]
    is_conditional: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of its whole arrays on one rank, in one run."""
        return sum(leaf.num_bytes for leaf in self.leaves)

    @property
    def dtype(self) -> str:
        """The dtypes of its leaves, such as "f32" or "bf16+f32"."""
        return "+".join(dict.fromkeys(leaf.dtype for leaf in self.leaves))

    def __str__(self) -> str:
        named = [leaf.path for leaf in self.leaves if leaf.path]
        num_others = len(self.leaves) - len(named)
        named += [f"{num_others} other array{'s' * (num_others > 1)}"] if num_others else []
        parts = [f"{self.kind} of {', '.join(named)}", f"{self.num_bytes} bytes of {self.dtype}"]
        parts += [self.algorithm, "in each iteration of a loop" * bool(self.num_loops)]
        parts += ["in some steps" * self.is_conditional, self.line]
        return ", ".join(filter(None, parts))


class TracedStep(NamedTuple):
    """The facts of a step's trace; loops scan `scanned` by layer, `kernels` are Pallas calls."""

    collectives: list[PlannedCollective]
    callbacks: list[tuple[str, str]]
    kernels: list[Any]
    scanned: set[str]


def planned(jaxpr: Any, names: Sequence[str]) -> TracedStep:
    """Return a traced step's collectives and callbacks; `names` are the paths of its inputs."""
    walk = _PlanWalk()
    body = opened(jaxpr)
    # XLA drops unread gathers.
    body, _ = partial_eval.dce_jaxpr(body, [True] * len(body.outvars), instantiate=True)
    walk.run(body, dict(zip(body.invars, names, strict=False)))
    return TracedStep(walk.collectives(), walk.callbacks, walk.kernels, walk.scanned)


class _PlanWalk:
    def __init__(self) -> None:
        self._found: list[PlannedCollective] = []
        self.callbacks: list[tuple[str, str]] = []
        self.kernels: list[Any] = []
        self.scanned: set[str] = set()
        self._around: list[Any] = []  # equations around the current ones
        self._num_loops = 0  # of them
        self._num_transposed = 0  # backward equations around them
        self._names = LeafNames()
        self._sums: list[PlannedCollective] = []  # all-gathers that end an all-reduce

    def run(self, jaxpr: Any, paths: Paths) -> Paths:
        before = None
        for eqn in jaxpr.eqns:
            name = _name(eqn)
            # JAX makes consecutive sums, one per leaf of a bucket.
            is_same, before = before is not None and _is_like(before, eqn), eqn
            if name.removesuffix("_native") in _EXCHANGES:
                self._exchange(eqn, name, paths)
            elif name in _KINDS or name in call_order.NATIVE:
                self._collective(eqn, name, paths, is_same=is_same)
            elif name == call_order.DONE:  # of two tokens and the leaves: a token and the leaves
                pass_on(eqn.invars[2:], eqn.outvars[1:], paths)
            elif "callback" in name or name in ("debug_print", "outfeed", "infeed"):
                self.callbacks.append((_callback_name(eqn), diagnostics.source_of(eqn)))
            elif name == "pallas_call":
                self.kernels.append(eqn)
            else:
                is_loop, is_transposed = name in ("scan", "while"), jaxprs.is_transposed(eqn)
                if name == "jdp_mark" and eqn.params["kind"] == ALL_REDUCED:
                    self._sums += [x for x in self._found[-1:] if x.kind == "all-gather"]
                self._around.append(eqn)
                self._num_loops += is_loop
                self._num_transposed += is_transposed
                if not self._bodies(eqn, name, paths):
                    self._names.name(eqn, name, paths)
                self._num_loops -= is_loop
                self._num_transposed -= is_transposed
                self._around.pop()
        return paths

    def _is_conditional(self) -> bool:
        return any(eqn.primitive.name == "cond" for eqn in self._around)

    def _line_of(self, eqn: Any) -> str:
        # JAX records no frames around a `shard_map`.
        lines = map(diagnostics.source_of, (eqn, *reversed(self._around)))
        return next(filter(None, lines), "")

    def collectives(self) -> list[PlannedCollective]:
        for each in self._found:
            is_sum = each.kind in ("all-reduce", "reduce-scatter") or (
                each.kind == "all-to-all" and not each.is_of_author
            )
            for leaves in (each.operands, each.leaves):
                for i, leaf in enumerate(leaves):
                    path = self._names.final(leaf.path)
                    is_of_one = each.num_loops or self._names.is_of_layer(leaf.path)
                    if is_sum and is_of_one and path != leaf.path and path:
                        path += OF_LAYER
                    leaves[i] = leaf._replace(path=path)
            if each.kind == "all-gather" and not any(each is x for x in self._sums):
                each.leaves[:] = [
                    leaf._replace(path=update_of(leaf.path)) if "grads" in leaf.path[:5] else leaf
                    for leaf in each.leaves
                ]
        return self._found

    def _collective(self, eqn: Any, name: str, paths: Paths, *, is_same: bool) -> None:
        atoms = _operands(eqn, name)
        if not atoms:
            return
        kind = _KINDS.get(name) or name.removeprefix("jdp_").replace("_", "-")
        is_of_author = diagnostics.is_of_author(eqn)
        is_backward = self._num_transposed > 0 or jaxprs.is_transposed(eqn)
        is_exchanged = kind == "all-to-all" and name in _KINDS and not is_of_author
        is_sum = kind in ("all-reduce", "all-to-all") and is_backward
        is_of_gradients = not is_of_author and (kind == "reduce-scatter" or is_sum)
        named = [
            self._names.sent(x, paths, is_of_gradients=is_of_gradients, is_exchanged=is_exchanged)
            for x in atoms
        ]
        leaves = [
            SentLeaf(path, _dtype(aval.dtype), size)
            for aval, whole in zip(map(_sent_type, atoms), named, strict=True)
            for path, size in self._names.parts(whole, int(aval.size))
        ]
        # Gathered and summed arrays keep their names; a call between GPUs returns them at its end.
        results = atoms if name == call_order.START else eqn.outvars[-len(atoms) :]
        paths |= {x: path for x, path in zip(results, named, strict=False) if path}
        native = name in call_order.NATIVE or name == call_order.START
        wholes = leaves
        if kind == "all-gather":
            wholes = [
                leaf._replace(path=path, num_elements=size)
                for leaf in _gathered(eqn, atoms, named)
                for path, size in self._names.parts(leaf.path, leaf.num_elements)
            ]
        if is_same and not native and self._found:
            self._found[-1].operands.extend(leaves)
            self._found[-1].leaves.extend(wholes)
            return
        params = dict(eqn.params["attributes"]) if name == call_order.START else eqn.params
        number = params.get("number", params.get("bucket")) if native else None
        self._found.append(
            PlannedCollective(
                kind=kind,
                algorithm="native" if native else "xla",
                leaves=[*wholes],
                operands=leaves,
                line=self._line_of(eqn),
                is_of_author=is_of_author,
                num_loops=self._num_loops,
                is_conditional=self._is_conditional(),
                number=number,
            )
        )

    def _exchange(self, eqn: Any, name: str, paths: Paths) -> None:
        """Record the collectives of a lookup in a sharded table, or of its gradient."""
        x, ids = eqn.invars[-2:]
        exchange = _EXCHANGES[name.removesuffix("_native")]
        calls = _ExchangeCalls(eqn.params["num_ranks"])
        options = {key: eqn.params[key] for key in ("dim", "num_rows") if key in eqn.params}
        # Without JAX's types, since no axis is bound here.
        types = [jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype) for each in (x, ids)]
        jax.eval_shape(lambda x, ids: exchange(calls, None, x, ids, **options)[1], *types)
        for kind, arrays, is_in_loop in calls.found.values():
            path = leaf_path(x, paths) if kind == "all-to-all" else ""
            operands = [
                SentLeaf(
                    "" if each.dtype == ids.aval.dtype else path, _dtype(each.dtype), each.size
                )
                for each in arrays
            ]
            whole = calls.num_ranks if kind == "all-gather" else 1
            self._found.append(
                PlannedCollective(
                    kind=kind,
                    algorithm="native" if name.endswith("_native") else "xla",
                    leaves=[
                        leaf._replace(num_elements=whole * leaf.num_elements) for leaf in operands
                    ],
                    operands=operands,
                    line=self._line_of(eqn),
                    is_of_author=diagnostics.is_of_author(eqn),
                    num_loops=self._num_loops + is_in_loop,
                    is_conditional=self._is_conditional(),
                    number=eqn.params.get("number"),
                )
            )

    def _bodies(self, eqn: Any, name: str, paths: Paths) -> bool:
        bodies = [opened(body) for body in jaxprs.bodies(eqn)]
        if name == "while":
            cond, body, num_cond, num_body = jaxprs.while_parts(eqn)
            own = inner_names(body, eqn.invars[num_cond:], paths)
            self.run(cond, {})
            inner = self.run(body, own)
            outer_names(eqn, body, inner, paths)
            return True
        for body in bodies:
            atoms = eqn.invars[1:] if name == "cond" else eqn.invars
            own = inner_names(body, atoms, paths) if len(atoms) == len(body.invars) else {}
            if name == "scan":  # a scanned array is a layer of its whole
                num_whole = sum(scan_counts(eqn.params))
                for variable in body.invars[num_whole:]:
                    if variable in own:
                        self.scanned.add(own[variable])
                        own[variable] += OF_LAYER
            outer_names(eqn, body, self.run(body, own), paths)
        return bool(bodies)


def _gathered(eqn: Any, atoms: Sequence[Any], named: Sequence[str]) -> list[SentLeaf]:
    """Return a gather's results, named as overwritten arrays, or as shards."""
    dims, flags = eqn.params.get("dims", atoms), eqn.params.get("overwrites") or ()
    names, overwritten = [*named[: len(dims)]], iter(named[len(dims) :])
    for i, flag in enumerate(flags):
        names[i] = next(overwritten) if flag else names[i]
    results = eqn.outvars[-len(names) :]
    return [
        SentLeaf(name, _dtype(aval.dtype), int(aval.size))
        for name, aval in zip(names, map(_sent_type, results), strict=True)
    ]


def _name(eqn: Any) -> str:
    """Return the primitive's name, or that of its call between GPUs."""
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


def _sent_type(atom: Any) -> Any:
    """Return the type sent by XLA: of a typed random key its data."""
    aval = atom.aval
    if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return aval
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))


def _dtype(dtype: Any) -> str:
    name = getattr(dtype, "name", str(dtype))
    short = {"bfloat16": "bf16", "bool": "pred"}
    for long, first in (("float", "f"), ("uint", "u"), ("int", "s"), ("complex", "c")):
        if name.startswith(long):
            return first + name.removeprefix(long)
    return short.get(name, name)
