"""The version of jdp that is installed."""

import functools


@functools.cache  # It looks through sys.path, and each commit holds it.
def version() -> str:
    """Return the version of jdp; "0+unknown" if it runs from its sources, not installed."""
    from importlib import metadata  # which takes longer than all of `import jdp`

    try:
        return metadata.version("jdp")
    except metadata.PackageNotFoundError:
        return "0+unknown"
