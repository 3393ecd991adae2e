"""Which functions of Python a call calls."""

import sys


def python_calls(fn, *args):
    """Names of the Python functions that `fn(*args)` calls, and what it returns."""
    names = set()
    sys.setprofile(lambda frame, event, arg: names.add(frame.f_code.co_name))
    try:
        result = fn(*args)
    finally:
        sys.setprofile(None)
    return names, result
