import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.processes import environment

from jdp.checkpoint import orbax_files
from jdp.checkpoint.directory import Folder, TornError

ARRAYS = {
    "0.params['a/b']": np.arange(6, dtype=np.float32).reshape(2, 3),
    "1": np.array([1.5, -0.0, np.nan], ml_dtypes.bfloat16),
    "2.step": np.array(7, np.int32),
    "3": np.array([True, False]),
    "4": np.array([1 + 2j], np.complex64),
    "5": np.array([0.5, 2.0], ml_dtypes.float8_e4m3fn),
    "6": np.array([2**63], np.uint64),
}


@pytest.fixture
def folder(tmp_path):
    folder = Folder(tmp_path / "runs" / "a")
    folder.lock()
    yield folder
    folder.unlock()


def steps(folder):
    return [(each.life, each.step) for each in folder.checkpoints()]


# What is still intact, latest first.
def intact(folder):
    found = []
    for checkpoint in folder.checkpoints():
        with contextlib.suppress(TornError):
            found.append(folder.facts(checkpoint)["step"])
    return found


def write(folder, step, life=1, arrays=None):
    arrays = arrays or {"0": np.full(1000, step, np.float32)}
    folder.write(life, step, facts(step, arrays, life), arrays)


def facts(step, arrays, life=1):
    leaves = [[name[1:], [*x.shape], str(x.dtype), None] for name, x in arrays.items()]
    return {"life": life, "step": step, "position": 640, "leaves": leaves}


def test_arrays_of_all_dtypes_come_back_with_equal_bits(folder):
    folder.write(1, 20, facts(20, ARRAYS), ARRAYS)
    (checkpoint,) = folder.checkpoints()
    assert folder.facts(checkpoint) == facts(20, ARRAYS)
    found = folder.read(checkpoint, list(ARRAYS))
    for name, array in ARRAYS.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def test_the_later_life_is_the_newer(folder):
    for life, step in [(1, 10), (1, 9), (2, 5), (1, 100)]:
        write(folder, step, life)
    assert steps(folder) == [(2, 5), (1, 100), (1, 10), (1, 9)]


def test_only_the_latest_are_kept(folder):
    for step in (5, 10, 15, 20):
        write(folder, step)
    folder.keep(2)
    assert steps(folder) == [(1, 20), (1, 15)]
    assert sorted(path.name for path in folder.path.iterdir()) == ["15-1", "20-1", "lock"]


def truncated(path):
    os.truncate(path, path.stat().st_size - 1)


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def grown(path):
    with open(path, "ab") as file:
        file.write(b"\0")


@pytest.mark.parametrize("damage", [truncated, flipped, grown, Path.unlink])
def test_damage_to_any_file_is_found_and_the_file_named(folder, damage):
    write(folder, 10)
    files = [path for path in folder.checkpoints()[0].path.rglob("*") if path.is_file()]
    assert len(files) >= 5
    for file in files:
        data = file.read_bytes()
        if not data:
            continue
        damage(file)
        with pytest.raises(TornError, match="manifest" if file.name == "manifest" else file.name):
            folder.facts(folder.checkpoints()[0])
        file.write_bytes(data)
    assert intact(folder) == [10]


def test_a_manifest_says_what_it_holds_or_is_torn(folder):
    write(folder, 10)
    manifest = folder.checkpoints()[0].path / "manifest"
    manifest.write_text(manifest.read_text().replace('"step": 10', '"step": 11'))
    assert intact(folder) == []


class Died(BaseException):
    pass


