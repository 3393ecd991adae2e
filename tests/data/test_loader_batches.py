"""A loader that saves its own state continues exactly there, however far it was read ahead."""

import json
import subprocess
import sys

import grain
import grain.python
import jax
import numpy as np
import pytest
from support.processes import environment

import jdp
from jdp.checkpoint.restore import set_position

NUM_BATCHES, SIZE = 7, 4
ROWS = np.arange(NUM_BATCHES * SIZE)


def iterator_of_grain():
    return iter(grain.MapDataset.source(ROWS).seed(3).shuffle().to_iter_dataset().batch(SIZE))


def dataset_of_grain():
    return grain.MapDataset.source(ROWS).seed(3).shuffle().to_iter_dataset().batch(SIZE)


def loader_of_grain():  # whose state is bytes
    sampler = grain.python.IndexSampler(len(ROWS), shuffle=True, num_epochs=1, seed=3)
    batches = [grain.python.Batch(SIZE)]
    return grain.python.DataLoader(data_source=ROWS, sampler=sampler, operations=batches)


class Stateful:
    """As PyTorch's StatefulDataLoader: the state is set before the iteration begins."""

    num_read = 0

    def __iter__(self):
        for i in range(self.num_read, NUM_BATCHES):
            self.num_read = i + 1
            yield {"row": ROWS[i * SIZE :][:SIZE]}

    def state_dict(self) -> dict:
        return {"num_read": self.num_read}

    def load_state_dict(self, state):
        self.num_read = state["num_read"]


LOADERS = [iterator_of_grain, dataset_of_grain, loader_of_grain, Stateful]


def rows(batch):
    return np.asarray(jax.tree.leaves(batch)[0]).tolist()


def in_one_go(make):
    return [rows(batch) for batch in make()]


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("make", LOADERS)
def test_a_state_continues_after_the_batch_that_was_handed_out(make, prefetch, make_mesh):
    options = {"mesh": make_mesh(2), "prefetch": prefetch}
    for cut in (0, 1, 4, NUM_BATCHES):
        before = jdp.shard_batches(make(), **options)
        before.get_state()
        found = [rows(next(before)) for _ in range(cut)]
        state = json.loads(json.dumps(before.get_state()))
        before.close()
        after = jdp.shard_batches(make(), **options)
        after.set_state(state)
        assert after.position == cut and after.get_state() == state
        assert found + [rows(batch) for batch in after] == in_one_go(make)
        assert after.position == NUM_BATCHES


@pytest.mark.parametrize("make", LOADERS)
def test_a_checkpointer_resumes_a_loader_exactly(make, make_mesh, tmp_path, before_init):
    jdp.init(make_mesh(2))
    found = []
    for last in (3, 5, NUM_BATCHES):
        batches = jdp.shard_batches(make())
        with batches, jdp.Checkpointer(tmp_path, resume=True) as ckpt:
            state = ckpt.restore({"n": 0}, batches)
            for batch in batches:
                found.append(rows(batch))
                state = {"n": state["n"] + 1}
                ckpt.step(state, batches)
                if ckpt.steps == last:
                    break
        assert (state["n"], batches.position) == (last, last)
    assert found == in_one_go(make)


def a_generator():
    yield {"row": ROWS[:SIZE]}


class Wrong:
    def __iter__(self):
        yield {"row": ROWS}

    def state_dict(self):
        return {"num_read": (0, b"")}

    def load_state_dict(self, state): ...


@pytest.mark.parametrize("loader", [a_generator(), [{"row": ROWS}], map(dict, [])], ids=type)
def test_a_loader_without_a_state_is_refused_before_training(loader, tmp_path, make_mesh):
    jdp.init(make_mesh(1))
    with jdp.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(TypeError, match=f"{type(loader).__name__} .*jdp.batches"):
            ckpt.restore({"n": 0}, jdp.shard_batches(loader))


@pytest.mark.parametrize("rows", [{"x": np.ones(4)}, np.ones((4, 2)), "rows"])
def test_rows_in_the_place_of_a_loader_are_refused(rows):
    with pytest.raises(TypeError, match=r"shard_batches takes an iterable.*jdp\.batches\("):
        jdp.shard_batches(rows)


@pytest.mark.parametrize("raw", [iterator_of_grain(), a_generator(), Stateful()], ids=type)
def test_a_loader_itself_is_refused_since_it_may_be_ahead(raw, tmp_path):
    with jdp.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(TypeError, match=r"batches = jdp.shard_batches\(loader\)"):
            ckpt.restore({"n": 0}, raw)


