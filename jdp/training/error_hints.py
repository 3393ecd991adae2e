"""Hints for JAX's errors while it traces or lowers a step."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdp.analysis import line_of, step_refusals
from jdp.error_codes import with_code
from jdp.reduction import scanned_layers
from jdp.reduction.step_context import Scope
from jdp.step_spec import StepSpec

# JAX names the arguments of jdp's traced function.
_ASKED = re.compile(
    r"the function (?:_?on_rank|reading|recording) at .* depends on the values? of the "
    r"arguments? (.*)\.$",
    re.MULTILINE,
)
_SEPARATORS = re.compile(r", and |, | and ")


def explained_value(
    error: TypeError, spec: StepSpec, paths: Mapping[str, Sequence[str]]
) -> str | None:
    """Return the error to raise instead of JAX's about a value."""
    asked = _ASKED.search(str(error))
    if asked is None:
        return None
    names = [f"`{_named(each, spec, paths)}`" for each in _SEPARATORS.split(asked[1])]
    what = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    line = line_of(error)
    if isinstance(error, jax.errors.TracerArrayConversionError):
        return with_code(
            "JDP127",
            f"`{spec.name}` passes {what} to NumPy{f' at {line}' if line else ''}, but a traced "
            "step has no values.\n"
            "Write the jax.numpy function instead, and jax.random with state.key instead of "
            "np.random. Return what you print as a metric.",
        )
    asks = f"`{spec.name}` needs a value that depends on {what}{f' at {line}' if line else ''}, as"
    if type(error) is jax.errors.ConcretizationTypeError:
        asks, advice = f"{asks} float(), int() or .item() does.", _READ + _CLOSED
    else:
        asks, advice = f"{asks} an `if`, a `range` or a shape does.", _CHOICE + _CLOSED
    if len(names) == 1 and re.match(rf"`{re.escape(spec.argument(0))}\b", names[0]):
        advice += _OF_MODULE
    return with_code("JDP127", f"{asks}\n{advice}")


_READ = (
    'Return it as a metric, {"x": x}, and write float(metrics["x"]) after the call; to branch on '
    "it, write jnp.where(flag, a, b)."
)
_CHOICE = "Write jnp.where(flag, a, b), or jax.lax.cond(flag, f, g, x)."
_CLOSED = (
    " A traced step has no values. Close over a flag or number that selects the program, one "
    "step per value: jdp.train_step(lambda state, batch: undecorated(state, batch, 2))."
)
_OF_MODULE = (
    " Keep numbers of a module, such as its number of heads, outside the state: arrays, static = "
    "eqx.partition(model, eqx.is_array), or a static field of a dataclass."
)


def _named(name: str, spec: StepSpec, paths: Mapping[str, Sequence[str]]) -> str:
    if (found := re.fullmatch(r"(.+)\[(\d+)\]", name)) and found[1] in paths:
        return paths[found[1]][int(found[2])]
    if found := re.match(r"rest\[(\d+)\]", name):
        return spec.argument(2 + int(found[1])) + name[found.end() :]
    if name.startswith("split.batch"):
        return spec.argument(1) + name.removeprefix("split.batch")
    return name


@contextlib.contextmanager
def refused_derivative(name: str, scope: Scope) -> Iterator[None]:
    """Raise jdp's error, which names the layers, if JAX cannot differentiate them."""
    try:
        yield
    except NotImplementedError as error:
        is_ours = scanned_layers.NAME in scope.reverse_only
        if not is_ours or "'custom_lin'" not in str(error):
            raise
        text = step_refusals.forward_mode(line_of(error))
        raise ValueError(f"`{name}` cannot be differentiated:\n- {text}") from error


