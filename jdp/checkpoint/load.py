"""`load`: reads a saved state or a part of it in any process."""

import ast
import functools
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdp import rank_state
from jdp.checkpoint import directory, orbax_files, split_state
from jdp.checkpoint.directory import Checkpoint, Folder
from jdp.checkpoint.manifest import TornError
from jdp.checkpoint.saved_leaves import (
    SavedLeaf,
    describe,
    disk_names,
    from_disk,
    is_split,
    leaves_of,
)
from jdp.checkpoint.shards import SplitValue
from jdp.checkpoint.split_state import split_values
from jdp.distributed.placement import copied_from_host
from jdp.pytrees import is_array, is_key, key_impl, without_key
from jdp.validation import int_at_least

_log = logging.getLogger("jdp")

# The most leaves of a kind in a message.
_NUM_NAMED = 8

_INSTEAD = (
    "Build the saved one, or give Checkpointer a new directory to start over. ckpt.restore(..., "
    'missing="keep") restores only leaves of equal name, shape and dtype.'
)


def fill(
    state: Any,
    saved: Sequence[SavedLeaf],
    values: Sequence[np.ndarray | SplitValue],
    where: str,
    *,
    keeps_missing: bool = False,
    copies: bool = False,
    instead: str = _INSTEAD,
) -> tuple[Any, list[Any]]:
    """Return the state with saved values, and the restored leaves.

    Types, shardings and non-array leaves are kept. A Python number or a 64-bit NumPy array also
    accepts a saved value of JAX's canonical dtype. `per_rank` state is resized by its rule. The
    values must not be written to later, unless `copies`.
    """
    left = defaultdict(list)
    for old, value in zip(saved, values, strict=True):
        left[old.name].append((old, value))
    leaves, treedef = jax.tree.flatten(state)
    positions = [i for i, x in enumerate(leaves) if is_array(x)]
    owners, found = rank_state.owners(state), {}
    changed, missing = [], []
    for i, new in zip(positions, describe(state), strict=True):
        if not left[new.name]:
            missing.append(f"{_shown(new.name)} {new}")
            continue
        old, value = left[new.name].pop(0)
        is_cut = isinstance(value, SplitValue) and value.is_cut
        if (owner := owners[i]) is not None and (is_cut or old.shape != new.shape):
            value = rank_state.resized(owner, leaves[i], value[...], new.name, where)
            old = old._replace(shape=value.shape)
        if not _fits(old, new):
            changed.append(f"{_shown(new.name)} is {old} there and {new} in the given state")
        found[i] = value
    unused = [f"{_shown(old.name)} {old}" for pairs in left.values() for old, _ in pairs]
    differences = _listed("", changed) + _listed("only there: ", unused)
    differences += _listed("only in the given state: ", missing)
    if changed or (differences and not (keeps_missing and found)):
        raise ValueError(
            f"{where} does not have the leaves of the given state: {'; '.join(differences)}. It "
            f"holds another model or optimizer. {instead}"
        )
    if differences and jax.process_index() == 0:
        text = "jdp: restored %d leaves from %s; %s."
        _log.warning(text, len(found), where, "; ".join(differences))
    for i, value in found.items():
        leaves[i] = _placed_split(leaves[i], value, copies)
    return treedef.unflatten(leaves), [leaves[i] for i in found]


def _shown(name: str) -> str:
    return f"`{name}`" if name else "the only leaf"


def _listed(title: str, texts: list[str]) -> list[str]:
    if len(texts) > _NUM_NAMED:
        texts = [*texts[:_NUM_NAMED], f"and {len(texts) - _NUM_NAMED} more"]
    return [title + ", ".join(texts)] if texts else []


# All processes take part in fetching a leaf, needed or not.
def _placed_split(x: Any, value: np.ndarray | SplitValue, copies: bool) -> Any:
    if not isinstance(value, SplitValue):
        return placed(x, value, copies=copies)
    value.fetch()
    is_placed = _has_place(x) and (is_key(x) or not x.weak_type)
    new = placed(x, value if is_placed else value[...])
    value.release()
    return new


