"""A derivative of a forward-mode derivative through `scan_layers`: refused as the latter is."""

import contextlib
from collections.abc import Iterator

from jdp.analysis import line_of, step_refusals
from jdp.reduction import scanned_layers
from jdp.reduction.scope import Scope


@contextlib.contextmanager
def refused(name: str, scope: Scope) -> Iterator[None]:
    """Raise an error of jdp's where JAX cannot differentiate what the author's function does.

    JAX finds that before the program is there to be proved, and does not name the layers.
    """
    try:
        yield
    except NotImplementedError as error:
        is_ours = scanned_layers.NAME in scope.reverse_only
        if not is_ours or "'custom_lin'" not in str(error):
            raise
        text = step_refusals.forward_mode(line_of(error))
        raise ValueError(f"`{name}` cannot be differentiated:\n- {text}") from error
