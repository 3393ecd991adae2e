"""Promises of users about primitives that are not part of JAX."""

import jax.extend.core

from jdp.analysis.rules import RULES, control_flow

_declared: set[str] = set()


def declare_pure(primitive: jax.extend.core.Primitive) -> None:
    """Promise that a primitive gives equal results for equal operands on every rank.

    jdp knows the primitives of JAX and of some libraries. Any other primitive may use a source that
    differs between ranks, such as the device's number or a hidden state, so jdp assumes that its
    results differ from rank to rank. jdp analyses a primitive with a jaxpr among its parameters, so
    that one needs no promise.

    Args:
      primitive: the object that your code or a library binds. The promise holds for all primitives
        with its name.

    Raises:
      TypeError: if it is not a primitive.
      ValueError: if jdp has a rule for a primitive of this name.

    >>> from jax.extend.core import Primitive
    >>> double_p = Primitive("double")
    >>> declare_pure(double_p)
    """
    if not isinstance(primitive, jax.extend.core.Primitive):
        raise TypeError(
            f"jdp.declare_pure takes a jax.extend.core.Primitive, got {type(primitive).__name__} "
            f"{primitive!r}. Hand over the object that your code binds."
        )
    if primitive.name in RULES and primitive.name not in _declared:
        raise ValueError(
            f"jdp knows the primitive `{primitive.name}` by itself, and a promise would change "
            "what it knows. If yours only has the same name, give it another one."
        )
    _declared.add(primitive.name)
    RULES[primitive.name] = control_flow.joined
