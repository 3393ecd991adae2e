"""The actors and the learners of `actors.py` in a cluster of Ray.

python examples/ray_actors.py --storage run        # Ray starts on this machine, and ends with it
RAY_ADDRESS=auto python examples/ray_actors.py --storage /shared/run --workers 8   # in a cluster

Kill an actor, with `kill -9` and the number that its learner prints: the learner starts another
one. Kill a learner: Ray starts all learners again with new actors, and they continue from the last
checkpoint. All hosts must see the folder `--storage` and that of the examples.
"""

import logging
import os

import actors
import jax
import ray
from ray_train import at_least_1, fit, join, new_parser

import jdp

log = logging.getLogger("ray_actors")  # Ray shows a print twice


@ray.remote(num_cpus=0)  # 1 in a cluster whose other CPUs are to act
class Actor:
    """Acts without JAX, and ends with its learner, which owns it."""

    def __init__(self, seed):
        self._poles = actors.Poles(seed)

    def act(self, version, weights):
        return os.getpid(), actors.rollout(self._poles, weights, version)


class RayActors:
    """The actors of a learner. Each has one call under way, so no queue grows."""

    def __init__(self, num, seed):
        self._num, self._seed, self._num_started = num, seed, 0
        self._called = {}  # reference to a rollout -> actor
        self._pids = {}  # actor -> pid

    def _start(self):
        actor = Actor.remote((self._seed, self._num_started))
        self._num_started += 1
        return actor

    def next_rows(self, version, weights):
        """Return the rows of the next rollout, from any actor."""
        while True:
            while len(self._called) < self._num:
                actor = self._start()
                self._called[actor.act.remote(version, weights)] = actor
            (done,), _ = ray.wait([*self._called])
            actor = self._called.pop(done)
            try:
                self._pids[actor], found = ray.get(done)
            except ray.exceptions.RayActorError:
                self._pids.pop(actor, None)
                continue
            self._called[actor.act.remote(version, weights)] = actor
            return found

    def pids(self):
        return [*self._pids.values()]


def train_loop(config):  # in each learner; in new ones after a death
    join()
    own = RayActors(config["actors"], seed=jax.process_index())
    checkpointer = jdp.Checkpointer(
        config["checkpoints"], resume=True, save_every=config["save_every"]
    )
    actors.learn(own, config["steps"], checkpointer, say=log.info)


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--actors", type=at_least_1, default=2, help="of a process")
    parser.set_defaults(storage="ray_actors", steps=200, save_every=10)
    fit(train_loop, parser.parse_args())
