"""Checks that all processes call a step with the same arguments and state."""

import itertools
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp import axis, pytrees
from jdp.distributed import agree
from jdp.distributed.checks import hashes
from jdp.distributed.checks.hashes import is_small
from jdp.error_codes import with_code
from jdp.step_spec import StepSpec

PART = " part "  # between a leaf's name and its shard's position along further axes

WHY = "Ranks with different arguments train different models, or wait for each other forever."
ADVICE_FOR_STATE = (
    "A program changed the state after the step that returned it. Make that change on all "
    "processes with equal values, outside `if jax.process_index() == 0`; or make it inside the "
    "step. Wrap state of one rank in jdp.per_rank(x)."
)
ADVICE = (
    "Pass the same on every process: a key from the same seed, the same numbers. Draw random "
    "numbers of one rank from state.key, and pass values that differ by design in the batch."
)


def first_difference(gathered: Mapping[int, Mapping[str, str]]) -> str | None:
    """Return a sentence that names the first differing leaf and its process.

    >>> first_difference({0: {"key": "a"}, 1: {"key": "a"}, 2: {"key": "b"}})
    '`key` has other values on process 2 than on process 0.'
    """
    if len(gathered) < 2:
        return None
    for name in dict.fromkeys(name for each in gathered.values() for name in each):
        found = {process: each[name] for process, each in gathered.items() if name in each}
        name, part, _ = name.partition(PART)
        if pair := agree.odd_one(found):
            odd, usual = pair
            values = [found[process].partition(" = ")[2] for process in (odd, usual)]
            shown = f": {values[0]} instead of {values[1]}" if all(values) else ""
            return f"`{name}` has other values on process {odd} than on process {usual}{shown}."
        lacking = next((process for process in gathered if process not in found), None)
        if lacking is not None and not part:  # a process need not hold every shard
            return (
                f"`{name}` was replaced between steps on process {next(iter(found))}, but not on "
                f"process {lacking}."
            )
    return None


