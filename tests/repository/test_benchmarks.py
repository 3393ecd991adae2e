"""The benchmarks count and compare what they say."""

import importlib
import json
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jdp
from benchmarks.all_reduce import loops, rank_jax
from benchmarks.gpu import measure
from benchmarks.gpu import step as gpu_step
from benchmarks.harness import exact, hlo, models, report, timing
from benchmarks.harness.oracle import Oracle
from benchmarks.step import call_cost, contestants, lineup, trace_cost
from jdp.analysis.marks import mark


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
    with pytest.raises(ValueError, match=r"loop while\.\d+"):
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


# A wrong result ends the benchmark: by contestant, rank, round and element


class Corrupted:
    """Passes a result on, but for one element on one rank in one call."""

    def __init__(self, at_call):
        self.calls_left = at_call

    def __call__(self, vector):
        self.calls_left -= 1
        if self.calls_left == 0:
            vector[5] += 1
        return vector


def wrong_on_rank_1(leaves):
    is_rank_1 = lax.axis_index("data") == 1
    return [leaf.at[..., 3].add(jnp.where(is_rank_1, 0.01, 0)) for leaf in leaves]


@pytest.mark.parametrize("name", ["psum", "none"])
def test_one_wrong_element_on_one_rank_of_a_loop_is_found(monkeypatch, make_mesh, name):
    loop = loops.Loop(name, make_mesh(4), [7, 300], 3, repeats=2)
    for _ in range(3):
        exact.checked(loop, timing.until_ready)()
    right = loops.SUMS[name]
    monkeypatch.setitem(loops.SUMS, name, lambda leaves, mesh: wrong_on_rank_1(right(leaves, mesh)))
    with pytest.raises(exact.WrongResultError, match=rf"'{name}'.* rank 1 .* element 3"):
        loops.Loop(name, make_mesh(4), [7, 300], 1)


def test_a_loop_that_skips_a_sum_or_hands_out_the_round_before_is_found(make_mesh):
    def skip(leaves):
        return leaves

    def repeat(_):
        return [jax.device_put(leaf, where) for leaf in before]

    for wrong in (skip, repeat):
        loop = loops.Loop("psum", make_mesh(2), [300], 4)
        before, where = [np.array(leaf) for leaf in loop()], loop._leaves[0].sharding
        loop._run = wrong
        with pytest.raises(exact.WrongResultError, match="'psum'.* rank 0 in round 2"):
            exact.checked(loop, timing.until_ready)()


def test_other_numbers_in_each_rank_round_and_place_have_an_exact_sum():
    seen = [exact.values(rank, number, 600, 7) for rank in range(3) for number in (1, 2)]
    assert len(np.unique([v[:2] for v in seen], axis=0)) == 6
    one = exact.reduced(3, 2, 1, 600, start=7)
    np.testing.assert_array_equal(one, sum(v.astype(int) for v in seen[1::2]))
    thrice = exact.reduced(4, 2, 3, 600, scale=0.5)
    total = sum(exact.values(rank, 2, 600) for rank in range(4))
    np.testing.assert_array_equal(thrice, 0.5 * (4 * 0.5) ** 2 * total)
    for num_ranks, num_calls in [(3, 2), (4, 100)]:
        with pytest.raises(ValueError, match=rf"^{num_calls} .* {num_ranks} ranks.* float32 "):
            exact.reduced(num_ranks, 0, num_calls, 1)


# Peers run in environments of their own: here in one process, rank 1 of 2, that plays both.
def sums_of_two(at_call):
    corrupt, first = Corrupted(at_call), [True]

    def all_reduce(vector):
        if first[0]:
            other = vector - exact.pattern(vector.size)  # rank 0 has one pattern less
        else:
            other = vector.copy()
        first[0] = False
        vector += other
        corrupt(vector)

    return all_reduce, first


@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_sum_of_open_mpi_is_found(monkeypatch, wrong):
    all_reduce, first = sums_of_two(at_call=6 if wrong else 0)
    world = types.SimpleNamespace(
        rank=1, size=2, Barrier=lambda: None, Allreduce=lambda _, vector: all_reduce(vector)
    )
    mpi = types.SimpleNamespace(COMM_WORLD=world, IN_PLACE=None)
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=mpi))
    module = "benchmarks.all_reduce.rank_mpi"
    monkeypatch.delitem(sys.modules, module, raising=False)
    rank_mpi = importlib.import_module(module)

    run_rounds(rank_mpi.functions(), first, wrong, "'Open MPI'.* rank 1 in round 3.* element 5")
    del sys.modules[module]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_sum_of_torch_is_found(monkeypatch, wrong):
    class Tensor(np.ndarray):
        def numpy(self):
            return np.asarray(self)

    all_reduce, first = sums_of_two(at_call=6 if wrong else 0)
    dist = types.ModuleType("torch.distributed")
    dist.init_process_group = lambda *_, **__: None
    dist.barrier = lambda: None
    dist.all_reduce = lambda vector: all_reduce(vector.numpy())
    torch, parallel = types.ModuleType("torch"), types.ModuleType("torch.nn.parallel")
    torch.set_num_threads = lambda _: None
    torch.zeros = lambda size: np.zeros(size, np.float32).view(Tensor)
    torch.nn, torch.distributed = types.ModuleType("torch.nn"), dist
    parallel.DistributedDataParallel = None
    fakes = {"torch": torch, "torch.distributed": dist, "torch.nn": torch.nn}
    for name, module in {**fakes, "torch.nn.parallel": parallel}.items():
        monkeypatch.setitem(sys.modules, name, module)
    module = "benchmarks.all_reduce.rank_torch"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "argv", ["rank_torch.py", "1", "0", "2"])
    rank_torch = importlib.import_module(module)

    run_rounds(rank_torch.functions(), first, wrong, "'torch gloo'.* rank 1 in round 3.* element 5")
    del sys.modules[module]


