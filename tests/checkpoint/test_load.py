"""`jdp.load`, and `Checkpointer.restore` into a state with other leaves."""

import json
import logging
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp.checkpoint.load import parse
from jdp.distributed.checks import state

PARAMS = {
    "layer": {"w": np.arange(6.0, dtype=np.float32).reshape(2, 3)},
    "b": [np.ones(3, np.float32), np.float32(2.5)],
}


@pytest.fixture(autouse=True)
def quiet(before_init, monkeypatch, caplog):
    monkeypatch.delenv("JDP_RESUME", raising=False)
    caplog.set_level(logging.INFO, "jdp")


def new(tx, params=PARAMS, **kwargs):
    return jdp.TrainState.create(params, jdp.replicated(tx), seed=3, **kwargs)


def saved(path, state, *steps, **options):
    with jdp.Checkpointer(path, save_every=1, **options) as ckpt:
        ckpt.restore(state)
        for _ in range(*steps):
            ckpt.step(state)


def resumed(path, state, **options):
    with jdp.Checkpointer(path, resume=True) as ckpt:
        return ckpt.restore(state, **options)


def assert_equal(found, right):
    assert jax.tree.structure(found) == jax.tree.structure(right)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert np.asarray(x).dtype == jnp.asarray(y).dtype
        np.testing.assert_array_equal(x, jnp.asarray(y))


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_a_state_is_loaded_without_a_mesh(make_mesh, tmp_path, num_ranks):
    jdp.init(make_mesh(num_ranks))
    own = jdp.per_rank(np.arange(2 * num_ranks))
    saved(tmp_path, new(optax.adam(0.1), model_state={"own": own}), 2)
    found = jdp.load(tmp_path)
    assert_equal(found["params"], PARAMS)
    assert found["model_state"]["own"]["value"].tolist() == [*range(2 * num_ranks)]
    assert found["opt_state"][0]["mu"]["layer"]["w"].shape == (2, 3)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(found["params"]))


def test_a_step_is_chosen_and_one_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    with jdp.Checkpointer(tmp_path, save_every=2, keep=3) as ckpt:
        ckpt.restore({"n": jnp.int32(0)})
        for n in range(1, 7):
            ckpt.step({"n": jnp.int32(n)})
    assert jdp.load(tmp_path)["n"] == 6 and jdp.load(tmp_path, 4)["n"] == 4
    with pytest.raises(ValueError, match=r"no step 3[.].*\[2, 4, 6\]"):
        jdp.load(tmp_path, 3)
    with pytest.raises(FileNotFoundError, match="nothing"):
        jdp.load(tmp_path / "nothing")


def test_a_damaged_checkpoint_is_passed_over_and_refused_when_asked_for(tmp_path, caplog):
    saved(tmp_path, {"n": jnp.int32(7)}, 2)
    (tmp_path / "2-1" / "manifest").write_text("{}")
    caplog.clear()
    assert jdp.load(tmp_path)["n"] == 7
    assert "2-1" in caplog.text
    with pytest.raises(RuntimeError, match="2-1"):
        jdp.load(tmp_path, 2)
    (tmp_path / "1-1" / "manifest").write_text("{}")
    with pytest.raises(RuntimeError, match="1-1"):
        jdp.load(tmp_path)


def test_a_part_is_loaded_and_only_that_is_read(tmp_path, monkeypatch):
    saved(tmp_path, new(optax.adam(0.1)), 1)
    read, names = jdp.checkpoint.directory.Folder.read, []

    def recorded(folder, checkpoint, wanted):
        names.extend(wanted)
        return read(folder, checkpoint, wanted)

    monkeypatch.setattr(jdp.checkpoint.directory.Folder, "read", recorded)
    for part in ("params", ".params"):
        assert_equal(jdp.load(tmp_path, part=part), PARAMS)
    assert len(names) == 6 and all(".params" in name for name in names)
    assert jdp.load(tmp_path, part="params['b'][1]") == 2.5
    assert jdp.load(tmp_path, part=".opt_state[0].count") == 0
    with pytest.raises(ValueError, match="model.*'opt_state', 'params'"):
        jdp.load(tmp_path, part="model")


class Layer(NamedTuple):
    w: jax.Array
    act: object