_UNBOUND = re.compile(r"unbound axis name: (\w+)")
_CONSTRAINT = re.compile(
    r"manual axes .*with_sharding_constraint|with_sharding_constraint .*Auto axes"
    r"|with_sharding_constraint requires a non-empty mesh"
    r"|Mesh for all inputs should be equal"  # of a constraint with its own mesh
)
_SHAPES = re.compile(
    r"incompatible shapes|dot_general requires|Incompatible shapes|to generate shape"
)

# Attributes of a table missing in the dict of its columns.
_OF_DICT = re.compile(
    r"'dict' object has no attribute|builtin_function_or_method|: 'dict' and|and 'dict'"
    r"|^unhashable type: 'slice'|^slice\("
)


def add_hint(
    error: Exception,
    spec: StepSpec,
    batch: Any,
    rest: Sequence[Any],
    num_ranks: int,
    state: Any = None,
) -> None:
    """Add a hint to an error of a common mistake in a step."""
    text = str(error)
    hint = None
    if isinstance(error, NameError):
        hint = _of_axis(text, spec)
    elif isinstance(error, jax.errors.TracerBoolConversionError):
        hint = _of_choice(error)
    elif _CONSTRAINT.search(text):
        hint = _of_constraint(text, spec)
    elif _SHAPES.search(text):
        hint = _of_rows(spec, batch, rest, num_ranks) or _of_devices(spec, batch)
    elif "accepts a single key, but was given a key array" in text:
        hint = _of_keys(spec, rest, num_ranks)
    elif "unsupported format string passed to" in text and "Tracer" in text:
        hint = (
            "the step formats a traced value. Return it as a metric and print it after the call, "
            'or write jax.debug.print("{x:.3f}", x=x).'
        )
    elif isinstance(batch, dict) and _OF_DICT.search(text):
        names = ", ".join(map(repr, [*batch][:4]))
        hint = (
            f"`{spec.argument(1)}` is a dict of arrays, also if it was a table: {names}. Select "
            f"one by name: {spec.argument(1)}[{next(iter(batch), 'x')!r}]."
        )
    elif "Too few leaves for PyTreeDef" in text:  # JAX 0.12 fails to name the output
        hint = (
            "an output of jax.shard_map may differ along an axis that its out_specs do not name. "
            "Sum it over that axis, jax.lax.psum, or name the axis."
        )
    elif "requires real- or complex-valued inputs" in text:
        hint = _of_integers(spec, state)
    _add(error, spec, hint)


def add_hint_of_lowering(error: Exception, spec: StepSpec) -> None:
    """Add a hint to JAX's error when it maps or lowers a step."""
    text = str(error)
    hint = None
    if _CONSTRAINT.search(text):
        hint = _of_constraint(text, spec)
    elif "ordered effects are not supported for more than 1 device" in text:
        hint = (
            "ranks print in any order. Remove ordered=True from jax.debug.print and "
            "jax.debug.callback, or return the value: jdp.rows(x)."
        )
    _add(error, spec, hint)


def _add(error: Exception, spec: StepSpec, hint: str | None) -> None:
    note = f"jdp: in `{spec.name}`, {hint}"
    if hint is not None and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _of_axis(text: str, spec: StepSpec) -> str | None:
    found = _UNBOUND.search(text)
    if found is None:
        return None
    names = spec.axis_name if len(spec.axis_name) > 1 else spec.axis_name[0]
    return (
        f"the axis of the ranks is {names!r}, not {found[1]!r}. Write {names!r} instead, or "
        "remove a mean of gradients and metrics: jdp.replicated(tx) averages gradients, and a "
        f"step its float metrics. To keep the name, write jdp.init(axis_name={found[1]!r}), and "
        f"axis_name={found[1]!r} in each jdp call with that option, such as jdp.train_step, "
        "jdp.replicated, jdp.value_and_grad and jdp.batches."
    )


