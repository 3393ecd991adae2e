"""How GPUs connect, with a library that only records its calls: nothing here runs on one."""

import ctypes
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from benchmarks.gpu import topology
from jdp.collectives import native
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.collectives.gpu import communicator as gpu_communicator
from jdp.collectives.gpu import runtime as gpu_runtime
from jdp.collectives.shared_library import Loaded
from jdp.collectives.xla import xla

native_module = sys.modules["jdp.collectives.native"]

STAGES = ["topology", "open", "export", "import", "probe_write", "probe_read"]
BLOB_BYTES = 16
DIFFERENCE = gpu_communicator.self_test_difference  # which most tests replace


class Notes:
    """The functions of the CUDA library: notes who called what, and fails where it is told to."""

    def __init__(self, failing=None, ordinal=None):
        self.calls = []  # (name, key, ordinal, further arguments)
        self.failing = failing
        self.ordinal = ordinal  # where; None: everywhere

    def __getattr__(self, name):
        name = name.removeprefix("jdp_cuda_")

        def call(key=None, ordinal=None, *rest):
            if name == "export":
                rest[0].raw, rest = (
                    f"{jax.process_index()}.{ordinal}".encode().ljust(BLOB_BYTES),
                    (),
                )
            if name == "import":
                rest = (rest[0].raw.decode().split(),)
            self.calls.append((name, key, ordinal, *rest))
            return -1 if name == self.failing and self.ordinal in (None, ordinal) else 0

        return call

    def jdp_cuda_num_devices(self):
        return -1 if self.failing == "num_devices" else 8

    def jdp_cuda_blob_bytes(self):
        return BLOB_BYTES

    def jdp_cuda_topology(self):
        return -1 if self.failing == "topology" else 1

    def jdp_cuda_describe(self, key, ordinal):
        return b"ranks over NVLink"

    def jdp_cuda_memory_bytes(self, key, ordinal):
        return 3 * 2**20

    def jdp_cuda_last_error(self):
        return f"jdp: {self.failing} went wrong".encode()

    def named(self, *names):
        return [call for call in self.calls if call[0] in names]


def use(notes, patch):
    patch.setattr(gpu_runtime, "_loaded", lambda: Loaded(notes, None))
    patch.setattr(gpu_runtime, "_open_ends", [])
    return notes


@pytest.fixture
def notes(monkeypatch):
    gpu_communicator.communicator.cache_clear()
    monkeypatch.setattr(gpu_communicator, "self_test_difference", lambda mesh, axes, key: "")
    yield use(Notes(), monkeypatch)
    gpu_communicator.communicator.cache_clear()


class StandIn:
    """What of a device is looked at."""

    platform = "gpu"
    device_kind = "stand-in"

    def __init__(self, number, process_index=0):
        self.id = self.local_hardware_id = number
        self.process_index = process_index


def mesh_of(shape, names, **kwargs):
    devices = [StandIn(i, **kwargs) for i in range(int(np.prod(shape)))]
    return Mesh(np.array(devices).reshape(shape), names)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_all_ranks_are_through_a_stage_before_any_begins_the_next(num_ranks, notes):
    made = gpu_communicator.communicator(mesh_of((num_ranks,), ("data",)), ("data",))
    assert made.why_not is None
    done = [name for name, *_ in notes.named(*STAGES)]
    each = ["import", "probe_write", "probe_read"]
    assert done == ["open", "export"] * num_ranks + [x for x in each for _ in range(num_ranks)]


@pytest.mark.parametrize(
    "axes, rank_of, groups",
    [
        (("a",), [0, 0, 0, 1, 1, 1], ["03", "14", "25"]),
        (("b",), [0, 1, 2, 0, 1, 2], ["012", "345"]),
        (("a", "b"), [0, 1, 2, 3, 4, 5], ["012345"]),
        (("b", "a"), [0, 2, 4, 1, 3, 5], ["031425"]),
    ],
)
def test_ranks_and_peers_are_those_of_the_group_that_a_device_is_in(axes, rank_of, groups, notes):
    made = gpu_communicator.communicator(mesh_of((2, 3), ("a", "b")), axes)
    arena_bytes = made._arena_bytes
    for _, key, ordinal, device, *rest in notes.named("open"):
        assert (key, device) == (made.key, ordinal)
        assert rest == [rank_of[ordinal], len(groups[0]), 1, arena_bytes]
    assert [ordinal for _, _, ordinal, *_ in notes.named("open")] == [
        int(ordinal) for group in groups for ordinal in group
    ]
    for _, _, ordinal, peers in notes.named("import"):
        peers = "".join(peer.removeprefix("0.") for peer in peers)  # of process 0
        assert peers in groups and str(ordinal) in peers


