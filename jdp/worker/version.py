"""The version of jdp that is installed."""

import functools
import re


@functools.cache  # It looks through sys.path, and each commit holds it.
def version() -> str:
    """Return the version of jdp; "0+unknown" if it runs from its sources, not installed."""
    from importlib import metadata  # which takes longer than all of `import jdp`

    try:
        package = metadata.distribution("jdp")
    except metadata.PackageNotFoundError:
        return "0+unknown"
    # METADATA of what is installed, PKG-INFO of sources that were built.
    found = package.read_text("METADATA") or package.read_text("PKG-INFO") or ""
    # Not `metadata.version`, which parses the whole description, in the first trace of a step.
    match = re.search(r"^Version: (\S+)$", found.partition("\n\n")[0], re.M)
    return match[1] if match else "0+unknown"