def _of_constraint(text: str, spec: StepSpec) -> str | None:
    named = [name for name in spec.axis_name if f"'{name}'" in text]
    if "non-empty mesh" in text:  # JAX names no axis
        named = [*spec.axis_name]
    if not named:
        return None
    return (
        f"the axis {named[0]!r} is split before the step, so a rank sees its own rows and whole "
        "parameters. Remove the constraint; jdp.sharded(tx, stage=3) instead of "
        "jdp.replicated(tx) shards parameters."
    )


def _of_choice(error: Exception) -> str:
    line = line_of(error)
    return (
        f"Python branches on a traced value{f' at {line}' if line else ''}, such as the number "
        "of a rank. All ranks run one program, traced once. Write jnp.where(flag, a, b), or "
        "jax.lax.cond(flag, f, g, x) around code without collectives. Move the work of one "
        "process, such as printing, behind the call of the step: if jax.process_index() == 0."
    )


def _of_integers(spec: StepSpec, state: Any) -> str:
    params = getattr(state, "params", None)
    named = jax.tree_util.tree_leaves_with_path(params)
    integers = [
        f"`{spec.argument(0)}.params{jax.tree_util.keystr(path)}` is {jnp.result_type(leaf)}"
        for path, leaf in named
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    ]
    if not integers:
        return (
            "differentiate with respect to the parameters, not to a whole state with its step "
            "number: jax.value_and_grad(loss_fn)(state.params, batch)."
        )
    others = f", and {len(integers) - 1} more are not floats" if len(integers) > 1 else ""
    return (
        f"{integers[0]}{others}, and jax.grad differentiates only floats. Cast trained "
        "parameters to float and keep other values outside params; or write "
        "jdp.value_and_grad(loss_fn, allow_int=True), which leaves them unchanged."
    )


def _of_rows(spec: StepSpec, batch: Any, rest: Sequence[Any], num_ranks: int) -> str | None:
    """Return a hint if a further argument has as many rows as the global batch."""
    leaves = jax.tree.leaves(batch)
    if num_ranks == 1 or not leaves or not jnp.shape(leaves[0]):
        return None
    rows = jnp.shape(leaves[0])[0]
    for i, arg in enumerate(rest, 2):
        if any(jnp.shape(leaf)[:1] == (rows * num_ranks,) for leaf in jax.tree.leaves(arg)):
            first, other = spec.argument(1), spec.argument(i)
            return (
                f"each of {num_ranks} ranks has {rows} rows of `{first}` and all "
                f"{rows * num_ranks} of `{other}`, because only the second argument of a step is "
                "split over ranks. If their rows belong together, pass one batch: call "
                f"{spec.name}({spec.argument(0)}, ({first}, {other})), and begin the step with "
                f"{first}, {other} = batch."
            )
    return None


def _of_devices(spec: StepSpec, batch: Any) -> str | None:
    """Return a hint if a batch may have pmap's dim for the devices."""
    shapes = {jnp.shape(leaf)[:2] for leaf in jax.tree.leaves(batch)}
    if len(shapes) != 1 or len(shape := shapes.pop()) < 2 or shape[0] != 1:
        return None
    return (
        f"a rank has one row of `{spec.argument(1)}`, with {shape[1]} entries in every leaf. If "
        "these are its rows, remove common_utils.shard or the reshape to [devices, rows, ...]: a "
        "jdp batch is [rows, ...]."
    )


def _of_keys(spec: StepSpec, rest: Sequence[Any], num_ranks: int) -> str | None:
    """Return a hint if an argument has a key per device, as for pmap."""
    for i, arg in enumerate(rest, 2):
        if any(jnp.shape(leaf)[:1] == (num_ranks,) for leaf in jax.tree.leaves(arg)):
            key, rank = spec.argument(i), f"jax.lax.axis_index({spec.axis_name[0]!r})"
            return (
                f"every rank has all {num_ranks} keys of `{key}`. Pass one key and write "
                f"jax.random.fold_in({key}, {rank}); or use state.key of a jdp.TrainState, which "
                "differs per rank and per step."
            )
    return None