def test_keys_are_the_same_in_every_run_and_differ_between_axes(notes):
    def key(shape, names, *axes):
        return gpu_communicator.Communicator(mesh_of(shape, names), axes).key

    assert key((2, 2), ("a", "b"), "a") == key((2, 2), ("a", "b"), "a") == 3108210936
    different = [
        key((2, 2), ("a", "b"), "b"),
        key((2, 2), ("a", "b"), "a", "b"),
        key((2, 2), ("a", "b"), "b", "a"),
        key((2, 2), ("b", "a"), "a"),
        key((4,), ("a",), "a"),
        key((2,), ("a",), "a"),
    ]
    assert len({3108210936, *different}) == 7 and min(different) > 0


def test_a_communicator_is_opened_and_described_once(notes, caplog):
    mesh = mesh_of((2,), ("data",))
    with caplog.at_level(logging.INFO, "jdp"):
        assert gpu_communicator.communicator(mesh, ("data",)) is gpu_communicator.communicator(
            mesh, ("data",)
        )
    assert len(notes.named("open")) == 2
    [line] = caplog.messages
    assert "NVLink" in line and "3 MiB" in line


@pytest.mark.parametrize("ordinal", [None, 2])
@pytest.mark.parametrize("stage", ["num_devices", *STAGES])
def test_a_stage_that_fails_is_the_reason_and_the_last(stage, ordinal, notes, monkeypatch):
    use(Notes(stage, ordinal), monkeypatch)
    notes = gpu_runtime._functions()
    why = gpu_communicator.communicator(mesh_of((3,), ("data",)), ("data",)).why_not
    assert f"{stage} went wrong." in why
    after = STAGES[STAGES.index(stage) + 1 :] if stage in STAGES else STAGES
    if stage == "open":
        after.remove("export")  # of those before
    assert not notes.named(*after)
    opened = [call[2] for call in notes.named("open") if stage != "open" or call[2] not in (0, 2)]
    closed = [call[2] for call in notes.named("close")]
    assert set(closed) >= set(opened) and gpu_runtime._open_ends == []


@pytest.mark.parametrize("num_kept", [0, 3])
def test_memory_that_others_may_still_write_is_kept_and_logged_once(num_kept, notes, caplog):
    notes.failing = "probe_read"
    call = notes.jdp_cuda_close
    notes.jdp_cuda_close = lambda key, ordinal: call(key, ordinal) + (ordinal < num_kept)
    assert gpu_communicator.communicator(mesh_of((3,), ("data",)), ("data",)).why_not
    assert [ordinal for _, _, ordinal in notes.named("close")] == [0, 1, 2]
    assert [f"{num_kept} GPUs" in line for line in caplog.messages] == [True] * bool(num_kept)


def test_numbers_that_come_out_wrong_are_the_reason(notes, monkeypatch):
    monkeypatch.setattr(
        gpu_communicator, "self_test_difference", lambda *args: "3 of 7 sums are wrong"
    )
    made = gpu_communicator.communicator(mesh_of((2,), ("data",)), ("data",))
    assert made.why_not == "3 of 7 sums are wrong."
    assert len(notes.named("close")) == 2


def test_a_mesh_that_is_only_described_is_compiled_for_and_not_opened(notes):
    mesh = mesh_of((2,), ("data",))
    for device in mesh.devices.flat:
        device.local_hardware_id = None
    made = gpu_communicator.communicator(mesh, ("data",))
    assert made.why_not is None
    made.reserve({0: 2**40})
    assert notes.calls == []


def test_a_process_that_sees_fewer_gpus_than_ranks_takes_them_for_pcie(notes):
    assert gpu_runtime.topology(8) == 1
    assert gpu_runtime.topology(9) == gpu_runtime.PCIE


# Room in the arena


def test_the_arena_holds_all_buckets_of_the_largest_program(notes, make_mesh):
    made = gpu_communicator.communicator(make_mesh(2), ("data",))
    begin = made._arena_bytes
    made.reserve({0: begin, 1: 256})
    made.reserve({2: 512})  # the same program
    made.reserve({0: begin + 512})  # another one, which needs less
    made.reserve({1: 768})
    grown = [arena_bytes for _, _, _, arena_bytes in notes.named("reserve")]
    assert grown == 2 * [begin + 256] + 2 * [begin + 768] + 2 * [begin + 1280]


