"""Imported packages without bytecode: each start compiles them again."""

import os
import re
import shlex
import sys
import time
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import NamedTuple

# CPU seconds of a slow start, and the fraction of modules without bytecode that explains one.
SLOW_START_S = 2.0
LEAST_SHARE = 0.25

_INSTALLED = re.compile(r".*[/\\](site|dist)-packages(?=[/\\])")


class Imports(NamedTuple):
    """This process's imported modules of installed packages.

    Attributes:
      without: how many of them have no bytecode.
      s: CPU seconds of this process up to now.
      command: writes the bytecode.
    """

    modules: int
    without: int
    s: float
    command: str

    def are_slow(self) -> bool:
        """Whether compiling slows the start of each process."""
        return self.without > LEAST_SHARE * self.modules


def imports() -> Imports:
    """Count the imported modules of installed packages."""
    folders, modules, missing = set(), 0, 0
    for module in [*sys.modules.values()]:
        if not isinstance(module, ModuleType):
            continue
        # Any other access would load a lazy module.
        spec = object.__getattribute__(module, "__dict__").get("__spec__")
        if type(spec) is not ModuleSpec or type(spec.loader) is not SourceFileLoader:
            continue
        if (found := _INSTALLED.match(spec.origin or "")) and spec.cached:
            modules += 1
            if not os.path.exists(spec.cached):
                missing += 1
                folders.add(found[0])
    level = f" -{'O' * sys.flags.optimize}" if sys.flags.optimize else ""
    where = shlex.join(sorted(folders))
    command = f"{shlex.quote(sys.executable)}{level} -m compileall -q -j0 {where}"
    return Imports(modules, missing, time.process_time(), command)


def slow_imports() -> Imports | None:
    """Return the imports, if compiling made this process's start slow."""
    if time.process_time() < SLOW_START_S:
        return None
    found = imports()
    return found if found.are_slow() else None