def test_a_part_takes_the_form_of_a_given_tree(make_mesh, tmp_path):
    params = [Layer(jnp.ones(3, jnp.bfloat16), jnp.tanh), (jax.random.key(4), 1.5)]
    saved(tmp_path, {"params": params, "n": 1}, 1)
    blank = [Layer(jnp.zeros(3, jnp.bfloat16), jnp.tanh), (jax.random.key(0), 0.0)]
    layer, (key, number) = jdp.load(tmp_path, part="params", like=blank)
    assert layer.act is jnp.tanh and layer.w.tolist() == [1.0] * 3
    assert number == 1.5 and type(number) is float
    assert jax.random.key_data(key).tolist() == jax.random.key_data(jax.random.key(4)).tolist()
    shape = [Layer(jax.ShapeDtypeStruct((3,), jnp.bfloat16), None)]
    assert jdp.load(tmp_path, part="params[0]", like=shape[0]).w.tolist() == [1.0] * 3
    with pytest.raises(ValueError, match=r"`\.w` is bfloat16\[3\] .* float32\[3\]"):
        jdp.load(tmp_path, part="params[0]", like=Layer(jnp.zeros(3), None))
    with pytest.raises(ValueError, match=r"int64.*float32.*like=") as caught:
        jdp.load(tmp_path, part="n", like=jnp.zeros(()))
    assert "Checkpointer" not in str(caught.value)
    for wrong in ({"part": 3}, {"step": "1"}, {"step": 1.0}):
        with pytest.raises(TypeError, match=r"(part|step) must be"):
            jdp.load(tmp_path, **wrong)
    again = jdp.load(tmp_path)["params"]
    assert jax.random.key_data(again[1][0]).tolist() == jax.random.key_data(key).tolist()


def test_paths_are_read_as_jax_writes_them():
    tree = {"a['b']": [0, {"c.d": 1, "e\"]'": 2}, {7: 3, -1: 4}], "x": (5,), "": 6}
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        keys = [key for key, _ in parse(jax.tree_util.keystr(path))]
        assert keys == [getattr(key, "key", getattr(key, "idx", None)) for key in path]


def test_a_checkpoint_of_0_1_0_is_loaded():
    found = jdp.load(Path(__file__).parent / "written_by_0_1_0")
    assert found["nibbles"].tolist() == [0, 1, 15] and found["n"] == 3
    assert found["nothing"].shape == (0, 3)


def test_a_home_directory_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    saved("~/run", {"n": jnp.int32(7)}, 1)
    assert (tmp_path / "run" / "1-1").is_dir() and jdp.load("~/run")["n"] == 7


# What a state has that the run did not, and the other way round.
def test_missing_leaves_keep_what_is_given_when_that_is_asked_for(make_mesh, tmp_path, caplog):
    jdp.init(make_mesh(2))
    trained = jax.tree.map(lambda x: x + 1, PARAMS)
    saved(tmp_path, new(optax.adam(0.1), trained), 3)
    other = new(optax.sgd(0.1, momentum=0.9), model_state={"ema": np.full(2, 8.0, np.float32)})
    with pytest.raises(ValueError, match=r"\.opt_state\[0\]\.mu.*missing=\"keep\""):
        resumed(tmp_path, other)
    caplog.clear()
    found = resumed(tmp_path, other, missing="keep")
    assert_equal(found.params, trained)
    assert found.model_state["ema"].tolist() == [8.0, 8.0]
    assert_equal(found.opt_state, other.opt_state)
    [line] = [record.message for record in caplog.records if "ema" in record.message]
    assert ".model_state['ema']" in line and ".opt_state[0].mu" in line and "step 3" in line
    # All processes have the saved leaves from one place; the others may differ between them.
    kept = [id(found.model_state["ema"])]
    assert not {id(ref()) for ref in state._vouched} & {*kept}


def test_what_is_there_is_restored_without_a_word(tmp_path, caplog):
    saved(tmp_path, {"n": jnp.int32(7)}, 1)
    caplog.clear()
    assert resumed(tmp_path, {"n": jnp.int32(0)}, missing="keep")["n"] == 7
    assert not caplog.records


@pytest.mark.parametrize(
    "given", [{"n": jnp.zeros(3)}, {"other": jnp.zeros(2)}], ids=["another shape", "nothing"]
)
def test_a_leaf_of_another_shape_or_no_leaf_at_all_is_refused_all_the_same(tmp_path, given):
    saved(tmp_path, {"n": jnp.zeros(2)}, 1)
    with pytest.raises(ValueError, match=r"`\['n'\]`.* float32\[2\]"):
        resumed(tmp_path, given, missing="keep")


def test_all_leaves_that_differ_are_named_up_to_a_number(tmp_path):
    saved(tmp_path, {"a": [jnp.zeros(1)] * 30, "same": jnp.zeros(2)}, 1)
    with pytest.raises(
        ValueError, match=r"`\['a'\]\[0\]`.*`\['a'\]\[3\]`.* 22 .*`\['b'\]`"
    ) as error:
        resumed(tmp_path, {"b": jnp.zeros(2), "same": jnp.zeros(2)})
    assert len(str(error.value)) < 1000


def test_missing_is_one_of_two_words(tmp_path):
    with pytest.raises(ValueError, match="'drop'"):
        resumed(tmp_path, {"n": 0}, missing="drop")
    assert not [*tmp_path.iterdir()]


def test_a_manifest_that_is_too_deep_is_damage(tmp_path):
    saved(tmp_path, {"n": jnp.int32(7)}, 2)
    (tmp_path / "2-1" / "manifest").write_text("[" * 100_000)
    assert jdp.load(tmp_path)["n"] == 7
    assert resumed(tmp_path, {"n": jnp.int32(0)})["n"] == 7
    assert json.loads((tmp_path / "1-1" / "manifest").read_text())["manifest"]["facts"]["step"] == 1
