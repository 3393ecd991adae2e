"""Random accidents in a directory of checkpoints: the latest good one is found and stays.

A run writes checkpoints, dies, meets a full disk and starts again. Meanwhile others damage, rename
and copy its folders, and put their own beside them, which are never touched. `JDP_FUZZ_SEED=7`
repeats the seed of a failure.
"""

import contextlib
import errno
import json
import os
import random
import shutil
import time
from collections import Counter

import numpy as np
import pytest

import jdp
from jdp.checkpoint import directory, manifest, orbax_files
from jdp.checkpoint.directory import Folder
from jdp.checkpoint.manifest import TornError
from jdp.checkpoint.restore_candidates import Key, Sources

NUM_ACTIONS = 16
FOREIGN_NAMES = [
    "2026-11", "7", "checkpoint_9", "run_000012", "best", "30-1.part", "31-1.4.part", "5-1.damaged",
    "6-1-7f.gathering", "1-1 (copy)", "-1-1", "1-1-1", "state", "manifest", "٣-١", "10-1~", "8.tmp",
]  # fmt: skip
FOREIGN_FILES = ["photos/1.png", "state.txt", "notes", "1000/_METADATA", "statement/a", "lock"]


class Died(BaseException):
    """The run was killed."""


class Failing:
    """A module whose calls that write fail after a number of them: the disk is full, or it dies."""

    def __init__(self, module, accident):
        self._module, self._accident = module, accident

    def __getattr__(self, name):
        function = getattr(self._module, name)
        if name not in ("fsync", "rename", "rmtree"):
            return function

        def call(*args, **options):
            self._accident.count()
            return name == "fsync" or function(*args, **options)  # no power is cut here

        return call


class Accident:
    """What happens to the run at its n-th write; None: it does not."""

    def __init__(self):
        self.left, self.error = None, None

    def count(self):
        if self.left is None:
            return
        self.left -= 1
        if self.left < 0:
            self.left = None
            raise self.error