@pytest.mark.parametrize("last", ["os.fsync", "os.rename"])
def test_a_death_while_writing_leaves_no_checkpoint_and_is_cleared_away(folder, monkeypatch, last):
    def die(*_):
        raise Died

    write(folder, 10)
    with monkeypatch.context() as patch:
        patch.setattr(f"jdp.checkpoint.directory.{last}", die)
        with pytest.raises(Died):
            write(folder, 20)
    assert steps(folder) == [(1, 10)]
    assert len(list(folder.path.iterdir())) == 3
    folder.unlock()
    folder.lock()
    assert sorted(path.name for path in folder.path.iterdir()) == ["10-1", "lock"]


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(folder, monkeypatch):
    synced, missing, fsync, rename = set(), [], os.fsync, os.rename

    def noted_fsync(file):
        synced.add(Path(f"/proc/self/fd/{file}").readlink())
        fsync(file)

    def noted_rename(old, new):
        if new == folder.path / "10-1":  # Orbax has a name of its own until it is done
            missing.extend(path for path in [old, *old.rglob("*")] if path not in synced)
        rename(old, new)

    monkeypatch.setattr("jdp.checkpoint.directory.os.fsync", noted_fsync)
    monkeypatch.setattr("jdp.checkpoint.directory.os.rename", noted_rename)
    write(folder, 10)
    assert not missing and intact(folder) == [10]
    assert folder.path in synced


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def test_what_others_have_in_the_directory_is_never_touched_and_named_once(folder, caplog):
    write(folder, 5)
    shutil.copytree(
        folder.path / "5-1", folder.path / "20-9.jdp-part"
    )  # of a removal that was cut off
    for name in ("2026-11", "30-1.part", "31-1.4.part", "a-b.gathering", "6-1-7f.gathering"):
        (folder.path / name / "photos").mkdir(parents=True)
        (folder.path / name / "photos" / "1.png").write_bytes(b"\x89PNG")
    for name in ("9-9", "notes.gathering", "notes.part", "8-1.part", "7-1-0a.gathering"):
        (folder.path / name).write_text("mine")
    (folder.path / "3-3").mkdir()
    before = contents(folder.path)
    mine = [name for name in before if name.split("/")[0] not in ("lock", "5-1", "20-9.jdp-part")]
    folder.unlock()
    again = Folder(folder.path)
    again.lock()
    for step in (10, 15, 20):
        write(again, step)
        again.keep(2)
    assert steps(again) == [(1, 20), (1, 15)]
    again.unlock()
    after = contents(folder.path)
    assert len(mine) > 20 and {name: after.get(name, "gone") for name in mine} == {
        name: before[name] for name in mine
    }
    assert not (folder.path / "20-9.jdp-part").exists() and not (folder.path / "5-1").exists()
    for name in ("2026-11", "9-9", "3-3"):
        assert caplog.text.count(f"{name} is not a checkpoint") == 1


def test_a_checkpoint_whose_place_is_taken_by_others_is_an_error_that_touches_nothing(folder):
    (folder.path / "10-1").mkdir()
    (folder.path / "10-1" / "mine").touch()
    (folder.path / "20-1").touch()
    (folder.path / "25-1").mkdir()
    for step in (10, 20, 25):
        with pytest.raises(OSError, match=f"step {step} could not be saved"):
            write(folder, step)
    assert (folder.path / "10-1" / "mine").exists() and (folder.path / "20-1").is_file()
    assert not [*(folder.path / "25-1").iterdir()]
    write(folder, 30)
    assert steps(folder) == [(1, 30)]


@pytest.mark.parametrize("known", [False, True])
def test_damaged_checkpoints_take_the_place_of_no_intact_one(folder, known):
    for step in (5, 10, 15, 20):
        write(folder, step)
    for step, damage in ((15, truncated), (20, flipped if known else grown)):
        files = [f for f in (folder.path / f"{step}-1" / "state").rglob("*") if f.is_file()]
        damage(max(files, key=lambda file: file.stat().st_size))
    if known:
        assert intact(folder) == [10, 5]
    folder.keep(2)
    assert steps(folder) == [(1, 20), (1, 15), (1, 10), (1, 5)]
    write(folder, 25)
    folder.keep(2)
    assert steps(folder) == [(1, 25), (1, 20), (1, 15), (1, 10)]
    for step in (30, 35):
        write(folder, step)
    folder.keep(2)
    assert steps(folder) == [(1, 35), (1, 30)]


def test_one_without_a_readable_manifest_is_set_aside_by_name(folder):
    for step in (5, 10):
        write(folder, step)
    (folder.path / "5-1" / "manifest").write_text("no JSON")
    folder.keep(1)
    assert sorted(path.name for path in folder.path.iterdir()) == ["10-1", "5-1.damaged", "lock"]
    assert any((folder.path / "5-1.damaged" / "state").iterdir())


