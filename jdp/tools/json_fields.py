"""Checks fields of a JSON file, perhaps damaged. Needs no JAX."""

import re
import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from jdp.tools.rate import LEAST_GIVEN, MOST_GIVEN


class Field(NamedTuple):
    """An object's field; `what` has the allowed values in words."""

    what: str
    holds: Callable[[Any], bool]
    is_required: bool = True


def number_in(least: float, most: float) -> Field:
    """Return a field of a finite number: neither NaN nor a bool."""
    what = f"a number from {least:g} to {most:g}"
    return Field(what, lambda it: type(it) in (int, float) and least <= it <= most)


def one_of(values: Collection[str]) -> Field:
    """Return a field of one of some texts."""
    return Field(f"one of {', '.join(values)}", lambda it: isinstance(it, str) and it in values)


def list_of(field: Field) -> Field:
    """Return a field of lists of a field's values."""
    what = f"a list, each of it {field.what}"
    return Field(what, lambda it: isinstance(it, list) and all(map(field.holds, it)))


def dict_of(field: Field) -> Field:
    """Return a field of objects with any names."""
    what = f"an object, each value of it {field.what}"
    return Field(what, lambda it: isinstance(it, dict) and all(map(field.holds, it.values())))


def optional(field: Field) -> Field:
    """Return an optional field of an object."""
    return field._replace(is_required=False)


_SURROGATE = re.compile("[\ud800-\udfff]")


def _is_text(value: Any) -> bool:
    # JSON may have half of a pair of surrogates, which cannot be printed.
    return isinstance(value, str) and _SURROGATE.search(value) is None


COUNT = Field("a whole number from 0 to 2**63 - 1", lambda it: type(it) is int and 0 <= it < 2**63)
AMOUNT = number_in(0, MOST_GIVEN)
POSITIVE = number_in(LEAST_GIVEN, MOST_GIVEN)
TEXT = Field("a text", _is_text)
OBJECT = Field("an object", lambda it: isinstance(it, dict))
LIST = Field("a list", lambda it: isinstance(it, list))


def checked(found: Any, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return a JSON object's known fields.

    >>> fields = {"process": COUNT, "host": optional(TEXT)}
    >>> checked({"process": 1, "more": [[]]}, fields)
    {'process': 1}
    >>> checked({"process": -1}, fields)
    Traceback (most recent call last):
    ValueError: its process is -1, not a whole number from 0 to 2**63 - 1
    """
    if not isinstance(found, dict):
        raise ValueError(f"{reprlib.repr(found)} is not an object")
    values = {}
    for name, (what, holds, is_required) in fields.items():
        if name in found:
            value = values[name] = found[name]
            if not holds(value):
                raise ValueError(f"its {name} is {reprlib.repr(value)}, not {what}")
        elif is_required:
            raise ValueError(f"it has no {name!r}")
    return values
