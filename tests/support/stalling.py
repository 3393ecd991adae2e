"""A training run of one or several processes, one of which stops getting on. Run in children."""

import ctypes
import os
import signal
import sys
import time

import jax

import jdp
from support import training

NUM_STEPS = 12
# The step before which it happens; the first call compiles.
WHEN = 4


def train(kind, timeout_s):
    """Train, and in the last process do what `kind` says."""
    if kind == "prompt":
        sys.ps1 = ">>> "
    jdp.init(timeout_s=timeout_s)
    is_odd = jax.process_index() == jax.process_count() - 1
    step = jdp.train_step(step_that_hangs if is_odd and kind == "callback" else training.plain_step)
    state = training.state()
    for i, batch in enumerate(jdp.shard_batches(loader(kind, is_odd), prefetch=0)):
        if is_odd and i == WHEN:
            if kind == "skip":
                continue
            BETWEEN.get(kind, int)()
        state, metrics = step(state, batch)
        float(metrics["loss"])
    print("trained")


def loader(kind, is_odd):
    for i in range(NUM_STEPS):
        if is_odd and i == WHEN:
            BEFORE.get(kind, int)()
        yield training.batch(i)


def sleep_in_the_loader():
    time.sleep(60)


def sleep_in_the_loop():
    time.sleep(60)


def sleep_for_a_while():
    time.sleep(2)
    with jdp.phase("counting sheep", timeout_s=30):
        time.sleep(2)


def hold_the_lock():
    ctypes.PyDLL(None).sleep(60)


def hold_the_lock_for_a_while():
    ctypes.PyDLL(None).sleep(3)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def debug():
    breakpoint()


def step_that_hangs(state, batch):
    state, metrics = training.plain_step(state, batch)
    jax.debug.callback(sleep_in_a_step, state.step)
    return state, metrics


def sleep_in_a_step(step):
    if step == WHEN:
        time.sleep(60)


# What happens in the loop, and in the loader.
BETWEEN = {
    "loop": sleep_in_the_loop,
    "lock": hold_the_lock,
    "long": sleep_for_a_while,
    "short lock": hold_the_lock_for_a_while,
    "stop": stop,
}
BEFORE = {"loader": sleep_in_the_loader, "prompt": sleep_in_the_loader, "debugger": debug}

if __name__ == "__main__":
    train(sys.argv[1], timeout_s=float(sys.argv[2]))