def test_a_renamed_checkpoint_is_what_its_manifest_says_and_stays(folder, caplog):
    for step in (10, 20):
        write(folder, step)
    (folder.path / "10-1").rename(folder.path / "30-2")
    assert steps(folder) == [(1, 20), (1, 10)] and intact(folder) == [20, 10]
    assert caplog.text.count("30-2 holds step 10 of life 1") == 1
    assert folder.read(folder.checkpoint(1, 10), ["0"])["0"][0] == 10
    with pytest.raises(OSError, match="step 30 could not be saved .*: 20"):
        write(folder, 30, 2)
    write(folder, 40)
    folder.keep(1)
    assert steps(folder) == [(1, 40), (1, 10)] and intact(folder) == [40, 10]


@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_damaged_checkpoint_makes_room_for_the_same_step_and_an_intact_one_does_not(
    folder, has_manifest
):
    write(folder, 10)
    with pytest.raises(OSError, match="step 10 could not be saved"):
        write(folder, 10, arrays={"0": np.zeros(3)})
    assert folder.read(folder.checkpoint(1, 10), ["0"])["0"][0] == 10
    path = folder.path / "10-1"
    (truncated if has_manifest else Path.unlink)(path / "manifest")
    (path / "state" / "_METADATA").unlink()
    assert not intact(folder)
    write(folder, 10)
    assert intact(folder) == [10]
    folder.keep(1)
    write(folder, 20)
    folder.keep(1)
    assert steps(folder) == [(1, 20)]


# In a mount namespace of its own, so that nothing is left however it ends; without root, files may
# not be larger than the disk would be, which is nearly the same.
ON_A_SMALL_DISK = """
path=$1
shift
mount -t tmpfs -o size=400k tmpfs "$path" 2> /dev/null || ulimit -f 200
exec "$@"
"""

FULL = """
import resource, sys
import numpy as np
from jdp.checkpoint.directory import Folder
folder = Folder(sys.argv[1])
folder.lock()
def facts(step, num):
    return {"life": 1, "step": step, "leaves": [["", [num], "float32", None]]}
small, rng = {"0": np.ones(1000, np.float32)}, np.random.default_rng(0)
folder.write(1, 10, facts(10, 1000), small)
try:
    folder.write(1, 20, facts(20, 250_000), {"0": rng.random(250_000, np.float32)})
except OSError as error:
    print(error)
print(sorted(path.name for path in folder.path.iterdir()))
folder.write(1, 30, facts(30, 1000), small)
print([folder.facts(each)["step"] for each in folder.checkpoints()])
folder.unlock()
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    folder.lock()
except OSError as error:
    print(error)
"""


