"""Directories of Orbax and Flax are read or named, and no run resumes there from nothing."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training import checkpoints, train_state

import jdp

PARAMS = {"layer": {"w": np.arange(6.0, dtype=np.float32).reshape(2, 3), "a/b": np.ones(3, "i4")}}


pytestmark = [
    pytest.mark.usefixtures("quiet"),
    # Flax deprecates the files that this reads, and users have them.
    pytest.mark.filterwarnings("ignore:Flax Checkpointing:DeprecationWarning"),
]


def trained(step):
    params = jax.tree.map(lambda x: x + np.asarray(step, x.dtype), PARAMS)
    return train_state.TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1)).replace(
        step=step
    )


def managed(path, *steps, item="default", **options):
    manager = ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(**options))
    for step in steps:
        saved = ocp.args.StandardSave(trained(step))
        items = {item: saved, "notes": ocp.args.JsonSave({"a": 1})}
        manager.save(step, args=saved if item == "default" else ocp.args.Composite(**items))
    manager.close()


def of_manager(path):
    managed(path, 3, 7)


def of_manager_with_prefix(path):
    managed(path, 3, 7, item="state", step_prefix="run", step_format_fixed_length=6)


def of_flax_by_orbax(path):
    for step in (3, 7):
        checkpoints.save_checkpoint(path, trained(step), step, keep=2)


WRITERS = [of_manager, of_manager_with_prefix, of_flax_by_orbax]


def equal(found, right):
    assert jax.tree.structure(found) == jax.tree.structure(right)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True)
    return all(np.array_equal(x, y) and x.dtype == np.asarray(y).dtype for x, y in pairs)


@pytest.mark.all_sets
@pytest.mark.parametrize("write", WRITERS)
def test_the_latest_step_or_a_named_one_is_loaded_whole_or_in_part(tmp_path, write):
    write(tmp_path)
    assert equal(jdp.load(tmp_path, part="params"), trained(7).params)
    assert jdp.load(tmp_path, 3)["step"] == 3
    like = jax.tree.map(lambda x: x * 0, trained(0))
    found = jdp.load(tmp_path, like=like)
    assert equal(found.opt_state, like.opt_state) and equal(found.params, trained(7).params)
    count = jdp.load(tmp_path, part="opt_state[0].count", like=jnp.int32(1))
    assert count == 0 and count.dtype == "int32"
    with pytest.raises(ValueError, match=r"no step 4[.].*\[3, 7\]"):
        jdp.load(tmp_path, 4)
    with pytest.raises(ValueError, match="no 'ema'.*'opt_state', 'params', 'step'"):
        jdp.load(tmp_path, part="ema")


@pytest.mark.parametrize("path", ["3", "3/default"])
def test_a_step_and_its_item_are_loaded(tmp_path, path):
    of_manager(tmp_path)
    assert jdp.load(tmp_path / path)["step"] == 3


def test_a_bare_tree_is_loaded_without_its_texts(tmp_path):
    tree = {"a": [jnp.ones(2, jnp.bfloat16), {"b": 3}], "key": jax.random.key(1), "name": "x"}
    ocp.PyTreeCheckpointer().save(tmp_path / "bare", tree)
    found = jdp.load(tmp_path / "bare")
    assert equal(found, {"a": [np.ones(2, jnp.bfloat16), {"b": np.int64(3)}], "key": found["key"]})
    np.testing.assert_array_equal(found["key"], jax.random.key_data(tree["key"]))


def test_of_several_trees_the_error_names_each(tmp_path):
    args = {name: ocp.args.StandardSave(PARAMS) for name in ("ema", "params")}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(5, args=ocp.args.Composite(**args))
    with pytest.raises(ValueError, match="step 5.* ema, params.*5/ema"):
        jdp.load(tmp_path)
    assert equal(jdp.load(tmp_path / "5" / "params"), PARAMS)


def of_flax(path):
    flax.config.update("flax_use_orbax_checkpointing", False)
    try:
        for step in (3, 12):
            checkpoints.save_checkpoint(path, trained(step), step, keep=2)
    finally:
        flax.config.update("flax_use_orbax_checkpointing", True)


def test_files_of_flax_are_named_with_the_line_that_reads_them(tmp_path):
    of_flax(tmp_path)
    with pytest.raises(ValueError, match="Flax.* step 12.*restore_checkpoint") as caught:
        jdp.load(tmp_path)
    line = str(caught.value).rpartition("Write ")[2].rstrip(".")
    scope = {"flax": flax, "state": trained(0)}
    exec(line, scope)
    assert scope["state"].step == 12


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {path: path.read_bytes() for path in files}


@pytest.mark.all_sets
@pytest.mark.parametrize("write", [*WRITERS, of_flax])
def test_a_run_does_not_resume_there_and_may_begin(tmp_path, write, caplog):
    write(tmp_path)
    before, state = contents(tmp_path), {"w": jnp.zeros(2)}
    with pytest.raises(RuntimeError, match="(Orbax|Flax).* step (7|12).*(jdp.load|restore_ch).*"):
        jdp.Checkpointer(tmp_path, resume=True).restore(state)
    assert contents(tmp_path) == before and not caplog.records
    with jdp.Checkpointer(tmp_path, save_every=1, keep=1) as ckpt:
        state = ckpt.restore(state)
        for _ in range(2):
            ckpt.step(state)
    assert caplog.text.count("starts at step 0") == 1
    assert {path: data for path, data in contents(tmp_path).items() if path in before} == before
    with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
        ckpt.restore(state)
        assert ckpt.steps == 2
    assert jdp.load(tmp_path)["w"].shape == (2,)


def test_a_folder_of_a_checkpoint_of_jdp_is_not_of_another_tool(tmp_path):
    with jdp.Checkpointer(tmp_path) as ckpt:
        ckpt.step(ckpt.restore({"w": jnp.zeros(2)}))
    for folder in ("1-1", "1-1/state"):
        with pytest.raises(FileNotFoundError, match="Checkpointer"):
            jdp.load(tmp_path / folder)
