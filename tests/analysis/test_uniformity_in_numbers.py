"""What is called uniform, compared with the numbers that ranks compute.

Everything here is traced, and nothing of it runs: wrong programs would hang.
"""

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from support.analysed import gathered, in_scan, pmean, rank, report


def random_program(seed, num_steps=80):
    """Operations on values drawn from those before, some of which differ from rank to rank."""
    rng = np.random.default_rng(seed)
    operations = [
        lambda a, b: a + b,
        lambda a, b: a * b,
        lambda a, b: jnp.where(a > b, a, 0.5),
        lambda a, b: pmean(a),
        lambda a, b: lax.pmax(a - b, "data"),
        lambda a, b: gathered(a)[:4],
        lambda a, b: lax.ppermute(a, "data", [(0, 1), (1, 2), (2, 3), (3, 0)]),
        lambda a, b: lax.psum(a, "data", axis_index_groups=[[0, 1, 2], [3]]) / 4,
        lambda a, b: lax.cond(a[0] > b[0], lambda: a, lambda: b),
        lambda a, b: lax.cond(a[0] > 0.5, lambda a, b: (b, a), lambda a, b: (b, b), a, b)[0],
        lambda a, b: lax.while_loop(lambda c: c[0] < a[0], lambda c: c + 0.3, b * 0.1),
        lambda a, b: in_scan(lambda c: (c[1], c[1] * c[0]), (a, b))[1],
        lambda a, b: lax.sort((a, b), num_keys=1)[1],
        lambda a, b: (ref := jax.new_ref(a), ref.__setitem__(0, b[1]), ref[...])[2],
        lambda a, b: jax.jit(lambda a, b: (b, a))(a, b)[1],
        lambda a, b: jax.grad(lambda a: pmean((a * b).sum()))(a),
    ]

    def program(w, x):
        values = [w, x, w * 2, rank() * jnp.ones(4)]
        for _ in range(num_steps):
            operation = operations[rng.integers(len(operations))]
            # Bounded, and fresh values now and then, or all would soon be alike.
            i, j = rng.integers(len(values), size=2)
            values.append(jnp.tanh(operation(values[i], values[j])))
            if rng.random() < 0.3:
                values.append(jnp.cos(w * rng.random()))
        return values

    return program


def test_what_is_called_uniform_has_equal_bits_on_every_rank(make_mesh):
    x = jnp.asarray(np.random.default_rng(7).uniform(size=16).astype("float32"))
    mesh = make_mesh(4)
    collected = jax.jit(
        jax.shard_map(
            lambda w, x: jnp.stack(random_program(0)(w, x))[None],
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P("data"),
            check_vma=False,
        )
    )
    values = np.asarray(collected(jnp.linspace(0.1, 0.9, 4), x))
    got = report(random_program(0)).outputs
    differ = [bool((values[:, i] != values[0, i]).any()) for i in range(len(got))]
    assert not [i for i, value in enumerate(got) if differ[i] and not value.axes]
    # It is no answer to call everything varying.
    assert sum(not value.axes for value in got) > len(got) / 4
    assert sum(differ) > len(got) / 4