def test_a_full_disk_is_an_error_that_leaves_the_last_good_checkpoint(tmp_path):
    alone = ["unshare", "--mount"] if not os.geteuid() else []
    done = subprocess.run(
        [*alone, "sh", "-c", ON_A_SMALL_DISK, "sh", str(tmp_path)]
        + [sys.executable, "-c", FULL, str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert not done.returncode, done.stderr
    *error, left, intact, locked = done.stdout.splitlines()
    assert re.search(r"step 20 .* 1000000 bytes.*: 10\.", " ".join(error))
    assert left == "['10-1', 'lock']" and intact == "[30, 10]"
    assert re.search(r"\[Errno 27\].* Checkpointer", locked)


def test_a_folder_that_cannot_be_written_to_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file/run: .*Checkpointer"):
        Folder(tmp_path / "file" / "run").lock()


def test_a_lock_of_others_is_refused_and_kept(tmp_path):
    (tmp_path / "lock").write_bytes(mine := b"\xff mine")
    with pytest.raises(OSError, match="`lock`.*Checkpointer"):
        Folder(tmp_path).lock()
    assert (tmp_path / "lock").read_bytes() == mine
    (tmp_path / "lock").write_bytes(b"proc")  # the disk was full
    folder = Folder(tmp_path)
    folder.lock()
    assert folder.owner().startswith("process ")
    folder.unlock()


def test_a_url_is_no_folder():
    with pytest.raises(ValueError, match="^gs://bucket/run "):
        Folder("gs://bucket/run")


@pytest.mark.parametrize("path, error", [("", ValueError), (None, TypeError), (3, TypeError)])
def test_what_names_no_folder_is_refused(path, error):
    with pytest.raises(error, match="directory of checkpoints"):
        Folder(path)


HOLDER = """
import sys, time
from jdp.checkpoint.directory import Folder
folder = Folder(sys.argv[1])
folder.lock()
print("locked", flush=True)
time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_is_dead(tmp_path, monkeypatch):
    monkeypatch.setattr("jdp.checkpoint.directory._TIMEOUT_S", 0.1)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], env=environment(), stdout=subprocess.PIPE
    )
    folder = Folder(tmp_path)
    with holder:
        try:
            assert holder.stdout.readline() == b"locked\n"
            with pytest.raises(RuntimeError, match=f"process {holder.pid} "):
                folder.lock()
        finally:
            holder.send_signal(signal.SIGKILL)
    folder.lock()
    folder.unlock()


FORKER = """
import os, sys, time
from jdp.checkpoint.directory import Folder
folder = Folder(sys.argv[1])
folder.lock()
if not os.fork():
    os.setsid()
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    os._exit(0)
time.sleep(60)
"""


def test_a_forked_child_that_outlives_the_run_does_not_keep_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr("jdp.checkpoint.directory._TIMEOUT_S", 0.5)
    forker = subprocess.Popen(
        [sys.executable, "-c", FORKER, str(tmp_path)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with forker:
        child = int(forker.stdout.readline())
        other = Folder(tmp_path)
        with pytest.raises(RuntimeError, match=f"{forker.pid}"):
            other.lock()  # the run itself still has it
        forker.send_signal(signal.SIGKILL)
        forker.wait()
        os.kill(child, 0)  # which lives
        other.lock()
        other.unlock()
        forker.stdin.close()


def test_a_run_that_goes_on_waits_for_who_holds_the_lock(folder, monkeypatch):
    monkeypatch.setattr("jdp.checkpoint.directory._TIMEOUT_S", 0.0)
    timer = threading.Timer(0.3, folder.unlock)
    timer.start()
    other = Folder(folder.path)
    other.lock(resumes=True)
    other.unlock()
    timer.join()


def test_two_runs_of_one_process_are_kept_apart(folder, monkeypatch):
    monkeypatch.setattr("jdp.checkpoint.directory._TIMEOUT_S", 0.1)
    with pytest.raises(RuntimeError, match=f"{folder.path} .*process {os.getpid()} "):
        Folder(folder.path).lock()
    folder.unlock()
    other = Folder(folder.path)
    other.lock()
    other.unlock()


def test_a_gathering_of_a_later_commit_outlives_one_that_is_complete(folder):
    kept, done = folder.gathering(1, 20, "b"), folder.gathering(1, 10, "a")
    folder.discard_gathering(up_to=(1, 10))
    assert kept.is_dir() and not done.exists()


def test_the_import_of_orbax_leaves_the_form_of_log_lines():
    script = (
        "import logging; from jdp.checkpoint import orbax_files; orbax_files.prepare()\n"
        "from absl import logging as absl_logging; absl_logging.info('hidden')\n"
        "logging.getLogger('jdp').warning('jdp: a line')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stderr == "jdp: a line\n"


PARTS = {
    "0['w']@0,12": np.arange(60, dtype=np.float32).reshape(5, 12),
    "1['a/b']@0": np.full(7, -0.0, np.float32),
    "2['zeros']@3": np.zeros((2, 3)),
    "3.n": np.array(5, np.int64),
    "4['h']": np.asarray(jnp.arange(6, dtype=jnp.bfloat16)),
    "5['nibbles']": np.asarray(jnp.arange(3, dtype=jnp.int4)),
    "6['c']": np.array([1j, np.nan], np.complex64),
}


def bits(arrays):
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in arrays.items()}


@pytest.mark.parametrize("batch_bytes", [1, 64 << 20])
def test_arrays_come_back_with_their_bits(tmp_path, monkeypatch, batch_bytes):
    monkeypatch.setattr(orbax_files, "_BATCH_BYTES", batch_bytes)
    orbax_files.write_parts(tmp_path / "state-1", iter(PARTS.items()))
    assert bits(orbax_files.read_parts(tmp_path / "state-1", [*PARTS])) == bits(PARTS)
    some = [*PARTS][1:3]
    assert [*orbax_files.read_parts(tmp_path / "state-1", some)] == some


def test_an_array_whose_files_are_gone_is_an_error(tmp_path):
    orbax_files.write_parts(tmp_path / "state-1", PARTS.items())
    for path in (tmp_path / "state-1").rglob("*"):
        if path.parent.name == "d":
            path.unlink()
    with pytest.raises(ValueError, match="NOT_FOUND|DATA_LOSS"):
        orbax_files.read_parts(tmp_path / "state-1", [*PARTS])