def test_the_arena_grows_when_no_step_is_in_flight(notes, make_mesh):
    mesh = make_mesh(2)
    made = gpu_communicator.communicator(mesh, ("data",))
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, x: x @ x, x))
    notes.jdp_cuda_reserve = lambda *args: 0 if result.is_ready() else -1
    result = slow(jnp.zeros((300, 300)))
    made.reserve({0: 2**40})


def test_no_memory_for_the_arena_is_an_error(notes, make_mesh):
    made = gpu_communicator.communicator(make_mesh(2), ("data",))
    notes.failing = "reserve"
    with pytest.raises(gpu_communicator.UnavailableError, match=r"^jdp: reserve went wrong\.$"):
        made.reserve({0: 2**40})


@pytest.mark.parametrize(
    "sizes, dtype, room", [([0], "f4", 256), ([1, 1], "f4", 256), ([61, 1], "f4", 512)]
)
def test_leaves_begin_at_16_bytes_and_buckets_at_256(sizes, dtype, room):
    assert gpu_communicator.room_of([np.zeros(n, dtype) for n in sizes]) == room


# The first use


def compare(monkeypatch, mesh, reduce, wrong_product=0):
    monkeypatch.setattr(gpu_communicator, "TRIED", (("bfloat16", 9), ("float32", 300)))

    def stand_in(buckets, axes, *, scale, numbers, communicator, between):
        assert communicator == 5 and len(set(numbers)) == len(buckets)
        with pytest.MonkeyPatch.context() as patch:
            barrier = jax.lax.optimization_barrier
            patch.setattr(
                gpu_communicator.lax,
                "optimization_barrier",
                lambda xs: barrier((xs[0] + wrong_product, xs[1])),
            )
            between([jnp.zeros(1) for _ in buckets])
        return reduce(xla(buckets, axes, scale=scale))

    monkeypatch.setattr(gpu_communicator, "pairs", stand_in)
    return gpu_communicator.self_test_difference(mesh, ("data",), 5)


def test_right_sums_are_found_right(mesh, monkeypatch):
    assert compare(monkeypatch, mesh, lambda buckets: buckets) == ""


@pytest.mark.parametrize("wrong, by", [(1.0, "1"), (np.nan, "nan")])
def test_a_wrong_sum_is_found_with_its_numbers(wrong, by, make_mesh, monkeypatch):
    def reduce(buckets):
        [[small], [large]] = buckets
        here = jax.lax.axis_index("data") == 1
        return [[small], [jnp.where(here & (jnp.arange(300) < 2), large + wrong, large)]]

    why = compare(monkeypatch, make_mesh(2), reduce)
    assert re.fullmatch(rf"2 of 300 .*float32 .*1.* lax.psum.* {by}", why)


def test_a_wrong_product_beside_the_sums_is_found(make_mesh, monkeypatch):
    why = compare(monkeypatch, make_mesh(2), lambda buckets: buckets, wrong_product=1)
    assert why.startswith("262144 of 262144 ") and "matmul" in why


def test_a_matmul_stands_between_all_starts_and_all_dones(make_mesh, monkeypatch):
    monkeypatch.setattr(gpu_communicator, "TRIED", (("bfloat16", 9), ("float32", 300)))
    text = gpu_communicator.comparison(make_mesh(2), ("data",), 5).lower().as_text()
    found = re.findall(r"dot_general|@jdp_ring_(?:start|done)", text)
    assert found == [*["@jdp_ring_start"] * 2, "dot_general", *["@jdp_ring_done"] * 2]


def test_a_reduction_that_fails_is_a_reason(make_mesh, monkeypatch):
    def reduce(buckets):
        raise RuntimeError("jdp: bucket 0: communicator 5 was not made")

    why = compare(monkeypatch, make_mesh(2), reduce)
    assert "(jdp: bucket 0: communicator 5 was not made)" in why


# A step on CPU devices that are taken for GPUs: traced, lowered, and never run.

PARAMS = {"a": np.ones((8, 8), np.float32), "b": np.ones(8, np.float32)}


