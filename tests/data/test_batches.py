"""Batches lie on the ranks in the order of the stream, every row once, from any position."""

import itertools
import json
import subprocess
import sys
import threading
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import environment
from support.threads import running, wait_until, wait_until_none_runs

import jdp.distributed.mesh
from jdp.data.batches import batches, shard_batches
from jdp.data.sampler import Sampler
from jdp.worker import progress

X = np.arange(22.0, dtype=np.float32).reshape(11, 2)  # 11 divides by no batch size
DATA = {"x": X, "row": np.arange(11)}


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    wait_until_none_runs()


@pytest.fixture(scope="module")
def one_rank():
    return data_mesh(1)


def data_mesh(num_ranks):
    return jax.sharding.Mesh(jax.devices("cpu")[:num_ranks], "data")


def rows_of(loop):
    """The rows that count, batch by batch."""
    found = []
    for batch in loop:
        mask = np.asarray(batch.get("mask", np.ones(batch["row"].shape, bool)))
        found.append(np.asarray(batch["row"])[mask].tolist())
    return found


# --- What comes, and where it lies


def test_ranks_hold_the_global_batch_in_order(mesh):
    num_ranks = mesh.size
    sampler = Sampler(11, 2 * num_ranks, seed=5)
    for batch in batches(DATA, 2 * num_ranks, num_steps=13, seed=5, mesh=mesh):
        rows = next(sampler)
        np.testing.assert_array_equal(batch["row"], rows)
        np.testing.assert_array_equal(batch["x"], X[rows])
        for rank, device in enumerate(mesh.devices):
            (shard,) = [s for s in batch["row"].addressable_shards if s.device == device]
            assert np.asarray(shard.data).tolist() == rows[2 * rank : 2 * rank + 2].tolist()
    assert sampler.position == 13 * 2 * num_ranks