def placed(x: Any, value: Any, *, copies: bool = False) -> Any:
    """Return a saved value as `x` is; `copies`: in its own memory."""
    if is_key(x):
        data = placed(without_key(x), value, copies=copies)
        return jax.random.wrap_key_data(data, impl=key_impl(x))
    if not isinstance(x, jax.Array) and not _has_place(x):
        if isinstance(x, np.ndarray | jax.ShapeDtypeStruct):
            return np.array(value)
        return type(x)(value[()]) if isinstance(x, np.generic) else type(x)(value.item())
    if x.weak_type and not x.shape and (not _has_place(x) or x.sharding.is_fully_addressable):
        # Only a Python number produces a weakly typed array, as jnp.asarray(1.0) does.
        number = jnp.asarray(value.item())
        return jax.device_put(number, x.sharding) if _has_place(x) else number
    if not _has_place(x):
        return jnp.asarray(np.array(value) if copies else value)
    if copies:
        return copied_from_host(value, x.sharding)
    get = value.__getitem__
    return jax.make_array_from_callback(x.shape, x.sharding, get, dtype=x.dtype)


def _has_place(x: Any) -> bool:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.sharding is not None
    return isinstance(x, jax.Array) and x.committed


def _fits(saved: SavedLeaf, given: SavedLeaf) -> bool:
    if saved.dtype != given.dtype:
        given = given._replace(dtype=str(jax.dtypes.canonicalize_dtype(given.dtype)))
    return saved._replace(name=given.name) == given


_GIVE_LIKE = (
    "Pass the saved leaves as like=, for instance another part=, or omit it to get all as NumPy "
    "arrays."
)

# One key of a path as JAX writes it: .name, ['key'], [0], [<flat index 0>].
_KEY = re.compile(r"""\.(\w+)|\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\]]*)\]""")


def load(
    directory: str | os.PathLike[str],
    step: int | None = None,
    *,
    part: str | None = None,
    like: Any = None,
) -> Any:
    """Load a checkpoint, or a part of it, for inference, export or fine-tuning.

    It works without `jdp.init`, on any number of devices, and while a run writes to the directory.

    Args:
      directory: of `jdp.Checkpointer`; or of Orbax: of a CheckpointManager, a step with one PyTree,
        or a PyTree, whose texts are left out.
      step: step of the checkpoint. Default: the latest intact checkpoint.
      part: path of the part to read, such as `"params"` or `"opt_state[0].mu"`. Default: all.
      like: a tree with the structure of that part. Its leaves give shapes, dtypes and shardings;
        leaves other than arrays and numbers are kept. `jax.ShapeDtypeStruct` leaves are allowed.

    Returns:
      The values in the form of `like`. Without it, NumPy arrays (and JAX random keys) in dicts and
      lists: attributes become dict keys, and positions 0 to n - 1 become a list.

    Raises:
      FileNotFoundError: the directory holds no checkpoint.
      ValueError: the directory lacks this step, the step lacks this part, or `like` has different
        leaves, shapes or dtypes; the checkpoint is of Flax, or a step has several PyTrees.
      RuntimeError: the requested checkpoint is damaged, or all of them are.

    >>> import tempfile, jax.numpy as jnp, jdp
    >>> directory = tempfile.mkdtemp()
    >>> with jdp.Checkpointer(directory) as ckpt:
    ...     state = ckpt.restore({"params": {"w": jnp.ones(2)}, "n": 0})
    ...     ckpt.step(state)
    >>> jdp.load(directory, part="params")
    {'w': array([1., 1.], dtype=float32)}
    """
    folder = Folder(directory)
    if not isinstance(part, str | None):
        raise TypeError(f"part must be a path such as 'params', got {part!r}.")
    step = None if step is None else int_at_least("step", step, least=0)
    where, leaves, read = _found(folder, step)
    paths = [parse(leaf.name) for leaf in leaves]
    wanted = [key for key, _ in parse(_path(part or ""))]
    begins = [[key for key, _ in path[: len(wanted)]] for path in paths]
    inside = [i for i, begin in enumerate(begins) if begin == wanted]
    if wanted and not inside:
        parts = sorted({str(path[0][0]) for path in paths if path})
        raise ValueError(f"{where} has no {part!r}. Its parts are {parts}.")
    saved, below = [leaves[i] for i in inside], [paths[i][len(wanted) :] for i in inside]
    values = read(inside, like)
    if like is None:
        found = zip(below, map(_as_key, saved, values), strict=True)
        return _nested({tuple(key for key, _ in path): value for path, value in found})
    names = _named_as(like, below)
    renamed = [leaf._replace(name=name) for leaf, name in zip(saved, names, strict=True)]
    return fill(like, renamed, values, f"{part or 'the state'} in {where}", instead=_GIVE_LIKE)[0]


_Path = list[tuple[str | int, str]]  # each key with its text