def lowered(mesh, **options):
    tx = jdp.replicated(optax.sgd(0.1), all_reduce=native, **options)

    @jdp.train_step
    def step(state, x):
        loss = lambda p: jnp.mean((x @ p["a"] + p["b"]) ** 2)  # noqa: E731
        return state.apply_gradients(jax.grad(loss)(state.params)), {}

    def placed(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    state = jax.tree.map(lambda x: placed(x, P()), jdp.TrainState.create(PARAMS, tx))
    return step.lower(state, placed(np.ones((mesh.size, 8), np.float32), P("data")))


@pytest.fixture
def as_gpus(notes, monkeypatch):
    monkeypatch.setattr(native_module, "_platform", lambda mesh: "gpu")
    return notes


def test_a_step_calls_its_communicator_and_has_room_for_its_gradients(
    as_gpus, make_mesh, monkeypatch
):
    monkeypatch.setattr(gpu_communicator, "TRIED", ())
    mesh = make_mesh(2)
    text = lowered(mesh, bucket_bytes=1).as_text()
    made = gpu_communicator.communicator(mesh, ("data",))
    keys = re.findall(r"@jdp_ring_(start|done).*communicator = (\d+) : i64", text)
    assert keys == [("start", str(made.key))] * 2 + [("done", str(made.key))] * 2
    assert made._arena_bytes == 256 + 256
    assert [call[3] for call in as_gpus.named("reserve")] == [512, 512]


def test_the_first_use_is_tried_while_a_step_is_traced(as_gpus, make_mesh, monkeypatch):
    mesh, found = make_mesh(2), []

    def stand_in(buckets, axes, *, scale, between, **_):
        between([jnp.zeros(1)])
        return xla(buckets, axes, scale=scale)

    def difference(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpu_communicator, "TRIED", (("float32", 300),))
            patch.setattr(gpu_communicator, "pairs", stand_in)
            found.append(DIFFERENCE(*args))
        return found[-1]

    monkeypatch.setattr(gpu_communicator, "self_test_difference", difference)
    lowered(mesh)
    assert found == [""]


def test_native_raises_the_reason_why_it_cannot_run(as_gpus, make_mesh):
    as_gpus.failing = "probe_read"
    with pytest.raises(ValueError, match=r"jdp: probe_read went wrong\. Write"):
        lowered(make_mesh(2))


def test_native_raises_when_there_is_no_room(as_gpus, make_mesh, monkeypatch):
    monkeypatch.setattr(gpu_communicator, "TRIED", ())
    as_gpus.failing = "reserve"
    with pytest.raises(ValueError, match="jdp: reserve went wrong"):
        lowered(make_mesh(2))


def test_without_a_mesh_native_asks_for_it(as_gpus, make_mesh):
    fn = lambda x: native([[x]], "data")  # noqa: E731
    mapped = jax.shard_map(fn, mesh=make_mesh(2), in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(ValueError, match=r"sync_gradients\(\.\.\., mesh=mesh\)"):
        mapped(jnp.ones(2))


def test_auto_leaves_gpus_to_xla(as_gpus, make_mesh):
    assert "collectives.native" in native_module.why_not(("data",), make_mesh(2))
    assert as_gpus.calls == []


def test_integers_and_what_the_kernels_do_not_know_are_summed_by_xla(as_gpus, make_mesh):
    mesh = make_mesh(2)

    def fn(*leaves):
        return native([[leaf] for leaf in leaves], "data", mesh=mesh)

    mapped = jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    text = str(jax.make_jaxpr(mapped)(jnp.ones(2), jnp.ones(3, int), jnp.ones(4, complex)))
    assert text.count("jdp_ring_start") == 1 and text.count("= psum") == 2


# Several processes, each with the library that takes notes


def open_in_a_process(failing):
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    # The rows are ranks of both processes; a failure is a run of its own, with its own names.
    mesh = Mesh(np.array(devices).reshape(2, 2), ("data", f"other_{failing}"))
    with pytest.MonkeyPatch.context() as patch:
        notes = use(Notes(failing if jax.process_index() == 1 else None), patch)
        patch.setattr(gpu_communicator, "self_test_difference", lambda *args: "")
        made = gpu_communicator.communicator(mesh, ("data",))
        return made.why_not, made.key, notes.calls


def test_processes_hand_each_other_their_blobs(processes):
    answers = processes(2).run(open_in_a_process, "no")
    for rank, (why, key, calls) in enumerate(answers):
        assert why is None and key == answers[0][1]
        opened = [call for call in calls if call[0] == "open"]
        assert [call[2:6] for call in opened] == [(0, 0, rank, 2), (1, 1, rank, 2)]
        # The first devices of both processes are a group, and so are the second ones.
        peers = [call[2:] for call in calls if call[0] == "import"]
        assert peers == [(0, ["0.0", "1.0"]), (1, ["0.1", "1.1"])]


@pytest.mark.parametrize("stage", ["num_devices", "open", "probe_write"])
def test_what_fails_in_one_process_is_the_reason_in_all(processes, stage):
    for why, *_, calls in processes(2).run(open_in_a_process, stage):
        assert why == f"in process 1 jdp: {stage} went wrong." or re.search("process 1 .*CUDA", why)
        assert "probe_read" not in [name for name, *_ in calls]


# What acts on all communicators of a process


def test_check_raises_the_error_of_the_library(notes):
    gpu_communicator.communicator(mesh_of((2,), ("data",)), ("data",))
    cpu_runtime.check()
    notes.failing, notes.ordinal = "check", 1
    with pytest.raises(RuntimeError, match="^jdp: check went wrong$"):
        cpu_runtime.check()


@pytest.mark.skipif(cpu_runtime.why_missing() is not None, reason="needs the CPU library too")
def test_deadline_abort_and_reset_act_on_gpus_too(notes):
    gpu_communicator.communicator(mesh_of((2,), ("data",)), ("data",))
    before = cpu_runtime.timeout_s()
    try:
        cpu_runtime.set_timeout_s(7)
        cpu_runtime.abort("enough")
    finally:
        cpu_runtime.set_timeout_s(before)
        cpu_runtime.reset()
    names = ("set_timeout_s", "abort", "reset")
    found = [(name, ordinal) for name, _, ordinal, *_ in notes.named(*names)]
    assert found == [
        *(("set_timeout_s", None), ("abort", None), ("set_timeout_s", None)),
        *[("reset", ordinal) for ordinal in (0, 1, 0, 1)],  # once more when all have ended
    ]


# The library itself, where it was built


# Once in a process: a second one would register its handlers beside those of the first.
@pytest.fixture(scope="module")
def loaded(built_cuda_library):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_runtime, "_PATH", built_cuda_library)
        gpu_runtime._loaded.cache_clear()
        assert gpu_runtime.why_missing() is None
        yield built_cuda_library
    gpu_runtime._loaded.cache_clear()


@pytest.mark.thorough
def test_without_a_driver_the_library_loads_and_says_that_there_are_no_gpus(built_cuda_library):
    program = """
        import json, pathlib, sys, jax
        from jdp.collectives.gpu import runtime as gpu_runtime
        gpu_runtime._PATH = pathlib.Path(sys.argv[1])
        why = [gpu_runtime.why_missing(), gpu_runtime.why_no_gpus()]
        print(json.dumps([*why, jax.devices()[0].platform]))
    """
    program = "\n".join(line.strip() for line in program.splitlines())
    env = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program, built_cuda_library],
        capture_output=True, text=True, timeout=240,
        cwd=Path(__file__).parents[2], env={**os.environ, **env},
    )  # fmt: skip
    missing, why, platform = json.loads(done.stdout.splitlines()[-1])
    assert missing is None and platform == "cpu"
    assert re.search("CUDA.*GPU|GPU.*CUDA", why)


