"""Loads the native libraries, which XLA must not meet if they are newer than itself."""

import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

LIB = Path(__file__).parent.parent / "lib"


class Loaded(NamedTuple):
    """A library, or a sentence that says why it is missing."""

    functions: Any
    why_missing: str | None

    def required(self) -> Any:
        """Return the functions.

        Raises:
          RuntimeError: if the library is missing.
        """
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
    """Load a library, and register its XLA handlers. No backend is started.

    Args:
      path: where the build leaves it, or the reason why it was not built.
      signatures: of its functions, by name: type of the result, types of the arguments.
      handlers: name in XLA programs -> stage of a run -> name in the library.
      platform: that the handlers are for, "cpu" or "CUDA".
      runtime: version of XLA's FFI in the installed jaxlib, None if that cannot be told.
    """
    if not path.exists():
        reason = path.with_suffix(".txt")  # what the build wrote
        why = reason.read_text().strip() if reason.exists() else "install jdp with pip"
        return Loaded(None, f"{path.name} was not built: {why}.")
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        return Loaded(None, f"{path.name} does not load: {error}.")
    # XLA would refuse a handler that is newer than itself together with the whole backend.
    built_with = divmod(functions.jdp_ffi_api_version(), 1000)
    if runtime is None or built_with[0] != runtime[0] or built_with > runtime:
        return Loaded(
            None,
            f"{path.name} was built with version {built_with} of XLA's FFI, and this jaxlib has "
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
    """Return the (major, minor) version of XLA's FFI of jaxlib, read from its headers."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    if not header.exists():
        return None
    text = header.read_text()
    major = re.search(r"#define XLA_FFI_API_MAJOR (\d+)", text)
    minor = re.search(r"#define XLA_FFI_API_MINOR (\d+)", text)
    return (int(major[1]), int(minor[1])) if major and minor else None
