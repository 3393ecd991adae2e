"""Explain the error of a step that asks for the value of an argument while it is traced."""

import re
from collections.abc import Mapping, Sequence

import jax

from jdp.analysis import line_of
from jdp.error_codes import with_code
from jdp.step_spec import StepSpec

# JAX names the arguments of the function that it traces, which is one of jdp's.
_ASKED = re.compile(
    r"the function (?:_on_rank|reading|recording) at .* depends on the values? of the "
    r"arguments? (.*)\.$",
    re.MULTILINE,
)
_SEPARATORS = re.compile(r", and |, | and ")


def explained(error: TypeError, spec: StepSpec, paths: Mapping[str, Sequence[str]]) -> str | None:
    """Return the error to raise in place of JAX's; None if that is not about a value."""
    asked = _ASKED.search(str(error))
    if asked is None:
        return None
    names = [f"`{_named(each, spec, paths)}`" for each in _SEPARATORS.split(asked[1])]
    what = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    line = line_of(error)
    if isinstance(error, jax.errors.TracerArrayConversionError):
        return with_code(
            "JDP127",
            f"`{spec.name}` hands {what} to NumPy{f' at {line}' if line else ''}: NumPy needs "
            "values, which do not exist while a step is traced.\n"
            "Write the function of jax.numpy in its place, and jax.random with state.key in place "
            "of np.random. Return what is printed as a metric.",
        )
    return with_code(
        "JDP127",
        f"`{spec.name}` asks for a value that depends on {what}{f' at {line}' if line else ''}, as "
        "an `if`, a `range`, a shape, int() or NumPy does.\nWrite jnp.where(flag, a, b) or "
        "jax.lax.cond(flag, f, g, x) to choose as it runs, and return what is printed as a metric. "
        "Arguments of a step have no values while it is traced: one program is compiled for all of "
        "them. A flag or a number that chooses the program is closed over, with a step for each "
        "value: jdp.train_step(lambda state, batch: undecorated(state, batch, True)). "
        f"{_of_state(names, spec)}".rstrip(),
    )


def _of_state(names: Sequence[str], spec: StepSpec) -> str:
    if not any(re.match(rf"`{re.escape(spec.argument(0))}\b", name) for name in names):
        return ""
    return (
        "Numbers of a module, such as its number of heads, stay outside of the state: "
        "arrays, static = eqx.partition(model, eqx.is_array), or a static field of a dataclass. "
    )


def _named(name: str, spec: StepSpec, paths: Mapping[str, Sequence[str]]) -> str:
    if (found := re.fullmatch(r"(.+)\[(\d+)\]", name)) and found[1] in paths:
        return paths[found[1]][int(found[2])]
    if found := re.match(r"rest\[(\d+)\]", name):
        return spec.argument(2 + int(found[1])) + name[found.end() :]
    if name.startswith("split.batch"):
        return spec.argument(1) + name.removeprefix("split.batch")
    return name
