"""Python asks for a value while a step is traced: of which argument it is, and what to write."""

import re
from collections.abc import Callable, Sequence

from jdp.analysis import line_of

# JAX names the arguments of the function that it traces, which is jdp's.
_ASKED = re.compile(
    r"the function _on_rank at .* depends on the values? of the arguments? (.*)\.$", re.MULTILINE
)
_SEPARATORS = re.compile(r", and |, | and ")


def explained(
    error: TypeError, step: str, argument: Callable[[int], str], own: Sequence[str]
) -> str | None:
    """Return what an author is told in place of JAX's error; None if that is not about a value.

    Args:
      error: from tracing the author's function.
      step: name of that function.
      argument: position of an argument of the step -> its name.
      own: names of the leaves of `per_rank`.
    """
    asked = _ASKED.search(str(error))
    if asked is None:
        return None
    names = [f"`{_named(each, argument, own)}`" for each in _SEPARATORS.split(asked[1])]
    what = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    line = line_of(error)
    return (
        f"`{step}` asks for a value that depends on {what}{f' at {line}' if line else ''}, as an "
        "`if`, a `range`, a shape, int() or NumPy does. Arguments of a step have no values while "
        "it is traced: one program is compiled for all of them. Close over a flag or a number that "
        "chooses the program, with a step for each value: jdp.train_step(lambda state, batch: "
        "undecorated(state, batch, True)). To choose as it runs, write jnp.where(flag, a, b) or "
        "jax.lax.cond(flag, f, g, x)."
    )


def _named(name: str, argument: Callable[[int], str], own: Sequence[str]) -> str:
    if found := re.fullmatch(r"split\.own\[(\d+)\]", name):
        return own[int(found[1])]
    if found := re.match(r"rest\[(\d+)\]", name):
        return argument(2 + int(found[1])) + name[found.end() :]
    for called, position in (("state", 0), ("split.batch", 1)):
        if name.startswith(called):
            return argument(position) + name.removeprefix(called)
    return name
