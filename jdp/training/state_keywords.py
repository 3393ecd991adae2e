"""Keywords of `TrainState.apply_gradients`: fields of the state, and what the optimizer reads."""

import difflib
import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from jdp.reduction.optimizer import Replicated

# What the update itself computes, and what is no array.
_NOT_REPLACED = frozenset(("step", "params", "opt_state", "tx", "trainable"))


def split(
    tx: Replicated, fields: Iterable[str], keywords: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keywords that the optimizer reads, and the new values of fields."""
    replaced = sorted(set(fields) - _NOT_REPLACED)
    values = {name: x for name, x in keywords.items() if name in replaced}
    others = {name: x for name, x in keywords.items() if name not in replaced}
    read = _read_by(tx)
    for name in others:
        if name in _NOT_REPLACED:
            raise TypeError(
                f"apply_gradients got {name}=, which the update computes or keeps. Write "
                f"state.apply_gradients(grads).replace({name}=...) to change it afterwards."
            )
        if read is not None and name not in read:
            raise TypeError(_without_effect(name, [*replaced, *read]))
    return others, values


def _read_by(tx: Replicated) -> set[str] | None:
    """Return the keywords that functions of the optimizer name; None if one may read any.

    Optax's own functions hand `**extra_args` on to others, which their closures hold.
    """
    names: set[str] = set()
    seen: set[int] = set()
    pending: list[Any] = [tx.options["tx"].update]
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if inspect.isfunction(each):
            code = each.__code__
            takes_any = code.co_flags & inspect.CO_VARKEYWORDS
            if takes_any and each.__module__.split(".")[0] != "optax":
                return None
            names.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
            names.update(x for x in code.co_consts if isinstance(x, str))
        pending.extend(_held_by(each))
    return names


def _held_by(each: Any) -> list[Any]:
    """Return the objects that may be functions, or hold some, in a function or a container."""
    if inspect.isfunction(each):
        return [x for cell in each.__closure__ or () for x in _contents(cell)]
    if inspect.ismethod(each):
        return [each.__func__, *getattr(each.__self__, "__dict__", {}).values()]
    if isinstance(each, functools.partial):
        return [each.func, *each.args, *each.keywords.values()]
    if isinstance(each, (tuple, list)):
        return [*each]
    if isinstance(each, dict):
        return [*each.values()]
    wrapped, update = (getattr(each, name, None) for name in ("__wrapped__", "update"))
    return [x for x in (wrapped, update) if x is not None]


def _contents(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # empty
        return []


def _without_effect(name: str, fields: list[str]) -> str:
    close = difflib.get_close_matches(name, fields, n=1)
    remedy = f"Write {close[0]}=" if close else "Leave it out"
    return (
        f"apply_gradients got {name}=, which would have no effect: it is no field of the state "
        f"({', '.join(fields)}), and the optimizer does not read it. {remedy}."
    )
