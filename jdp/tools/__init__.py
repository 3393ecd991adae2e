"""Tools for a machine, a run or a program: `jdp doctor`, `jdp bench`, `jdp explain`."""