def described(leaf: Any) -> str:
    """Return a leaf's dtype, shape, digest, and at most four values."""
    leaf = pytrees.without_key(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = leaf.addressable_data(0)
    value = np.asarray(leaf)
    shown = f" = {value.tolist()}" if value.size <= 4 else ""
    return f"{value.dtype}{[*value.shape]} {agree.digest(value)}{shown}"


# For others' arguments after a difference.
_EXPLAIN_S = 20.0

# Steps of each name, so all processes name a call alike.
_num_steps: Counter[str] = Counter()


class Given(NamedTuple):
    """This process's compared arguments in one call of a step.

    Attributes:
      call: name of the call, equal on all processes.
      checksums: of the state and of each large argument, `[*mesh.devices.shape, 2]` uint32; inputs
        of the step.
      small: name -> leaf of small arguments.
      large: names of leaves, and their hashes from `hashes.folded`.
    """

    call: str
    checksums: tuple[jax.Array, ...]
    small: dict[str, Any]
    large: list[tuple[list[str], list[jax.Array]]]


class Arguments:
    """Compares a step's arguments between its mesh's processes."""

    def __init__(self, mesh: Mesh, spec: StepSpec):
        self._mesh = mesh
        self._spec = spec
        self._axis_name = spec.axis_name
        self._group = agree.peers(mesh)
        number = _num_steps[spec.name]
        _num_steps[spec.name] += 1
        self._calls = (f"{spec.name}/{number}/{call}" for call in itertools.count())
        # Argument -> its leaves in the last call, their names and hashes.
        self._last: dict[int, tuple[list[weakref.ref], list[str], Any, jax.Array]] = {}

    @property
    def spec(self) -> P:
        """A checksum's sharding in a step: over its data axes."""
        return P(*(name if name in self._axis_name else None for name in self._mesh.axis_names))

    def checksums(self, args: Sequence[Any], unknown: Sequence[int]) -> Given:
        """Hash one call's arguments, without waiting."""
        small: dict[str, Any] = {}
        large: list[tuple[list[str], list[jax.Array]]] = []
        checksums = [self._hashed(0, args[0], large, unknown) if unknown else self.zero]
        for i, arg in enumerate(args[2:], 2):
            if is_small(arg):
                small |= {self._path(i, path): leaf for path, leaf in _named(arg)}
            else:
                checksums.append(self._hashed(i, arg, large))
        return Given(next(self._calls), tuple(checksums), small, large)

    def zeros(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the checksums' types, for a program only to compile."""
        # Types, since the mesh may only describe devices.
        where = NamedSharding(self._mesh, P(*self._mesh.axis_names))
        shape = (*self._mesh.devices.shape, 2)
        described = jax.ShapeDtypeStruct(shape, np.uint32, sharding=where)
        return (described, *(described for arg in args[2:] if not is_small(arg)))

    @property
    def zero(self) -> jax.Array:
        """The checksum of no leaves."""
        return hashes.zero(self._mesh)

    def require_equal(self, given: Given) -> None:
        """Compare the arguments before a step first runs, on all processes."""
        gathered = agree.all_gather(self._group, self._described(given), what="arguments of a step")
        if difference := first_difference(gathered):
            text = f"{difference} {WHY} The step did not run. {ADVICE}"
            raise ValueError(with_code("JDP204", text))

    def difference(self, given: Given, *, timeout_s: float = _EXPLAIN_S) -> str | None:
        """Return a sentence about a leaf that differs between processes."""
        if len(self._group) == 1:
            return None
        try:
            mine = self._described(given)
        except Exception:  # the arrays may be deleted, or come from a failed step
            mine = {}
        key = f"arguments/{given.call}"
        return first_difference(agree.offered(self._group, key, mine, timeout_s=timeout_s))

    def explained(self, given: Given, call: str) -> str:
        """Return the error for a call with different arguments."""
        difference = self.difference(given)
        advice = ADVICE
        if difference is None:
            difference = (
                "Its state or a further argument differs on one process; the leaf is unknown, "
                "because not all processes reported theirs in time."
            )
        elif difference.startswith(f"`{self._spec.argument(0)}"):
            advice = ADVICE_FOR_STATE
        return with_code(
            "JDP211",
            f"{call} was not the same on all processes: {difference} {WHY} The states that it "
            f"and later calls returned are wrong. {advice}",
        )

    def _path(self, i: int, path: tuple) -> str:
        return self._spec.argument(i) + jax.tree_util.keystr(path)

    def _hashed(
        self,
        i: int,
        arg: Any,
        large: list[tuple[list[str], list[jax.Array]]],
        chosen: Sequence[int] | None = None,
    ) -> jax.Array:
        named = _named(arg)
        numbers = [*range(len(named))] if chosen is None else chosen
        leaves = [named[number][1] for number in numbers]
        last = self._last.get(i)
        if last is None or not _are(leaves, last[0]):
            names = [self._path(i, named[number][0]) for number in numbers]
            last = self._last[i] = self._hash(leaves, names, numbers)
        _, names, hashed, checksum = last
        large.append((names, hashed))
        return checksum

    def _hash(self, leaves: list[Any], names: list[str], numbers: Sequence[int]) -> Any:
        placed = [
            (n, name, self._placed(x)) for x, name, n in zip(leaves, names, numbers, strict=True)
        ]
        placed = [(n, name, x) for n, name, x in placed if x is not None]
        hashed, checksum = hashes.folded(
            self._mesh, [x for *_, x in placed], [n for n, *_ in placed]
        )
        # A NumPy array is mutable: hash it in each call.
        is_kept = all(isinstance(leaf, jax.Array) for leaf in leaves)
        refs = [weakref.ref(leaf) for leaf in leaves] if is_kept else []
        return refs, [name for _, name, _ in placed], hashed, checksum

    def _placed(self, leaf: Any) -> jax.Array | None:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh == self._mesh:
            split = {
                name for part in sharding.spec if part is not None for name in axis.names(part)
            }
            # The step gathers a leaf sharded over ranks: all use the same.
            return None if split & set(self._axis_name) else leaf
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return None
        value = np.asarray(pytrees.without_key(leaf))
        where = NamedSharding(self._mesh, P())
        return jax.make_array_from_callback(value.shape, where, lambda index: value[index])

    def _described(self, given: Given) -> dict[str, str]:
        """Return name -> dtype, shape and digest of every leaf."""
        found = {name: described(leaf) for name, leaf in given.small.items()}
        apart = [i for i, name in enumerate(self._mesh.axis_names) if name not in self._axis_name]
        for names, hashed in given.large:
            for position, values in hashes.parts(hashed):
                # Processes may hold different shards along further axes.
                part = "".join(f"{PART}{position[i]}" for i in apart)
                for name, value in zip(names, values, strict=True):
                    seen, text = found.get(name + part), value.tobytes().hex()
                    found[name + part] = text if seen in (None, text) else f"{seen} {text}"
        return found


def _are(leaves: Sequence[Any], refs: Sequence[weakref.ref]) -> bool:
    same = (ref() is leaf for ref, leaf in zip(refs, leaves, strict=False))
    return len(leaves) == len(refs) and all(same)


def _named(arg: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(arg)
