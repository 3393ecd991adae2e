"""A state that is split over any ranks is restored on any others, in the placement given there."""

import numpy as np
import pytest
from support.sharded_state import STAGES, differences, state_at, values_at

import jdp
from jdp.checkpoint import shards
from jdp.checkpoint.load import fill
from jdp.checkpoint.saved_leaves import SavedLeaf

STEP = 3


def save(path, state):
    with jdp.Checkpointer(path) as ckpt:
        ckpt.restore(state)
        ckpt.step(state)


def restored(path, state):
    with jdp.Checkpointer(path, resume=True) as ckpt:
        return ckpt.restore(state)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(("stage", "other"), [("all", "optimizer"), ("replicated", "all")])
def test_any_stage_and_number_of_ranks_is_restored_from_any_other(
    make_mesh, tmp_path, num_ranks, stage, other
):
    save(tmp_path, state_at(STEP, make_mesh(4), stage))
    for like in (stage, other):
        mesh = make_mesh(num_ranks)
        state = restored(tmp_path, state_at(0, mesh, like))
        assert differences(state, state_at(STEP, mesh, like)) == []


@pytest.mark.parametrize("stage", STAGES)
def test_load_returns_a_sharded_state_as_a_whole_and_in_any_placement(make_mesh, tmp_path, stage):
    save(tmp_path, state_at(STEP, make_mesh(8), stage))
    loaded, right = jdp.load(tmp_path), values_at(STEP)
    assert {name: loaded[name].tobytes() for name in right} == {
        name: value.tobytes() for name, value in right.items()
    }
    like = state_at(0, make_mesh(3), "all")
    assert differences(jdp.load(tmp_path, like=like), state_at(STEP, make_mesh(3), "all")) == []
    assert np.array_equal(jdp.load(tmp_path, part="w"), right["w"])


def test_a_sharded_state_of_another_model_is_refused_by_its_leaf(make_mesh, tmp_path):
    save(tmp_path, state_at(STEP, make_mesh(4), "all"))
    with pytest.raises(ValueError, match=r"`\['w'\]` is float32\[5, 24\] .*float32\[6, 24\]"):
        restored(tmp_path, state_at(0, make_mesh(2), "all", rows=6))


def test_a_rule_is_called_for_rows_of_lost_hosts_though_as_many_remain():
    leaves = [SavedLeaf("['own'].value", (3,), "float32", None)]
    parts = {n: shards.LeafPart(0, ((n, n + 1),), n) for n in range(3)}
    (leaf,), remain = shards.without(leaves, parts, [1])
    value = shards.SplitValue(
        leaf, remain, lambda numbers: {n: np.full(1, n, "f") for n in numbers}, is_cut=True
    )
    state = {"own": jdp.per_rank(np.zeros(2, "f"), resize=lambda saved, like: saved + 10)}
    new, _ = fill(state, [leaf], [value], "here")
    assert [*new["own"].value] == [10, 12]
