"""Directories of checkpoints of other tools: whose they are, and how to bring them over."""

import re
from pathlib import Path
from typing import NamedTuple

from jdp.checkpoint import manifest

# "1000" or "run_1000" of a CheckpointManager, "checkpoint_1000" of Flax.
_STEP = re.compile(r"(?:.*_)?(\d+)")
_TREE, _STEP_OF_MANAGER = "_METADATA", "_CHECKPOINT_METADATA"


class ForeignCheckpoints(NamedTuple):
    """The checkpoints of another tool in a directory."""

    path: Path
    tool: str
    steps: dict[int | None, list[Path]]  # the PyTrees of Orbax of each step; None: of no step

    @property
    def latest(self) -> int | None:
        """Return the latest step."""
        return max((step for step in self.steps if step is not None), default=None)

    def __str__(self) -> str:
        step = "" if self.latest is None else f", step {self.latest}"
        return f"{self.path} holds {self.tool}{step}"

    def advice(self) -> str:
        """Return the line that reads the latest step."""
        trees = self.steps[self.latest]
        if len(trees) == 1:
            return f'state = jdp.load("{self.path}", like=state)'
        if trees:
            return f'state = jdp.load("{trees[0]}", like=state), or another of {_names(trees)}'
        if self.tool.startswith("Flax"):
            flax = "flax.training.checkpoints.restore_checkpoint"
            return f'state = {flax}("{self.path}", state)'
        return f'state = orbax.checkpoint.CheckpointManager("{self.path}").restore({self.latest})'

    def tree(self, step: int | None) -> Path:
        """Return the PyTree of a step, or of the latest one."""
        step = self.latest if step is None else step
        if step not in self.steps:
            known = sorted(each for each in self.steps if each is not None)
            raise ValueError(f"step {step} is not in {self.path}, which holds {known}.")
        if len(self.steps[step]) != 1:
            names = _names(self.steps[step]) or "none"
            raise ValueError(
                f"{self}. jdp.load reads one PyTree of Orbax, and the PyTrees there are: {names}. "
                f"Write {self.advice()}."
            )
        return self.steps[step][0]


def find(path: Path) -> ForeignCheckpoints | None:
    """Return the checkpoints of another tool in a directory, if that is what it holds."""
    if not path.is_dir() or manifest.exists(path) or manifest.exists(path.parent):
        return None
    if (path / _TREE).is_file():
        return ForeignCheckpoints(path, "a PyTree of Orbax", {None: [path]})
    if (path / _STEP_OF_MANAGER).is_file():
        return ForeignCheckpoints(path, "a step of Orbax", {None: _trees(path)})
    steps, flax = {}, {}
    for each in path.iterdir():
        if (number := _STEP.fullmatch(each.name)) is None:
            continue
        if (each / _STEP_OF_MANAGER).is_file():
            steps[int(number[1])] = [each] if (each / _TREE).is_file() else _trees(each)
        elif each.name.startswith("checkpoint_") and _is_map_of_msgpack(each):
            flax[int(number[1])] = list[Path]()
    if steps:
        return ForeignCheckpoints(path, "checkpoints of Orbax", steps)
    return ForeignCheckpoints(path, "Flax's files of checkpoints", flax) if flax else None


def _trees(step: Path) -> list[Path]:
    return sorted(each for each in step.iterdir() if (each / _TREE).is_file())


def _names(trees: list[Path]) -> str:
    return ", ".join(each.name for each in trees)


def _is_map_of_msgpack(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        first = file.read(1)
    return first in (b"\xde", b"\xdf") or b"\x80" <= first <= b"\x8f"
