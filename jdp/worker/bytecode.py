"""Imported modules without bytecode: each process compiles them anew."""

import os
import shlex
import sys
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import MAGIC_NUMBER
from types import ModuleType
from typing import NamedTuple

# CPU seconds of a slow start, and of compiling in it.
SLOW_START_S = 2.0
LEAST_S = 1.0
# Modules examined first, and seconds of compiling.
_SAMPLE = 40
_BUDGET_S = 0.2
# Named folders hold this fraction of the modules.
_LEAST_SHARE = 0.1


class SourceFile(NamedTuple):
    """An imported module, its source, and where Python looks for bytecode."""

    name: str
    path: str
    cached: str

    def has_bytecode(self) -> bool:
        """Whether the next process finds its bytecode."""
        try:
            at = os.stat(self.path)
        except OSError:
            return True  # removed since: no process compiles it
        try:
            file = os.open(self.cached, os.O_RDONLY)
        except OSError:
            return False
        try:
            header = os.read(file, 16)
        finally:
            os.close(file)
        if len(header) < 16 or header[:4] != MAGIC_NUMBER:
            return False
        is_for_hash = header[4] & 1  # in place of time and size
        return bool(is_for_hash) or header[8:] == _word(at.st_mtime) + _word(at.st_size)

    def folder(self) -> str:
        """Return the folder to compile: site-packages, or its own."""
        levels = self.name.count(".") + (os.path.basename(self.path) == "__init__.py")
        root = os.path.dirname(self.path)
        for _ in range(levels):
            root = os.path.dirname(root)
        installed = os.path.basename(root) in ("site-packages", "dist-packages")
        if installed or root == os.path.dirname(os.__file__):
            return root
        top = os.path.join(root, self.name.partition(".")[0])
        return top if levels else self.path


class Uncompiled(NamedTuple):
    """This process's modules without bytecode.

    Attributes:
      s: CPU seconds to compile them.
      measured: how many were compiled to estimate `s`.
      why: why Python keeps no bytecode.
      command: writes it.
    """

    modules: int
    s: float
    measured: int
    why: str
    command: str


def sources(step: int = 1) -> list[SourceFile]:
    """Return the imported modules read from source files."""
    found = {}
    for module in [*sys.modules.values()][::step]:
        if isinstance(module, ModuleType):
            # Any other access would load a lazy module.
            spec = object.__getattribute__(module, "__dict__").get("__spec__")
            if type(spec) is ModuleSpec and type(spec.loader) is SourceFileLoader:
                if spec.origin and spec.cached:
                    found[spec.origin] = SourceFile(spec.name, spec.origin, spec.cached)
    return [*found.values()]


def without_bytecode() -> list[SourceFile]:
    """Return the modules to compile for the next process."""
    return [source for source in sources() if not source.has_bytecode()]


def examine(missing: Sequence[SourceFile], budget_s: float) -> Uncompiled:
    """Measure how long modules take to compile."""
    seconds, measured = _compile_s(missing, budget_s)
    return Uncompiled(len(missing), seconds, measured, _cause(missing), _command(missing))


def slow_imports() -> Uncompiled | None:
    """Return the modules, if they made this process's start slow."""
    used_s = time.process_time()
    if used_s < SLOW_START_S:
        return None
    if all(it.has_bytecode() for it in sources(step=len(sys.modules) // _SAMPLE or 1)):
        return None
    missing = without_bytecode()
    found = examine(missing, _BUDGET_S)
    found = found._replace(s=min(found.s, used_s))
    return found if missing and found.s >= LEAST_S else None


def _word(number: float) -> bytes:
    return (int(number) & 0xFFFFFFFF).to_bytes(4, "little")


# (CPU seconds for all modules, modules compiled).
def _compile_s(missing: Sequence[SourceFile], budget_s: float) -> tuple[float, int]:
    sizes = {source: _size(source.path) for source in missing}
    done, measured = 0, 0
    deadline, start = time.monotonic() + budget_s, time.thread_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for source in sorted(missing, key=lambda it: zlib.crc32(os.fsencode(it.path))):
            _compile(source.path)
            done, measured = done + sizes[source], measured + 1
            if time.monotonic() >= deadline:
                break
    return (time.thread_time() - start) * sum(sizes.values()) / max(done, 1), measured


def _compile(path: str) -> None:
    try:
        with open(path, "rb") as file:
            compile(file.read(), path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError):
        pass  # changed since the import


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _cause(missing: Sequence[SourceFile]) -> str:
    if sys.dont_write_bytecode:
        is_set = os.environ.get("PYTHONDONTWRITEBYTECODE")
        return "PYTHONDONTWRITEBYTECODE is set" if is_set else "Python runs with -B"
    folders = [sys.pycache_prefix or it.folder() for it in missing]
    counts = Counter(folder for folder in folders if not _is_writable(folder))
    return f"this process may not write to {counts.most_common(1)[0][0]}" if counts else ""


def _is_writable(folder: str) -> bool:
    return os.access(folder if os.path.isdir(folder) else os.path.dirname(folder), os.W_OK)


def _command(missing: Sequence[SourceFile]) -> str:
    counts = Counter(source.folder() for source in missing).most_common()
    often = [it for it, num in counts if num >= _LEAST_SHARE * len(missing)]
    often = often or [it for it, _ in counts[:1]]
    chosen = [it for it in often if not any(it.startswith(f"{other}/") for other in often)]
    level = ("", " -O", " -OO")[min(sys.flags.optimize, 2)]
    return f"{shlex.quote(sys.executable)}{level} -m compileall -q -j0 {shlex.join(chosen)}"
