"""Reinforcement learning: processes that act feed a learner, which sends its weights back.

jdp run --nproc-per-node 2 examples/actors.py      # two learners of 2 ranks, with 2 actors each
python examples/actors.py --actors 0               # one process acts and learns

Actors balance poles in NumPy, without JAX. An actor sends the rows of one rollout, and gets the
latest weights in return, so no queue grows. Kill an actor, and its learner starts another one;
kill a learner, and `jdp run` replaces it and its actors. Each row counts how old the weights were
that chose its action, and the loss (PPO, https://arxiv.org/abs/1707.06347) limits what it changes.
"""

import argparse
import multiprocessing
import multiprocessing.connection
import os
import time

import numpy as np

HIDDEN, ENVIRONMENTS, LENGTH, DISCOUNT = 32, 16, 32, 0.98
ROWS = ENVIRONMENTS * LENGTH


class Poles:
    """Poles on carts, with the physics of Barto, Sutton and Anderson (1983)."""

    def __init__(self, seed):
        self.draw = np.random.default_rng(seed)
        self.state = self.draw.uniform(-0.05, 0.05, (ENVIRONMENTS, 4))
        self.lengths, self.done = np.zeros(ENVIRONMENTS), []

    def push(self, right):
        """Push each cart right or left; return which poles fell, and start those anew."""
        x, speed, angle, turn = self.state.T
        sine, cosine = np.sin(angle), np.cos(angle)
        force = (np.where(right, 10.0, -10.0) + 0.05 * turn**2 * sine) / 1.1
        bend = (9.8 * sine - cosine * force) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        shift = force - 0.05 * bend * cosine / 1.1
        self.state = self.state + 0.02 * np.stack([speed, shift, turn, bend], axis=1)
        self.lengths += 1
        fell = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 0.21)
        fell |= self.lengths >= 500
        self.done += self.lengths[fell].tolist()
        self.state[fell] = self.draw.uniform(-0.05, 0.05, (fell.sum(), 4))
        self.lengths[fell] = 0
        return fell


def forward(np, weights, x):
    """Return the score of a push to the right, and the value; `np` is NumPy or JAX's."""
    hidden = np.tanh(x @ weights["in"] + weights["bias"])
    score, value = np.moveaxis(hidden @ weights["out"], -1, 0)
    return score, value


def rollout(poles, weights, version):
    """Return rows of `LENGTH` pushes on each cart."""
    seen, pushes, chances, fallen, values = [], [], [], [], []
    for _ in range(LENGTH):
        seen.append(poles.state.astype("f"))
        score, value = forward(np, weights, seen[-1])
        chance = 1 / (1 + np.exp(-score))
        right = poles.draw.random(ENVIRONMENTS) < chance
        pushes.append(right)
        chances.append(np.where(right, chance, 1 - chance))
        values.append(value)
        fallen.append(poles.push(right))
    total, returns = forward(np, weights, poles.state.astype("f"))[1], []
    for fell in reversed(fallen):
        total = 1 + DISCOUNT * np.where(fell, 0, total)
        returns.append(total)
    columns = {"seen": seen, "right": pushes, "chance": chances, "return": returns[::-1]}
    columns |= {"value": values}
    rows = {name: np.concatenate(column).astype("f") for name, column in columns.items()}
    lengths, poles.done = poles.done, []
    return rows | {"version": np.full(ROWS, version, "i")}, lengths


def act(connection, seed):
    """An actor: it ends with its learner."""
    poles = Poles(seed)
    while True:
        try:
            version, weights = connection.recv()
            connection.send(rollout(poles, weights, version))
        except (EOFError, OSError):
            return