class Directory:
    """A directory, and what must be there.

    Attributes:
      good: the values of each intact checkpoint, by its path.
      hidden: paths of those whose damage only their checksums show.
      unreadable: paths of those of which no manifest proves that jdp wrote them.
      foreign: contents of all that is not of jdp.
    """

    def __init__(self, path, seed, patch):
        self.path, self.die, self.seed = path, random.Random(seed), seed
        self.good, self.hidden, self.unreadable, self.foreign = {}, set(), set(), {}
        self.accident, self.life, self.step, self.log = Accident(), 0, 0, []
        for module in (directory, manifest):
            patch.setattr(module, "os", Failing(os, self.accident))
        patch.setattr(directory, "shutil", Failing(shutil, self.accident))
        patch.setattr(directory, "orbax_files", Orbax(self.accident, self.die))
        self.folder = None

    def run(self):
        self.start()
        for _ in range(NUM_ACTIONS):
            action = self.die.choice(ACTIONS)
            self.log.append(action.__name__)
            action(self)
            self.require_foreign()
        self.start()
        self.folder.unlock()

    def require(self, is_right, what):
        listing = sorted(each.name for each in self.path.iterdir())
        assert is_right, f"seed {self.seed}: {what} after {self.log}; {listing}"

    def require_foreign(self):
        for path, content in self.foreign.items():
            self.require(path.exists() and contents(path) == content, f"{path.name} changed")
        for path in self.unreadable:
            aside = path.with_name(f"{path.name}.damaged")
            self.require(path.exists() or aside.exists(), f"{path.name} is removed")

    def latest(self):
        """Return the latest good checkpoint as a key and its values."""
        return max(self.good.values(), default=None)

    def start(self):
        """Begin the next life of the run, which finds the latest good checkpoint."""
        if self.folder is not None:
            self.folder.unlock()
        self.folder = Folder(self.path)
        self.folder.lock()
        left = [each.name for each in self.path.iterdir() if each.name.endswith(".jdp-part")]
        self.require(not left, f"{left} stay")
        sources, right = Sources(self.folder, None), self.latest()
        if right is None:
            self.require(sources.keys == [], f"found {sources.keys}")
        else:
            (life, step), value = right
            self.require(sources.keys == [Key(life, step)], f"{sources.keys}, not {right}")
            facts, [found] = sources.read(sources.keys[0])
            self.require((facts["step"], *found) == (step, *[value] * 3), "other values")
            self.require(jdp.load(self.path)["w"].tolist() == [value] * 3, "load differs")
        self.life, self.step = max(self.life, sources.life) + 1, right[0][1] if right else 0

    def save(self):
        """Write the next checkpoint, perhaps with an accident, and keep some."""
        self.step += self.die.randint(1, 5)
        if self.die.random() < 0.4:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.accident.error = self.die.choice([full, Died()])
            self.accident.left = self.die.randint(0, 14)
        place, value = self.path / f"{self.step}-{self.life}", self.die.random()
        is_free, count = not os.path.lexists(place), self.die.randint(1, 3)
        before, outcome = {**self.good}, "saved"
        try:
            leaves = [["['w']", [3], "float64", None]]
            facts = {"life": self.life, "step": self.step, "leaves": leaves}
            self.folder.write(self.life, self.step, facts, {"0['w']": np.full(3, value)})
        except OSError as error:
            outcome = "failed"
            self.require("No space" in str(error) or not is_free, str(error))
        except Died:
            outcome = "died"
        if place not in before and self.holds(value):  # perhaps in place of a damaged one
            self.good[place] = (self.life, self.step), value
            self.hidden.discard(place)
        self.require(outcome != "saved" or place in self.good, "a saved one is not intact")
        self.require(all(map(is_intact, before)), f"{outcome}, and lost one")
        if outcome == "saved":
            with contextlib.suppress(Died):
                self.folder.keep(count)
                outcome = "kept"
            self.require_kept(count, all_done=outcome == "kept" and self.accident.left is None)
        if outcome == "failed":
            self.require(not (self.path / f"{place.name}.jdp-part").exists(), "a part stays")
        if outcome == "kept":
            self.require(not any(self.path.glob("*.jdp-gathering")), "a gathering stays")
        RESULTS[outcome] += 1
        self.accident.left = None
        if outcome not in ("kept", "failed"):
            self.start()

    def holds(self, value):
        """Whether the checkpoint that is written now is there, with its value."""
        folder = Folder(self.path)
        checkpoint = folder.checkpoint(self.life, self.step)
        try:
            folder.facts(checkpoint)
        except TornError:
            return False
        return folder.read(checkpoint, ["0['w']"])["0['w']"][0] == value

    def require_kept(self, count, *, all_done):
        proper = {
            path: key for path, (key, _) in self.good.items() if path.name == f"{key[1]}-{key[0]}"
        }
        hidden = [tuple(map(int, path.name.split("-")))[::-1] for path in self.hidden]
        for path in [path for path in self.good if not is_intact(path)]:
            key, _ = self.good.pop(path)
            newer = [other for other in [*proper.values(), *hidden] if other > key]
            self.require(path in proper and len(newer) >= count, f"{path.name} is removed")
        self.hidden = {path for path in self.hidden if path.exists()}
        stay = len([path for path in proper if path in self.good])
        self.require(not all_done or stay <= count, f"{stay} stay of keep={count}")

    def damage(self):
        """Damage a good checkpoint, in its sizes or only in its checksums."""
        if not self.good:
            return
        latest = max(self.good, key=self.good.get)
        path = self.die.choice([latest, *sorted(self.good)])
        files = [each for each in files_in(path) if each.stat().st_size]
        file = self.die.choice([path / "manifest", self.die.choice(files)])
        kind = self.die.choice(["cut", "gone", "flipped", "wrong"])
        data = file.read_bytes()
        if kind == "wrong":
            wrong = {"facts": {"life": 9, "step": "x", "leaves": []}, "files": {}}
            document = {"sha256": manifest._checksum(wrong), "manifest": wrong}
            (path / "manifest").write_text(json.dumps(document))
        elif kind == "gone":
            file.unlink()
        elif kind == "cut":
            file.write_bytes(data[: self.die.randrange(len(data))])
        else:
            at = self.die.randrange(len(data))
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            if file.name != "manifest" and path.name == "-".join(
                map(str, self.good[path][0][::-1])
            ):
                self.hidden.add(path)
        if not manifest.exists(path):
            self.unreadable.add(path)
        del self.good[path]

    def rename(self):
        """Rename a good checkpoint, to a name like those of jdp or to another."""
        if not self.good:
            return
        path = self.die.choice(sorted(self.good))
        number = f"{self.die.randint(0, 30)}-{self.die.randint(0, 4)}"
        new = self.path / self.die.choice([number, number, number, "best", f"{path.name}.bak"])
        if os.path.lexists(new):
            return
        path.rename(new)
        found = self.good.pop(path)
        if "-" in new.name and "." not in new.name:
            self.good[new] = found
        else:
            self.foreign[new] = contents(new)

    def copy(self):
        """Leave a folder as a write, a removal or a gathering that was cut off left it."""
        if not self.good:
            return
        path = self.die.choice(sorted(self.good))
        name = self.die.choice(
            ["{}.jdp-part", "{}.3.jdp-part", "{}.removed.jdp-part", "{}-0a.jdp-gathering"]
        )
        part = self.path / name.format(self.die.choice([path.name, "70-1"]))
        if not part.exists():
            shutil.copytree(path, part)
            files = files_in(part)
            for file in self.die.sample(files, self.die.randint(0, len(files))):
                file.unlink()

    def add_foreign(self):
        """Put a folder, a file or a link of others into the directory."""
        number = f"{self.die.randint(0, 30)}-{self.die.randint(0, 4)}"
        path = self.path / self.die.choice([number, self.die.choice(FOREIGN_NAMES)])
        if os.path.lexists(path):
            return
        kind = self.die.choice(["file", "folder", "empty", "link"])
        outside = self.path.parent / f"outside {len(self.foreign)}"
        if kind == "file":
            path.write_text(f"mine {self.die.random()}")
        elif kind == "empty":
            path.mkdir()
        else:
            real = outside if kind == "link" else path
            for name in self.die.sample(FOREIGN_FILES, 2):
                (real / name).parent.mkdir(parents=True, exist_ok=True)
                (real / name).write_text(f"mine {self.die.random()}")
            if kind == "link":
                path.symlink_to(outside)
        self.foreign[path] = contents(path)


