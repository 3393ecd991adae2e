"""Questions about a machine, a run and a program: `jdp doctor`, `jdp bench`, `jdp explain`."""
