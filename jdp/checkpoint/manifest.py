"""A checkpoint's manifest: facts about its state, size and checksum of each file.

    {"sha256": of the manifest, "manifest": {"facts": {...}, "files": {name: [bytes, sha256]}}}

`write` refuses what `read` refuses, so a readable manifest suffices for a restore.
"""

import hashlib
import itertools
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import jax.numpy as jnp

from jdp.checkpoint import shards
from jdp.checkpoint.saved_leaves import ArrayForm, dtype_on_disk, is_known, is_split, leaves_of

_NAME = "manifest"


class TornError(Exception):
    """A checkpoint differs from what was written."""


def write(folder: Path, facts: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Write a folder's manifest to disk."""
    manifest = json.loads(json.dumps({"facts": facts, "files": files}))
    for fault in _faults(manifest):
        raise ValueError(f"{fault}, which a checkpoint must not hold")
    with open(folder / _NAME, "w") as file:
        json.dump({"sha256": _checksum(manifest), "manifest": manifest}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> dict[str, Any]:
    """Return the facts and files in a folder's manifest."""
    try:
        document = json.loads((folder / _NAME).read_bytes())
        manifest, checksum = document["manifest"], document["sha256"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TornError(f"its manifest cannot be read ({error})") from error
    if checksum != _checksum(manifest):
        raise TornError("its manifest has another checksum than when it was written")
    for fault in _faults(manifest):
        raise TornError(f"its manifest was changed or belongs to another version of jdp: {fault}")
    return manifest


def exists(folder: Path) -> bool:
    """Whether a folder has a jdp manifest, perhaps damaged."""
    try:
        document = json.loads((folder / _NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and {*document} == {"sha256", "manifest"}


def _checksum(manifest: Any) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# Yields the wrong values in a value from JSON.
Form = Callable[[Any], Iterator[Any]]


def _each(is_right: Callable[[Any], bool]) -> Form:
    return lambda x: iter(() if is_right(x) else (x,))


def _list(form: Form) -> Form:
    def wrong(x: Any) -> Iterator[Any]:
        yield from itertools.chain(*map(form, x)) if isinstance(x, list) else (x,)

    return wrong


def _row(*forms: Form) -> Form:
    def wrong(x: Any) -> Iterator[Any]:
        if isinstance(x, list) and len(x) == len(forms):
            yield from itertools.chain(*map(lambda form, each: form(each), forms, x))
        else:
            yield x

    return wrong


def _map(form: Form) -> Form:
    def wrong(x: Any) -> Iterator[Any]:
        yield from itertools.chain(*map(form, x.values())) if isinstance(x, dict) else (x,)

    return wrong


def _is_dtype(x: Any) -> bool:
    try:
        return isinstance(x, str) and is_known(jnp.dtype(x))
    except TypeError:
        return False


def _is_key(x: Any) -> bool:
    if not isinstance(x, str):
        return x is None
    try:
        jax.eval_shape(lambda: jax.random.key(0, impl=x))
    except ValueError:
        return False
    return True


def _is_loop(x: Any) -> bool:
    is_loop = isinstance(x, dict) and "position" in x  # may be of the author's form
    return is_loop and isinstance(x.get("loaders", []), list)


_text = _each(lambda x: isinstance(x, str))
_count = _each(lambda x: type(x) is int and 0 <= x < 2**63)
_box = _list(_row(_count, _count))
_FACTS = {
    "life": _count,
    "step": _count,
    "leaves": _list(_row(_text, _list(_count), _each(_is_dtype), _each(_is_key))),
    "parts": _list(_row(_count, _box, _count)),
    "whole_in": _map(_count),
    "data": _each(_is_loop),
    "directory": _text,
    "tag": _text,
    "run": _each(lambda x: x is None or isinstance(x, str)),
    "jdp": _text,
    "jax": _text,
    "sources": _map(_row(_text, _text)),
    "programs": _map(_map(_map(_count))),
}
_FILE = _row(_count, _text)


def _faults(manifest: Any) -> Iterator[str]:
    for name in ("facts", "files"):
        if not isinstance(manifest, dict) or not isinstance(manifest.get(name), dict):
            yield f"it has no {name}"
    facts, files = manifest["facts"], manifest["files"]
    yield from (f"its facts have no {x!r}" for x in ("life", "step", "leaves") if x not in facts)
    for name in _FACTS.keys() & facts:
        yield from (f"{name} has {wrong!r:.60}" for wrong in _FACTS[name](facts[name]))
    for name, file in files.items():
        yield from (f"the size or checksum of {name} is {wrong!r:.60}" for wrong in _FILE(file))
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            yield f"the file {name} is elsewhere"
    if "data" not in facts and type(facts.get("position", 0)) not in (int, type(None)):
        yield f"position is {facts['position']!r:.60}"
    yield from _faults_of_parts(facts)
    there = {PurePosixPath(name).parts[:1] for name in files}
    yield from (f"{folder} has no files" for folder in arrays(facts) if (folder,) not in there)


def _faults_of_parts(facts: Mapping[str, Any]) -> Iterator[str]:
    leaves, sizes = leaves_of(facts), Counter[int]()
    for number, box, _ in facts.get("parts", ()):
        shape = leaves[number].shape if number < len(leaves) else None
        if shape is None or len(box) != len(shape):
            yield f"leaf {number} of {len(leaves)} has a part {box}"
        elif not all(a <= b <= size for (a, b), size in zip(box, shape, strict=True)):
            yield f"{leaves[number].name} {leaves[number]} has a part {box}"
        sizes[number] += math.prod(b - a for a, b in box)
    for number, size in sizes.items():
        if size != math.prod(leaves[number].shape):
            yield f"the parts of {leaves[number].name} {leaves[number]} have {size} values"


def arrays(facts: Mapping[str, Any]) -> dict[str, dict[str, ArrayForm]]:
    """Return the arrays in each folder, by their names on disk."""
    found: dict[str, dict[str, ArrayForm]] = defaultdict(dict)
    described = zip(shards.pieces(facts), shards.names(facts), shards.described(facts), strict=True)
    for piece, name, leaf in described:
        if leaf.num_bytes:
            folder = shards.folder_name(piece.writer) if is_split(facts) else "state"
            found[folder][name] = leaf.shape, dtype_on_disk(leaf.dtype)
    return found