# Orbax writes attributes as keys, and may write positions as texts.
def _named_as(like: Any, paths: list[_Path]) -> list[str]:
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(like)]
    by_keys = {_keys(parse(name)): name for name in names}
    own = ["".join(text for _, text in path) for path in paths]
    known = {*names}
    pairs = zip(own, paths, strict=True)
    return [name if name in known else by_keys.get(_keys(path), name) for name, path in pairs]


def _keys(path: _Path) -> tuple[str, ...]:
    return tuple(str(key) for key, _ in path)


class _SavedState(NamedTuple):
    where: str
    leaves: list[SavedLeaf]
    read: Callable[[list[int], Any], Sequence[np.ndarray | SplitValue]]  # leaves with these numbers


def _found(folder: Folder, step: int | None) -> _SavedState:
    checkpoints = folder.checkpoints()
    if not checkpoints and (other := directory.find_foreign(folder.path)) is not None:
        tree = other.tree(step)
        leaves = orbax_files.tree_leaves(tree)
        return _SavedState(
            str(tree), leaves, lambda inside, like: orbax_files.read_tree(tree, inside)
        )
    checkpoint, facts = _intact(folder, checkpoints, step)
    leaves = leaves_of(facts)
    named = [*disk_names(leaves).items()]

    def read(inside: list[int], like: Any) -> Sequence[np.ndarray | SplitValue]:
        return _values(folder, checkpoint, facts, dict(named[i] for i in inside), like)

    return _SavedState(f"step {checkpoint.step} of {folder.path}", leaves, read)


def _values(
    folder: Folder,
    checkpoint: Checkpoint,
    facts: dict[str, Any],
    saved: dict[str, SavedLeaf],
    like: Any,
) -> Sequence[np.ndarray | SplitValue]:
    if not is_split(facts):
        return from_disk(saved, functools.partial(folder.read, checkpoint))
    readable = split_state.CheckpointReader(folder, checkpoint, facts)
    split = dict(zip(disk_names(leaves_of(facts)), split_values(facts, readable), strict=True))
    return [split[name] if like is not None else split[name][...] for name in saved]


def parse(path: str) -> _Path:
    """Split a JAX path into its keys, each with its text.

    >>> parse(".params['w'][0]")
    [('params', '.params'), ('w', "['w']"), (0, '[0]')]
    """
    keys, start = [], 0
    while start < len(path):
        match = _KEY.match(path, start)
        if match is None:  # a pytree node with another key syntax
            return [*keys, (path[start:], path[start:])]
        keys.append((match[1] if match[2] is None else _literal(match[2]), match[0]))
        start = match.end()
    return keys


def _literal(text: str) -> str | int:
    try:
        key = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
    return key if isinstance(key, str | int) else text


def _path(part: str) -> str:
    return part if not part or part[0] in ".[" else f".{part}"


def _intact(
    folder: Folder, checkpoints: list[Checkpoint], step: int | None
) -> tuple[Checkpoint, dict[str, Any]]:
    if not checkpoints:
        raise FileNotFoundError(
            f"{folder.path} holds no checkpoint. Pass the directory of jdp.Checkpointer."
        )
    if step is not None:
        steps = sorted({found.step for found in checkpoints})
        checkpoints = [found for found in checkpoints if found.step == step][:1]
        if not checkpoints:
            raise ValueError(f"{folder.path} has no step {step}. It holds {steps}.")
    torn = []
    for checkpoint in checkpoints:
        try:
            return checkpoint, folder.facts(checkpoint)
        except TornError as error:
            torn.append(f"{checkpoint.path}: {error}")
            _log.warning("jdp: skipped a damaged checkpoint: %s.", torn[-1])
    raise RuntimeError(f"jdp.load found no intact checkpoint: {'; '.join(torn)}.")


def _as_key(leaf: SavedLeaf, value: Any) -> Any:
    if leaf.key is None:
        return value
    return jax.random.wrap_key_data(jnp.asarray(value), impl=leaf.key)


def _nested(found: dict[tuple[str | int, ...], Any]) -> Any:
    if () in found:
        return found[()]
    below: dict[str | int, dict[tuple[str | int, ...], Any]] = defaultdict(dict)
    for (key, *rest), value in found.items():
        below[key][tuple(rest)] = value
    nested = {key: _nested(inner) for key, inner in below.items()}
    if nested and [*nested] == [*range(len(nested))]:
        return [*nested.values()]
    return nested
