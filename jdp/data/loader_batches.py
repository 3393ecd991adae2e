"""Batches of a loader, which can continue at a saved state if the loader has one."""

import base64
import json
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jdp.data import host_arrays
from jdp.data.loops import Target, place

# The methods that read and set the state of an iterator, as in grain, and of a loader, as in
# PyTorch.
_OF_ITERATOR = "get_state", "set_state"
_OF_LOADER = "state_dict", "load_state_dict"
_BYTES = "base64"


class LoaderBatches(Generator[Any, None, None]):
    """The batches of one pass over a loader.

    `close`, or deleting it, ends the loop and its background thread.

    Args:
      loader: an iterable over this process's host batches.
      target: where to place the batches.
    """

    def __init__(self, loader: Iterable[Any], target: Target) -> None:
        self._source = _Source(loader)
        self._loop = place(self._source, target)
        self._position, self._has_begun = 0, False
        self._state: Any = None  # of the loader, after the last batch that the loop got

    @property
    def position(self) -> int:
        """The number of batches that the loop got, since the start of the run."""
        return self._position

    def get_state(self) -> dict[str, Any]:
        """Return the state of this process's loader after the last batch that the loop got.

        `jdp.Checkpointer` saves it for all processes. The first call must come before the loop.
        From then on, the state of the loader is read after each batch.
        """
        if self._source.states is None:
            if self._has_begun:
                raise RuntimeError(
                    f"get_state was first called after {self._position} batches, when others were "
                    "read ahead. Call it, or ckpt.restore(state, batches), before the loop."
                )
            self._state = self._source.track()
        return {"position": self._position, "loader": self._state}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called, with a loader that was created in the same way."""
        if self._has_begun:
            raise RuntimeError(
                f"set_state was called after {self._position} batches, when others were read "
                "ahead. Call it, or ckpt.restore(state, batches), before the loop."
            )
        self._source.set(state["loader"])
        self._position, self._state = state["position"], state["loader"]

    def close(self) -> None:
        """End the loop and its thread."""
        self._loop.close()

    def __enter__(self) -> "LoaderBatches":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def send(self, value: Any, /) -> Any:
        """Return the next batch."""
        self._has_begun = True
        batch = self._loop.send(value)
        self._position += 1
        if self._source.states is not None:
            self._state = self._source.states.popleft()
        return batch

    def throw(self, *error: Any) -> Any:
        """Raise an error inside the loop."""
        return self._loop.throw(*error)


class _Source(Iterator[Any]):
    """The host batches of a loader.

    `states` holds the loader's state after each batch that is read ahead; None if none was
    requested.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.states: deque[Any] | None = None
        self._loader = loader
        self._iterator: Iterator[Any] | None = None

    # Copy: JAX may use the memory of a NumPy array for a CPU device without a copy, whatever
    # `may_alias` is. A loader that fills one buffer for each batch would change batches read ahead.
    def __next__(self) -> Any:
        batch = next(self._opened())
        found, treedef = host_arrays.flattened(batch, "`batch`")
        named = [(f"`batch{jax.tree_util.keystr(path)}`", leaf) for path, leaf in found]
        arrays = [np.array(host_arrays.array(leaf, name), order="C") for name, leaf in named]
        if self.states is not None:
            self.states.append(self._get())
        return treedef.unflatten(arrays)

    def track(self) -> Any:
        """Return the state of the loader, and record it after each batch from now on."""
        self.states = deque()
        return self._get()

    def set(self, state: Any) -> None:
        """Set the loader to a state."""
        self.states = deque()
        owner, (_, name) = self._owner()
        if isinstance(state, dict) and [*state] == [_BYTES]:
            state = base64.b64decode(state[_BYTES])
        if state is not None:
            getattr(owner, name)(state)

    def _opened(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = iter(self._loader)
        return self._iterator

    def _owner(self) -> tuple[Any, tuple[str, str]]:
        if all(hasattr(self._loader, name) for name in _OF_LOADER):
            return self._loader, _OF_LOADER
        if all(hasattr(self._opened(), name) for name in _OF_ITERATOR):
            return self._opened(), _OF_ITERATOR
        raise TypeError(
            f"a loader of type {type(self._loader).__name__} has neither get_state and set_state "
            "nor state_dict and load_state_dict, so it cannot continue where it stood, and it may "
            "have read ahead: after a restart rows would count twice or never. Write jdp.batches("
            "dataset, ...), or give an iterator of grain or a StatefulDataLoader; or leave "
            "batches out of ckpt.restore and ckpt.step, to begin with the data anew."
        )

    def _get(self) -> Any:
        owner, (name, _) = self._owner()
        state = getattr(owner, name)()
        if isinstance(state, bytes):
            return {_BYTES: base64.b64encode(state).decode()}
        try:
            text = json.dumps(state)
            is_kept = json.loads(text) == state
        except (TypeError, ValueError):
            is_kept, text = False, repr(state)
        if not is_kept:
            raise TypeError(
                f"{type(owner).__name__}.{name} returned {text:.200}, which JSON does not keep as "
                "it is, and a checkpoint holds it as JSON. Return dicts, lists, numbers and text."
            )
        return json.loads(text)