@settings(deadline=None, max_examples=40)
@given(
    num_rows=st.integers(1, 11),
    epochs=st.integers(1, 3),
    ranks=st.tuples(st.sampled_from([1, 2, 3, 5, 8]), st.sampled_from([1, 2, 3, 5, 8])),
    batch_sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    stop=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_every_row_counts_once_per_epoch_also_across_a_change_of_ranks(
    num_rows, epochs, ranks, batch_sizes, stop, shuffle
):
    data = {"row": np.arange(num_rows)}
    options = dict(epochs=epochs, seed=2, shuffle=shuffle, prefetch=0)
    first = batches(data, batch_sizes[0], mesh=data_mesh(ranks[0]), **options)
    done = rows_of(itertools.islice(first, stop))
    second = batches(
        data, batch_sizes[1], mesh=data_mesh(ranks[1]), position=first.position, **options
    )
    seen = np.concatenate([np.array([], int), *done, *rows_of(second)])
    stream = Sampler(num_rows, 1, seed=2, shuffle=shuffle).indices(0, epochs * num_rows)
    assert seen.tolist() == stream.tolist()
    assert second.position == epochs * num_rows


@pytest.mark.parametrize(
    "dataset, masked",
    [
        (X, lambda x, mask: (x, mask)),
        ((X, X[:, 0]), lambda x, mask: (x, x[:, 0], mask)),
        ({"x": X, "y": {"z": X}}, lambda x, mask: {"x": x, "y": {"z": x}, "mask": mask}),
        ([{"x": x} for x in X], lambda x, mask: {"x": x, "mask": mask}),
        ([(x, x[0]) for x in X], lambda x, mask: (x, x[:, 0], mask)),
    ],
    ids=["array", "tuple", "dict", "rows of dicts", "rows of tuples"],
)
def test_the_last_batch_is_padded_and_masked(dataset, masked, mesh):
    size = 8 * mesh.size if mesh.size == 1 else mesh.size * 3
    found = list(batches(dataset, size, epochs=1, shuffle=False, mesh=mesh))
    for i, batch in enumerate(found):
        rows = np.arange(i * size, (i + 1) * size)
        mask = rows < 11
        expected = masked(X[np.minimum(rows, 10)], mask)
        assert jax.tree.structure(batch) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, batch, expected)
        assert jax.tree.leaves(batch)[0].shape[0] == size
    assert len(found) == -(-11 // size)


@pytest.mark.parametrize(
    "num_rows, options, has_mask",
    [
        (11, dict(epochs=1), True),
        (12, dict(epochs=1), True),  # also where no batch is short: a step can rely on it
        (11, dict(num_steps=5), False),
        (11, dict(epochs=1, tail="drop"), False),
        (3, dict(epochs=1), True),  # one short batch
    ],
)
def test_a_mask_is_in_every_batch_or_in_none(num_rows, options, has_mask, make_mesh):
    traces = []

    @jax.jit
    def step(batch):
        traces.append(batch)
        return batch["row"].sum()

    for batch in batches({"row": np.arange(num_rows)}, 4, mesh=make_mesh(2), **options):
        step(batch)
        assert ("mask" in batch) == has_mask
    assert len(traces) == 1


def test_tail_drop_leaves_out_the_short_batch_only(make_mesh):
    loop = batches(DATA, 4, epochs=2, tail="drop", seed=1, mesh=make_mesh(2))
    assert len(loop) == 5
    rows = np.concatenate(rows_of(loop))
    assert rows.tolist() == Sampler(11, 1, seed=1).indices(0, 20).tolist()
    assert loop.position == 20


def test_steps_run_across_epochs_with_full_batches(one_rank):
    loop = batches(DATA, 8, num_steps=4, mesh=one_rank)
    rows = np.concatenate(rows_of(loop))
    assert len(rows) == 32
    for epoch in rows[:22].reshape(2, 11):
        assert sorted(epoch) == list(range(11))
    assert rows[:11].tolist() != rows[11:22].tolist()


def test_seeds_have_different_orders_and_the_same_seed_the_same(one_rank):
    orders = [rows_of(batches(DATA, 11, epochs=1, seed=s, mesh=one_rank)) for s in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]


def test_a_row_is_read_once_however_many_devices_hold_it():
    read = []

    class Rows:
        def __len__(self):
            return 11

        def __getitem__(self, i):
            read.append(i)
            return np.float32(i)

    mesh = jax.make_mesh(
        (2, 4),
        ("data", "model"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices("cpu"),
    )
    (batch,) = batches(Rows(), 4, num_steps=1, mesh=mesh, prefetch=0)
    assert read == Sampler(11, 4).indices(0, 4).tolist()
    assert [s.data.tolist() for s in batch.addressable_shards] == [read[:2]] * 4 + [read[2:]] * 4


def test_several_axes_split_the_batch():
    mesh = jax.make_mesh(
        (2, 2),
        ("replica", "fsdp"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices("cpu")[:4],
    )
    both = ("replica", "fsdp")
    (batch,) = batches(X, 8, num_steps=1, shuffle=False, axis_name=both, mesh=mesh)
    assert [s.data[0, 0].item() / 2 for s in batch.addressable_shards] == [0, 2, 4, 6]


def test_the_mesh_is_that_of_init_when_the_loop_begins(make_mesh, before_init):
    loop, sharded = batches(X, 4, num_steps=1), shard_batches([X[:4]])
    with pytest.raises(RuntimeError, match="jdp.init"):
        next(iter(loop))
    mesh = make_mesh(2)
    jdp.distributed.mesh.init(mesh)
    assert next(iter(loop)).sharding.mesh == mesh
    assert next(sharded).sharding.mesh == mesh


class ReusedColumn:
    """An array-like that returns its rows in the same memory each time, its own array or a view."""

    shape, dtype = (24, 2048), np.dtype(np.float32)

    def __init__(self, is_view):
        # As large and aligned as JAX needs to take it for a device's memory.
        buffer = np.empty(24 * 2048 + 16, np.float32)
        start = -buffer.ctypes.data // 4 % 16
        self.buffer = buffer[start : start + 24 * 2048].reshape(self.shape)
        self.buffer = self.buffer if is_view else self.buffer.copy()

    def __getitem__(self, rows):
        found = self.buffer[: len(rows)]
        found[:] = np.asarray(rows)[:, None]
        return found if len(rows) < 24 else self.buffer


class ReusedRow:
    """Rows that are returned in the same memory each time."""

    def __init__(self, is_view):
        self.buffer = ReusedColumn(is_view).buffer[0]

    def __len__(self):
        return 24

    def __getitem__(self, row):
        self.buffer[:] = row
        return self.buffer


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("is_view", [True, False])
@pytest.mark.parametrize("size", [1, 8, 24])
def test_a_dataset_may_use_its_memory_again(size, is_view, prefetch, one_rank):
    expected = Sampler(24, size).indices(0, 6 * size).reshape(6, size).tolist()
    for dataset in (ReusedColumn(is_view), {"row": ReusedColumn(is_view)}, ReusedRow(is_view)):
        loop = batches(dataset, size, num_steps=6, mesh=one_rank, prefetch=prefetch)
        found = [jax.tree.leaves(batch)[0] for batch in loop]
        assert [batch[:, 0].tolist() for batch in found] == expected
        assert all((batch == batch[:, :1]).all() for batch in found)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_threads_that_read_rows_keep_their_order_and_end(prefetch, one_rank):
    rows = [{"row": np.int32(i)} for i in range(11)]
    options = dict(num_steps=5, mesh=one_rank, prefetch=prefetch)
    expected = rows_of(batches(rows, 4, **options))
    before = threading.active_count()
    assert rows_of(batches(rows, 4, read_threads=3, **options)) == expected
    assert threading.active_count() == before


# --- Position


class Watched:
    """Rows that say how many were read."""

    def __init__(self, num_rows=1000):
        self.num_rows, self.read = num_rows, 0

    def __len__(self):
        return self.num_rows

    def __getitem__(self, i):
        self.read += 1
        return np.float32(i)


def test_position_counts_what_was_handed_out_not_what_was_read_ahead(one_rank):
    rows = Watched()
    loop = batches(rows, 4, num_steps=100, mesh=one_rank, prefetch=3)
    assert loop.position == 0
    for i, _ in enumerate(itertools.islice(loop, 5)):
        wait_until(lambda i=i: rows.read == (i + 1 + 3) * 4)
        assert loop.position == (i + 1) * 4


def test_a_loop_goes_on_after_a_break(one_rank):
    expected = rows_of(batches(DATA, 4, num_steps=6, mesh=one_rank))
    loop = batches(DATA, 4, num_steps=6, mesh=one_rank)
    assert rows_of(itertools.islice(loop, 2)) == expected[:2]
    assert loop.position == 8
    assert rows_of(loop) == expected[2:]


def test_setting_the_position_goes_there(one_rank):
    expected = rows_of(batches(DATA, 4, num_steps=6, mesh=one_rank))
    loop = batches(DATA, 4, num_steps=6, mesh=one_rank)
    for position in (16, 0, 12):
        loop.position = position
        assert rows_of(loop) == expected[position // 4 :]
        assert loop.position == 24


LARGE = 2**16 + 1  # rows: one more than have the same order in all versions


def stream_of(loop, count):
    return np.concatenate(rows_of(itertools.islice(loop, count))).tolist()


@pytest.mark.parametrize("num_rows", [11, LARGE])
def test_a_state_goes_on_in_the_order_in_which_the_run_began(num_rows, one_rank):
    data, options = {"row": np.arange(num_rows)}, dict(epochs=3, seed=1, mesh=one_rank)
    position = num_rows - 2
    begun = batches(data, 4, position=position, **options)
    stream = Sampler(num_rows, 1, seed=1).indices(position, 12).tolist()
    assert stream_of(begun, 2) == stream[:8]
    resumed = batches(data, 2, **options)
    resumed.set_state(json.loads(json.dumps(begun.get_state())))
    assert stream_of(resumed, 2) == stream[8:]
    # A run that began with jdp 0.1 stays in its order, also when it is saved again.
    old = batches(data, 4, **options)
    old.set_state({"position": position})
    stream = Sampler(num_rows, 1, seed=1, order=1).indices(position, 12).tolist()
    assert stream_of(old, 2) == stream[:8]
    resumed.set_state(json.loads(json.dumps(old.get_state())))
    assert stream_of(resumed, 2) == stream[8:]


@pytest.mark.parametrize(
    "other, named",
    [
        (dict(dataset={"row": np.arange(12)}), "num_rows .*11.*12"),
        (dict(seed=5), "seed .*0.*5"),
        (dict(shuffle=False), "shuffle .*True.*False"),
    ],
)
def test_a_run_does_not_go_on_with_another_stream(other, named, one_rank):
    usual = dict(dataset=DATA, batch_size=4, num_steps=5, mesh=one_rank)
    state = batches(**usual, position=8).get_state()
    changed = batches(**{**usual, **other})
    with pytest.raises(ValueError, match=rf'{named}.*position 8 .*allow="new data"'):
        changed.set_state(state)
    assert changed.position == 0
    allowed = batches(**{**usual, **other}, allow="new data")
    allowed.set_state(state)
    expected = batches(**{**usual, **other}, position=8)
    assert rows_of(allowed) == rows_of(expected)
    changed.set_state(allowed.get_state())  # which is the stream that the run goes on in
    changed = batches(**{**usual, "batch_size": 3, "num_steps": 9, "mask": True})
    changed.set_state(state)
    assert changed.position == 8


@pytest.mark.parametrize("state", [{}, None, {"next_index": 2}])
def test_a_state_of_something_else_is_refused(state, one_rank):
    batches = jdp.batches(np.arange(8), 4, num_steps=4)
    with pytest.raises(ValueError, match="no `position`"):
        batches.set_state(state)
    assert batches.position == 0


def test_the_state_cannot_be_set_inside_a_loop(one_rank):
    loop = batches(DATA, 4, num_steps=3, mesh=one_rank)
    for _ in loop:
        with pytest.raises(RuntimeError, match=r"position .*close\(\)"):
            loop.set_state({"position": 0})


def test_a_finished_run_has_nothing_left_and_another_loop_is_refused(one_rank):
    finished = batches(DATA, 4, epochs=2, position=22, mesh=one_rank)
    assert list(finished) == []  # a job that starts again after its end
    loop = batches(DATA, 4, epochs=2, mesh=one_rank)
    again = rows_of(loop)
    with pytest.raises(RuntimeError, match="6 batches.*num_steps.*position = 0"):
        iter(loop)
    loop.position = 0
    assert rows_of(loop) == again


def test_the_position_cannot_be_set_inside_a_loop(one_rank):
    loop = batches(DATA, 4, num_steps=3, mesh=one_rank)
    for _ in loop:
        with pytest.raises(RuntimeError, match=r"position .* 0 .*close\(\)"):
            loop.position = 0
    loop.position = 4
    stopped = iter(loop)
    next(stopped)
    loop.close()
    loop.position = 4
    assert len(list(loop)) == 2


def test_a_new_loop_ends_the_one_before(one_rank):
    loop = batches(DATA, 4, num_steps=4, mesh=one_rank)
    first = iter(loop)
    next(first)
    second = iter(loop)
    next(second)
    assert list(first) == []
    assert len(list(second)) == 2


def test_length_and_epoch(one_rank):
    loop = batches(DATA, 4, epochs=2, mesh=one_rank)
    epochs = []
    for _ in loop:
        epochs.append(loop.epoch)
        assert len(loop) == 6
    assert epochs == [0, 0, 1, 1, 1, 2]  # of the row after 4, 8, 12, 16, 20 and 22 rows
    assert len(batches(DATA, 4, num_steps=7, mesh=one_rank)) == 7


# --- The thread


@pytest.mark.parametrize("leave", ["break", "raise", "close", "with", "drop", "end"])
def test_leaving_a_loop_ends_the_thread(leave, one_rank):
    loop = batches(Watched(), 4, num_steps=10, mesh=one_rank)
    iterator = iter(loop)
    next(iterator)
    assert len(running()) == 1
    if leave == "break":
        del iterator
        for _ in loop:
            break
    elif leave == "raise":
        with pytest.raises(KeyError):
            for _ in iterator:
                raise KeyError("in the step")
        del iterator
    elif leave == "close":
        loop.close()
        assert list(iterator) == []
    elif leave == "with":
        with loop:
            next(iterator)
    elif leave == "drop":
        del loop, iterator
    else:
        assert len(list(iterator)) == 9
    assert not running()


def test_an_exception_of_the_dataset_keeps_its_traceback(one_rank):
    class Rows(Watched):
        def __getitem__(self, i):
            return self.broken_disk() if i == 9 else np.float32(i)

        def broken_disk(self):
            raise OSError("cannot read row 9")

    loop = batches(Rows(), 4, num_steps=10, shuffle=False, mesh=one_rank)
    with pytest.raises(OSError, match="cannot read row 9") as caught:
        for _ in loop:
            pass
    assert loop.position == 8
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "broken_disk" in frames


def test_depth_0_needs_no_thread(one_rank):
    rows = Watched()
    loop = batches(rows, 4, num_steps=10, mesh=one_rank, prefetch=0)
    for i, _ in enumerate(itertools.islice(loop, 3)):
        assert rows.read == (i + 1) * 4
        assert not running()


# The thread is at work when the program ends, since there is room for all batches.
PROGRAM = """
import jax, numpy as np
from jdp.data.batches import batches

class Rows:
    def __len__(self):
        return 1000

    def __getitem__(self, i):
        return np.ones(2_000, np.float32)

mesh = jax.sharding.Mesh(jax.devices(), "data")
loop = iter(batches(Rows(), 64, num_steps=10**6, mesh=mesh, prefetch=10**6))
total = jax.jit(lambda batch: batch.sum())
assert total(next(loop)) == total(next(loop)) == 64 * 2_000
"""


def test_a_program_that_ends_inside_a_loop_ends_quietly():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment(), timeout=240, capture_output=True
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")


# --- Wrong arguments


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(), "num_steps=None .*epochs=None"),
        (dict(num_steps=3, epochs=2), "num_steps=3 .*epochs=2"),
        (dict(epochs=0), "epochs .*1.*0"),
        (dict(num_steps=0), "num_steps .*1.*0"),
        (dict(epochs=1, tail="wrap"), "tail must be .*'wrap'"),
        (dict(epochs=1, prefetch=-1), "prefetch .*0.*-1"),
        (dict(epochs=1, allow="all"), "allow must be .*'all'"),
        (dict(epochs=1, read_threads=0), "read_threads .*1.*0"),
        (dict(epochs=1, position=-1), "position .*0.*-1"),
        (dict(epochs=1, seed=-1), "seed .*0.*-1"),
        (dict(epochs=1, batch_size=12, tail="drop"), "11 .*12"),
        (dict(num_steps=1, batch_size=10), "batch_size 10 .* 4 .*mask=True.* 4, .* 12"),
        (dict(epochs=1, batch_size=10, tail="drop"), "batch_size 10 .* 4 ranks"),
        (dict(epochs=1, mask=False), 'mask=False .*tail="pad"'),
        (dict(epochs=1, axis_name="dp"), "'dp'"),
        (dict(epochs=1, dataset={"x": X, "y": X[:3]}), r"\['y'\] .*3 .*\['x'\] .*11"),
    ],
)
def test_wrong_arguments_are_refused_at_once(options, message, make_mesh):
    options = {"dataset": DATA, "batch_size": 4, "mesh": make_mesh(4), **options}
    with pytest.raises(ValueError, match=message):
        batches(**options)


@pytest.mark.parametrize("labels", [DATA["row"], DATA["row"].tolist()])
@pytest.mark.parametrize("rest", [((), {}), ((4,), {}), ((), {"batch_size": 4})])
def test_two_arrays_by_position_are_told_to_be_one_dataset(labels, rest):
    args, options = rest
    with pytest.raises(TypeError, match=r"jdp\.batches\(\(x, y\), batch_size=\.\.\.\)"):
        batches(X, labels, *args, **options, num_steps=1)


def test_a_batch_size_may_be_an_array_of_one_number():
    assert len(batches(X, np.array(4), num_steps=3)) == 3


def test_a_mask_of_the_datasets_own_is_refused_only_where_one_is_needed(one_rank):
    data = {"x": X, "mask": np.ones(11)}
    with pytest.raises(ValueError, match='"mask"'):
        next(iter(batches(data, 4, epochs=1, mesh=one_rank)))
    assert next(iter(batches(data, 4, num_steps=1, mesh=one_rank)))["mask"].dtype == np.float32


# --- Batches of other loaders


class Tensor:
    """What NumPy sees of a PyTorch tensor: `__array__` without the `copy` of NumPy 2."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None):
        return self.values if dtype is None else self.values.astype(dtype)


class TorchLoader:
    """Like a PyTorch DataLoader: a new iterator each time, over lists of tensors."""

    def __init__(self, num_batches, rows, drop_last=True):
        self.num_batches, self.rows, self.drop_last = num_batches, rows, drop_last

    def __iter__(self):
        for i in range(self.num_batches):
            yield [Tensor(X[: self.rows] + i), Tensor(np.arange(self.rows))]
        if not self.drop_last:
            yield [Tensor(X[:1]), Tensor(np.arange(1))]


def test_places_the_batches_of_a_torch_like_loader(mesh):
    rows = 8 if mesh.size == 1 else mesh.size
    loader = TorchLoader(3, rows)
    for _ in range(2):  # epochs
        found = list(shard_batches(loader, mesh=mesh))
        assert len(found) == 3
        for i, (x, y) in enumerate(found):
            np.testing.assert_array_equal(x, X[:rows] + i)
            np.testing.assert_array_equal(y, np.arange(rows))
            assert [s.device for s in x.addressable_shards] == list(mesh.devices)
            assert {s.data.shape for s in x.addressable_shards} == {(rows // mesh.size, 2)}


def test_places_the_batches_of_grain(make_mesh):
    grain = pytest.importorskip("grain")
    source = grain.MapDataset.source([{"x": X[i], "row": i} for i in range(11)])
    loader = source.shuffle(seed=3).batch(4, drop_remainder=True).to_iter_dataset()
    found = list(shard_batches(loader, mesh=make_mesh(2)))
    expected = list(loader)
    assert len(found) == len(expected) == 2
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def mixture_of_grain():
    grain = pytest.importorskip("grain")
    sources = [grain.MapDataset.source([i] * n) for i, n in enumerate((300, 50))]
    return grain.MapDataset.mix([sources[0], sources[1].repeat(2)], weights=[0.75, 0.25])


# The sources of the mixture alternate: 0 0 0 1. Within 6 standard deviations of a draw of n rows.
def is_mixed(counts):
    n = counts.sum()
    return abs(counts[1] - n / 4) < 6 * np.sqrt(n * 3 / 16)


@pytest.mark.all_sets
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_each_rank_sees_all_sources_of_a_mixture(make_mesh, num_ranks):
    made = make_mesh(num_ranks)
    by_rank = {device: np.zeros(2, int) for device in made.devices.flat}
    for batch in batches(mixture_of_grain(), 2 * num_ranks, num_steps=150, mesh=made):
        for shard in batch.addressable_shards:
            by_rank[shard.device] += np.bincount(np.asarray(shard.data), minlength=2)
    assert all(map(is_mixed, by_rank.values())), by_rank


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_each_slice_of_a_shuffled_mixture_has_all_sources(num_ranks):
    shuffled = mixture_of_grain().seed(0).shuffle()
    slices = [[*shuffled[rank::num_ranks]] for rank in range(num_ranks)]
    counts = [np.bincount(each, minlength=2) for each in slices]
    assert all(map(is_mixed, counts)) and np.sum(counts, axis=0).tolist() == [300, 100]


def test_a_loader_may_use_its_memory_again(mesh):
    def loader():
        # As large and aligned as JAX needs to take it for a device's memory.
        buffer = np.empty(24 * 1024 + 16, np.float32)
        start = -buffer.ctypes.data // 4 % 16
        x = buffer[start : start + 24 * 1024].reshape(24, 1024)
        for i in range(4):
            x[:] = i
            yield x

    found = list(shard_batches(loader(), mesh=mesh))
    assert [np.unique(batch).tolist() for batch in found] == [[0], [1], [2], [3]]


def test_later_batches_may_have_other_shapes_and_train_as_on_one_device(make_mesh):
    draw = np.random.default_rng(0).normal
    shapes = ((4, 3), (4, 5), (2, 5), (4, 3))
    given = [draw(size=shape).astype(np.float32) for shape in shapes]
    traced = []

    @jdp.train_step
    def step(state, batch):
        traced.append(batch.shape)
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch * w) ** 2))(state.params)
        return state.apply_gradients(grad), {"loss": loss}

    jdp.init(make_mesh(2))
    state = jdp.TrainState.create(jnp.float32(1), jdp.replicated(optax.sgd(0.1)))
    w = 1.0
    for batch, rows in zip(shard_batches(given), given, strict=True):
        state, metrics = step(state, batch)
        square = np.mean(np.square(rows, dtype=float))
        np.testing.assert_allclose(metrics["loss"], w**2 * square, rtol=1e-5)
        w -= 0.2 * w * square
    np.testing.assert_allclose(state.params, w, rtol=1e-5)
    assert traced == [(2, 3), (2, 5), (1, 5)]


def test_a_short_last_batch_that_ranks_do_not_divide_is_refused(make_mesh):
    loop = shard_batches(TorchLoader(2, 4, drop_last=False), mesh=make_mesh(2))
    got = []
    with pytest.raises(ValueError, match="1 rows .*2 ranks .*drop_last"):
        for batch in loop:
            got.append(batch)
    assert len(got) == 2


def test_a_batch_that_cannot_be_split_is_refused_in_the_loop(make_mesh):
    with pytest.raises(ValueError, match="3 rows .*2 ranks"):
        next(shard_batches([X[:3]], mesh=make_mesh(2)))


def test_an_empty_loader_gives_no_batches(one_rank):
    assert list(shard_batches([], mesh=one_rank)) == []


def test_a_loader_is_asked_when_the_loop_begins_and_stopped_when_it_ends(one_rank):
    asked = []

    class Loader:
        def __iter__(self):
            asked.append(threading.current_thread())
            return itertools.repeat(X)

    loop = shard_batches(Loader(), mesh=one_rank)
    assert not asked
    next(loop)
    assert len(asked) == len(running()) == 1
    loop.close()
    assert not running()


def test_an_exception_of_the_loader_keeps_its_traceback(one_rank):
    def loader():
        yield X
        broken_pipe()

    def broken_pipe():
        raise OSError("the loader's process died")

    loop = shard_batches(loader(), mesh=one_rank)
    next(loop)
    with pytest.raises(OSError, match="process died") as caught:
        next(loop)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "broken_pipe" in frames


@pytest.mark.parametrize(("first", "then"), [(8, 4), (4, 8), (6, 4)])
def test_a_run_of_steps_has_as_many_with_another_batch_size(first, then, make_mesh, caplog):
    mesh, rows = make_mesh(2), np.arange(40)
    before = batches(rows, first, num_steps=10, mesh=mesh)
    for _ in zip(range(7), before, strict=False):
        pass
    before.close()
    after = batches(rows, then, num_steps=10, mesh=mesh)
    after.set_state(before.get_state())
    assert f"3 of 10 batches of {then} rows are left, after 7 with {7 * first} rows" in caplog.text
    assert not progress.own.is_complete
    found = [batch.tolist() for batch in after]
    after.set_state(after.get_state())
    assert progress.own.is_complete
    stream = Sampler(40, 1).indices(7 * first, 3 * then).tolist()
    assert len(after) == 10 and sum(found, []) == stream
    # One that is over says so.
    again = batches(rows, then, num_steps=10, mesh=mesh)
    again.set_state(after.get_state())
    assert not list(again) and "all 10 batches are done" in caplog.text


def test_a_state_without_a_number_of_batches_goes_on_by_its_rows(make_mesh):
    loop = batches(np.arange(40), 4, num_steps=10, mesh=make_mesh(2))
    loop.set_state({"position": 28, "num_rows": 40, "seed": 0, "shuffle": True, "order": 2})
    assert len(list(loop)) == 3


@pytest.mark.parametrize(
    ("options", "steps", "is_said"),
    [
        ({"seed": 3}, True, True),
        ({"seed": 3}, False, False),  # an evaluation
        ({"shuffle": False}, True, False),
        ({"seed": None}, True, False),  # another one for each epoch
    ],
)
def test_epochs_of_one_order_are_said_once(options, steps, is_said, caplog, mesh):
    rows = {"x": np.arange(40)}
    for epoch in range(4):
        chosen = {**options, "seed": epoch} if options.get("seed", 0) is None else options
        for _ in batches(rows, 8, epochs=1, mesh=mesh, **chosen):
            if steps:
                with progress.TRAIN_STEP:
                    pass
    found = [it.getMessage() for it in caplog.records if "same order of rows" in it.getMessage()]
    assert len(found) == is_said and all("3 epochs" in text and "seed=3" in text for text in found)
