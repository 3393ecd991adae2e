"""The author's source files as this process read them."""

import hashlib
import re
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

# Lines by path relative to the script's folder.
_lines: dict[str, list[bytes]] = {}
# A recovery has no time to examine all modules again.
_seen: set[str] = set()


def record() -> None:
    """Read the script and new modules below its folder; call it soon after the imports."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None or not Path(script).is_file():  # a notebook
        return
    root = Path(script).resolve().parent
    while (root / "__init__.py").exists():  # `python -m package.train`
        root = root.parent
    prefix = f"{root}/"
    for name, module in [item for item in [*sys.modules.items()] if item[0] not in _seen]:
        _seen.add(name)
        path = getattr(module, "__dict__", {}).get("__file__")
        is_below = isinstance(path, str) and path.startswith(prefix)
        if name == "__main__" or (is_below and _is_authors(name, path)):
            file = Path(path or script).resolve()
            try:
                _lines.setdefault(str(file.relative_to(root)), file.read_bytes().splitlines())
            except (OSError, ValueError):  # removed, or a link to another folder
                continue


def digests() -> dict[str, list[str]]:
    """Return for each file `[digest, 4 hexadecimal digits a line]`."""
    return {
        name: [_digest(lines), "".join(map(_line_sum, lines))] for name, lines in _lines.items()
    }


def difference(saved: Mapping[str, Sequence[str]]) -> str | None:
    """Return the first edited line of a file imported in both lives."""
    for name, lines in _lines.items():
        digest, sums = saved.get(name, (None, ""))
        if digest is None or digest == _digest(lines):
            continue
        old = [sums[i : i + 4] for i in range(0, len(sums), 4)]
        pairs = zip(old, map(_line_sum, lines), strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(old), len(lines)))
        if first < len(lines):
            return f"{name}:{first + 1} is now `{lines[first].decode(errors='replace').strip()}`"
        return f"{name} now ends after line {len(lines)}"
    return None


def find_executed(pattern: re.Pattern[bytes]) -> tuple[str, str] | None:
    """Search executed code of uninstalled modules: ("file:line", first group) or None."""
    last = _last_lines()
    for path in {*last, *_authors_files()}:
        with suppress(OSError):
            lines = path.read_bytes().splitlines()[: last.get(path)]
            for number, line in enumerate(lines, 1):
                match = pattern.search(line)
                if match and not line.lstrip().startswith(b"#"):
                    return f"{path.name}:{number}", match[1].decode()
    return None


def _authors_files() -> Iterator[Path]:
    for name, module in [*sys.modules.items()]:
        path = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(path, str) and (name == "__main__" or _is_authors(name, path)):
            yield Path(path).resolve()


def _last_lines() -> dict[Path, int]:
    """Return the running statement's last line, by script file."""
    found, frame = {}, sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__":  # also a profiler's script
            code = frame.f_code
            _, end, _, _ = next(islice(code.co_positions(), frame.f_lasti // 2, None))
            found[Path(code.co_filename).resolve()] = max(frame.f_lineno, end or 0)
        frame = frame.f_back
    return found


# Whether a module is the author's.
def _is_authors(name: str, path: str) -> bool:
    installed = (
        "site-packages" in path
        or "dist-packages" in path
        or path.startswith(sysconfig.get_path("stdlib"))
    )
    own = name == "jdp" or name.startswith("jdp.")
    return path.endswith(".py") and not installed and not own


def _digest(lines: Sequence[bytes]) -> str:
    return hashlib.sha256(b"\n".join(lines)).hexdigest()[:16]


def _line_sum(line: bytes) -> str:
    return f"{zlib.crc32(line) & 0xFFFF:04x}"
