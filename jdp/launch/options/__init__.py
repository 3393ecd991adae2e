"""The command line of `jdp run`."""
