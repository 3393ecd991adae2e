"""Tools: `jdp doctor`, `jdp bench`, `jdp explain`."""
