"""Do all processes call a step with the same further arguments, and with the same state?"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp import axis, pytrees
from jdp.distributed import agree
from jdp.distributed.checks import hashes
from jdp.distributed.checks.argument_differences import (
    ADVICE,
    ADVICE_FOR_STATE,
    PART,
    WHY,
    described,
    first_difference,
)
from jdp.distributed.checks.checksums import is_small
from jdp.error_codes import with_code

# How long a process that has seen a difference waits for what the others say of it.
_EXPLAIN_S = 20.0

# Calls of steps in this process, so that all processes call the same one by the same name.
_numbers = itertools.count()


class Given(NamedTuple):
    """What one call of a step got from this process, as far as it is compared.

    Attributes:
      number: of the call, among all of this process.
      checksums: for the step, one for the state and one for each large argument:
        `[*mesh.devices.shape, 2]` uint32.
      small: name -> leaf of a small argument.
      large: names of leaves, and their hashes from `hashes.of_leaves`.
    """

    number: int
    checksums: tuple[jax.Array, ...]
    small: dict[str, Any]
    large: list[tuple[list[str], list[jax.Array]]]


class Arguments:
    """Compares the arguments of one step between the processes of its mesh.

    Args:
      mesh: where the step runs.
      axis_name: its data axes.
      name_of: position of an argument -> its name.
    """

    def __init__(self, mesh: Mesh, axis_name: tuple[str, ...], name_of: Callable[[int], str]):
        self._mesh = mesh
        self._axis_name = axis_name
        self._name_of = name_of
        self._group = agree.peers(mesh)
        # Position of an argument -> leaves that were hashed in the last call, and what came out.
        self._last: dict[int, tuple[list[weakref.ref], list[str], Any, jax.Array]] = {}

    @property
    def spec(self) -> P:
        """How a step takes a checksum: split over its data axes."""
        return P(*(name if name in self._axis_name else None for name in self._mesh.axis_names))

    def of(self, args: Sequence[Any], unknown: Sequence[int]) -> Given:
        """Hash what one call of the step gets; nothing is waited for.

        Args:
          args: state, batch and further arguments, placed.
          unknown: positions of the leaves of the state that have to be compared.
        """
        small: dict[str, Any] = {}
        large: list[tuple[list[str], list[jax.Array]]] = []
        checksums = [self._hashed(0, args[0], large, unknown) if unknown else self.zero]
        for i, arg in enumerate(args[2:], 2):
            if is_small(arg):
                small |= {self._path(i, path): leaf for path, leaf in _named(arg)}
            else:
                checksums.append(self._hashed(i, arg, large))
        return Given(next(_numbers), tuple(checksums), small, large)

    def zeros(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Describe the checksums, for a program that is only to be compiled."""
        # No array: the mesh may be one that is only described.
        where = NamedSharding(self._mesh, P(*self._mesh.axis_names))
        shape = (*self._mesh.devices.shape, 2)
        described = jax.ShapeDtypeStruct(shape, np.uint32, sharding=where)
        return (described, *(described for arg in args[2:] if not is_small(arg)))

    @property
    def zero(self) -> jax.Array:
        """The checksum of nothing."""
        return hashes.zero(self._mesh)

    def require_equal(self, given: Given) -> None:
        """Compare before a step runs for the first time; all processes of the mesh come here.

        Raises:
          ValueError: on every process, naming the first leaf that differs, and whose it is.
        """
        gathered = agree.all_gather(self._group, self._described(given), what="arguments of a step")
        if difference := first_difference(gathered):
            text = f"{difference} {WHY} Nothing was sent or donated. {ADVICE}"
            raise ValueError(with_code("JDP204", text))

    def difference(self, given: Given, *, timeout_s: float = _EXPLAIN_S) -> str | None:
        """Name the leaf in which a call differed between processes; None if that is not known."""
        if len(self._group) == 1:
            return None
        try:
            mine = self._described(given)
        except Exception:  # The arrays may be deleted since, or of a step that failed.
            mine = {}
        key = f"arguments/{given.number}"
        return first_difference(agree.offered(self._group, key, mine, timeout_s=timeout_s))

    def explained(self, given: Given, step: str, call: int) -> str:
        """Return that a call differed between processes, and in what."""
        difference = self.difference(given)
        advice = ADVICE
        if difference is None:
            difference = (
                "The state that was handed to it, or a further argument, was another on one "
                "process than on the others; they did not all say which."
            )
        elif difference.startswith(f"`{self._name_of(0)}"):
            advice = ADVICE_FOR_STATE
        return with_code(
            "JDP211",
            f"call {call} of `{step}` was not the same on all processes: {difference} {WHY} The "
            f"states that it and later calls returned are wrong. {advice}",
        )

    def _path(self, i: int, path: tuple) -> str:
        return self._name_of(i) + jax.tree_util.keystr(path)

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
        # What may be written into is hashed in each call.
        is_kept = all(isinstance(leaf, jax.Array) for leaf in leaves)
        refs = [weakref.ref(leaf) for leaf in leaves] if is_kept else []
        return refs, [name for _, name, _ in placed], hashed, checksum

    def _placed(self, leaf: Any) -> jax.Array | None:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh == self._mesh:
            split = {
                name for part in sharding.spec if part is not None for name in axis.names(part)
            }
            # What is split over the ranks is put together by the step, the same for all of them.
            return None if split & set(self._axis_name) else leaf
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return None
        value = np.asarray(pytrees.without_key(leaf))
        where = NamedSharding(self._mesh, P())
        return jax.make_array_from_callback(value.shape, where, lambda index: value[index])

    def _described(self, given: Given) -> dict[str, str]:
        """Describe every leaf of a call: name -> dtype, shape, and what tells its bits."""
        found = {name: described(leaf) for name, leaf in given.small.items()}
        apart = [i for i, name in enumerate(self._mesh.axis_names) if name not in self._axis_name]
        for names, hashed in given.large:
            for position, values in hashes.parts(hashed):
                # Processes may hold other parts along further axes.
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