# The first round is that of prepare: 1 sum, then 2 a round, so that the 6th is in round 4.
def run_rounds(functions, first, wrong, message):
    def run(num_calls):
        first[0] = True
        functions["run"](num_calls)

    functions["prepare"](1200)
    run(2)
    if not wrong:
        run(3)
        return
    with pytest.raises(exact.WrongResultError, match=message):
        run(3)


def test_a_copy_of_the_round_before_is_found(monkeypatch):
    monkeypatch.setenv("JDP_INDEX", "1")
    from benchmarks.all_reduce import rank_memcpy

    functions = rank_memcpy.functions()
    functions["prepare"](4000)
    functions["run"](2)
    monkeypatch.setattr(rank_memcpy.ctypes, "memmove", lambda *_: None)
    with pytest.raises(exact.WrongResultError, match="'memcpy'.* rank 1 in round 2"):
        functions["run"](2)


def wrong_all_reduce(buckets, axis_name, **options):
    # Marked as equal on every rank, or the step itself is refused.
    def marked(x):
        return mark(x, kind="all_reduced", path="", axes=("data",))

    sums = jdp.collectives.xla(buckets, axis_name, **options)
    wrong = [wrong_on_rank_1(bucket) if bucket[0].ndim else bucket for bucket in sums]
    return jax.tree.map(marked, wrong)


@pytest.mark.parametrize("wrong", [False, True])
def test_training_between_processes_is_compared_with_one_device_on_every_rank(make_mesh, wrong):
    all_reduce = wrong_all_reduce if wrong else jdp.collectives.xla
    one = rank_jax.training_of("ring", all_reduce, make_mesh(2), (8, 2, 4), 1, {})
    clock = exact.checked(one, timing.until_ready)
    if wrong:
        with pytest.raises(exact.WrongResultError, match="'ring'.* rank 1 in round 1"):
            clock()
    else:
        for _ in range(5):
            clock()
        one.prepare()
        with pytest.raises(exact.WrongResultError, match="in round 6"):
            one.check()  # no step was made


def test_every_contestant_trains_like_one_device_and_a_wrong_one_is_found(make_mesh):
    mesh, k = jdp.init(make_mesh(2)), 4
    mlp = models.mlp(width=8, num_layers=2, num_rows=16)
    transformer = models.transformer(dim=32, num_layers=1, num_rows=16, length=4)
    cases = [(mlp, label) for label in lineup.makers(k)]
    cases += [(transformer, label) for label in ("jdp", contestants.EXPLICIT)]
    oracles = {id(one): Oracle(one, num_steps=1, num_runs=2) for one in (mlp, transformer)}
    for problem, label in cases:
        step = lineup.makers(k)[label](problem.loss_fn, mesh, k)
        one = lineup.training(label, step, problem, mesh, oracles[id(problem)])
        for _ in range(3):
            exact.checked(one, timing.until_ready)()

    step = contestants.shard_map(lambda p, b: 1.001 * mlp.loss_fn(p, b), mesh, 1)
    wrong = lineup.training("scaled", step, mlp, mesh, oracles[id(mlp)])
    with pytest.raises(exact.WrongResultError, match="'scaled'.* in round 1"):
        exact.checked(wrong, timing.until_ready)()


@pytest.mark.parametrize("label", ["jdp", "shard_map"])
def test_a_program_that_is_traced_otherwise_or_trains_otherwise_is_found(make_mesh, label):
    mesh = jdp.init(make_mesh(2))
    mlp = models.mlp(width=8, num_layers=2, num_rows=16)
    wrong = mlp._replace(loss_fn=lambda p, b: 1.001 * mlp.loss_fn(p, b))
    oracle = Oracle(mlp, num_steps=1, num_runs=1)
    lowering = trace_cost.Lowering(label, mlp, mesh)
    assert min(lowering(), lowering()) > 0
    lowering.check(oracle)
    lowering._problem = wrong
    lowering()
    with pytest.raises(exact.WrongResultError, match=f"'{label}' lowered mlp to 2 different"):
        lowering.check(oracle)
    lowering = trace_cost.Lowering(label, wrong, mesh)
    lowering()
    with pytest.raises(exact.WrongResultError, match=f"'{label}'.* in round 1"):
        lowering.check(oracle)


