"""How long training steps compute, beside what the rates of single operations say.

A large matmul, and a loop over an array in a cache, are the best that a device does. In a step
matrices are smaller, some are transposed, arrays are read across their rows, and operations wait
for threads. Factors are fitted to steps whose operations are counted as `explain` counts them, and
which are timed.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.inspect import models, paired_timing, timeline
from jdp.inspect.compute_rates import Slowness
from jdp.inspect.exact import require
from jdp.inspect.hlo import HloProgram
from jdp.inspect.models import SmallModel
from jdp.inspect.prediction import Likely
from jdp.inspect.rate import Rate, given
from jdp.inspect.speeds import Groups, Work

_NUM_STEPS, _BUDGET_S = 4, 9.0
_TOLERANCE = 1e-3  # of the largest element of a leaf
_LEARNING_RATE, _MOMENTUM = 1e-3, 0.9


class AloneSeconds(NamedTuple):
    """The seconds of the operations of a step by themselves, added up by kind.

    Attributes:
      matmul: of matmuls.
      elementwise: of others that read arrays in order.
      strided: of operations that compute while they read or write an array across its rows.
      start: of the starts of all.
    """

    matmul: float = 0.0
    elementwise: float = 0.0
    strided: float = 0.0
    start: float = 0.0


class Training(NamedTuple):
    """A model, and how many micro-batches it sums the gradients of in a step."""

    model: SmallModel
    num_micro_batches: int = 1

    @property
    def name(self) -> str:
        """The model with its number of micro-batches."""
        return f"{self.model.name} in {self.num_micro_batches}"

    def gradients(self, params: Any, batch: Any) -> Any:
        """Return the gradients of the mean loss, of one micro-batch after the other."""
        num = self.num_micro_batches
        gradient = jax.grad(self.model.loss_fn)
        if num == 1:
            return gradient(params, batch)
        split = jax.tree.map(lambda x: x.reshape(num, -1, *x.shape[1:]), batch)

        def add(total: Any, rows: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradient(params, rows)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), split)
        return jax.tree.map(lambda x: x / num, total)


class TimedStep(NamedTuple):
    """A step that was timed: its operations by themselves, and its own seconds."""

    alone: AloneSeconds
    seconds: float


def slowness(mesh: Mesh, rates: Mapping[str, Rate]) -> Slowness:
    """Time training steps without collectives, and return how slow their operations are."""
    trainings = _trainings(mesh.devices.flat[0].platform)
    made = {training.name: _made(mesh, training) for training in trainings}
    clocks = {name: clock for name, (clock, _) in made.items()}
    found = paired_timing.alternate(clocks, budget_s=_BUDGET_S, warm_up=1)
    return fitted(
        [
            TimedStep(alone_seconds(program, rates), float(np.median(found[name])) / _NUM_STEPS)
            for name, (_, program) in made.items()
        ]
    )


def fitted(steps: Sequence[TimedStep]) -> Slowness:
    """Fit the factors to the times of steps, with small relative errors.

    Where the steps do not tell two factors apart, these are one.

    >>> fitted([TimedStep(AloneSeconds(1.0), 3.0), TimedStep(AloneSeconds(1.0, 4.0), 13.0)])
    Slowness(matmul=3.0, elementwise=2.5, strided=3.0, start=3.0, largest_error=0.0)
    """
    shares = np.array([step.alone for step in steps])
    shares /= np.array([[step.seconds] for step in steps])
    factors = _least_squares(shares)
    error = float(np.abs(shares @ factors - 1).max())
    return Slowness(*(float(f"{x:.4g}") for x in (*factors, round(error, 6))))


def _groupings(num: int) -> Iterator[list[int]]:
    """Yield the ways in which factors may be one: for each the number of its group."""
    for groups in itertools.product(range(num), repeat=num):
        firsts = list(dict.fromkeys(groups))
        if firsts == list(range(len(firsts))):
            yield list(groups)


def _least_squares(shares: np.ndarray) -> np.ndarray:
    """Return the positive factors with which the shares of each step come closest to 1."""
    num_steps, num = shares.shape
    best, least = np.ones(num), float("inf")
    for groups in _groupings(num):
        joined = np.zeros((num_steps, max(groups) + 1))
        np.add.at(joined, (slice(None), groups), shares)
        found, _, rank, _ = np.linalg.lstsq(joined, np.ones(num_steps), rcond=1e-6)
        residual = float(np.sum((joined @ found - 1) ** 2))
        if rank == joined.shape[1] and found.min() > 0 and residual < least - 1e-9:
            best, least = found[groups], residual
    return best


class _Recorder:
    """Speeds that add up the seconds of operations by kind."""

    def __init__(self, rates: Mapping[str, Rate]):
        self._start_s = rates["operation_start_s"].value
        no_start = {"operation_start_s": given(0.0, "s")}
        self._likely = Likely({**rates, **no_start}, num_ranks=1, hosts=[0])
        self.alone = AloneSeconds()

    def compute_s(self, work: Work) -> float:
        kind = "matmul" if work.flops else "strided" if work.is_strided else "elementwise"
        own = {kind: getattr(self.alone, kind) + self._likely.compute_s(work)}
        self.alone = self.alone._replace(**own, start=self.alone.start + self._start_s)
        return 0.0

    def transfer_s(self, kind: str, algorithm: str, num_bytes: float, groups: Groups = ()) -> float:
        return 0.0


def alone_seconds(program: HloProgram, rates: Mapping[str, Rate]) -> AloneSeconds:
    """Return the seconds of the operations of a program at some rates, by kind."""
    recorder = _Recorder(rates)
    timeline.simulate(program, recorder)
    return recorder.alone


# Small and large ones, with more and with less beside their matmuls, and in micro-batches, whose
# arrays are smaller than those of other steps.
def _trainings(platform: str) -> list[Training]:
    if platform != "cpu":
        narrow = models.mlp(width=1024, num_layers=4, num_rows=4096)._replace(name="narrow mlp")
        large = models.mlp(width=4096, num_layers=2, num_rows=8192)
        half = models.mlp(width=4096, num_layers=2, num_rows=8192, dtype=jnp.bfloat16)
        short = models.transformer(dim=512, num_layers=2, num_rows=16, length=512)
        long = models.transformer(dim=1024, num_layers=1, num_rows=8, length=1024)
        return [
            *(Training(narrow), Training(large), Training(large, 4)),
            *(Training(half._replace(name="mlp in bfloat16")), Training(short)),
            *(Training(long), Training(long, 4)),
        ]
    deep = models.mlp(width=384, num_layers=6, num_rows=64)._replace(name="deep mlp")
    wide = models.mlp(width=768, num_layers=2, num_rows=192)
    thin = models.transformer(dim=96, num_layers=4, num_rows=24, length=24)
    return [
        Training(models.mlp(width=256, num_layers=3, num_rows=32)._replace(name="narrow mlp")),
        *(Training(deep), Training(deep, 4), Training(wide), Training(wide, 4)),
        Training(models.transformer(dim=64, num_layers=3, num_rows=8, length=64)),
        *(Training(thin), Training(thin, 4)),
        Training(models.transformer(dim=192, num_layers=2, num_rows=8, length=48)),
    ]


def _made(mesh: Mesh, training: Training) -> tuple[Callable[[], float], HloProgram]:
    """Return a clock of `_NUM_STEPS` steps that also checks them, and the compiled step."""
    name, num, model = mesh.axis_names[0], mesh.size, training.model

    def step(state: Any, batch: Any) -> Any:
        params, momentum = state
        grads = training.gradients(params, batch)
        momentum = jax.tree.map(lambda m, g: _MOMENTUM * m + g, momentum, grads)
        return jax.tree.map(lambda p, m: p - _LEARNING_RATE * m, params, momentum), momentum

    specs: Any = {"in_specs": (P(), P(name)), "out_specs": P(), "check_vma": False}
    run: Any = jax.jit(jax.shard_map(step, mesh=mesh, **specs), donate_argnums=0)
    whole = jax.tree.map(lambda x: np.concatenate([x] * num), model.batch)
    batch = jax.device_put(whole, NamedSharding(mesh, P(name)))
    start = model.params, jax.tree.map(np.zeros_like, model.params)
    right = _right(step, start, model.batch, mesh.devices.flat[0])

    def place() -> Any:
        return jax.block_until_ready(jax.device_put(start, NamedSharding(mesh, P())))

    def clock() -> float:
        state = jax.block_until_ready(run(place(), batch))  # into the caches
        begin = time.perf_counter()
        for _ in range(_NUM_STEPS):
            state = run(state, batch)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - begin
        for leaf, expected in zip(jax.tree.leaves(state), right, strict=True):
            _require(leaf, expected, training.name)
        return seconds

    return clock, HloProgram(run.lower(place(), batch).compile().as_text())


def _right(step: Any, state: Any, batch: Any, device: Any) -> list[np.ndarray]:
    """Return the leaves of the state after the steps of one run on one device."""
    alone: Any = jax.jit(step)
    state, batch = jax.device_put((state, batch), device)
    for _ in range(_NUM_STEPS + 1):
        state = alone(state, batch)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def _require(leaf: jax.Array, expected: np.ndarray, name: str) -> None:
    for rank, shard in enumerate(leaf.addressable_shards):
        require(
            shard.data, expected, contestant="XLA", rank=rank, round_number=0,
            what=f"the state of {name}", tolerance=_TOLERANCE * float(np.abs(expected).max()),
        )  # fmt: skip
