"""The benchmarks count and compare what they say."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import hlo  # noqa: E402 - benchmarks are programs, found by their folder
import timing  # noqa: E402


def compiled(fn, *args):
    return jax.jit(fn).lower(*args).compile().as_text()


def test_the_body_of_a_loop_counts_as_often_as_it_runs():
    square = jnp.ones((16, 16))

    def many(x):
        return lax.scan(lambda x, _: (jnp.tanh(x @ square), None), x, length=7)[0] @ square

    assert hlo.count(compiled(many, square)).flops == (7 + 1) * 2 * 16**3


def test_a_batched_matmul_counts_every_product():
    x, y = jnp.ones((3, 4, 5)), jnp.ones((3, 5, 6))
    counts = hlo.count(compiled(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), x, y))
    assert counts.flops == 2 * 3 * 4 * 5 * 6


def test_collectives_count_with_the_bytes_that_a_device_puts_in(make_mesh):
    def rank_step(x):  # [1, 8] float32: 32 bytes
        summed, _ = lax.scan(lambda x, _: (lax.psum(x, "data") / 2, None), x, length=5)
        return lax.all_gather(summed, "data")

    mapped = jax.shard_map(
        rank_step, mesh=make_mesh(2), in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    counts = hlo.count(compiled(mapped, jnp.ones((2, 8))))
    assert counts.calls == {"all-reduce": 5, "all-gather": 1}
    assert counts.sent_bytes == {"all-reduce": 5 * 32, "all-gather": 32}


def test_bytes_are_hidden_if_a_matmul_runs_before_they_have_arrived():
    counts = hlo.count("""
ENTRY %main (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  %early = f32[4,4]{1,0} all-reduce-start(%x), to_apply=%add
  %product = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %arrived = f32[4,4]{1,0} all-reduce-done(%early)
  %late = (bf16[2]{0}, bf16[2]{0}) all-gather-start(%x)
  ROOT %done = f32[4,4]{1,0} all-gather-done(%late)
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %sum = f32[] add(%a, %a)
}
""")
    assert counts.hidden_bytes == counts.sent_bytes["all-reduce"] == 4 * 4 * 4
    assert counts.calls == {"all-reduce": 1, "all-gather": 1}


def test_refuses_to_guess_how_often_a_loop_runs():
    program = compiled(lambda n: lax.fori_loop(0, n, lambda i, x: x @ x, jnp.eye(4)), 3)
    with pytest.raises(ValueError, match="how often the loop .* runs"):
        hlo.count(program)


def test_compares_in_both_orders_and_gives_first_over_second():
    runs = []

    def clock(name, seconds):
        return lambda: runs.append(name) or seconds

    found = timing.compare(
        clock("a", 3.0), clock("b", 2.0), budget_s=0, min_rounds=2, max_rounds=2, warm_up=1
    )
    assert "".join(runs) == "ab" + "abba" + "baab"
    assert found == (3.0, 2.0, 1.5, 1.5, 1.5, 2)


def test_the_interval_holds_the_median_and_narrows_with_more_values():
    few, many = (timing.interval(np.arange(n) / n) for n in (10, 1000))
    assert few[0] < many[0] < 0.5 < many[1] < few[1]