# The benchmarks of one GPU: what of them runs without one


def test_kernels_that_computed_a_wrong_result_get_no_table(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "gpu", lambda: "a GPU")
    times = {"bytes": 1024, "us": 1.0}
    size = times | {"num_ranks": 8, "num_channels": 1, "slot_bytes": 1024, "floor_us": 1.0}
    size |= {"algorithm": "ring", "type": "float32", "fraction": 1.0}
    rows = [{"kind": "copy", "tb_per_s": 4.0, **times}]
    rows += [{"kind": kind, **size} for kind in ("latency", "size", "type", "variant")]
    lines = tmp_path / "bench_ring.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = measure.ring_sections(lines)
    assert all(measure.report.table(section).count("\n") == 2 for section in sections)
    wrong = {"kind": "wrong", "error": "ring: 3 of 2048 elements are wrong"}
    lines.write_text("".join(json.dumps(row) + "\n" for row in [*rows, wrong]))
    with pytest.raises(exact.WrongResultError, match="3 of 2048"):
        measure.ring_sections(lines)


def test_a_call_through_xla_that_does_nothing_is_found():
    def double(leaves):
        return [2 * leaf for leaf in leaves]

    calls = measure.Calls("double", double)
    for _ in range(2):
        exact.checked(calls, timing.until_ready)()
    skipping, calls_left = calls._double, [measure.CALLS // 2]

    def skip_one(leaves):
        calls_left[0] -= 1
        return leaves if calls_left[0] == 0 else skipping(leaves)

    calls._double = skip_one
    with pytest.raises(exact.WrongResultError, match="'double'.* in round 3"):
        exact.checked(calls, timing.until_ready)()


def test_a_step_that_skips_a_call_is_found(make_mesh):
    ours, bare = call_cost.contestants_of(3, jdp.init(make_mesh(2)))
    for one in (ours, bare):
        one(), one()
        one.check()
    ours._step = lambda state, batch: (state, {})
    ours()
    with pytest.raises(exact.WrongResultError, match="'jdp'.* rank 0 in round 3"):
        ours.check()


def test_the_overview_names_every_program_and_every_page_of_results():
    folder = Path(__file__).parents[2] / "benchmarks"
    overview = (folder / "README.md").read_text()
    starts = 'if __name__ == "__main__":'
    programs = {path for path in folder.rglob("*.py") if starts in path.read_text()}
    alone = {path for path in programs if not path.name.startswith(("rank_", "team."))}
    missing = {path.stem for path in alone if f"`{path.parent.name}.{path.stem}`" not in overview}
    pages = {path.stem.split("_", 2)[2] for path in (folder / "results").glob("*.md")}
    assert not missing | {page for page in pages if f"`{page}`" not in overview}


def test_each_page_of_results_is_of_the_run_of_its_rows():
    for page in sorted(report.RESULTS.glob("*.md")):
        rows = [json.loads(line) for line in page.with_suffix(".jsonl").read_text().splitlines()]
        title, text = page.stem.split("_", 2)[2], page.read_text()
        assert text.startswith(f"# {title}\n"), page.name
        facts = {row[name] for row in rows for name in ("hardware", "commit", "date")}
        assert all(fact in text for fact in facts), page.name


def test_a_page_names_no_folder_of_the_machine(monkeypatch):
    beside = report.RESULTS.parents[2] / "before"
    monkeypatch.setattr(sys, "argv", ["/measure.py", str(beside), "--quick"])
    assert report.environment()["command"] == "python measure.py ../before --quick"


def test_the_step_on_one_gpu_is_compared_with_jit_and_a_wrong_one_is_found(monkeypatch):
    problem = models.mlp(width=8, num_layers=2, num_rows=4)
    rows = list(gpu_step.measured([problem, problem._replace(name="larger")], budget_s=0))
    assert [row["model"] for row in rows] == ["mlp"] * 3 + ["larger"]
    assert [row["ten"] for row in rows] == [*gpu_step._WAYS, "in a row"]
    assert all(row["num_rounds"] == 3 and row["ratio"] > 0 for row in rows)

    def twice(loss_fn, mesh, k):
        return contestants.jit_natural(lambda params, batch: 2 * loss_fn(params, batch), mesh, k)

    monkeypatch.setitem(gpu_step._MAKERS, "jit", twice)
    with pytest.raises(exact.WrongResultError, match="'jit'.* the loss"):
        list(gpu_step.measured([problem], budget_s=0))