def test_a_state_that_json_does_not_keep_is_refused(make_mesh):
    with pytest.raises(TypeError, match="Wrong.state_dict .*JSON"):
        jdp.shard_batches(Wrong(), mesh=make_mesh(1)).get_state()


def test_a_state_is_asked_for_and_set_before_the_loop_only(make_mesh):
    options = {"mesh": make_mesh(1)}
    batches, state = (jdp.shard_batches(Stateful(), **options) for _ in range(2))
    next(batches)
    with pytest.raises(RuntimeError, match="after 1 batches"):
        batches.get_state()
    with pytest.raises(RuntimeError, match="after 1 batches"):
        batches.set_state(state.get_state())


def test_a_position_means_nothing_to_other_batches_or_processes(make_mesh):
    mesh = make_mesh(1)
    loader, dataset = jdp.shard_batches(Stateful(), mesh=mesh), jdp.batches(ROWS, 4, epochs=1)
    of_loaders = {"position": 1, "loaders": [{"num_read": 1}]}
    facts = {"position": 1, "data": of_loaders}
    set_position(loader, facts, "step 1")
    assert loader.position == 1
    with pytest.raises(ValueError, match="step 1 .*jdp.shard_batches, .* others,"):
        set_position(dataset, facts, "step 1")
    for data in (dataset.get_state(), None):
        with pytest.raises(ValueError, match="step 1 .*others, .*jdp.shard_batches,"):
            set_position(loader, {"position": 1} | ({"data": data} if data else {}), "step 1")
    twice = {"position": 1, "data": {"position": 1, "loaders": [{"num_read": 1}] * 2}}
    with pytest.raises(ValueError, match="2 processes.* 1[.]"):
        set_position(loader, twice, "step 1")


class WithPosition(Stateful):
    """A class of the user's with both: its position counts."""

    position = 0

    def get_state(self):
        return {"other": 1}

    set_state = None


def test_a_class_may_have_a_position_and_another_state(tmp_path):
    for last in (2, 4):
        own = WithPosition()
        with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
            ckpt.restore({"n": 0}, own)
            assert own.position == last - 2
            own.position = last
            ckpt.step({"n": 1}, own)


class Shard(Stateful):
    """The rows of one process, which are not those of another."""

    def state_dict(self):
        return {**super().state_dict(), "process": jax.process_index()}

    def load_state_dict(self, state):
        assert state["process"] == jax.process_index()
        super().load_state_dict(state)

    def __iter__(self):
        for batch in super().__iter__():
            yield {"row": batch["row"] + 1000 * jax.process_index()}


def lives(path):
    """The rows that each of three lives of a run gets on this process."""
    jdp.init()
    found = []
    for last in (2, 5, NUM_BATCHES):
        batches = jdp.shard_batches(Shard())
        with batches, jdp.Checkpointer(path, resume=True) as ckpt:
            state = ckpt.restore({"n": 0}, batches)
            for batch in batches:
                own = [np.asarray(shard.data) for shard in batch["row"].addressable_shards]
                found += np.concatenate(own).tolist()
                state = {"n": state["n"] + 1}
                ckpt.step(state, batches)
                if ckpt.steps == last:
                    break
    return found


@pytest.mark.processes
@pytest.mark.xdist_group("processes")
def test_each_process_continues_its_own_loader(processes, tmp_path):
    found = processes(2).run(lives, str(tmp_path), timeout_s=120.0)
    assert found == [(ROWS + 1000 * process).tolist() for process in range(2)]


WORKERS = """
import sys
import numpy as np

class Rows:
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return np.full(2, i, np.float32)

if __name__ == "__main__":
    import absl.flags, grain, jdp
    if "parsed" in sys.argv:
        absl.flags.FLAGS.mark_as_parsed()
    jdp.init()
    stream = grain.MapDataset.source(Rows()).to_iter_dataset().batch(4)
    stream = stream.mp_prefetch(grain.MultiprocessingOptions(num_workers=1))
    with jdp.shard_batches(iter(stream)) as batches:
        print([batch[:, 0].tolist() for batch in batches])
"""


# If the first one passes one day, the page need not say so.
@pytest.mark.processes
@pytest.mark.xdist_group("processes")
@pytest.mark.all_sets
@pytest.mark.parametrize("how", ["unparsed", "parsed"])
def test_workers_of_grain_need_the_flags_of_absl(tmp_path, how):
    script = tmp_path / "train.py"
    script.write_text(WORKERS)
    command = [sys.executable, "-W", "ignore", script, how]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=environment(1), timeout=120, check=False
    )
    if how == "parsed":
        assert ended.stdout.strip() == "[[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]", ended.stderr
    else:
        assert ended.returncode == 1 and "UnparsedFlagAccessError" in ended.stderr
