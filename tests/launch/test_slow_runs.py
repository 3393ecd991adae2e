"""`jdp run` names a slow process of a real run, which sleeps: load changes few ratios then."""

import pytest

# A step sleeps for base_s in its computation, the slow process for `extra` times that in a part.
SCRIPT = """
import os, subprocess, sys, time
from pathlib import Path
import jax, numpy as np, optax
import jdp
part, extra, reduction, base_s, *more = sys.argv[1].split(",")
extra, base_s = float(extra), float(base_s)
mesh = jdp.init()
is_slow = jax.process_index() == 1
done = Path(__file__).parent / "done"

def sleep_in(where, least_s=0.0):
    time.sleep(least_s + (extra * base_s if is_slow and where == part else 0.0))

def compute(x):
    sleep_in("compute", base_s)
    if part == "neighbour":
        end = time.thread_time() + base_s
        while time.thread_time() < end:
            pass
    return x

def loss_fn(params, batch):
    x = jax.pure_callback(compute, jax.typeof(batch["x"]), batch["x"])
    if "pmean" in more:  # as in batch normalization: XLA's collective comes first
        x = x - jax.lax.pmean(x.mean(), "data")
    return ((x @ params["w"]) ** 2).mean()

@jdp.train_step
def step(state, batch):
    accumulate = 2 if reduction == "sharded" else 1
    loss, grads = jdp.value_and_grad(loss_fn, accumulate=accumulate)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}

if part == "neighbour":
    cores = sorted(os.sched_getaffinity(0))
    core = cores[-1] if is_slow else cores[0]
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), [core])
    if is_slow:
        spin = "import os\\nwhile os.getppid() == {}: pass".format(os.getpid())
        for _ in range(6):  # more than what else may run beside process 0
            subprocess.Popen([sys.executable, "-c", spin])

def batches():
    while not done.exists():
        # The devices take base_s for a step, and the loader works meanwhile.
        sleep_in("data", base_s if part == "data" else 0.0)
        yield {"x": np.ones((4, 8), "float32")}

if reduction == "sharded":
    tx = jdp.sharded(optax.sgd(1e-3), stage=3, min_size=1)
else:
    tx = jdp.replicated(optax.sgd(1e-3), all_reduce=getattr(jdp.collectives, reduction))
state = jdp.TrainState.create({"w": np.ones((8, 8), "float32")}, tx)
if "commits" in more:
    ckpt = jdp.Checkpointer(Path(__file__).parent / "checkpoints", commit_every=1)
    state = ckpt.restore(state)
for number, batch in enumerate(jdp.shard_batches(batches())):
    state, metrics = step(state, batch)
    if "commits" in more:
        ckpt.step(state)
    if part == "host":
        float(metrics["loss"])
        sleep_in("host")
    if part == "none" and number == 1000:
        os._exit(0)
"""


def run_of(
    jdp_run, part, extra, reduction="auto", base_s=0.06, *, more="", num_processes=2, hosts=()
):
    arguments = f"{part},{extra},{reduction},{base_s},{more}"
    flags = f"--nproc-per-node={num_processes}", "--standbys=0", *hosts
    return jdp_run(*flags, before=arguments, script=SCRIPT, JAX_NUM_CPU_DEVICES="1")


@pytest.mark.parametrize(
    ("part", "extra", "reduction"),
    [
        ("data", 0.2, "auto,commits"),
        ("data", 0.2, "auto,pmean"),
        ("data", 1.0, "xla"),
        ("compute", 0.2, "auto"),
        ("compute", 1.0, "sharded,commits"),
        ("host", 0.2, "xla"),
        ("host", 1.0, "auto"),
    ],
)
def test_a_process_that_sleeps_is_named_with_the_part_in_which_it_does(
    jdp_run, part, extra, reduction
):
    reduction, _, more = reduction.partition(",")
    run = run_of(jdp_run, part, extra, reduction, more=more)
    (slow, *_) = run.until("slow", process_id=1, part=part)
    assert slow["own_us"] - slow["usual_us"] >= 0.4 * extra * 60_000
    run.until_true(lambda: "process 1 is slow" in run.output, "line about process 1")


@pytest.mark.thorough  # beside other tests, on two cores, all processes have busy neighbours
def test_a_process_with_a_busy_neighbour_is_named(jdp_run):
    run = run_of(jdp_run, "neighbour", 0.0, base_s=0.02)
    (slow, *_) = run.until("slow", process_id=1)
    assert slow["part"] == "compute"


@pytest.mark.thorough
def test_1000_short_steps_without_a_slow_process_give_no_alarm(jdp_run):
    # They wait in both kinds of collectives. They commit after each step, which may cost
    # process 0, that finishes the commits, a millisecond.
    run = run_of(jdp_run, "none", 0.0, base_s=0.001, more="commits,pmean", num_processes=3)
    assert run.wait() == 0
    assert {slow["process_id"] for slow in run.events("slow")} <= {0}
    assert {slow["part"] for slow in run.events("slow")} <= {"paused", "several"}