class Orbax:
    """`orbax_files`, whose writes may fail and leave some of their files."""

    def __init__(self, accident, die):
        self._accident, self._die = accident, die

    def __getattr__(self, name):
        return getattr(orbax_files, name)

    def write(self, state, arrays):
        orbax_files.write(state, arrays)
        try:
            self._accident.count()
        except BaseException:
            files = files_in(state)
            for path in self._die.sample(files, self._die.randint(1, len(files))):
                path.unlink()
            raise


ACTIONS = [
    *[Directory.save] * 7,
    *[Directory.damage] * 3,
    *[Directory.start] * 2,
    *[Directory.add_foreign] * 2,
    Directory.rename,
    Directory.copy,
]
RESULTS = Counter()


def files_in(path):
    """Return the files in a folder of jdp in the same order in each run: Orbax draws names."""
    files = [each for each in path.rglob("*") if each.is_file()]
    return sorted(files, key=lambda each: (each.parent.name, each.stat().st_size, each.name))


def contents(path):
    """Return a file, link or folder with all that is in it."""
    if path.is_symlink():
        return os.readlink(path), contents(path.resolve())
    if path.is_file():
        return path.read_bytes(), path.stat().st_ino
    return {each.name: contents(each) for each in path.iterdir()}, path.stat().st_ino


def is_intact(path):
    try:
        return bool(directory._manifest_with_files(path))
    except TornError:
        return False


def fuzz(path, seed):
    with pytest.MonkeyPatch.context() as patch:
        Directory(path / str(seed) / "run", seed, patch).run()
    shutil.rmtree(path / str(seed))


def test_no_accident_loses_a_good_checkpoint_or_touches_what_is_foreign(tmp_path):
    RESULTS.clear()
    for seed in range(30):
        fuzz(tmp_path, seed)
    assert min(RESULTS[each] for each in ("kept", "failed", "died")) > 5, RESULTS


@pytest.mark.thorough
def test_no_accident_of_a_minute_does(tmp_path):
    first, seconds = os.environ.get("JDP_FUZZ_SEED"), os.environ.get("JDP_FUZZ_SECONDS", 60)
    seed, end = int(first or time.time_ns() // 1000), time.monotonic() + float(seconds)
    fuzz(tmp_path, seed)
    while time.monotonic() < end:
        seed += 1
        fuzz(tmp_path, seed)
