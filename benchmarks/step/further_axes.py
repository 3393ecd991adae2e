"""Steps with a further axis beside the same steps written by hand, without jdp.

    python -m benchmarks.step.further_axes            in 3 minutes on 2 cores
    python -m benchmarks.step.further_axes --quick    few rounds, to see that it works

The models are those of examples/tensor_parallel.py and examples/mixture_of_experts.py, larger. By
hand, one `jax.shard_map` over both axes has the same function for a device, and averages over
"data". Prints its table and writes it to benchmarks/results/, that of a quick run to
out/benchmarks/.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from benchmarks.harness import exact, report, timing
from benchmarks.harness.models import Problem
from benchmarks.harness.oracle import Oracle, Training
from benchmarks.harness.report import Section
from benchmarks.step.contestants import State
from examples import mixture_of_experts, tensor_parallel

GOAL, NUM_STEPS, BUDGET_S = 1.02, 5, 20.0
TX = optax.sgd(0.1, momentum=0.9)
# One optimizer for all states: a different one would retrace the step.
_REPLICATED = jdp.replicated(TX)


class Model(NamedTuple):
    """A model with weights that are split over a further axis.

    Attributes:
      name: of its row.
      axis: the further axis.
      specs: how the weights are split over it.
      params: the weights, NumPy arrays.
      loss_fn: `(params, batch) -> loss` of the rows of a rank, for jdp.
      loss_by_hand: the mean over all devices, of the weights and the rows of one.
      rows: how the batch is split by hand.
      batch: the rows of all ranks.
    """

    name: str
    axis: str
    specs: Any
    params: Any
    loss_fn: Callable[[Any, Any], jax.Array]
    loss_by_hand: Callable[[Any, Any], jax.Array]
    rows: P
    batch: Any


def tensor_parallel_model() -> Model:
    example = tensor_parallel
    vars(example).update(VOCABULARY=512, WIDTH=128, HIDDEN=512, LENGTH=64)
    return Model(
        "tensor_parallel.py",
        "model",
        example.SPECS,
        example.new_params(),
        example.loss_fn,
        lambda params, batch: lax.pmean(example.loss_on_device(params, batch), "data"),
        P("data"),
        example.text(num_rows=16, seed=0),
    )


def experts_model(capacity: float) -> Model:
    example = mixture_of_experts
    vars(example).update(WIDTH=128, HIDDEN=512)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return example.loss_fn(capacity, 0, params, batch)[0]

    def loss_by_hand(params: Any, batch: Any) -> jax.Array:
        axes = ("data", "expert")
        loss, (chosen, probability), _ = example.parts_on_device(params, batch, capacity, 0)
        balance = example.balance_of(lax.pmean(chosen, axes), probability)
        return lax.pmean(loss + example.BALANCE * balance, axes)

    return Model(
        "mixture_of_experts.py" + (f" --capacity {capacity:g}" if capacity else ""),
        "expert",
        example.SPECS,
        example.new_params(),
        loss_fn,
        loss_by_hand,
        P(("data", "expert")),
        example.batch_of(1024, seed=0),
    )


def main() -> None:
    quick = report.parser(__doc__).parse_args().quick
    jdp.init(cpu_ranks=4)  # JAX fixes the number of devices at its first use
    models = (tensor_parallel_model(), experts_model(0.0), experts_model(2.0))
    rows = [measure(model, 0.1 if quick else BUDGET_S) for model in models]
    report.publish("further_axes", [_section(rows)], quick=quick)


def measure(model: Model, budget_s: float) -> dict[str, Any]:
    """Time the step of jdp and the one by hand in turns, on 2 x 2 devices."""
    mesh = jdp.init(axes={model.axis: 2}, cpu_ranks=4)
    oracle = _oracle(model, mesh.axis_names)

    def clock(label: str, step: Any, state: Any, rows: P) -> timing.Clock:
        batch = jax.device_put(model.batch, NamedSharding(mesh, rows))
        return exact.checked(Training(label, step, state, batch, oracle), timing.until_ready)

    found = timing.alternate(
        {
            "jdp": clock("jdp", _jdp_step(model), lambda: _jdp_state(model, mesh), P("data")),
            "by hand": clock(
                "by hand", _step_by_hand(model, mesh), lambda: _state(model, mesh), model.rows
            ),
        },
        budget_s=budget_s,
        warm_up=2,
    )
    jdp_s, hand_s = found.values()
    low, high = timing.interval(jdp_s / hand_s)
    ratio = float(np.median(jdp_s / hand_s))
    return {
        "section": "further_axes",
        "model": model.name,
        "jdp_ms": float(np.median(jdp_s)) / NUM_STEPS * 1e3,
        "hand_ms": float(np.median(hand_s)) / NUM_STEPS * 1e3,
        "ratio": ratio,
        "low": low,
        "high": high,
        "rounds": len(jdp_s),
        "goal": GOAL,
        "met": "yes" if ratio <= GOAL else "no",
    }


def _oracle(model: Model, axes: tuple[str, ...]) -> Oracle:
    loss_fn = jax.shard_map(
        model.loss_by_hand,
        mesh=Mesh(np.reshape(jax.devices()[:1], (1, 1)), axes),
        in_specs=(model.specs, model.rows),
        out_specs=P(),
    )
    problem = Problem(model.name, model.params, model.batch, loss_fn)
    return Oracle(problem, num_steps=NUM_STEPS, num_runs=2, tx=TX)


def _jdp_step(model: Model) -> Any:
    @jdp.train_step
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jdp.value_and_grad(model.loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    return step


def _jdp_state(model: Model, mesh: Mesh) -> Any:
    return jdp.TrainState.create(_params(model, mesh), _REPLICATED)


# The weights are equal along "data", so JAX sums their gradients over it.
def _step_by_hand(model: Model, mesh: Mesh) -> Any:
    specs = jax.tree.map(lambda x: x.sharding.spec, _state(model, mesh))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(specs, model.rows), out_specs=(specs, P())
    )
    def step(state: State, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(model.loss_by_hand)(state.params, batch)
        updates, opt_state = TX.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), {"loss": loss}

    return jax.jit(step, donate_argnums=0)


def _state(model: Model, mesh: Mesh) -> State:
    params = _params(model, mesh)
    return State(params, jax.tree.map(jnp.zeros_like, TX.init(params)))


def _params(model: Model, mesh: Mesh) -> Any:
    def put(spec: P, value: np.ndarray) -> jax.Array:
        # Copied, since device_put may keep NumPy's buffers, and every contestant donates.
        return jax.device_put(value.copy(), NamedSharding(mesh, spec))

    return jax.tree.map(put, model.specs, model.params)


def _section(rows: list[dict[str, Any]]) -> Section:
    return Section(
        "Steps with a further axis",
        "The models of two examples: tensor parallelism with 2 layers of width 128, 512 words and "
        "16 rows of 64 tokens, and 8 experts of width 128 with 1,024 tokens. The mesh has 2 ranks "
        f"of 2 devices, which take turns on 2 cores. A round has two runs of {NUM_STEPS} steps of "
        "each, in both orders. Without `--capacity`, both exchange tokens by "
        "`jdp.ragged_all_to_all`. The loss, the parameters and the momentum of all devices after "
        f"each run are those of one device, to 1e-4 of the largest element. {exact.CHECKED}",
        rows,
        {
            "model": "{model}",
            "jdp, ms": "{jdp_ms:.2f}",
            "by hand, ms": "{hand_ms:.2f}",
            "jdp / by hand": "{ratio:.3f}",
            "95 % interval": "{low:.3f} to {high:.3f}",
            "rounds": "{rounds}",
            "goal": "{goal}",
            "met": "{met}",
        },
    )


if __name__ == "__main__":
    main()