@pytest.fixture(scope="module")
def h200s():
    described = os.environ.get("JDP_TARGET_CONFIG")
    try:
        return topology.mesh_of_h200s(described=described and Path(described).read_text())
    except topology.UnavailableError as reason:
        pytest.skip(str(reason))


def num_rings(lowered):
    text = lowered.compile().as_text()
    kinds = ("start", "done")
    return [text.count(f'custom_call_target="jdp_ring_{kind}"') for kind in kinds]


@pytest.mark.thorough
def test_a_step_with_native_compiles_for_8_h200s(h200s, loaded):
    assert num_rings(lowered(h200s)) == [1, 1]


@pytest.mark.thorough
def test_what_is_tried_before_the_first_use_compiles_for_8_h200s(h200s, loaded):
    num_tried = len(gpu_communicator.TRIED)
    lowered = gpu_communicator.comparison(h200s, ("data",), 5).lower()
    assert num_rings(lowered) == [num_tried, num_tried]


def test_functions_are_called_with_the_types_of_the_header():
    types = {
        "void": None, "int": ctypes.c_int, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64,
        "double": ctypes.c_double, "const char*": ctypes.c_char_p, "void*": ctypes.c_void_p,
        "const void*": ctypes.c_void_p,
    }  # fmt: skip
    header = (Path(jdp.__file__).parent / "csrc" / "cuda" / "c_api.h").read_text()
    declared = {}
    for result, name, rest in re.findall(
        r"^JDP_EXPORT ([\w ]+\*?) (jdp_cuda_\w+)\(([^)]*)\);", header, re.M
    ):
        arguments = [x.strip().rsplit(maxsplit=1)[0] for x in rest.split(",") if x]
        declared[name] = (types[result], *(types[one] for one in arguments))
    assert declared.items() >= gpu_runtime._SIGNATURES.items()