class Actors:
    """The actors of a learner, each behind a pipe of its own: a killed one leaves no lock."""

    def __init__(self, num, seed):
        self._spawn = multiprocessing.get_context("spawn")
        self._num, self._seed, self.num_started = num, seed, 0
        self._processes = {}  # connection -> process
        self._alone = Poles(seed) if num == 0 else None

    def _start(self, weights):
        ours, theirs = self._spawn.Pipe()
        seed = (self._seed, self.num_started)
        process = self._spawn.Process(target=act, args=(theirs, seed), daemon=True)
        process.start()
        theirs.close()
        self.num_started += 1
        self._processes[ours] = process
        ours.send(weights)

    def next_rows(self, version, weights):
        """Return the rows of the next rollout, from any actor."""
        if self._alone is not None:
            return rollout(self._alone, weights, version)
        while True:
            while len(self._processes) < self._num:
                self._start((version, weights))
            for connection in multiprocessing.connection.wait([*self._processes]):
                try:
                    found = connection.recv()
                    connection.send((version, weights))
                    return found
                except (EOFError, OSError):
                    self._processes.pop(connection).join()

    def pids(self):
        return [each.pid for each in self._processes.values()]


def learn(actors, num_steps, checkpointer, say=print):
    """Train on the rows of actors, after `jdp.init()`."""
    import jax
    import jax.numpy as jnp
    import optax

    import jdp

    @jdp.train_step
    def step(state, rows):
        def loss_fn(weights, rows):
            score, value = forward(jnp, weights, rows["seen"])
            chance = jax.nn.sigmoid(jnp.where(rows["right"] > 0, score, -score))
            ratio = chance / rows["chance"]
            gain = rows["return"] - rows["value"]
            gain = gain / jnp.sqrt(jdp.mean_over_ranks(jnp.mean(gain**2)) + 1e-6)
            better = jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain)
            return jnp.mean(0.005 * (value - rows["return"]) ** 2 - better)

        loss, grads = jdp.value_and_grad(loss_fn)(state.params, rows)
        age = jnp.mean(state.step - rows["version"].astype(float))
        return state.apply_gradients(grads), {"loss": loss, "age": age}

    def new_state():
        draw = np.random.default_rng(0).normal
        weights = {"in": draw(size=(4, HIDDEN)), "bias": np.zeros(HIDDEN)}
        weights = {k: x.astype("f") for k, x in weights.items()}
        weights["out"] = 0.1 * draw(size=(HIDDEN, 2)).astype("f")
        return jdp.TrainState.create(weights, jdp.replicated(optax.adam(3e-3)))

    who = f"process {jax.process_index()} (pid {os.getpid()})"
    with checkpointer:
        state = checkpointer.restore(new_state)
        first, begin = checkpointer.steps, time.monotonic()
        # `shard_batches` reads ahead in a thread, so actors act while the ranks learn.
        latest = first, jax.device_get(state.params)
        lengths, ages, known = [], [], set()

        def rollouts():
            for _ in range(first, num_steps):
                rows, done = actors.next_rows(*latest)
                lengths.extend(done)
                yield rows

        for rows in jdp.shard_batches(rollouts()):
            state, metrics = step(state, rows)
            checkpointer.step(state)
            latest = checkpointer.steps, jax.device_get(state.params)
            ages.append(float(metrics["age"]))
            if new := {*actors.pids()} - known:
                known |= new
                say(f"{who} has the new actors {sorted(new)} after step {checkpointer.steps}")
            if checkpointer.steps % 50 == 0:
                up, age = np.mean(lengths[-50:]), np.mean(ages[-50:])
                say(
                    f"step {checkpointer.steps}: poles stay up for {up:.0f} pushes, "
                    f"weights are {age:.1f} steps old"
                )
        rows = ROWS * jax.process_count()  # of a step
        done, spent = checkpointer.steps, time.monotonic() - begin
        rate = rows * (done - first) / spent
        say(f"{rows * done:,} rows in {done} steps, {rate:,.0f} a second since step {first}")


def main():
    import jax

    import jdp

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="virtual CPU devices of a process")
    parser.add_argument("--actors", type=int, default=2, help="of a process; 0: it acts itself")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--directory", default="out/actors")
    args = parser.parse_args()

    jdp.init(cpu_ranks=args.ranks)
    actors = Actors(args.actors, seed=jax.process_index())
    learn(actors, args.steps, jdp.Checkpointer(args.directory, commit_every=10))


if __name__ == "__main__":
    main()
