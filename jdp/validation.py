"""Checks of what a user passed in, with the value in the error."""

import operator


def int_at_least(name: str, value: int, *, least: int) -> int:
    """Return `value` as an int.

    Raises:
      TypeError: if it is not an integer.
      ValueError: if it is less than `least`.

    >>> int_at_least("num_steps", 0, least=1)
    Traceback (most recent call last):
    ValueError: num_steps must be at least 1, not 0.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}.") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, not {number}.")
    return number
