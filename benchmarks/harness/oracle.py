"""A contestant that trains, and the same training on one device, which computes the expected
result."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from benchmarks.harness import exact, models
from benchmarks.harness.models import Problem

# Relative to the largest element of a leaf: another order of sums differs by less, a wrong gradient
# by more.
TOLERANCE = 1e-4


class Expected(NamedTuple):
    """The expected result of a run of steps: the loss, the parameters and the optimizer's state."""

    loss: np.ndarray
    leaves: list[np.ndarray]


class Oracle:
    """Plain training on the whole batch, on one device, run by run.

    Attributes:
      num_steps: number of steps of one run.
      runs: expected results of consecutive runs; after the last, training restarts.
    """

    def __init__(self, problem: Problem, *, num_steps: int, num_runs: int, tx: Any = models.TX):
        """Train on one device, with the optimizer `tx`.

        Raises:
          ValueError: if a run moves no parameter, so that every check would pass.
        """
        self.num_steps, self.runs, loss = num_steps, [], np.nan
        device = jax.local_devices()[0]
        batch = jax.device_put(problem.batch, device)
        params = jax.device_put(jax.tree.map(np.array, problem.params), device)
        opt_state = tx.init(params)

        @jax.jit
        def step(params: Any, opt_state: Any, batch: Any) -> Any:
            loss, grads = jax.value_and_grad(problem.loss_fn)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        for _ in range(num_runs):
            for _ in range(num_steps):
                params, opt_state, loss = step(params, opt_state, batch)
            leaves = [np.asarray(x) for x in jax.tree.leaves((params, opt_state))]
            self.runs.append(Expected(np.asarray(loss), leaves))
        if not any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(jax.device_get(opt_state))):
            raise ValueError(f"{problem.name}: all gradients are 0, so every result would pass.")


class Training:
    """One contestant: a step, the state that it trains, and a batch."""

    def __init__(
        self,
        label: str,
        step: Any,
        start: Callable[[], Any],
        batch: Any,
        oracle: Oracle,
    ):
        """Store the contestant, which `prepare` initializes.

        Args:
          label: its name in errors.
          step: `(state, batch) -> (state, {"loss": loss})`, may donate the state.
          start: returns a new state of step 0.
          batch: the batch, on the devices.
          oracle: the expected results.
        """
        self._label, self._start, self._oracle = label, start, oracle
        self.step, self.batch, self.state = step, batch, start()
        self._metrics: Any = None
        self._round = 0

    def prepare(self) -> None:
        """Restart training after the last run of the oracle, else continue."""
        if self._round and self._round % len(self._oracle.runs) == 0:
            self.state = jax.block_until_ready(self._start())
        self._round += 1

    def __call__(self) -> Any:
        for _ in range(self._oracle.num_steps):
            self.state, self._metrics = self.step(self.state, self.batch)
        return self.state, self._metrics

    def check(self) -> None:
        """Compare the loss, the parameters and the optimizer's state on this process's ranks.

        Raises:
          exact.WrongResultError: if an element is wrong.
        """
        expected = self._oracle.runs[(self._round - 1) % len(self._oracle.runs)]
        self._require(self._metrics["loss"], expected.loss, "the loss")
        found = jax.tree_util.tree_leaves_with_path((self.state.params, self.state.opt_state))
        for (path, leaf), wanted in zip(found, expected.leaves, strict=True):
            self._require(leaf, wanted, jax.tree_util.keystr(path))

    def _require(self, found: Any, expected: np.ndarray, what: str) -> None:
        tolerance = TOLERANCE * float(np.abs(expected).max())
        mesh = list(found.sharding.mesh.devices.flat)
        for shard in found.addressable_shards:
            exact.require(
                shard.data,
                expected[shard.index],
                contestant=self._label,
                rank=mesh.index(shard.device),
                round_number=self._round,
                what=what,
                tolerance=tolerance or 1e-30,
            )
