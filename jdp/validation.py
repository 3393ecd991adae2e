"""Checks of arguments, with the value in the error."""

import operator


def integer(name: str, value: int) -> int:
    """Return `value`, an integer of Python, NumPy or JAX, as an int.

    >>> integer("stage", True)
    Traceback (most recent call last):
    TypeError: stage must be an integer, got True.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        if str(getattr(value, "dtype", "")).startswith("key<"):
            raise TypeError(
                f"{name} must be an integer, got a random key. Write {name}=0, or "
                f"{name}=int(jax.random.bits(key)) to derive it from the key."
            ) from None
        raise TypeError(f"{name} must be an integer, got {value!r}.") from None


def int_at_least(name: str, value: int, *, least: int) -> int:
    """Return `value` as an int.

    >>> int_at_least("num_steps", 0, least=1)
    Traceback (most recent call last):
    ValueError: num_steps must be at least 1, got 0.
    """
    number = integer(name, value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}.")
    return number


def allows(allow: str | None, change: str) -> bool:
    """Whether `allow=` permits a change since a run began, such as "new data".

    >>> allows("new data", "new data"), allows(None, "new script")
    (True, False)
    """
    if allow not in (None, change):
        raise ValueError(f'allow must be "{change}" or omitted, got {allow!r}.')
    return allow is not None
