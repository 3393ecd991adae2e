"""A manifest with a right checksum and wrong content is damage: the checkpoint before is used."""

import itertools
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

import jdp
from jdp.checkpoint import manifest
from jdp.checkpoint.directory import Folder, TornError

WRONG = [None, True, -1, 2, 1.5, 10**30, "", "x", [], [[]], [1], {}, {"x": 1}]
STATE = {"w": np.arange(6.0, dtype=np.float32).reshape(2, 3), "n": np.int32(1)}

pytestmark = pytest.mark.usefixtures("quiet")


def restored(path):
    with jdp.Checkpointer(path, resume=True) as ckpt:
        return ckpt.restore({k: v * 0 for k, v in STATE.items()}, SimpleNamespace(position=0))


@pytest.fixture
def path(tmp_path):
    """Two checkpoints."""
    rows = SimpleNamespace(position=0)
    with jdp.Checkpointer(tmp_path, save_every=1) as ckpt:
        state = ckpt.restore(STATE, rows)
        for _ in range(2):
            ckpt.step(state, rows)
    return tmp_path


def places(tree, path=()):
    """Return the path of each value in JSON."""
    yield path
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from places(value, (*path, key))


def changed(tree, path, value):
    if not path:
        return value
    tree = {**tree} if isinstance(tree, dict) else [*tree]
    tree[path[0]] = changed(tree[path[0]], path[1:], value) if path[1:] else value
    return tree


def put(folder, content):
    document = {"sha256": manifest._checksum(content), "manifest": content}
    (folder / "manifest").write_text(json.dumps(document))


MORE = {"run": "a", "sources": {"train.py": ["0a", "0b"]}, "programs": {"step": {"0c": {"add": 2}}}}


def test_any_value_in_any_place_is_damage_or_restored(path):
    content = json.loads((path / "2-1" / "manifest").read_text())["manifest"]
    content["facts"] |= MORE
    num_damaged = num_restored = 0
    for where, value in itertools.product(places(content), WRONG):
        put(path / "2-1", changed(content, where, value))
        folder = Folder(path)
        try:
            folder.facts(folder.checkpoints()[0])
        except TornError:
            num_damaged += 1
            continue
        if where == ("facts", "position") and value is None:  # as written without batches
            continue
        found, num_restored = restored(path), num_restored + 1
        assert all(np.array_equal(found[name], STATE[name]) for name in STATE)
    assert num_damaged > 300 and num_restored > 20


SPLIT = {
    "life": 1,
    "step": 2,
    "leaves": [["w", [4, 2], "float32", None], ["b", [0], "float32", None]],
    "parts": [[0, [[0, 2], [0, 2]], 0], [0, [[2, 4], [0, 2]], 1]],
}
FILES = {"state-0/d": [1, "a"], "state-1/d": [1, "b"]}


@pytest.mark.parametrize(
    ("where", "value", "match"),
    [
        (("facts", "parts", 1, 0), 2, "leaf 2 of 2"),
        (("facts", "parts", 1, 0), 1, r"leaf 1 of 2 .*\[2, 4\]"),
        (("facts", "parts", 1, 1), [[2, 4]], r"leaf 0 of 2 .*\[\[2, 4\]\]"),
        (("facts", "parts", 1, 1, 0), [2, 5], "w float32.* part"),
        (("facts", "parts", 1, 1, 0), [3, 2], "w float32.* part"),
        (("facts", "parts", 1, 1, 0), [3, 4], "parts of w .* 6 values"),
        (("facts", "parts", 1, 2), 2, "state-2"),
        (("facts", "leaves", 0, 2), "float31", "leaves has 'float31'"),
        (("facts", "leaves", 0, 3), "dice", "leaves has 'dice'"),
        (("files",), {"state-0/d": [1, "a"]}, "state-1"),
        (("files", "../secret"), [1, "a"], "../secret"),
        (("facts",), {"step": 2}, "life"),
        (("facts", "position"), "3", "position is '3'"),
        (("facts", "data"), {"rows": 3}, "data has {'rows': 3}"),
    ],
)
def test_a_fault_is_named_and_neither_read_nor_written(tmp_path, where, value, match):
    content = {"facts": SPLIT, "files": FILES}
    manifest.write(tmp_path, SPLIT, FILES)
    assert manifest.read(tmp_path) == content
    wrong = changed(content, where, value)
    put(tmp_path, wrong)
    with pytest.raises(TornError, match=match):
        manifest.read(tmp_path)
    with pytest.raises(ValueError, match=match):
        manifest.write(tmp_path, wrong["facts"], wrong["files"])


@pytest.mark.parametrize("where", ["life", "leaves"])
def test_the_checkpoint_before_is_used_and_the_wrong_one_named(path, caplog, where):
    content = json.loads((path / "2-1" / "manifest").read_text())["manifest"]
    put(path / "2-1", changed(content, ("facts", where), ["x"]))
    assert jdp.load(path)["n"] == 1
    with jdp.Checkpointer(path, resume=True) as ckpt:
        ckpt.restore({k: v * 0 for k, v in STATE.items()}, SimpleNamespace(position=0))
        assert ckpt.steps == 1
    assert caplog.text.count("2-1: its manifest") == 2
    shutil.rmtree(path / "1-1")
    for use in (jdp.load, restored):
        with pytest.raises(RuntimeError, match=f"2-1: .*{where} has"):
            use(path)


def test_arrays_that_are_not_those_of_the_manifest_are_damage(path):
    content = json.loads((path / "2-1" / "manifest").read_text())["manifest"]
    folder = Folder(path)
    for number, leaf in (
        (0, ["['m']", [], "int32", None]),
        (1, ["['w']", [3, 2], "float32", None]),
    ):
        put(path / "2-1", changed(content, ("facts", "leaves", number), leaf))
        with pytest.raises(TornError, match=f"state has .*{leaf[0][2]}"):
            folder.facts(folder.checkpoints()[0])
