"""Loads the native libraries, unless XLA is older than their headers."""

import ctypes
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

LIB = Path(__file__).parent.parent / "lib"
_VERSION = "jdp_ffi_api_version"

_log = logging.getLogger("jdp")
_IS_SOURCE = (
    "jdp: %s is a source tree without the compiled library, so CPU reductions use XLA and are "
    "slower. Run pip install -e %s, or start the script in another folder."
)


class Loaded(NamedTuple):
    """A library's functions, or why it is missing."""

    functions: Any
    why_missing: str | None

    def required(self) -> Any:
        """Return the functions, or raise a RuntimeError."""
        if self.functions is None:
            raise RuntimeError(f"{self.why_missing} jdp.collectives.xla needs no library.")
        return self.functions


def load(
    path: Path,
    signatures: Mapping[str, Sequence[Any]],
    handlers: Mapping[str, Mapping[str, str]],
    platform: str,
    runtime: tuple[int, int] | None,
) -> Loaded:
    """Load a library, and register its XLA handlers, without starting a backend."""
    if not path.exists():
        reason = path.with_suffix(".txt")  # written by the build
        why = reason.read_text().strip() if reason.exists() else "install jdp with pip"
        if not reason.exists() and platform == "cpu":
            _log.warning(_IS_SOURCE, LIB.parent, LIB.parent.parent)
        return Loaded(None, f"{path.name} was not built: {why}.")
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        return Loaded(None, f"{path.name} does not load: {error}.")
    wanted = {*signatures, *(name for names in handlers.values() for name in names.values())}
    absent = sorted(name for name in {_VERSION, *wanted} if not hasattr(functions, name))
    if absent:
        text = f"it has no {absent[0]}, so it belongs to another version of jdp: install jdp again"
        return Loaded(None, f"{path.name} does not load: {text}.")
    # A handler newer than XLA would prevent the backend from starting.
    built_with = divmod(getattr(functions, _VERSION)(), 1000)
    if runtime is None or built_with[0] != runtime[0] or built_with > runtime:
        return Loaded(
            None,
            f"{path.name} was built with version {built_with} of XLA's FFI, but this jaxlib has "
            f"{runtime}: install jdp again with this jaxlib, or with jaxlib 0.10.2's headers.",
        )
    for name, (result, *arguments) in signatures.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    for target, names in handlers.items():
        stages = {stage: jax.ffi.pycapsule(getattr(functions, names[stage])) for stage in names}
        jax.ffi.register_ffi_target(target, stages, platform=platform)
    return Loaded(functions, None)


def runtime_version() -> tuple[int, int] | None:
    """Return the (major, minor) version of XLA's FFI in jaxlib's headers."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    if not header.exists():
        return None
    text = header.read_text()
    major = re.search(r"#define XLA_FFI_API_MAJOR (\d+)", text)
    minor = re.search(r"#define XLA_FFI_API_MINOR (\d+)", text)
    return (int(major[1]), int(minor[1])) if major and minor else None
