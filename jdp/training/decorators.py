"""`train_step` and `eval_step`: run a function of one rank on every rank of the mesh."""

from collections.abc import Callable
from typing import Any

from jdp import axis
from jdp.axis import AxisName
from jdp.step_spec import StepSpec
from jdp.training.step import Step


def train_step(
    fn: Callable[..., Any] | None = None,
    *,
    axis_name: AxisName = "data",
    weight: Callable[[Any], Any] | None = None,
    donate: bool = True,
) -> Any:
    """Run a training step on every rank of the mesh, each on its own rows of the batch.

    Inside, write plain JAX. Before a step runs for the first time, its traced program is
    proved to leave the same state on every rank, with no gradient reduced twice and no rank
    waiting for another; a program of which that is not true is refused. Several processes also
    compare theirs, with the arrays that they capture and the arguments, before anything is sent or
    donated, and in each later call `rest` and what was changed in the state since the last; a step
    inside a `jax.jit` of your own is proved, and not compared.

    Args:
      fn: `fn(state, batch, *rest) -> (state, metrics)`. `state`: any pytree, the same on every
        rank. `batch`: a tree of arrays, split over ranks on their first dim. `rest`: the same on
        every rank (a key, a temperature, a teacher's parameters), by position or keyword; one that
        a call leaves out keeps its default, as a part of the program. `metrics`: a tree; float
        scalars are averaged over ranks, see also `jdp.sum_over_ranks` and `jdp.rows`.
      axis_name: the data axis of the mesh: a name, or a tuple of names.
      weight: `weight(batch) -> []`, how much this rank's rows count, for instance
        `lambda batch: batch["mask"].sum()`. Gradients, accumulation, metrics and
        `jdp.mean_over_ranks` are then sum(w * x) / sum(w); weight 0 contributes nothing, even NaN.
        Finite and >= 0: a constant that is not is refused, other values are an error soon after.
        A `lax.psum` or `lax.all_gather` that is differentiated is refused: JAX transposes it
        without weights.
      donate: reuse the memory of the state that goes in for the one that comes out. Ctrl-C is then
        put off until the call has returned the new state.

    Returns:
      `step(state, batch, *rest) -> (state, metrics)`, which takes global batches and returns
      without waiting for the devices. `step.lower(...)` gives the program.

    Raises:
      ValueError: from the first call with new shapes, if the program is not the same training
        on every rank, or another one on another process; if rows do not divide by the ranks; if a
        buffer was donated before.
      RuntimeError: if a step failed while it ran, an earlier one got another `rest` or changed
        state on another process (on every process, naming the leaf), or a weight was negative, NaN
        or infinite (naming the rank).
      TypeError: if the value of an argument is asked for while the step is traced, as `if` does.

    >>> import jax, jax.numpy as jnp, optax, jdp
    >>> mesh = jdp.init(cpu_ranks=2)
    >>> state = jdp.TrainState.create({"w": jnp.zeros(())}, jdp.replicated(optax.sgd(0.1)))
    >>> @jdp.train_step
    ... def step(state, batch):
    ...     loss_fn = lambda params: jnp.mean((params["w"] - batch) ** 2)
    ...     loss, grads = jax.value_and_grad(loss_fn)(state.params)
    ...     return state.apply_gradients(grads), {"loss": loss}
    >>> state, metrics = step(state, jnp.array([1.0, 2.0, 3.0, 6.0]))
    >>> float(state.params["w"]), float(metrics["loss"])
    (0.6000000238418579, 12.5)
    """
    return _decorated(fn, axis_name, weight, donate=donate, returns_state=True)


def eval_step(
    fn: Callable[..., Any] | None = None,
    *,
    axis_name: AxisName = "data",
    weight: Callable[[Any], Any] | None = None,
) -> Any:
    """Run an evaluation step on every rank of the mesh, each on its own rows of the batch.

    Args:
      fn: `fn(state, batch, *rest) -> metrics`, as for `train_step`; nothing is donated.
      axis_name: the data axis of the mesh: a name, or a tuple of names.
      weight: `weight(batch) -> []`, how much this rank's rows count.

    Returns:
      `step(state, batch, *rest) -> metrics`; `jdp.evaluate` runs it over a whole set.

    Raises:
      ValueError: as from `train_step`.

    >>> import jax.numpy as jnp, jdp
    >>> mesh = jdp.init(cpu_ranks=2)
    >>> @jdp.eval_step
    ... def measure(params, batch):
    ...     return {"mean": batch.mean() * params, "doubled": jdp.rows(2 * batch)}
    >>> metrics = measure(jnp.float32(10.0), jnp.arange(4.0))
    >>> float(metrics["mean"]), metrics["doubled"].tolist()
    (15.0, [0.0, 2.0, 4.0, 6.0])
    """
    return _decorated(fn, axis_name, weight, donate=False, returns_state=False)


def _decorated(fn: Any, axis_name: AxisName, weight: Any, **options: Any) -> Any:
    def decorate(fn: Callable[..., Any]) -> Step:
        return Step(StepSpec(fn, axis.names(axis_name), weight, **options))

    if weight is not None and not callable(weight):
        raise TypeError(
            f"weight= must be a function of the batch, got {weight!r}. For example "
            'weight=lambda batch: batch["mask"].sum().'
        )
    if fn is None:
        return decorate
    if isinstance(fn, Step):
        raise TypeError(
            f"`{fn.__name__}` is decorated with jdp.train_step or jdp.eval_step already. Leave one "
            "of the two decorators out; a step that calls another one calls the undecorated "
            "function."
        )
    if not callable(fn):
        raise TypeError(
            f"the decorator got {fn!r}, which is not a function. Write @jdp.train_step above "
            "def step(state, batch); options are given by name, as in "
            '@jdp.train_step(axis_name="data").'
        )
    return decorate(fn)
